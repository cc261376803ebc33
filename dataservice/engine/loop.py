"""The loop of one running job: draw → plan → dispatch → ready window.

                    plan_step               Dispatcher
    cursor ──► [thread] ──► StepPlan ──► orders to workers ──► ready[step] ──► ranks
       ▲                                                          │
       └──────────── room in the window ◄── received by all ──────┘

Contract. Steps are planned in order, at most `ready_steps` beyond the last step that every
rank has received; a step leaves the window when all have. A step asked for again later is
planned again from the ledger's cursor: the same plan, by construction, and checked by digest.
A planning or state error ends the attempt with that error; ranks that wait are told.
New steps are planned inside `planning`, the job's own lock: who holds it knows that none is
under way, and may change the coefficients of those to come.
"""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dataservice.core.cursor import Cursor
from dataservice.core.errors import NotFoundError, ServiceError, StateError
from dataservice.core.job import LedgerEntry
from dataservice.core.orders import (
    EVERYTHING,
    PackOrder,
    PartSpec,
    RankShard,
    Ticket,
    WantedParts,
)
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Metrics, StateStore
from dataservice.core.tickets import sign_ticket
from dataservice.engine.api import EndOfData
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.dispatch import DispatchedStep, Dispatcher, pack_orders
from dataservice.engine.planner import PlannedStep, plan_step
from dataservice.engine.setup import JobSetup
from dataservice.engine.shards import StepParts, cut_step, microbatches_of, part_specs

log = logging.getLogger(__name__)

TICKET_LIFE_S = 900

Result = TypeVar("Result")
Made = tuple[PlannedStep, str, StepParts, list[PackOrder]]
"""A plan, its digest, its parts, and the orders of its packs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyStep:
    """A planned step whose packs are decoding or decoded."""

    planned: PlannedStep
    digest: str
    parts: StepParts
    dispatched: DispatchedStep


class AttemptLoop:
    """Plans ahead for one complete attempt and hands each rank its part."""

    def __init__(
        self,
        setup: JobSetup,
        attempt: Attempt,
        *,
        store: StateStore,
        dispatcher: Dispatcher,
        metrics: Metrics,
        ticket_secret: bytes,
        planning: asyncio.Lock,
    ) -> None:
        self._setup = setup
        self._attempt = attempt
        self._store = store
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._secret = ticket_secret
        self._planning = planning
        self._measured_s: dict[int, float] = {}
        self._ready: dict[int, ReadyStep] = {}
        self._again: dict[int, asyncio.Task[ReadyStep]] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._next_step = attempt.start.step
        self._first_step = attempt.start.step
        self._committed = attempt.start.step - 1
        self._end: EndOfData | None = None
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    @property
    def planned_step(self) -> int:
        """The last step planned, or the one before the attempt's first."""
        return self._next_step - 1

    @property
    def committed_step(self) -> int:
        """The last step that every rank has trained."""
        return self._committed

    def start(self, cursor: Cursor, *, committed_step: int | None = None) -> None:
        """Begin planning at `cursor`: the attempt's start, or where its ledger ends."""
        self._next_step = cursor.step
        if committed_step is not None:
            self._committed = committed_step
        self._task = asyncio.create_task(self._run(cursor))

    def use(self, setup: JobSetup) -> None:
        """Plan the steps to come by this setup; those that were planned come out the same."""
        self._setup = setup

    async def stop(self) -> None:
        """Stop planning and let the workers forget this attempt's packs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for task in self._again.values():
            task.cancel()
        steps, self._ready = list(self._ready.values()), {}
        self._note_ready()
        # A plan that a thread is at cannot be cancelled; it must not outlive the store.
        await asyncio.gather(*self._running, return_exceptions=True)
        await asyncio.gather(
            *(self._dispatcher.release(step.dispatched, received=False) for step in steps)
        )

    async def shard(
        self,
        claim: Claim,
        step: int,
        *,
        received_step: int,
        failed_workers: Sequence[str],
        wanted: WantedParts = EVERYTHING,
    ) -> tuple[RankShard, StepPlan] | EndOfData:
        """This rank's part of a step, as soon as it is planned, with tickets for the `wanted`
        bytes."""
        await self._note_received(claim, received_step)
        ready = await self._wait_for(step)
        if isinstance(ready, EndOfData):
            return ready
        if failed_workers:
            about = {**self._attempt.about, "step": step, "rank": claim.rank}
            log.warning("the rank cannot fetch from %s", ", ".join(failed_workers), extra=about)
            await self._dispatcher.recover(ready.dispatched, failed_workers)
        return self._rank_shard(ready, claim.rank, wanted), ready.planned.plan

    async def commit(self, claim: Claim, step: int, measured_s: float | None = None) -> None:
        """Record the steps that have now been trained by every rank, and the seconds that the
        slowest of those that told has measured."""
        if measured_s is not None and self._committed < step < self._next_step:
            self._measured_s[step] = max(measured_s, self._measured_s.get(step, 0.0))
        claim.committed_step = max(claim.committed_step, step)
        done = self._attempt.committed_by_all
        for trained in range(self._committed + 1, done + 1):
            slowest_s = self._measured_s.pop(trained, None)
            await asyncio.to_thread(self._record_trained, trained, slowest_s)
            if trained > self._committed:  # else another rank's commit has been here
                self._committed = trained
                self._metrics.step_committed(self._attempt.job)

    def _record_trained(self, step: int, measured_s: float | None) -> None:
        job, attempt = self._attempt.job, self._attempt.number
        self._store.commit_step(job, attempt, step, time.time(), measured_s)
        if measured_s is None:
            return
        entry = self._store.ledger_entry(job, step, attempt)
        if entry is not None and entry.predicted_s is not None:
            self._metrics.step_measured(job, predicted_s=entry.predicted_s, measured_s=measured_s)

    async def _run(self, cursor: Cursor) -> None:
        try:
            while True:
                await self._wait_for_room()
                async with self._planning:
                    ready = await self._plan(cursor)
                async with self._changed:
                    if ready is None:
                        self._end = EndOfData(steps=cursor.step)
                    else:
                        self._ready[cursor.step] = ready
                        cursor = ready.planned.next_cursor
                        self._next_step = cursor.step
                        self._note_ready()
                    self._changed.notify_all()
                if ready is None:
                    return
        except ServiceError as error:
            log.error("the attempt ends: %s", error, extra=self._attempt.about)
            self._attempt.end(error)
        except Exception as error:
            log.exception("planning failed", extra=self._attempt.about)
            self._attempt.end(ServiceError(f"planning failed: {error!r}. See the service's log."))

    def _background(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Work that `stop` waits for."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _plan(self, cursor: Cursor) -> ReadyStep | None:
        planning = self._background(asyncio.to_thread(self._plan_and_record, cursor))
        made = await asyncio.shield(planning)
        if made is None:
            return None
        planned, digest, parts, orders = made
        dispatched = await self._dispatcher.dispatch(planned.plan, orders)
        return ReadyStep(planned=planned, digest=digest, parts=parts, dispatched=dispatched)

    def _plan_and_record(self, cursor: Cursor) -> Made | None:
        attempt = self._attempt
        started_s = time.perf_counter()
        planned = plan_step(self._setup, cursor, attempt.topology)
        plan_s = time.perf_counter() - started_s
        if planned is None:
            return None
        digest = planned.plan.digest
        known = self._store.ledger_entry(attempt.job, cursor.step, attempt.number)
        if known is None:
            self._store.put_ledger(
                LedgerEntry(
                    job=attempt.job,
                    attempt=attempt.number,
                    step=cursor.step,
                    cursor=cursor.to_json(),
                    plan_digest=digest,
                    world_size=attempt.topology.world_size,
                    cost_version=planned.plan.cost_version,
                    planned_unix_s=time.time(),
                    predicted_s=planned.plan.predicted_s,
                )
            )
            self._note_planned(planned.plan, plan_s)
        elif known.plan_digest != digest:
            raise StateError(
                f"step {cursor.step} of job {attempt.job!r} now plans to {digest}, the ledger "
                f"says {known.plan_digest}. The index, the job or the release changed under a "
                "running attempt; restart the trainers from their checkpoint."
            )
        orders = pack_orders(
            planned.plan,
            job=attempt.job,
            digest=digest,
            pipeline=self._setup.pipeline,
            catalog=self._setup.catalog,
        )
        return planned, digest, cut_step(planned.plan), orders

    def _note_planned(self, plan: StepPlan, plan_s: float) -> None:
        self._metrics.step_planned(self._attempt.job, plan, plan_s=plan_s)
        log.info(
            "planned %d samples as %d packs in %d waves, %.3g s of training, in %.3g s",
            len(plan.sample_ids),
            plan.packs,
            plan.waves,
            plan.predicted_s,
            plan_s,
            extra={**self._attempt.about, "step": plan.step},
        )

    def _note_ready(self) -> None:
        self._metrics.ready_steps(self._attempt.job, len(self._ready))

    async def _wait_for_room(self) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._next_step - self._attempt.received_by_all <= self._setup.ready_steps
            )

    async def _note_received(self, claim: Claim, received_step: int) -> None:
        claim.received_step = max(claim.received_step, received_step)
        done = self._attempt.received_by_all
        gone = [step for step in self._ready if step <= done]
        released = [self._ready.pop(step) for step in gone]
        self._note_ready()
        async with self._changed:
            self._changed.notify_all()
        for ready in released:
            self._background(self._dispatcher.release(ready.dispatched, received=True))

    async def _wait_for(self, step: int) -> ReadyStep | EndOfData:
        if step < self._next_step and step not in self._ready:
            return await self._plan_again(step)
        waiter = asyncio.create_task(self._wait_planned(step))
        over = asyncio.create_task(self._attempt.ended())
        try:
            done, _ = await asyncio.wait({waiter, over}, return_when=asyncio.FIRST_COMPLETED)
            if over in done:
                over.result()
            return waiter.result()
        finally:
            for task in (waiter, over):
                task.cancel()

    async def _wait_planned(self, step: int) -> ReadyStep | EndOfData:
        async with self._changed:
            await self._changed.wait_for(lambda: step in self._ready or self._end is not None)
            if step in self._ready:
                return self._ready[step]
            assert self._end is not None
            return self._end

    async def _plan_again(self, step: int) -> ReadyStep:
        """A step that has left the window, or that a former coordinator planned."""
        if step not in self._again:
            self._again[step] = asyncio.create_task(self._plan_from_ledger(step))
        try:
            ready = await asyncio.shield(self._again[step])
        finally:
            self._again.pop(step, None)
        kept = self._ready.setdefault(step, ready)
        self._note_ready()
        return kept

    async def _plan_from_ledger(self, step: int) -> ReadyStep:
        entry = await asyncio.to_thread(
            self._store.ledger_entry, self._attempt.job, step, self._attempt.number
        )
        if entry is None:
            raise NotFoundError(
                f"step {step} of job {self._attempt.job!r} was never planned in attempt "
                f"{self._attempt.number}, which began at step {self._first_step}."
            )
        ready = await self._plan(Cursor.from_json(entry.cursor))
        assert ready is not None, "a step of the ledger is never past the end"
        return ready

    def _rank_shard(self, ready: ReadyStep, rank: int, wanted: WantedParts) -> RankShard:
        attempt, plan = self._attempt, ready.planned.plan
        replica = attempt.topology.replica_of(rank)
        microbatches = microbatches_of(ready.parts, replica, wanted)
        keys = [order.key for order in ready.dispatched.orders]
        return RankShard(
            job=attempt.job,
            attempt=attempt.number,
            step=plan.step,
            rank=rank,
            replica=replica,
            plan_digest=ready.digest,
            cursor_after=ready.planned.next_cursor.to_json(),
            loss_tokens=int(plan.sample_loss_tokens.sum()),
            microbatches=microbatches,
            tickets=self._tickets(ready.dispatched, part_specs(microbatches, keys, wanted), rank),
        )

    def _tickets(
        self, dispatched: DispatchedStep, parts: dict[int, list[PartSpec]], rank: int
    ) -> tuple[Ticket, ...]:
        """One ticket a worker, its parts in wave order."""
        of_worker: dict[str, list[PartSpec]] = {}
        address = {}
        for pack in sorted(parts):
            holder = dispatched.holder[pack]
            address[holder.worker] = holder.address
            of_worker.setdefault(holder.worker, []).extend(parts[pack])
        expires = int(time.time()) + TICKET_LIFE_S
        return tuple(
            sign_ticket(
                Ticket(
                    worker=worker,
                    address=address[worker],
                    rank=rank,
                    expires_unix_s=expires,
                    parts=tuple(specs),
                ),
                self._secret,
            )
            for worker, specs in of_worker.items()
        )
