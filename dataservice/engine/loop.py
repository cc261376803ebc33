"""The loop of one running job: draw → plan → dispatch → ready window.

                    plan_step               Dispatcher
    cursor ──► [thread] ──► StepPlan ──► orders to workers ──► ready[step] ──► ranks
       ▲                                                          │
       └──────────── room in the window ◄── received by all ──────┘

What is ready is in `window.py`, what is trained in `commits.py`.

Contract. Steps are planned in order, at most `ready_steps` beyond the last step that every
rank has received, and decoded as far as the team's ready bytes allow. A step leaves the window
when all ranks have it; at most `ready_steps` steps are being released at once, whatever ranks say
of what they have. Steps that the attempt skips are drawn and passed over: a rank that asks for one
is told which comes next. A step asked for again later is planned again from the ledger's cursor:
the same plan, by construction, and checked by digest.
A planning or state error, or a source that passes its error budget, ends the attempt with that
error; ranks that wait are told, and the workers let go of its packs.
Plans are made in threads that the teams share (`step_threads.py`); the ledger is written in other
threads, so that a slow disk holds none of them, and what an index that is still being read must be
asked for is fetched in others again.
New steps are planned inside `planning`, the job's own lock: its holder knows that no step is being
planned, and may change the coefficients of those to come.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cursor import Cursor
from dataservice.core.errors import NotFoundError, ServiceError, StateError, WorkerLostError
from dataservice.core.job_setup import JobSetup
from dataservice.core.orders import (
    EVERYTHING,
    RankShard,
    StepSummary,
    WantedParts,
)
from dataservice.core.ports import Metrics
from dataservice.core.receipts import PackReceipts
from dataservice.core.state_store import StateStore
from dataservice.engine.api import EndOfData, SkippedSteps
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.commits import Commits
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.error_budget import BudgetTally
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.planner import pass_over
from dataservice.engine.ready_bytes import ReadyBytes
from dataservice.engine.ready_step import RankShards, ReadyStep
from dataservice.engine.records import (
    CONTENT_WAIT_S,
    AttemptRecords,
    MadeStep,
    two_versions,
)
from dataservice.engine.shards import packs_of
from dataservice.engine.shares import Shares
from dataservice.engine.skips import Skips
from dataservice.engine.step_threads import StepThreads
from dataservice.engine.tasks import SharedWork, cancel_all, detach, retrieve_error
from dataservice.engine.threads import in_store
from dataservice.engine.window import ReadyWindow, WindowNow

log = logging.getLogger(__name__)

# Steps passed over in one turn of a thread, for which other teams wait.
PASSED_AT_ONCE = 1024
# Summaries of the last steps that are kept for ranks that ask; older ones are made again.
SUMMARIES_KEPT = 16

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopPorts:
    """What the loops of all jobs share."""

    store: StateStore
    dispatcher: Dispatcher
    metrics: Metrics
    ready_bytes: ReadyBytes
    shares: Shares
    threads: StepThreads
    ticket_secret: bytes
    idle_release_s: float


class AttemptLoop:
    """Plans ahead for one complete attempt, and hands each rank its part."""

    def __init__(
        self,
        setup: JobSetup,
        attempt: Attempt,
        *,
        ports: LoopPorts,
        planning: asyncio.Lock,
        skips: Skips,
    ) -> None:
        self._setup = setup
        self._attempt = attempt
        self._ports = ports
        self._records = AttemptRecords(attempt, store=ports.store, metrics=ports.metrics)
        self._shards = RankShards(attempt, ports.ticket_secret)
        self._commits = Commits(attempt, records=self._records, metrics=ports.metrics, skips=skips)
        self._window = ReadyWindow(
            attempt,
            dispatcher=ports.dispatcher,
            ready_bytes=ports.ready_bytes,
            metrics=ports.metrics,
        )
        self._threads = ports.threads
        self._dispatcher = ports.dispatcher
        self._metrics = ports.metrics
        self._planning = planning
        self._skips = skips
        self._tally = BudgetTally(attempt.job, setup.budgets, files_of=setup.catalog.files)
        self._again: SharedWork[ReadyStep] = SharedWork()
        self._summaries: dict[int, StepSummary] = {}
        self._summing: SharedWork[StepSummary] = SharedWork()
        self._running: set[asyncio.Future[Any]] = set()
        self._releasing = 0
        self._next_step = attempt.start.step
        self._recorded = attempt.start.step - 1
        self._quarantined = 0
        self._taken_up: Cursor | None = None
        self._task: asyncio.Task[None] | None = None
        self._idle: asyncio.Task[None] | None = None
        self._contents_due: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None
        attempt.when_over(self._again.look_again)

    @property
    def planned_step(self) -> int:
        """The last step planned or passed over, or the one before the attempt's first."""
        return max(self._next_step - 1, self._recorded)

    @property
    def committed_step(self) -> int:
        """The last step that every rank has trained."""
        return self._commits.through_step

    @property
    def quarantined(self) -> int:
        """Bad samples put on record since this loop began: those of a step may be known after it
        was trained."""
        return self._quarantined

    @property
    def window(self) -> WindowNow:
        """Its window now."""
        return self._window.now

    def start(self, cursor: Cursor) -> None:
        """Begin planning: at the attempt's start, or where it was taken up."""
        self._task = asyncio.create_task(self._run(cursor))
        idle = self._window.release_when_idle(self._ports.idle_release_s)
        self._idle = asyncio.create_task(idle)

    def take_up(self, cursor: Cursor, *, recorded_step: int) -> None:
        """Be ready to go on where the attempt's ledger ends, with `recorded_step`; planning
        begins once a rank is back: see `wake`."""
        self._next_step = cursor.step
        self._recorded = max(self._recorded, recorded_step)
        self._taken_up = cursor

    def wake(self) -> None:
        """A rank is back."""
        cursor, self._taken_up = self._taken_up, None
        if cursor is not None:
            self.start(cursor)

    def use(self, setup: JobSetup) -> None:
        """Plan the steps to come by this setup; it plans those of before as they were planned."""
        self._setup = setup
        self._tally.use(setup.budgets, files_of=setup.catalog.files)

    async def stop(self) -> None:
        """Stop planning and let the workers forget this attempt's packs. May be called again."""
        await asyncio.shield(self._stop_once())

    async def shard(
        self,
        claim: Claim,
        step: int,
        *,
        received_step: int,
        failed_workers: Sequence[str],
        slow_workers: Sequence[str] = (),
        wanted: WantedParts = EVERYTHING,
    ) -> RankShard | SkippedSteps | EndOfData:
        """This rank's part of a step, as soon as it is planned, with a ticket for the `wanted`
        bytes; of a step that is skipped, which comes next."""
        if self._note_received(claim, received_step):
            await self._take_received()
        if self._skips.record(step) is not None:
            return SkippedSteps(next_step=self._skips.next_trained(step))
        ready = await self._wait_for(step)
        if isinstance(ready, EndOfData):
            return ready
        rank = claim.rank
        if failed_workers:
            about = {**self._attempt.about, "step": step, "rank": rank}
            log.warning("the rank cannot fetch from %s", ", ".join(failed_workers), extra=about)
        replica = self._attempt.topology.replica_of(rank)
        packs = packs_of(ready.parts, replica, wanted)
        holders = await self._holders(ready, rank, packs, failed_workers, slow_workers)
        return self._shards.of(ready, claim, wanted, holders, self._setup.positions)

    async def summary(self, step: int) -> StepSummary:
        """The groups of a whole step of this attempt. Raises NotFoundError where it never planned
        the step."""
        known = self._summaries.get(step)
        if known is not None:
            return known
        return await self._summing.result(step, partial(self._summed_again, step))

    async def _summed_again(self, step: int) -> StepSummary:
        """The same of a step that is not kept, planned again once for all ranks that ask."""
        cursor = await in_store(self._records.cursor, step)
        if cursor is None:
            raise NotFoundError(self._never_handed_out(step))
        planning = partial(self._records.summary, self._setup, cursor)
        summary = await self._threads.plan(self._setup, cursor, planning)
        self._keep_summary(step, summary)
        return summary

    async def commit(
        self,
        claim: Claim,
        step: int,
        measured_s: float | None = None,
        phase_s: Mapping[str, float] | None = None,
    ) -> None:
        """Record the steps that every rank has trained now, with the training time of the slowest
        rank that measured it, in all and by phase. Raises NotFoundError where this attempt never
        planned the step, StateError, which ends the attempt, where the store cannot be written."""
        if step > self._recorded:
            raise NotFoundError(self._never_handed_out(step))
        if step > claim.received_step and self._note_received(claim, step):
            await self._take_received()
        try:
            await self._commits.note(claim, step, measured_s, phase_s)
        except StateError as error:
            raise self._fail(error) from error

    async def note_receipts(self, step: DispatchedStep, receipts: PackReceipts) -> None:
        """A worker has decoded packs of a step: record their bad samples, judge their sources, and
        compare what it delivers with what was delivered before."""
        if self._attempt.over:
            return
        try:
            if receipts.bad:
                await in_store(self._records.quarantine, receipts)
                self._quarantined += len(receipts.bad)
        except NotFoundError:
            return  # the job was deleted meanwhile
        except ServiceError as error:
            self._fail(error)
            return
        self._judged(self._tally.take(receipts))
        await self._note_delivered(step, receipts)

    async def _note_delivered(self, step: DispatchedStep, receipts: PackReceipts) -> None:
        delivered = step.delivered
        for pack in receipts.pack.tolist() if delivered.otherwise else ():
            if others := delivered.otherwise.get(pack):
                self._delivered_otherwise(StateError(two_versions(step, pack, others)))
                break
        if self._attempt.over or not delivered.complete or delivered.noted:
            return
        delivered.noted = True
        if self._records.noted_soon(delivered):
            if self._contents_due is None:
                due = asyncio.get_running_loop().call_later(CONTENT_WAIT_S, self._write_contents)
                self._contents_due = due
            return
        try:
            verdict = await self._written(partial(self._records.delivered, delivered))
        except NotFoundError:
            return  # the job was deleted meanwhile
        except ServiceError as error:
            self._fail(error)
            return
        if verdict is not None:
            self._delivered_otherwise(verdict)

    def _write_contents(self) -> None:
        self._contents_due = None
        self._background(detach(self._contents_written()))

    async def _contents_written(self) -> None:
        try:
            await in_store(self._records.write_contents)
        except NotFoundError:
            return  # the job was deleted meanwhile
        except ServiceError as error:
            self._fail(error)

    def _delivered_otherwise(self, error: ServiceError) -> None:
        """Two versions of one step must not be mixed."""
        self._metrics.delivered_otherwise(self._attempt.job)
        self._fail(error)

    # ---- planning ahead -------------------------------------------------------------------

    async def _run(self, cursor: Cursor) -> None:
        try:
            while True:
                cursor = await self._passed_over(cursor)
                if await self._ranks_have_left_at(cursor):
                    await self._window.close(EndOfData(steps=cursor.step))
                    return
                await self._wait_for_room()
                made = await self._next_made(cursor)
                if made is None:
                    await self._window.close(EndOfData(steps=cursor.step))
                    return
                await self._ports.ready_bytes.admit(
                    self._attempt.job, made.size_bytes, needed=self._is_needed
                )
                self._tally.expect(cursor.step, made.orders, made.samples)
                await self._window.put(made)
                cursor = made.planned.next_cursor
                self._next_step = cursor.step
                del made  # the window keeps it while it is needed; here it would outlast that
                await self._window.tell()
        except ServiceError as error:
            self._fail(error)
        except Exception as error:
            log.exception("planning failed", extra=self._attempt.about)
            self._fail(ServiceError(f"planning failed: {error!r}. See the service's log."))

    async def _passed_over(self, cursor: Cursor) -> Cursor:
        """The cursor of the next step to train, or of the end of data."""
        while self._skips.record(cursor.step) is not None:
            async with self._planning:
                cursor = self._with_changes(cursor)
                to_step = min(self._skips.next_trained(cursor.step), cursor.step + PASSED_AT_ONCE)
                passed = await self._passed_to(cursor, to_step)
                if passed == cursor:
                    break
                cursor = passed
                self._next_step = cursor.step
        return cursor

    def _with_changes(self, cursor: Cursor) -> Cursor:
        """The cursor with the changes of the mixture that are due, where its step is planned the
        first time in this attempt."""
        if cursor.step <= self._recorded:
            return cursor
        return self._setup.stream.begin_changes(cursor)

    async def _ranks_have_left_at(self, cursor: Cursor) -> bool:
        """Whether this is the end of data, and ranks that had all of it may have ended before a
        restart: they would never make room, and the others would wait for it."""
        if self._attempt.full:
            return False
        return await self._passed_to(cursor, cursor.step + 1) == cursor

    async def _passed_to(self, cursor: Cursor, step: int) -> Cursor:
        passing = partial(pass_over, self._setup, cursor, to_step=step)
        return await self._threads.planners.run(self._attempt.job, passing)

    async def _next_made(self, cursor: Cursor) -> MadeStep | None:
        async with self._planning:
            made = await self._made(self._with_changes(cursor))
        self._recorded = max(self._recorded, cursor.step if made is not None else -1)
        return made

    async def _made(self, cursor: Cursor) -> MadeStep | None:
        job = self._attempt.job
        await self._threads.fetch(self._setup, cursor)  # its orders are made of it too
        planning = partial(self._records.plan, self._setup, cursor, self._ports.shares(job))
        made = await self._threads.planners.run(job, planning)
        if made is not None:
            self._keep_summary(made.planned.plan.step, made.common.summary)
            await self._written(partial(self._records.record, made))
        return made

    def _keep_summary(self, step: int, summary: StepSummary) -> None:
        """Ranks may ask for it while they train the step, which has left the window then."""
        self._summaries[step] = summary
        while len(self._summaries) > SUMMARIES_KEPT:
            del self._summaries[next(iter(self._summaries))]

    # ---- what ranks have, and ask for -----------------------------------------------------

    def _ahead(self) -> int:
        """The number of planned steps that not every rank has received."""
        received = self._attempt.received_by_all
        return self._skips.trained_between(received + 1, self._next_step - 1)

    def _is_needed(self) -> bool:
        """The slowest rank has every planned step, or the attempt is over."""
        return not self._ahead() or self._attempt.over

    async def _wait_for_room(self) -> None:
        most = self._setup.ready_steps
        await self._window.wait_until(lambda: self._ahead() < most and self._releasing < most)

    def _note_received(self, claim: Claim, received_step: int) -> bool:
        """Note it; whether every rank has received more now, or a step that was planned again, as
        nearly no call of a rank finds."""
        # A client may claim anything; the window moves only by steps that were planned.
        claim.received_step = max(claim.received_step, min(received_step, self._recorded))
        return self._window.has_received

    async def _take_received(self) -> None:
        for ready in await self._window.take_received():
            self._releasing += 1
            self._background(asyncio.create_task(self._release(ready)))

    async def _release(self, ready: ReadyStep) -> None:
        """Every rank has the step; its receipts are in, or will not come."""
        try:
            await self._window.release(ready, received=True)
        finally:
            self._releasing -= 1
            await self._window.tell()
        self._judged(self._tally.give_up(ready.planned.plan.step))

    async def _holders(
        self,
        ready: ReadyStep,
        rank: int,
        packs: NDArray[np.int32],
        failed: Sequence[str],
        slow: Sequence[str],
    ) -> NDArray[np.int32]:
        """Where the rank fetches; a pack that nobody can make ends the attempt for all ranks."""
        try:
            return await self._dispatcher.holders(
                ready.dispatched, rank, packs, failed=failed, slow=slow
            )
        except WorkerLostError:
            raise
        except ServiceError as error:
            raise self._fail(error) from error

    async def _wait_for(self, step: int) -> ReadyStep | EndOfData:
        if self._stopping is not None:  # its job is being deleted, which ends it: nothing is held
            await self._attempt.ended()
        if step >= self._next_step or step in self._window:
            return await self._window.wait_planned(step)
        # It has left the window, or a former coordinator planned it: all its ranks may ask at once.
        planning = partial(self._plan_from_ledger, step)
        ready = await self._again.result_while(lambda: not self._attempt.over, step, planning)
        if ready is None:
            await self._attempt.ended()
        return ready

    async def _plan_from_ledger(self, step: int) -> ReadyStep:
        cursor = await in_store(self._records.cursor, step)
        if cursor is None:
            raise NotFoundError(self._never_handed_out(step))
        made = await self._made(cursor)
        assert made is not None, "a step of the ledger is never past the end"
        self._ports.ready_bytes.add(self._attempt.job, made.size_bytes)
        ready = await self._window.put(made)
        await self._window.tell()
        return ready

    # ---- bad samples, and the end ---------------------------------------------------------

    def _judged(self, verdict: ServiceError | None) -> None:
        for source, window in self._tally.windows.items():
            self._metrics.error_budget_used(self._attempt.job, source, window.used)
        if verdict is not None:
            self._fail(verdict)

    def _fail(self, error: ServiceError) -> ServiceError:
        """End the attempt; all its ranks get the error, which is returned."""
        if not self._attempt.over:
            log.error("the attempt ends: %s", error, extra=self._attempt.about)
        self._attempt.end(error)
        self._stop_once()
        return error

    def _background(self, work: asyncio.Future[Result]) -> asyncio.Future[Result]:
        """Work that `stop` waits for."""
        self._running.add(work)
        work.add_done_callback(self._running.discard)
        return work

    async def _written(self, writing: Callable[[], Result]) -> Result:
        """What a thread of the store writes; it goes on when its caller is cancelled."""
        work = in_store.begin(writing)
        work.add_done_callback(retrieve_error)
        return await asyncio.shield(self._background(work))

    def _stop_once(self) -> asyncio.Task[None]:
        if self._stopping is None:
            self._taken_up = None  # a rank that comes back now begins nothing
            self._stopping = asyncio.create_task(self._stop())
        return self._stopping

    async def _stop(self) -> None:
        await cancel_all(self._task, self._idle, *self._again.tasks)
        # A task keeps how it ended, that its frames, and these us: whatever the attempt has, its
        # index and its last plan, would stay until garbage is collected, which may be never.
        self._task = self._idle = None
        if self._contents_due is not None:
            self._contents_due.cancel()
            self._write_contents()
        # What a thread writes cannot be cancelled; it must not outlive the store.
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._commits.written()
        await self._window.stop()
        if self._contents_due is not None:  # of receipts that came meanwhile
            self._contents_due.cancel()

    def _never_handed_out(self, step: int) -> str:
        attempt = self._attempt
        return (
            f"step {step} of job {attempt.job!r} was never planned in attempt {attempt.number}, "
            f"which has steps {attempt.start.step} to {self._recorded}. Ask for steps in order, "
            "and commit only those that came. Where the service's state was put back from a copy, "
            "start the trainers again from their checkpoint."
        )
