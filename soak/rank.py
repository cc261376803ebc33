"""One audited trainer rank: the real client in a separate process, without a model.

It records the data it receives (in the journal), commits, and every few steps saves its part of a
checkpoint. It resumes from the state it is given. `holds` lets the harness stop all ranks at a
known point of a known step, so that a fault hits exactly then.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from soak import checkpoint
from soak.digest import digest_of_tokens, digests_of_item
from soak.gate import through_gate
from soak.journal import JournalWriter, PackPart, Row
from trainer_client import ClientError, Shard, ShardDataset
from trainer_client.transport import GrpcTransport

import grpc  # isort: skip

FAILED = 3  # exit code of a rank whose dataset raised
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class RankOptions:
    """The options of one rank. `gate` is the control address of a gate, "" for none."""

    folder: Path
    address: str
    job: str
    launch: int
    rank: int
    world_size: int
    state: checkpoint.State | None
    steps_per_checkpoint: int
    pace_s: float
    gate: str = ""
    token: str | None = None
    connect_timeout_s: float = 60.0
    timeout_s: float = 120.0
    stall_timeout_s: float = 4.0


class GatedTransport(GrpcTransport):
    """The client's own transport, which reaches every address through the gate."""

    def __init__(self, control: str, *, token: str | None) -> None:
        super().__init__(token=token)
        self._control = control

    def channel(self, address: str, *, authorised: bool) -> grpc.Channel:
        """A channel to the gate's port for this address."""
        near = through_gate(self._control, address) if self._control else address
        return super().channel(near, authorised=authorised)


def run_rank(options: RankOptions) -> None:
    """The main function of the process: exits with 0 after the last step, FAILED on the client's
    error."""
    torch.set_num_threads(1)
    log = options.folder / f"launch-{options.launch:04d}-rank-{options.rank:02d}.log"
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(sink, 2)
    try:
        train(options)
    except ClientError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(FAILED) from None


def train(options: RankOptions) -> None:
    """Train from the given state to the end of the data."""
    journal = JournalWriter(options.folder / "journal", launch=options.launch, rank=options.rank)
    with ShardDataset(
        options.address,
        job=options.job,
        rank=options.rank,
        world_size=options.world_size,
        connect_timeout_s=options.connect_timeout_s,
        timeout_s=options.timeout_s,
        stall_timeout_s=options.stall_timeout_s,
        transport=GatedTransport(options.gate, token=options.token),
        same_node=not options.gate,  # else bytes would pass by the gate
    ) as dataset:
        if options.state is not None:
            dataset.load_state_dict(options.state)
        for shard in dataset:
            world_size = options.world_size
            journal.write(row_of(shard, launch=options.launch, world_size=world_size))
            wait_while_held(options, "trained", shard.step)
            time.sleep(options.pace_s)
            dataset.commit(shard.step, measured_s=max(options.pace_s, 1e-3))
            wait_while_held(options, "committed", shard.step)
            if (shard.step + 1) % options.steps_per_checkpoint == 0:
                save(dataset, options)
        save(dataset, options)
    journal.close()


def save(dataset: ShardDataset, options: RankOptions) -> None:
    """Save this rank's part of a checkpoint."""
    state = dataset.state_dict()
    wait_while_held(options, "saving", int(state["step"]) - 1)
    checkpoint.save(
        options.folder / "checkpoints",
        rank=options.rank,
        world_size=options.world_size,
        state=state,
    )


def row_of(shard: Shard, *, launch: int, world_size: int) -> Row:
    """The journal's row of the data that this rank received for a step."""
    parts, items = [], []
    for microbatch in shard.microbatches:
        if not microbatch.idle:
            tensors = (microbatch.input_ids, microbatch.labels, microbatch.position_ids)
            parts.append(
                PackPart(
                    wave=microbatch.wave,
                    pack=microbatch.pack,
                    group=microbatch.cp_group,
                    cp_rank=microbatch.cp_rank,
                    samples=tuple(microbatch.sample_ids.tolist()),
                    tokens=digest_of_tokens(tensor.numpy() for tensor in tensors),
                )
            )
        for batch in (microbatch.vision, microbatch.audio):
            for item in batch.items if batch else ():
                items += digests_of_item(item.numpy())
    return Row(
        launch=launch,
        attempt=shard.attempt,
        rank=shard.rank,
        world_size=world_size,
        step=shard.step,
        plan=shard.plan.digest,
        parts=tuple(parts),
        items=tuple(items),
    )


def wait_while_held(options: RankOptions, point: str, step: int) -> None:
    """Wait while the harness's hold names this point and step."""
    hold, mine = options.folder / "hold", f"{point} {step}"
    if read(hold) != mine:
        return
    (options.folder / f"held-{point}-{options.launch}-{options.rank}").touch()
    while read(hold) == mine:
        time.sleep(POLL_S)


def read(path: Path) -> str:
    """A file's text, or "" when there is no such file."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
