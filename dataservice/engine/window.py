"""The ready window of one attempt: steps that are planned, until every rank has received them.

    made step ──► put: dispatched ──► decoding, decoded ──► take ──► release at workers
                                          ▲
                        wait_planned ─────┘  ranks

Contract. The bytes of a step that is put count against its team until workers have released it,
also where its dispatch fails or is cancelled. Whoever takes a step out of the window releases it.
`stop` empties it, and returns once nothing of the attempt is held.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dataservice.core.ports import Metrics
from dataservice.engine.affinity import PackWishes
from dataservice.engine.api import EndOfData
from dataservice.engine.attempt import Attempt
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.reachability import Reachability
from dataservice.engine.ready_bytes import ReadyBytes
from dataservice.engine.ready_step import ReadyStep
from dataservice.engine.records import MadeStep
from dataservice.engine.ticket_rows import StepTickets
from dataservice.engine.waiters import Waiters

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowNow:
    """The number of steps planned ahead, how many of them, from the first on, are decoded whole,
    and whether no more are to come."""

    ready_steps: int
    decoded_steps: int
    ended: bool


class ReadyWindow:
    """The steps by number, and whoever waits for one. `end` is known once planning is through."""

    def __init__(
        self,
        attempt: Attempt,
        *,
        dispatcher: Dispatcher,
        ready_bytes: ReadyBytes,
        metrics: Metrics,
    ) -> None:
        self._attempt = attempt
        self._dispatcher = dispatcher
        self._ready_bytes = ready_bytes
        self._metrics = metrics
        self._reachability = Reachability(job=attempt.job, ranks=attempt.topology.world_size)
        self._steps: dict[int, ReadyStep] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._put = Waiters()
        self._received = attempt.received_by_all
        self.end: EndOfData | None = None
        attempt.when_over(self._put.wake)

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    @property
    def now(self) -> WindowNow:
        """The window as it is now."""
        pending = [self._steps[step].dispatched.decoding for step in sorted(self._steps)]
        decoded = pending.index(True) if True in pending else len(pending)
        ended = self.end is not None and not pending
        return WindowNow(ready_steps=len(pending), decoded_steps=decoded, ended=ended)

    # ---- in ---------------------------------------------------------------------------------

    async def put(self, made: MadeStep) -> ReadyStep:
        """Have a step decoded, whose bytes are counted already."""
        plan = made.planned.plan
        try:
            dispatched = await self._dispatcher.dispatch(
                plan,
                made.orders,
                reachability=self._reachability,
                wishes=PackWishes(keys=made.keys, replicas=self._attempt.replicas_at),
            )
        except BaseException:
            await self._ready_bytes.drop(self._attempt.job, made.size_bytes)
            raise
        ready = self._steps[plan.step] = ReadyStep(
            planned=made.planned,
            digest=made.digest,
            parts=made.parts,
            common=made.common,
            dispatched=dispatched,
            tickets=StepTickets(made.parts, dispatched),
            size_bytes=made.size_bytes,
        )
        self._put.wake()
        return ready

    async def close(self, end: EndOfData) -> None:
        """No step comes behind those that are here."""
        self.end = end
        self._put.wake()
        await self.tell()

    # ---- waiting ----------------------------------------------------------------------------

    async def tell(self) -> None:
        """Wake those who wait: something changed."""
        self._metrics.ready_steps(self._attempt.job, len(self._steps))
        async with self._changed:
            self._changed.notify_all()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for what `tell` may have made true."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def wait_planned(self, step: int) -> ReadyStep | EndOfData:
        """A step once it is put, or the end. Raises the reason where the attempt ends."""
        while True:
            if self._attempt.over:
                await self._attempt.ended()
            if (found := self._steps.get(step) or self.end) is not None:
                return found
            # Not the condition, which tells of all else too: thousands of ranks wait here.
            await self._put.next_change()

    # ---- out --------------------------------------------------------------------------------

    @property
    def has_received(self) -> bool:
        """Whether every rank has received more than when `take_received` was called last, or a step
        that is here."""
        received = self._attempt.received_by_all
        return received != self._received or min(self._steps, default=received + 1) <= received

    async def take_received(self) -> list[ReadyStep]:
        """Take out the steps that every rank has received."""
        self._received = self._attempt.received_by_all
        await self._ready_bytes.look_again()
        return await self.take(self._received)

    async def take(self, through_step: int | None = None) -> list[ReadyStep]:
        """Take out the steps up to this one, all by default."""
        gone = [step for step in self._steps if through_step is None or step <= through_step]
        taken = [self._steps.pop(step) for step in gone]
        await self.tell()
        return taken

    async def release(self, ready: ReadyStep, *, received: bool) -> None:
        """Have workers release a step, which every rank has `received` or nobody wants."""
        try:
            await self._dispatcher.release(ready.dispatched, received=received)
        except Exception:  # it must not keep the next attempt from starting
            about = {**self._attempt.about, "step": ready.planned.plan.step}
            log.exception("the step was not released", extra=about)
        finally:
            await self._ready_bytes.drop(self._attempt.job, ready.size_bytes)

    async def release_when_idle(self, idle_s: float) -> None:
        """Empty the window each time that no trainer has been connected for `idle_s`. A trainer
        that comes back has its steps planned again."""
        loop = asyncio.get_running_loop()
        seen_s = loop.time()
        while True:
            await asyncio.sleep(max(0.05, idle_s / 8))
            if self._attempt.connected:
                seen_s = loop.time()
            elif loop.time() - seen_s >= idle_s and self._steps:
                about = self._attempt.about
                log.info("no trainer is connected: its steps are let go", extra=about)
                self._release_soon(await self.take())

    async def stop(self) -> None:
        """Release all that is here or is being released."""
        self._release_soon(await self.take())
        await asyncio.gather(*self._releases, return_exceptions=True)

    def _release_soon(self, steps: Sequence[ReadyStep]) -> None:
        # Apart from the caller, whose frame would keep the last step while it waits.
        for ready in steps:
            task = asyncio.create_task(self.release(ready, received=False))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)
