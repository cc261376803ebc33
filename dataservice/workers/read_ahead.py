"""Samples that are read before they have a slot, so that no slot waits for storage.

    samples of a pack ──► fair queue ──► reads under way ──► their slots' queue
       far sources          as slots'     bounded, no slot      with the bytes

Read ahead are the samples of sources on other machines, and of those whose storage made slots wait
several times. Which is next is decided as for slots: teams by weight, jobs equally, packs in the
order of need. A team may have twice as many reads and bytes as it leaves free to all others, so
that one whose storage hangs leaves room for whoever comes.

Contract.
  Read       a sample goes on to the slots' queue with its bytes, which count until `used`.
  Failed     it goes on without, and its slot reads it: only slots mask samples.
  Away       while its storage does not answer, a sample stays here and is tried again, for as long
             as it takes; `outages` tells of it.
  Withdrawn  samples that wait are dropped, and so are results of those under way.

Used on one event loop; reading blocks threads of its own.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from dataservice.core.orders import PackKey, StorageOutage
from dataservice.core.team import TeamShare, team_of
from dataservice.workers.byte_cache import KeptReads
from dataservice.workers.decoders import Decoders, ReadOutcome, SampleOutcome
from dataservice.workers.fair_queue import Begun, FairQueue, Task

READ_AHEAD_BYTES = 256 * 2**20
BATCH_SAMPLES = 16
BATCH_BYTES = 2**20  # of samples that are asked for together
NEIGHBOUR_BYTES = 64 * 1024  # between two that are read in one request
WAIT_S = 0.005  # in which a CPU does what a slot could do meanwhile
LOOKED_AT, MOST_WAITS = 8, 4
AGAIN_S = 1.0
GUESSED_BYTES = 128 * 1024
SOURCES_KEPT = 1024
HOG = 2  # times what is left free to others


@dataclass(kw_only=True, slots=True, eq=False)
class _Source:
    """A source of a job. `waits` says of the last samples that slots read whether storage made
    them wait; `mean_bytes` is of those read ahead."""

    waits: deque[bool] = field(default_factory=lambda: deque(maxlen=LOOKED_AT))
    is_slow: bool = False
    mean_bytes: float = 0.0
    away_since_s: float = 0.0
    away: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Wanted:
    """A pack until it is withdrawn: another of the same name is another."""

    share: TeamShare


class ReadAhead:
    """Reads on the threads of `decoders`; samples that may have a slot go to `ready`."""

    def __init__(
        self,
        decoders: Decoders,
        *,
        limit_bytes: int = READ_AHEAD_BYTES,
        ready: Callable[[PackKey, Sequence[Task]], None],
    ) -> None:
        self._decoders = decoders
        self._limit_bytes = limit_bytes
        self._ready = ready
        self._threads = ThreadPoolExecutor(decoders.reads, thread_name_prefix="read")
        self._queue = FairQueue(slots=decoders.reads, may_begin=self._has_room)
        self._wanted: dict[PackKey, _Wanted] = {}
        self._sources: dict[tuple[str, str], _Source] = {}
        self._reads: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()
        self._closed = False
        self.kept = KeptReads()
        """What was found on this machine so far."""
        self.samples = 0
        """Samples that were read ahead so far."""

    @property
    def reads(self) -> int:
        """Requests under way."""
        return self._reads.total()

    @property
    def held_bytes(self) -> int:
        """Bytes being read, and read for slots that have not decoded them."""
        return self._bytes.total()

    def wants(self, task: Task) -> bool:
        """Whether a sample is to be read ahead."""
        if task.read is not None or task.in_slot:
            return False
        source = task.sample.ref.source
        known = self._sources.get((task.key.job, source))
        slow = known is not None and known.is_slow
        return slow or source in self._decoders.far_sources(task.pipeline)

    def learn(self, task: Task, outcome: SampleOutcome) -> None:
        """What a slot that read this sample found out about its storage."""
        source = self._source(task)
        if outcome.away:
            source.is_slow = True
            self._note_away(source, outcome.reason)
            return
        source.away = ""
        source.waits.append(outcome.read_s - outcome.read_cpu_s >= WAIT_S)
        source.is_slow = source.is_slow or sum(source.waits) >= MOST_WAITS

    def add(self, key: PackKey, tasks: Sequence[Task], share: TeamShare) -> None:
        """Read these samples of a pack."""
        if not tasks:
            return
        self._wanted.setdefault(key, _Wanted(share=share))
        # The limit of a team is on its slots.
        self._queue.add(key, tasks, replace(share, limit=1.0), time.monotonic())
        self._fill()

    def add_later(self, key: PackKey, tasks: Sequence[Task], share: TeamShare) -> None:
        """Read these samples after a pause, unless their pack is withdrawn meanwhile."""
        wanted = self._wanted.setdefault(key, _Wanted(share=share))
        loop = asyncio.get_running_loop()
        loop.call_later(AGAIN_S, self._again, key, tasks, wanted)

    def withdraw(self, key: PackKey) -> None:
        """Forget the samples of this pack."""
        self._wanted.pop(key, None)
        self._queue.withdraw(key)
        if not any(other.job == key.job for other in self._wanted):
            for known in [known for known in self._sources if known[0] == key.job]:
                self._sources[known].away = ""

    def used(self, task: Task) -> None:
        """A sample that was read ahead has been decoded, or will not be."""
        if task.read is not None:
            self._count_bytes(task, -task.read.size_bytes)
            self._fill()

    def outages(self) -> tuple[StorageOutage, ...]:
        """The sources whose storage does not answer, the longest away first."""
        now_s = time.monotonic()
        away = [
            StorageOutage(job=job, source=name, away_s=now_s - each.away_since_s, reason=each.away)
            for (job, name), each in self._sources.items()
            if each.away
        ]
        return tuple(sorted(away, key=lambda outage: -outage.away_s))

    def close(self) -> None:
        """Begin nothing more, and wait for nothing."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- reading ---------------------------------------------------------------------------

    def _has_room(self, team: str) -> bool:
        free_reads = self._decoders.reads - self._reads.total()
        free_bytes = self._limit_bytes - self._bytes.total()
        return self._reads[team] < HOG * free_reads and self._bytes[team] < HOG * free_bytes

    def _fill(self) -> None:
        while not self._closed and (batch := self._batch()):
            tasks = [begun.task for begun in batch]
            team, guesses = team_of(tasks[0].key.job), [*map(self._guessed_bytes, tasks)]
            self._reads[team] += 1
            self._bytes[team] += sum(guesses)
            asked = partial(
                self._decoders.read, tasks[0].pipeline, [task.sample.ref for task in tasks]
            )
            reading = asyncio.get_running_loop().run_in_executor(self._threads, asked)
            wanted = [self._wanted[task.key] for task in tasks]
            reading.add_done_callback(partial(self._done, batch, wanted, sum(guesses)))

    def _batch(self) -> list[Begun]:
        """The next sample, followed by others that are asked for with it: texts of its source, and
        its neighbours in a tar."""
        first = self._queue.next(time.monotonic())
        if first is None:
            return []
        batch, left_bytes = [first], BATCH_BYTES - _span_bytes(first.task)

        def fits(task: Task, _seconds: float) -> bool:
            same = task.pipeline == first.task.pipeline and _source_of(task) == _source_of(
                first.task
            )
            fits_in = _span_bytes(task) <= left_bytes
            return same and fits_in and _together(batch[-1].task, task)

        while left_bytes > 0 and len(batch) < BATCH_SAMPLES:
            also = self._queue.next(time.monotonic(), only=fits)
            if also is None:
                break
            batch.append(also)
            left_bytes -= _span_bytes(also.task)
        return batch

    def _done(
        self,
        batch: Sequence[Begun],
        packs: Sequence[_Wanted],
        guessed_bytes: int,
        reading: asyncio.Future[list[ReadOutcome]],
    ) -> None:
        team = team_of(batch[0].task.key.job)
        self._reads[team] -= 1
        self._bytes[team] -= guessed_bytes
        if reading.cancelled():  # closed
            return
        # Whatever is wrong, the slot meets it too.
        failed = reading.exception() is not None
        outcomes = [ReadOutcome()] * len(batch) if failed else reading.result()
        now_s, ready = time.monotonic(), []
        for begun, pack, outcome in zip(batch, packs, outcomes, strict=True):
            self.kept = self.kept.plus(outcome.kept)
            self._queue.done(begun, (now_s - begun.run.started_s) / len(batch))
            if self._wanted.get(begun.task.key) is pack:
                ready += self._settled(begun.task, pack.share, outcome)
        self._fill()
        for task in ready:
            self._ready(task.key, [task])

    def _settled(self, task: Task, share: TeamShare, outcome: ReadOutcome) -> list[Task]:
        source = self._source(task)
        if outcome.away:
            self._note_away(source, outcome.away)
            self.add_later(task.key, [task], share)
            return []
        source.away = ""
        if outcome.read is None:
            return [replace(task, in_slot=True)]
        self.samples += 1
        size_bytes = outcome.read.size_bytes
        source.mean_bytes += (size_bytes - source.mean_bytes) * (0.1 if source.mean_bytes else 1)
        self._count_bytes(task, size_bytes)
        return [replace(task, read=outcome.read, ahead_s=outcome.read_s)]

    def _again(self, key: PackKey, tasks: Sequence[Task], pack: _Wanted) -> None:
        if not self._closed and self._wanted.get(key) is pack:
            self.add(key, tasks, pack.share)

    # ---- what is known of sources ----------------------------------------------------------

    def _source(self, task: Task) -> _Source:
        known = (task.key.job, task.sample.ref.source)
        found = self._sources.pop(known, None) or _Source()
        self._sources[known] = found
        while len(self._sources) > SOURCES_KEPT:
            del self._sources[next(iter(self._sources))]
        return found

    def _note_away(self, source: _Source, reason: str) -> None:
        if not source.away:
            source.away_since_s = time.monotonic()
        source.away = reason

    def _guessed_bytes(self, task: Task) -> int:
        known = self._sources.get((task.key.job, task.sample.ref.source))
        mean_bytes = int(known.mean_bytes) if known is not None else 0
        return max(_span_bytes(task), mean_bytes or GUESSED_BYTES)

    def _count_bytes(self, task: Task, more: int) -> None:
        self._bytes[team_of(task.key.job)] += more


def _source_of(task: Task) -> tuple[str, str]:
    return task.key.job, task.sample.ref.source


def _span_bytes(task: Task) -> int:
    return sum(span.size_bytes for span in task.sample.ref.location.spans)


def _together(before: Task, task: Task) -> bool:
    """Whether one request is well spent on both: their files, if they have some, are in it."""
    one, other = before.sample.ref.location, task.sample.ref.location
    if not one.spans or not other.spans:
        return False
    if not (before.sample.lengths.items or task.sample.lengths.items):
        return True
    in_tar = len(one.spans) > 1 and len(other.spans) > 1
    end = max(span.offset_bytes + span.size_bytes for span in one.spans)
    gap_bytes = min(span.offset_bytes for span in other.spans) - end
    return in_tar and one.file == other.file and 0 <= gap_bytes <= NEIGHBOUR_BYTES
