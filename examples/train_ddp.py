"""Train a multimodal model with DistributedDataParallel, fed by a running service.

    torchrun --nproc-per-node 4 -m examples.train_ddp --service 127.0.0.1:50051 --job demo

Start it again with the same --checkpoint and it goes on from there, also on another number of
ranks: a global batch holds the same samples on any.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from demo.model import DemoModel
from trainer_client import ShardDataset
from trainer_client.runtime import GroupPool, run_step

PEER_TIMEOUT_S = 120.0  # after which a silent rank ends the others


def train(options: argparse.Namespace, device: torch.device) -> None:
    """Train to the end of the data, or for `max_steps`."""
    torch.manual_seed(0)
    model = DemoModel().to(device)
    # A step's last wave may have no sound, say: its encoder is unused in that pass.
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=2e-3, betas=(0.9, 0.95))
    dataset = ShardDataset(options.service, job=options.job, device=device)
    state = {"model": model, "optimizer": optimizer, "dataset": dataset}
    load(options.checkpoint, state)

    with dataset, GroupPool(timeout_s=PEER_TIMEOUT_S) as groups:
        for shard in dataset:
            # Leaves the gradients of the whole global batch, weighted by tokens, in `.grad`.
            result = run_step(ddp, shard, groups)
            clip_grad_norm_(ddp.parameters(), 1.0)
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
                save(options.checkpoint, state)
            if shard.step + 1 >= options.max_steps:
                break


def save(path: Path | None, state: dict) -> None:
    """Weights, optimizer and the position in the data, as one file, all or nothing."""
    if path is None:
        return
    saved = {name: part.state_dict() for name, part in state.items()}  # alike on all ranks
    if dist.get_rank() == 0:
        torch.save(saved, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


def load(path: Path | None, state: dict) -> None:
    """The other way round, if there is a checkpoint."""
    if path is not None and path.exists():
        saved = torch.load(path, weights_only=True, map_location="cpu")
        for name, part in state.items():
            part.load_state_dict(saved[name])


def arguments(prog: str, *, saves: bool = True) -> argparse.ArgumentParser:
    """What the command line takes; a checkpoint's options only where the example `saves` one."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("--service", required=True, help="coordinator, as host:port")
    parser.add_argument("--job", required=True, help="name of a submitted job")
    parser.add_argument("--max-steps", type=int, default=sys.maxsize)
    if saves:
        parser.add_argument("--checkpoint", type=Path, help="where to save to and resume from")
        parser.add_argument("--steps-per-checkpoint", type=int, default=100)
    return parser


@contextmanager
def process_group() -> Iterator[torch.device]:
    """This rank's device, in the group of all ranks that torchrun started."""
    backend, device = "gloo", torch.device("cpu")
    if torch.cuda.is_available():
        backend, device = "nccl", torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=PEER_TIMEOUT_S))
    try:
        yield device
    finally:
        dist.destroy_process_group()


def main() -> None:
    """One rank, as torchrun starts it."""
    options = arguments("examples.train_ddp").parse_args()
    with process_group() as device:
        train(options, device)


if __name__ == "__main__":
    main()
