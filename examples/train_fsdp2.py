"""Train a multimodal model sharded with FSDP2 (`fully_shard`), fed by a running service.

    torchrun --nproc-per-node 4 -m examples.train_fsdp2 --service 127.0.0.1:50051 --job demo

Start it again with the same --checkpoint and it goes on from there, also on another number of
ranks: a global batch holds the same samples on any, and the checkpoint is resharded.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as sharded
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from demo.model import DemoModel
from examples.train_ddp import PEER_TIMEOUT_S, arguments, process_group
from trainer_client import ShardDataset
from trainer_client.runtime import GroupPool, run_step


def sharded_model(device: torch.device) -> DemoModel:
    """Every encoder and layer on its own, then the rest: the whole model must be sharded."""
    torch.manual_seed(0)
    model = DemoModel().to(device)
    for part in (*model.encoders.values(), *model.layers):
        fully_shard(part)
    return fully_shard(model)


def train(
    options: argparse.Namespace, model: nn.Module, device: torch.device, learning_rate: float
) -> None:
    """Train to the end of the data, or for `max_steps`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    dataset = ShardDataset(options.service, job=options.job, device=device)
    load(options.checkpoint, model, optimizer, dataset)

    with dataset, GroupPool(timeout_s=PEER_TIMEOUT_S) as groups:
        for shard in dataset:
            # Leaves the gradients of the whole global batch, weighted by tokens, in `.grad`.
            result = run_step(model, shard, groups)
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            dataset.commit(shard.step, measured_s=result.seconds, phase_s=result.phase_s)

            if dist.get_rank() == 0:
                degrees = " ".join(map(str, shard.plan.degrees))
                print(
                    f"step {shard.step}  loss {result.loss:.7f}  {result.seconds:.2f} s  "
                    f"waited {shard.wait_s:.3f} s  CP degrees {degrees}",
                    flush=True,
                )
            if (shard.step + 1) % options.steps_per_checkpoint == 0:
                save(options.checkpoint, model, optimizer, dataset)
            if shard.step + 1 >= options.max_steps:
                break


def save(folder: Path | None, model, optimizer, dataset: ShardDataset) -> None:
    """Every rank writes its shards; the position in the data is the same on all of them."""
    if folder is not None:
        weights, moments = sharded.get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "dataset": dataset.state_dict()}
        dcp.save(state, checkpoint_id=folder / f"step-{state['dataset']['step']:08d}")


def load(folder: Path | None, model, optimizer, dataset: ShardDataset) -> None:
    """The other way round, from the newest checkpoint that is whole, if there is one."""
    whole = sorted(folder.glob("step-*/.metadata")) if folder is not None else []
    if not whole:
        return
    reader = dcp.FileSystemReader(whole[-1].parent)
    weights, moments = sharded.get_state_dict(model, optimizer)
    # An encoder that no step has used so far has no moments.
    saved = reader.read_metadata().state_dict_metadata
    of_saved = (name for name in moments["state"] if f"optimizer.state.{name}.step" in saved)
    moments["state"] = {name: moments["state"][name] for name in of_saved}
    state = {"model": weights, "optimizer": moments, "dataset": dataset.state_dict()}
    dcp.load(state, storage_reader=reader)
    some = sharded.StateDictOptions(strict=False)
    sharded.set_model_state_dict(model, weights)
    sharded.set_optimizer_state_dict(model, optimizer, moments, options=some)
    dataset.load_state_dict(state["dataset"])


def main() -> None:
    """One rank, as torchrun starts it."""
    options = arguments("examples.train_fsdp2").parse_args()
    with process_group() as device:
        train(options, sharded_model(device), device, learning_rate=2e-3)


if __name__ == "__main__":
    main()
