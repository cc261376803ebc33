"""A worker's slots: samples of all packs go through one fair queue to the decoders. Where storage
would make a slot wait, they are read before they come to the queue (see read_ahead.py).

Contract.
  decode     returns the outcomes of a pack's samples, in its order. When a pipeline cannot be
             built or the decoders are lost, all packs that had a sample there raise.
  Cancelling drops the pack's samples that have no slot yet; results of the others are discarded.

Small samples go to a slot several at a time: handing a text over takes about as long as decoding
it, and samples that are read and tokenised together take less than one by one.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from dataservice.core.orders import PackKey, PackOrder
from dataservice.core.team import TeamShare
from dataservice.workers.decoders import Decoders, SampleOutcome
from dataservice.workers.fair_queue import Begun, FairQueue, Task, TeamLoad, tasks_of
from dataservice.workers.read_ahead import READ_AHEAD_BYTES, ReadAhead
from dataservice.workers.sample_memory import sample_bytes

BATCH_SAMPLES = 16
BATCH_S = 0.1  # estimated seconds of decoding in one batch
BATCH_BYTES = 32 * 2**20  # of its decoded samples


@dataclass(kw_only=True, slots=True, eq=False)
class _Pack:
    share: TeamShare
    outcomes: list[SampleOutcome | None]
    left: int
    done: asyncio.Future[None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Served:
    outcomes: list[SampleOutcome]
    slot_s: float


class Slots:
    """Decodes packs. Used on one event loop."""

    def __init__(self, decoders: Decoders, *, read_ahead_bytes: int = READ_AHEAD_BYTES) -> None:
        self._decoders = decoders
        self._threads = ThreadPoolExecutor(decoders.slots, thread_name_prefix="slot")
        self._queue = FairQueue(slots=decoders.slots)
        self.ahead = ReadAhead(decoders, limit_bytes=read_ahead_bytes, ready=self._ready)
        self._packs: dict[PackKey, _Pack] = {}
        self._busy = 0
        self._closed = False
        self._alarm: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Start the decoders. Raises WorkerLostError when they cannot start."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._decoders.start)

    async def open(self, pipeline: str) -> int:
        """Build a pipeline on a slot; its pad token. Raises what building it raises."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._decoders.open, pipeline)

    async def decode(self, order: PackOrder) -> list[SampleOutcome]:
        """Outcomes of a pack's samples. The pack must not be in decoding already."""
        self._withdraw(order.key)  # another order under this key
        pack = _Pack(
            share=order.share,
            outcomes=[None] * len(order.samples),
            left=len(order.samples),
            done=asyncio.get_running_loop().create_future(),
        )
        self._packs[order.key] = pack
        first_read: list[Task] = []
        at_once: list[Task] = []
        for task in tasks_of(order):
            (first_read if self.ahead.wants(task) else at_once).append(task)
        self._queue.add(order.key, at_once, order.share, time.monotonic())
        self.ahead.add(order.key, first_read, order.share)
        self._fill()
        try:
            if pack.left:
                await pack.done
        finally:
            if self._packs.get(order.key) is pack:
                self._withdraw(order.key)
                del self._packs[order.key]
        return [outcome for outcome in pack.outcomes if outcome is not None]

    def teams(self) -> tuple[TeamLoad, ...]:
        """Waiting samples and finished work, by team."""
        return self._queue.teams()

    def close(self) -> None:
        """End the decoders, and the threads without waiting for them."""
        self._closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._decoders.close()
        self.ahead.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _withdraw(self, key: PackKey) -> None:
        self.ahead.withdraw(key)
        for task in self._queue.withdraw(key):
            self.ahead.used(task)

    def _ready(self, key: PackKey, tasks: Sequence[Task]) -> None:
        """Samples that were read, or that a slot is to read after all."""
        self._queue.add(key, tasks, self._packs[key].share, time.monotonic())
        self._fill()

    def _next(
        self, now_s: float, *, only: Callable[[Task, float], bool] = lambda task, seconds: True
    ) -> Begun | None:
        """The next sample of the queue that does not wait for its storage: what is known of it may
        have changed since it was queued."""
        while (begun := self._queue.next(now_s, only=only)) is not None:
            task = begun.task
            if not self.ahead.wants(task):
                return begun
            self._queue.give_back(begun)
            self.ahead.add(task.key, [task], self._packs[task.key].share)
        return None

    def _fill(self) -> None:
        """Give samples to all free slots."""
        if self._closed:
            return
        now_s = time.monotonic()
        loop = asyncio.get_running_loop()
        while self._busy < self._decoders.slots and (batch := self._batch(now_s)):
            self._busy += 1
            packs = [self._packs[begun.task.key] for begun in batch]
            running = loop.run_in_executor(self._threads, self._serve, batch)
            running.add_done_callback(partial(self._served, batch, packs))
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        pause_s = self._queue.pause_s(now_s) if self._busy < self._decoders.slots else None
        if pause_s is not None:
            self._alarm = loop.call_later(pause_s, self._fill)

    def _batch(self, now_s: float) -> list[Begun]:
        """The next sample, followed by others of its pipeline when enough of them wait for all
        slots, and all are small."""
        first = self._next(now_s)
        if first is None:
            return []
        batch = [first]
        # At most one slot's share of the waiting samples: one slot serves the whole batch.
        room = min(BATCH_SAMPLES, 1 + self._queue.queued // self._decoders.slots)
        left_s = BATCH_S - first.run.charged_s
        left_bytes = BATCH_BYTES - sample_bytes(first.task.sample.lengths)

        def fits(task: Task, seconds: float) -> bool:
            size_bytes = sample_bytes(task.sample.lengths)
            small = seconds <= left_s and size_bytes <= left_bytes
            return small and task.pipeline == first.task.pipeline

        while len(batch) < room:
            also = self._next(now_s, only=fits)
            if also is None:
                break
            batch.append(also)
            left_s -= also.run.charged_s
            left_bytes -= sample_bytes(also.task.sample.lengths)
        return batch

    def _serve(self, batch: Sequence[Begun]) -> _Served:
        """Decode the batch on one slot; runs in a thread."""
        began_s = time.monotonic()
        outcomes = self._decoders.decode(
            batch[0].task.pipeline,
            [begun.task.sample for begun in batch],
            [begun.task.read for begun in batch],
        )
        return _Served(outcomes=outcomes, slot_s=time.monotonic() - began_s)

    def _served(
        self, batch: Sequence[Begun], packs: Sequence[_Pack], running: asyncio.Future[_Served]
    ) -> None:
        self._busy -= 1
        for begun in batch:
            self.ahead.used(begun.task)
        if running.cancelled():  # closed
            return
        error = running.exception()
        if error is None:
            self._settle(batch, packs, running.result())
        else:
            for begun, pack in zip(batch, packs, strict=True):
                self._queue.done(begun, time.monotonic() - begun.run.started_s)
                if not pack.done.done():
                    pack.done.set_exception(error)
        self._fill()

    def _settle(self, batch: Sequence[Begun], packs: Sequence[_Pack], served: _Served) -> None:
        decode_s = sum(outcome.seconds for outcome in served.outcomes)
        besides_s = max(0.0, served.slot_s - decode_s) / len(batch)
        for begun, pack, outcome in zip(batch, packs, served.outcomes, strict=True):
            task = begun.task
            self._queue.done(begun, outcome.seconds + besides_s)
            if task.read is None:
                self.ahead.learn(task, outcome)
            if outcome.away:
                if self._packs.get(task.key) is pack:
                    self.ahead.add_later(task.key, [replace(task, in_slot=False)], pack.share)
                continue
            if task.read is not None:
                outcome = replace(outcome, ahead_s=task.ahead_s)
            pack.outcomes[task.place] = outcome
            pack.left -= 1
            if pack.left == 0 and not pack.done.done():
                pack.done.set_result(None)
