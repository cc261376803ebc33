"""A dataset of drawn steps, in the place of ShardDataset: the same loop, without a service.

    thread: draw ─ stage for the device ─ Prefetcher ─▶ for shard in dataset

Success: the shards come in order, drawn and copied up to `prefetch_steps` ahead.
Failure: an error while drawing is raised in the loop, after the shards before it.
Cancellation: leaving the loop, or `close`, stops the thread after the step that it draws.
"""

import os
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import TracebackType

import torch
from torch.utils.data import IterableDataset

from trainer_client.alignment import aligned, check_multiple
from trainer_client.device import DeviceCopier, resolve_device
from trainer_client.errors import BadArgument, MisuseError, RankOutOfRange
from trainer_client.parts import EVERYTHING, WantedParts
from trainer_client.position import Position, Progress, from_state, to_state
from trainer_client.prefetch import Prefetcher
from trainer_client.shard import Shard
from trainer_client.synthetic.job import SyntheticJob

WAIT_S = 600.0  # for a step to be drawn
JOIN_S = 5.0


class SyntheticDataset(IterableDataset[Shard]):
    """Yields this rank's `Shard` of every step of a `SyntheticJob`, from the position on.

    Use it as `ShardDataset`: `commit`, `peek`, `state_dict`, `parts=`, `device=`,
    `prefetch_steps=` and `rows_multiple=` mean the same. A replica may have several ranks,
    `ranks_per_replica`; rank = replica · `ranks_per_replica` + place, by default RANK of the
    environment. Each rank draws for itself, and sends nothing.

    Raises RankOutOfRange and BadArgument where ranks and replicas do not agree.
    """

    def __init__(
        self,
        job: SyntheticJob,
        *,
        rank: int | None = None,
        ranks_per_replica: int = 1,
        parts: Collection[str] = EVERYTHING,
        device: torch.device | str | None = None,
        prefetch_steps: int = 2,
        rows_multiple: int = 1,
    ) -> None:
        rank = int(os.environ.get("RANK", 0)) if rank is None else rank
        ranks = job.replicas * ranks_per_replica
        if not 0 <= rank < ranks:
            raise RankOutOfRange(
                f"rank {rank} is outside 0..{ranks - 1}: the job has {job.replicas} replicas of "
                f"{ranks_per_replica} ranks. Give SyntheticJob the replicas of this launch."
            )
        if prefetch_steps < 1:
            raise BadArgument(f"prefetch_steps={prefetch_steps} must be at least 1.")
        self._job, self._rank, self._replica = job, rank, rank // ranks_per_replica
        self._wanted = WantedParts.named(parts)
        self._device = None if device is None else torch.device(device)
        check_multiple(rows_multiple)
        self._rows_multiple = rows_multiple
        self._prefetch_steps = prefetch_steps
        self._progress = Progress(Position(step=0, cursor=""), job=job.name)
        self._prefetcher: Prefetcher[Shard] | None = None

    def __iter__(self) -> Iterator[Shard]:
        """Draw and yield shards until the steps end."""
        if self._prefetcher is not None:
            raise MisuseError("this dataset is iterated already. Finish the first loop.")
        self._progress.begin()
        prefetcher = self._prefetcher = self._start(DeviceCopier(resolve_device(self._device)))
        try:
            while True:
                began_s = time.monotonic()
                shard = prefetcher.next(WAIT_S)
                if shard is None:
                    return
                self._progress.hand(Position(step=shard.step + 1, cursor=shard.cursor_after))
                wait_s = time.monotonic() - began_s
                yield replace(shard, wait_s=wait_s, progress=self._progress)
                del shard  # its memory may be needed for the next one
                if not self._progress.by_commit_alone:
                    self._progress.ask()
        finally:
            self.close()

    def peek(self, *, wait: bool = True) -> Shard | None:
        """The shard that the loop gets next, None after the last step; without `wait`, None also
        where it is not drawn yet."""
        if self._prefetcher is None:
            raise MisuseError("peek was called while the dataset is not iterated.")
        return self._prefetcher.peek(WAIT_S) if wait else self._prefetcher.ready()

    def commit(
        self,
        step: int,
        *,
        measured_s: float | None = None,
        phase_s: Mapping[str, float] | None = None,
    ) -> None:
        """This rank has trained `step`. Moves the position; the seconds go nowhere."""
        if step > self._progress.last_handed:
            raise MisuseError(
                f"step {step} cannot be committed: the last step yielded is "
                f"{self._progress.last_handed}. Commit shard.step after training on it."
            )
        self._progress.commit(step)

    def commit_next(self, shards: int = 1) -> None:
        """Commit the next `shards` shards after the last committed one."""
        step = self._progress.next_uncommitted(shards)
        if step is not None:
            self.commit(step)

    def expect_commits(self) -> None:
        """From here on a step counts as trained only once it is committed."""
        self._progress.expect_commits()

    def state_dict(self) -> dict[str, str | int]:
        """The position after the last trained step, as `ShardDataset` has it."""
        return to_state(self._progress.saved(), self._job.name)

    def load_state_dict(self, state: dict[str, str | int]) -> None:
        """Continue from a `state_dict` when next iterated."""
        if self._prefetcher is not None:
            raise MisuseError("load_state_dict was called while the dataset is iterated.")
        self._progress = Progress(from_state(state, self._job.name), job=self._job.name)

    def close(self) -> None:
        """Stop drawing."""
        if (prefetcher := self._prefetcher) is not None:
            self._prefetcher = None
            prefetcher.close()
            prefetcher.join(JOIN_S)

    def __enter__(self) -> "SyntheticDataset":
        """`with SyntheticDataset(...) as dataset:` closes it at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _start(self, copier: DeviceCopier) -> Prefetcher[Shard]:
        steps = iter(range(self._progress.start.step, self._job.steps))

        def load() -> Shard | None:
            number = next(steps, None)
            if number is None:
                return None
            step = self._job.step(number)
            shard = step.shard(self._replica, rank=self._rank, wanted=self._wanted)
            return copier.send(aligned(shard, self._rows_multiple))

        return Prefetcher(load, depth=self._prefetch_steps)
