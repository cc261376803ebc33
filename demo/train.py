"""Train the demo's model from a running service, as a trainer does with `trainer_client`.

    torchrun --nproc-per-node 4 -m demo.train --service 127.0.0.1:50051 --job demo --out runs

Each rank appends one line of JSON per trained step to OUT/rank{r}.jsonl. An attempt that resumes
from a checkpoint trains the steps after it again: a line counts unless a newer attempt has a line
of the same or an earlier step.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from demo.model import DemoModel
from trainer_client import ClientError, Shard, ShardDataset
from trainer_client.runtime import GroupPool, RuntimeFault, run_step
from trainer_client.runtime.step_result import StepResult

SEED = 0
CHECKPOINTS_KEPT = 2
PEER_TIMEOUT_S = 120.0


def train(dataset: ShardDataset, groups: GroupPool, options: argparse.Namespace) -> None:
    """Train until the end of the data or `max_steps`; a checkpoint then contains the last step."""
    torch.manual_seed(SEED)
    model = DemoModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))
    state = {"model": model, "optimizer": optimizer, "dataset": dataset}
    saved_step = next_step = restore(options.out, state) if options.resume else 0
    for weight in model.state_dict().values():
        dist.broadcast(weight, src=0)

    with (options.out / f"rank{groups.replica}.jsonl").open("ab", buffering=0) as log:
        for shard in dataset if next_step < options.max_steps else ():
            began_s = time.perf_counter()
            optimizer.zero_grad()
            # Compares plan digests, encodes, exchanges, attends over CP groups, sums gradients.
            result = run_step(model, shard, groups)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            dataset.commit(shard.step, measured_s=result.seconds, phase_s=result.phase_s)
            next_step = shard.step + 1

            record = step_record(shard, result, step_s=time.perf_counter() - began_s)
            log.write(json.dumps(record).encode() + b"\n")  # one write: a kill leaves it whole
            if groups.replica == 0:
                print(progress_line(record), flush=True)
            if next_step % options.steps_per_checkpoint == 0:
                save(options.out, next_step, state)
                saved_step = next_step
            if next_step >= options.max_steps:
                break
    if saved_step < next_step:
        save(options.out, next_step, state)


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Write weights, optimizer and the position before `step` as one file, all or nothing."""
    # The position is the same on every rank; reading it raises on a fenced rank.
    saved = {name: part.state_dict() for name, part in state.items()}
    dist.barrier()  # every rank has logged the steps that this checkpoint contains
    if dist.get_rank() == 0:
        path = folder / f"checkpoint-{step:08d}.pt"
        unfinished = path.with_suffix(".tmp")
        torch.save(saved, unfinished)
        os.replace(unfinished, path)
        for old in sorted(folder.glob("checkpoint-*.pt"))[:-CHECKPOINTS_KEPT]:
            old.unlink()


def restore(folder: Path, state: dict[str, Any]) -> int:
    """Load the newest checkpoint, if there is one; returns the next step to train."""
    paths = sorted(folder.glob("checkpoint-*.pt"))
    if not paths:
        return 0
    saved = torch.load(paths[-1], weights_only=True)
    for name, part in state.items():
        part.load_state_dict(saved[name])
    return int(saved["dataset"]["step"])


def step_record(shard: Shard, result: StepResult, *, step_s: float) -> dict[str, Any]:
    """This rank's record of a step. The first rank of a pack's group names its samples."""
    firsts = [mb for mb in shard.microbatches if mb.cp_rank == 0]
    return {
        "attempt": shard.attempt,
        "step": shard.step,
        "digest": shard.plan.digest,
        "loss": result.loss,
        "loss_tokens": result.loss_tokens,
        "sample_ids": [sample for mb in firsts for sample in mb.sample_ids.tolist()],
        "degrees": list(shard.plan.degrees),  # of all groups of the step
        "wait_s": shard.wait_s,
        "step_s": step_s,
        "predicted_s": shard.plan.predicted_s,
        "tokens": sum(mb.input_ids.numel() for mb in shard.microbatches),  # of this rank
    }


def progress_line(record: dict[str, Any]) -> str:
    """One step in words."""
    return (
        f"attempt {record['attempt']} step {record['step']:>4}  loss {record['loss']:7.4f}  "
        f"CP degrees {' '.join(map(str, record['degrees']))}  "
        f"step {record['step_s']:.2f} s  wait {record['wait_s']:.3f} s"
    )


def main() -> int:
    """One rank, as torchrun starts it."""
    parser = argparse.ArgumentParser(prog="demo.train", description="Train the demo's model.")
    parser.add_argument("--service", required=True, help="coordinator, as host:port")
    parser.add_argument("--job", required=True, help="name of a submitted job")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and checkpoints")
    parser.add_argument("--steps-per-checkpoint", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in OUT")
    parser.add_argument("--max-steps", type=int, default=sys.maxsize, help="stop before this step")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        dataset = ShardDataset(options.service, job=options.job)  # RANK, WORLD_SIZE from torchrun
        with dataset, GroupPool(timeout_s=PEER_TIMEOUT_S) as groups:
            train(dataset, groups, options)
            dist.barrier()
    except (ClientError, RuntimeFault) as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
