"""ShardDataset: a job's steps as a torch dataset, one shard a step for this rank.

The checkpoint owns the position. The position follows what the loop has trained: `commit` tells
it, and position.py infers it for loops that do not call `commit`. `state_dict` returns the
position and `load_state_dict` restores it, on any number of ranks.
"""

import copy
import operator
import os
import time
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import torch
from torch.utils.data import IterableDataset

from trainer_client.address import split_address
from trainer_client.alignment import check_multiple
from trainer_client.device import resolve_device
from trainer_client.errors import (
    BadArgument,
    MisuseError,
    RankOutOfRange,
    ServiceTimeout,
)
from trainer_client.loaders import check_loader
from trainer_client.media_watch import MediaWatch
from trainer_client.parts import EVERYTHING, WantedParts
from trainer_client.position import Position, Progress, from_state, to_state
from trainer_client.prefetch import Trained
from trainer_client.read_watch import LOSS_WEIGHTS, POSITIONS, ReadWatch
from trainer_client.run import Run, RunOptions
from trainer_client.shard import Shard
from trainer_client.transport import GrpcTransport, Tls, Transport

VALIDATION = ":validation"  # behind a job's name, of the service's own making
CHECKPOINT_FLUSH_S = 30.0

_BEGINNING = Position(step=0, cursor="")


class ShardDataset(IterableDataset[Shard]):
    """Yields this rank's `Shard` of every step from the position on.

    `rank` and `world_size` default to RANK and WORLD_SIZE, as torchrun sets them. `token` is
    the team's bearer token, or `token_file` holds it and is read again for every call; by
    default DATASERVICE_TOKEN_FILE or DATASERVICE_TOKEN gives it. `tls` is True for the system's
    certificates, or a `Tls`.
    `parts` names what this rank reads of its microbatches, by default everything: see `parts.py`.
    `device` is the device for tokens, encoder items and exchange indices; for a GPU they are
    received in pinned memory and copied on a stream of their own, a microbatch ahead. By default
    they stay on the host.

    `rows_multiple`: each microbatch gets rows without labels until it has a multiple of it, as
    sequence parallelism and FP8 want; give it on all ranks (see `alignment.py`).

    `prefetch_steps` shards are kept ready or on their way, which costs the memory of their bytes.
    `connect_timeout_s` bounds the wait for the coordinator's port, `timeout_s` every other
    wait: for the other ranks to open, for a step, for a broken connection or a lost worker to
    come back. When a worker sends nothing for `stall_timeout_s`, the missing bytes are requested
    again, from whichever worker has them first. While bytes arrive slowly, this limit grows by
    itself to at most 16 times `stall_timeout_s`.

    From workers on this machine the bytes come through memory that both map, without a setting,
    where a Unix socket of the worker can be opened from here; `same_node=False`, or
    DATASERVICE_SAME_NODE=0, has them come over gRPC. `received_bytes` says what came by which.

    Ranks train together only with those of their own `launch`, one start of the job. Its name
    comes from torch's process group, torchrun, srun or mpirun. With any other launcher, give it
    here or in DATASERVICE_LAUNCH: the same on all ranks, new for each start. The newest launch
    takes over the job; the older one gets Fenced.

    Nothing is opened before the first shard is requested. Each pass over the dataset is a new
    attempt of the job: all ranks take part, and it starts at the committed position, so a
    shard that was yielded but not committed when the loop broke off comes again. Once the
    data has ended, iterating again yields nothing until `load_state_dict`.

    Use it alone, or in `DataLoader` or `StatefulDataLoader(dataset, batch_size=None)` with
    `num_workers=0`: it prefetches in threads of its own. Use it from one thread only. With
    Lightning or transformers' Trainer, use the callbacks of `trainer_client.adapters`.

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
        launch: str | None = None,
        rows_multiple: int = 1,
        same_node: bool | None = None,
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
            launch=launch,
            rows_multiple=rows_multiple,
            same_node=_same_node(same_node),
        )
        _check(self._options)
        self._transport = transport or GrpcTransport(token=token, token_file=token_file, tls=tls)
        self._begin()

    def _begin(self) -> None:
        """Stand at the beginning of the job that the options name."""
        job = self._options.job
        self._progress = Progress(_BEGINNING, job=job)
        self._expects_commits = False
        self._media = MediaWatch(job=job, rank=self._options.rank)
        self._watches = tuple(
            ReadWatch(duty, job=job, rank=self._options.rank) for duty in (POSITIONS, LOSS_WEIGHTS)
        )
        self._untold: deque[int] = deque()  # steps handed out whose commit was not sent
        self._ended = False
        self._peeked_s = 0.0  # seconds waited in `peek` for the next shard
        self._run: Run | None = None
        self._received = {"grpc": 0, "same_node": 0}  # by passes that have ended
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
                    self._media.ended(self._progress.last_handed)
                    return
                self._hand(shard)
                wait_s, self._peeked_s = time.monotonic() - began_s + self._peeked_s, 0.0
                yield replace(shard, wait_s=wait_s, progress=self._progress)
                del shard  # its memory may be needed for the next shard
                self._asked()
        finally:
            if not (self._ended and self._untold):  # else the last commits are still to come
                self._finish(run)

    def peek(self, *, wait: bool = True) -> Shard | None:
        """The shard that the loop gets next, None after the last step.

        Commits nothing and takes nothing, so that the next step can be prepared while this
        one computes. Waits until the shard has arrived; the wait counts in its `wait_s`. Without
        `wait`, None also means that it has not arrived yet. Its tensors may still be on their way
        to `device`: read its plan now, and compute with it once the loop gets it. Raises
        MisuseError outside a loop.
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

        `measured_s` are the seconds that the step took (`StepResult.seconds`), which the service
        compares with its prediction; `phase_s` are the seconds by phase (`StepResult.phase_s`).
        Does not wait for the service: commits are sent in the background, in order. Committing a
        step again changes nothing. Asking for a shard commits the one before it, until the loop
        commits a step after which more shards were already handed out: from then on only `commit`
        moves the position. Raises MisuseError where the step was not yielded, and the error of an
        earlier commit.
        """
        if isinstance(step, Shard):
            raise MisuseError("a shard was given to commit; give it the number, shard.step.")
        try:
            step = operator.index(step)  # numpy's integers too
        except TypeError as error:
            raise MisuseError(
                f"{step!r} was given to commit; give it the number of a step, shard.step."
            ) from error
        if not 0 <= step <= self._progress.last_handed:
            raise MisuseError(
                f"step {step} cannot be committed: the last step yielded is "
                f"{self._progress.last_handed}. Commit shard.step after training on it."
            )
        self._trained(step)
        if self._progress.commit(step):
            self._tell(step, Trained(step=step, measured_s=measured_s, phase_s=phase_s or {}))
            if self._ended and not self._untold:
                self.close()
            self._media.committed(step)

    def commit_next(self, shards: int = 1) -> None:
        """Commit the next `shards` shards after the last committed one, in the order in which they
        were handed out, or all of them if fewer were handed out. For framework hooks that do not
        see the shard."""
        step = self._progress.next_uncommitted(shards)
        if step is not None:
            self.commit(step)

    def expect_commits(self) -> None:
        """From here on a step counts as trained only once it is committed.

        For loops that commit every step while their loader runs ahead. The first such commit has
        the same effect; this call covers states that are saved before it.
        """
        self._expects_commits = True
        self._progress.expect_commits()

    @property
    def received_bytes(self) -> dict[str, int]:
        """Bytes of parts that all passes have received: over `grpc`, and through memory of this
        machine, `same_node`."""
        now = self._run.received_bytes if self._run else {}
        return {path: count + now.get(path, 0) for path, count in self._received.items()}

    def state_dict(self) -> dict[str, str | int]:
        """The position after the last trained step: version, job, step, cursor.

        If the loop calls `commit`, that is the last committed step. If it never does, all shards
        handed out count as trained, which is the convention of torch's StatefulDataLoader and
        accelerate; if a framework calls `Shard.to`, those up to the last one it was called on. An
        UncommittedSteps warning says once where this may not be what the loop means.

        The same on every rank; keep it in the trainer's checkpoint. Waits briefly until the
        service has received the commits; an unreachable service does not stop a checkpoint.
        Raises the error of a commit, so that a fenced trainer saves nothing.
        """
        if self._run is not None:
            # Commits that take longer stay queued; the position does not depend on them.
            with suppress(ServiceTimeout):
                self._run.flush(min(CHECKPOINT_FLUSH_S, self._options.timeout_s))
        return self.position()

    def position(self) -> dict[str, str | int]:
        """`state_dict` without waiting for the service, for a hook that keeps it at every step."""
        return to_state(self._progress.saved(), self._options.job)

    def load_state_dict(self, state: dict[str, str | int]) -> None:
        """Continue from a `state_dict`, of any rank and any world size, when next iterated.

        Raises MisuseError while the dataset is iterated, and StateMismatch where the state is of
        another job or version, or no state of a dataset.
        """
        if self._ended:
            self.close()
        if self._run is not None:
            raise MisuseError(
                "load_state_dict was called while the dataset is iterated. Leave the loop (or "
                "call close()) first, then load and iterate again."
            )
        job = self._options.job
        self._progress = Progress(from_state(state, job), job=job)
        if self._expects_commits:
            self._progress.expect_commits()
        self._ended = False

    def validation(self) -> "ShardDataset":
        """A pass over the job's held-out sources, from its beginning: another dataset for the same
        rank, with the same options. All ranks take part, between two of their training steps:

            with dataset.validation() as held_out:
                for shard in held_out:
                    ...
                    held_out.commit(shard.step)

        Its `state_dict` is its own. Where the job file has no `validation`, iterating it raises
        UnknownJob. Raises MisuseError where this dataset is such a pass itself.
        """
        if self._options.job.endswith(VALIDATION):
            raise MisuseError(
                f"{self._options.job!r} is a validation, and has none of its own. Call "
                "validation() of the dataset that trains."
            )
        held_out = copy.copy(self)
        held_out._options = replace(self._options, job=self._options.job + VALIDATION)
        held_out._begin()
        return held_out

    def close(self) -> None:
        """Give up the rank and stop all threads. The dataset may be iterated again."""
        if self._run is not None:
            self._finish(self._run)

    def __enter__(self) -> "ShardDataset":
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

    def _hand(self, shard: Shard) -> None:
        """Note a shard that goes to the loop."""
        self._progress.hand(Position(step=shard.step + 1, cursor=shard.cursor_after))
        self._untold.append(shard.step)
        self._media.hand(shard)
        for watch in self._watches:
            watch.hand(shard)

    def _trained(self, step: int) -> None:
        """Raises MisuseError where the loop has trained `step` otherwise than the job says."""
        for watch in self._watches:
            watch.trained(step)

    def _asked(self) -> None:
        """The loop asks for the next shard."""
        if not self._progress.by_commit_alone:
            self._trained(self._progress.last_handed)
            self._progress.ask()
            self._tell(self._progress.last_handed)
            self._media.asked(self._progress.last_handed)

    def _tell(self, step: int, measured: Trained | None = None) -> None:
        """Send the commits, not sent before, of all steps up to this one."""
        while self._untold and self._untold[0] <= step:
            told = self._untold.popleft()
            if self._run is not None:
                of_told = measured if measured is not None and measured.step == told else None
                self._run.commit(of_told or Trained(step=told))

    def _start(self) -> Run:
        check_loader(self._progress.start.step)
        if self._run is not None:
            raise MisuseError(
                f"rank {self._options.rank} already iterates this dataset. Finish or close() the "
                "first loop before a second one."
            )
        self._progress.begin()
        self._untold.clear()
        self._peeked_s = 0.0
        options = replace(self._options, device=resolve_device(self._options.device))
        run = Run(options, self._transport, self._progress.start)
        # Also closes in the middle of a loop, when the dataset is collected or the process exits.
        self._run, self._finalizer = run, weakref.finalize(self, run.close)
        return run

    def _finish(self, run: Run) -> None:
        if self._run is run:
            self._received = self.received_bytes
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


def _same_node(given: bool | None) -> bool:
    if given is not None:
        return given
    return os.environ.get("DATASERVICE_SAME_NODE", "1").lower() not in ("0", "false", "off")


def _check(options: RunOptions) -> None:
    split_address(options.address)
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
    check_multiple(options.rows_multiple)
    timeouts = (options.connect_timeout_s, options.timeout_s, options.stall_timeout_s)
    if min(timeouts) <= 0:
        raise BadArgument(
            f"connect_timeout_s, timeout_s, stall_timeout_s are {timeouts}; each must be above 0."
        )
