"""ShardDataset: a job's steps as a torch dataset, one shard a step for this rank.

The checkpoint owns the position. It advances when a step is committed, by `commit` or by
asking for the next shard; `state_dict` gives it and `load_state_dict` takes it back, on any
number of ranks.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.utils.data import IterableDataset, get_worker_info

from trainer_client.device import resolve_device
from trainer_client.errors import (
    BadArgument,
    MisuseError,
    RankOutOfRange,
    ServiceTimeout,
    StateMismatch,
)
from trainer_client.parts import EVERYTHING, WantedParts
from trainer_client.prefetch import Trained
from trainer_client.run import Position, Run, RunOptions
from trainer_client.shard import Shard
from trainer_client.transport import GrpcTransport, Tls, Transport

STATE_VERSION = 1
CHECKPOINT_FLUSH_S = 30.0

_BEGINNING = Position(step=0, cursor="")


class ShardDataset(IterableDataset[Shard]):
    """Yields this rank's `Shard` of every step from the position on.

    `rank` and `world_size` default to RANK and WORLD_SIZE, as torchrun sets them. `token` is
    the team's bearer token; or `token_file` holds it, and is read again for every call; by
    default DATASERVICE_TOKEN_FILE or DATASERVICE_TOKEN say. `tls` is True for the system's
    certificates, or a `Tls`.
    `parts` are what this rank reads of its microbatches, all by default: see `parts.py`.
    `device` is where tokens, encoder items and exchange indices are wanted; for a GPU they are
    received in pinned memory and copied on a stream of their own, `prefetch_steps` ahead. By
    default they stay on the host.

    `prefetch_steps` shards are kept ready or on their way; their bytes are what this costs.
    `connect_timeout_s` bounds the wait for the coordinator's port, `timeout_s` every other
    wait: for the other ranks to open, for a step, for a broken connection or a lost worker to
    come back. What a worker has not begun to send within `stall_timeout_s`, or stops sending
    for as long, is asked for again: from wherever the service has it first. Where bytes come
    slowly, but come, that is raised by itself, to 16 times as much.

    Nothing is opened before the first shard is asked for. Each pass over the dataset is a new
    attempt of the job: all ranks take part, and it starts at the committed position, so a
    shard that was yielded but not committed when the loop broke off comes again. Once the
    data has ended, iterating again yields nothing until `load_state_dict`.

    Use it alone, or in `DataLoader(dataset, batch_size=None)` with `num_workers=0`: it
    prefetches in threads of its own. It is to be used by one thread.

    Raises (when iterated) ServiceUnreachable, ServiceTimeout, UnknownJob, WrongWorldSize,
    RankAlreadyClaimed, CursorMismatch, Fenced, AccessDenied, ServiceFailed, BadData.
    """

    def __init__(
        self,
        address: str,
        *,
        job: str,
        rank: int | None = None,
        world_size: int | None = None,
        parts: Collection[str] = EVERYTHING,
        token: str | None = None,
        token_file: str | Path | None = None,
        tls: Tls | bool | None = None,
        device: torch.device | str | None = None,
        prefetch_steps: int = 2,
        parallel_streams: int = 8,
        connect_timeout_s: float = 30.0,
        timeout_s: float = 300.0,
        stall_timeout_s: float = 4.0,
        transport: Transport | None = None,
    ) -> None:
        self._options = RunOptions(
            address=address,
            job=job,
            rank=_from_environment("rank", rank),
            world_size=_from_environment("world_size", world_size),
            wanted=WantedParts.named(parts),
            prefetch_steps=prefetch_steps,
            parallel_streams=parallel_streams,
            connect_timeout_s=connect_timeout_s,
            timeout_s=timeout_s,
            stall_timeout_s=stall_timeout_s,
            device=None if device is None else torch.device(device),
        )
        _check(self._options)
        self._transport = transport or GrpcTransport(token=token, token_file=token_file, tls=tls)
        self._committed = _BEGINNING
        self._yielded: deque[Position] = deque()  # behind each shard that is not committed
        self._ended = False
        self._peeked_s = 0.0  # waited in `peek` for the shard that comes next
        self._run: Run | None = None
        self._finalizer: weakref.finalize[..., ShardDataset] | None = None

    def __iter__(self) -> Iterator[Shard]:
        """Open the session and yield shards until the data ends."""
        if self._ended:
            return
        run = self._start()
        try:
            while True:
                began_s = time.monotonic()
                shard = run.next()
                if shard is None:
                    self._ended = True
                    return
                step = shard.step
                self._yielded.append(Position(step=step + 1, cursor=shard.cursor_after))
                wait_s, self._peeked_s = time.monotonic() - began_s + self._peeked_s, 0.0
                yield replace(shard, wait_s=wait_s)
                del shard  # its memory may be needed for the next
                self.commit(step)
        finally:
            self._finish(run)

    def peek(self, *, wait: bool = True) -> Shard | None:
        """The shard that the loop will be given next, None behind the last step.

        Commits nothing and takes nothing, so that the next step can be prepared while this
        one computes. Waits until it is there, which counts in its `wait_s`; without `wait`,
        None also means that it is not there yet. Its tensors may still be on their way to
        `device`: read its plan, compute with it only once the loop gives it. Raises MisuseError
        outside a loop.
        """
        if self._run is None:
            raise MisuseError("peek was called while the dataset is not iterated.")
        began_s = time.monotonic()
        try:
            return self._run.peek(wait=wait)
        finally:
            self._peeked_s += time.monotonic() - began_s

    def commit(
        self,
        step: int,
        *,
        measured_s: float | None = None,
        phase_s: Mapping[str, float] | None = None,
    ) -> None:
        """This rank has trained `step`, and with it every step before.

        `measured_s` are the seconds it took (`StepResult.seconds`), which the service sets
        against those it predicted; `phase_s` what they went to (`StepResult.phase_s`).
        Does not wait for the service: it is told in the background, in order. Committing a
        step again changes nothing. Raises MisuseError for a step that was not yielded, and
        whatever went wrong with an earlier commit.
        """
        if step < self._committed.step:
            return
        if not self._yielded or step >= self._yielded[-1].step:
            last = self._yielded[-1].step - 1 if self._yielded else self._committed.step - 1
            raise MisuseError(
                f"step {step} cannot be committed: the last step yielded is {last}. Commit "
                "shard.step after training on it."
            )
        while self._yielded and self._yielded[0].step <= step + 1:
            self._committed = self._yielded.popleft()
            if self._run is not None:
                trained = Trained(step=self._committed.step - 1)
                if trained.step == step:
                    trained = replace(trained, measured_s=measured_s, phase_s=phase_s or {})
                self._run.commit(trained)

    def state_dict(self) -> dict[str, str | int]:
        """The position behind the last committed step: version, job, step, cursor.

        The same on every rank; keep it in the trainer's checkpoint. Waits a moment until the
        service has taken the commits; that it is away for now does not stop a checkpoint.
        Raises what went wrong with a commit, so that a fenced trainer saves nothing.
        """
        if self._run is not None:
            # Commits that take longer stay queued; the position does not depend on them.
            with suppress(ServiceTimeout):
                self._run.flush(min(CHECKPOINT_FLUSH_S, self._options.timeout_s))
        return {
            "version": STATE_VERSION,
            "job": self._options.job,
            "step": self._committed.step,
            "cursor": self._committed.cursor,
        }

    def load_state_dict(self, state: dict[str, str | int]) -> None:
        """Continue from a `state_dict`, of any rank and any world size, when next iterated.

        Raises MisuseError while the dataset is iterated, StateMismatch for the state of
        another job, another version, or something else.
        """
        if self._run is not None:
            raise MisuseError(
                "load_state_dict was called while the dataset is iterated. Leave the loop (or "
                "call close()) first, then load and iterate again."
            )
        self._committed = _position(state, self._options.job)
        self._yielded.clear()
        self._ended = False

    def close(self) -> None:
        """Give up the rank and stop all threads. The dataset may be iterated again."""
        if self._run is not None:
            self._finish(self._run)

    def __enter__(self) -> Self:
        """`with ShardDataset(...) as dataset:` closes it at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _start(self) -> Run:
        if get_worker_info() is not None:
            raise MisuseError(
                "ShardDataset is iterated in a DataLoader worker process. It prefetches by "
                "itself, and one rank may claim its shards only once: use "
                "DataLoader(dataset, batch_size=None, num_workers=0)."
            )
        if self._run is not None:
            raise MisuseError(
                f"rank {self._options.rank} already iterates this dataset. Finish or close() the "
                "first loop before a second one."
            )
        self._yielded.clear()
        self._peeked_s = 0.0
        options = replace(self._options, device=resolve_device(self._options.device))
        run = Run(options, self._transport, self._committed)
        # Also closes when the dataset is collected, or at exit, in the midst of a loop.
        self._run, self._finalizer = run, weakref.finalize(self, run.close)
        return run

    def _finish(self, run: Run) -> None:
        if self._run is run:
            self._run = None
            if self._finalizer is not None:
                self._finalizer.detach()
                self._finalizer = None
        run.close()


def _from_environment(name: str, given: int | None) -> int:
    if given is not None:
        return given
    text = os.environ.get(name.upper())
    if text is None:
        raise BadArgument(
            f"{name} was not given and {name.upper()} is not set. Start under torchrun, or pass "
            "rank= and world_size=."
        )
    try:
        return int(text)
    except ValueError:
        raise BadArgument(f"{name.upper()}={text!r} is not a whole number.") from None


def _check(options: RunOptions) -> None:
    host, _, port = options.address.rpartition(":")
    if not host or not port.isdigit():
        raise BadArgument(f"address is {options.address!r}; give it as host:port.")
    if options.world_size < 1 or not 0 <= options.rank < options.world_size:
        raise RankOutOfRange(
            f"rank {options.rank} is outside 0..{options.world_size - 1}: the world size is "
            f"{options.world_size}. Pass the values that torchrun sets in RANK and WORLD_SIZE."
        )
    if options.prefetch_steps < 1 or options.parallel_streams < 1:
        raise BadArgument(
            f"prefetch_steps={options.prefetch_steps} and parallel_streams="
            f"{options.parallel_streams} must both be at least 1."
        )
    timeouts = (options.connect_timeout_s, options.timeout_s, options.stall_timeout_s)
    if min(timeouts) <= 0:
        raise BadArgument(
            f"connect_timeout_s, timeout_s, stall_timeout_s are {timeouts}; each must be above 0."
        )


def _position(state: dict[str, str | int], job: str) -> Position:
    if not isinstance(state, dict) or not {"version", "job", "step", "cursor"} <= state.keys():
        raise StateMismatch(
            f"not a state_dict of ShardDataset: {str(state)[:120]}. It has version, job, step "
            "and cursor."
        )
    if state["version"] != STATE_VERSION:
        raise StateMismatch(
            f"the state_dict has version {state['version']}, this client reads version "
            f"{STATE_VERSION}. Resume with the release that wrote it."
        )
    if state["job"] != job:
        raise StateMismatch(
            f"the state_dict belongs to job {state['job']!r}, this dataset to {job!r}. Load the "
            "checkpoint of this job."
        )
    return Position(step=int(state["step"]), cursor=str(state["cursor"]))
