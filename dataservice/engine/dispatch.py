"""Give each pack of a step to one worker, and keep it available until it is released.

This file decides which packs are ordered from which worker, and when; `open_orders.py` sees each
order through to its end, and `load_balancer.py` knows the workers and what is queued at each.

Contract. `dispatch` returns at once; packs decode in the background in wave order. From then
until `release`, every pack of the step is ordered from some worker that is alive:
  A lost worker         costs its packs another order each, at another worker; a watch over all
                        steps sees to it, whether the pool or an order noticed the loss.
  A silent one          keeps what it has until the pool gives it up; meanwhile packs that a
                        rank has asked for are ordered elsewhere too.
  A slow one            is hedged: an overdue pack that a rank has asked for is ordered at a
                        second worker, within a budget. The first receipt wins, the other order
                        is released.
  One that a rank       fails to fetch from is asked for the rank's packs again, which finds out
                        whether it lives; the second time the rank is sent elsewhere, at
                        later steps too. From a worker that several ranks fail to reach,
                        nothing is ordered for their job: see `reachability.py`.
  A pack that is        refused time and again is reported to the ranks that need it.
Releasing a step cancels its orders, and workers drop what they hold for it. Whatever they
hold that no step claims (a former coordinator's order, a release that did not arrive) is
found by asking them: it is used when it is ordered again, and released after a while.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import WorkerLostError
from dataservice.core.order_columns import PackOrders
from dataservice.core.orders import PackKeys, PackOrder, PackSet, StorageOutage
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Metrics, WorkerInfo, WorkerLink, WorkerPool
from dataservice.engine.affinity import NO_WISHES, Affinity, PackWishes
from dataservice.engine.delivered import Delivered
from dataservice.engine.hedging import SOONEST_S, HedgeBudget, OrderDeadlines
from dataservice.engine.load_balancer import LoadBalancer
from dataservice.engine.open_orders import OnReceipts, OpenOrders
from dataservice.engine.orphaned_packs import ASK_EVERY_S, OrphanedPacks
from dataservice.engine.pack_orders import decode_work
from dataservice.engine.placement import Copy, DispatchedStep, Placements, grouped
from dataservice.engine.reachability import Reachability
from dataservice.engine.tasks import cancel_all

log = logging.getLogger(__name__)

TICK_S = 0.5
# Workers that hold or decode one pack at once.
MOST_COPIES = 3
RECEIPT_WAIT_S = 10.0
# How long one question of a rank waits for its packs to be at hand.
HOLDERS_WAIT_S = 10.0
# How long the first step of a coordinator waits for workers to say what they hold.
FIRST_ANSWERS_S = 2.0
NO_WORKER_PAUSE_S = 0.2
NO_WORKER_LOG_S = 30.0


class Dispatcher:
    """Orders packs from workers, for all jobs of the coordinator."""

    def __init__(
        self,
        pool: WorkerPool,
        link: WorkerLink,
        *,
        on_receipts: OnReceipts,
        metrics: Metrics,
    ) -> None:
        self._pool = pool
        self._link = link
        self._metrics = metrics
        self._wake = asyncio.Event()
        self._deadlines = OrderDeadlines()
        self._hedges = HedgeBudget()
        self._balancer = LoadBalancer(pool, self._metrics, wake=self._wake)
        self._orders = OpenOrders(
            link, self._balancer, self._deadlines, on_receipts=on_receipts, wake=self._wake
        )
        self._orphans = OrphanedPacks(pool, link)
        self._affinity = Affinity()
        self._releases = True
        self._steps: dict[DispatchedStep, None] = {}
        self._watcher: asyncio.Task[None] | None = None
        self._asker: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    # ---- life -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to ask the workers what they hold already, once they are there, and ask them again
        now and then. Waits for none of them: the first steps do, for a moment, before they are
        ordered."""
        self._asker = asyncio.create_task(self._ask_now_and_then())

    def let_be(self) -> None:
        """From now on workers keep what they hold, also of steps that are released."""
        self._releases = False

    async def stop(self) -> None:
        """Forget all steps, and cancel every order and whatever else is under way."""
        await cancel_all(self._watcher, self._asker)
        steps, self._steps = self._steps, {}
        await self._orders.stop(steps)
        await self._balancer.stop()

    async def _ask_now_and_then(self) -> None:
        while True:
            if self._asked.is_set() or self._pool.workers():
                try:
                    await self._orphans.ask(self._claimed)
                except Exception:
                    log.exception("asking workers what they hold failed; it goes on")
                self._asked.set()
            await asyncio.sleep(ASK_EVERY_S if self._asked.is_set() else NO_WORKER_PAUSE_S)
            self._see_workers()

    def _claimed(self) -> dict[str, PackSet]:
        """The packs that steps have at each worker."""
        claimed: dict[str, list[PackKeys]] = {}
        for step in self._steps:
            for worker, packs in step.packs_by_worker().items():
                claimed.setdefault(worker, []).append(step.orders.keys(packs))
        return {worker: PackSet(keys) for worker, keys in claimed.items()}

    # ---- steps ----------------------------------------------------------------------------

    async def dispatch(
        self,
        plan: StepPlan,
        orders: Sequence[PackOrder],
        *,
        reachability: Reachability | None = None,
        delivered: Delivered | None = None,
        wishes: PackWishes = NO_WISHES,
    ) -> DispatchedStep:
        """Choose a worker for each pack ordered, by these `wishes` and by load, and start decoding.
        Waits for as long as no worker is there. `reachability` is what the ranks found out at
        earlier steps; `delivered` takes what workers tell, of this order alone by default."""
        await self.until_a_worker_is_there()
        await self._until_workers_were_asked()
        ordered = PackOrders.of(orders)
        placements = Placements(decode_work(plan)[ordered.pack])
        step = DispatchedStep(
            plan=plan,
            orders=ordered,
            placements=placements,
            reachability=reachability or Reachability(),
            delivered=delivered or Delivered(plan, ordered),
            wishes=wishes,
        )
        step.reachability.know(frozenset(self._balancer.workers))
        if not placements:
            return step  # a window of steps may fit into one: the others have no samples
        self._steps[step] = None
        self._hedges.earn(len(placements))
        try:
            await self._order_all(step)
        except BaseException:
            await self.release(step, received=False)
            raise
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        return step

    async def release(self, step: DispatchedStep, *, received: bool) -> None:
        """Free the workers' memory: every rank has `received` the step, or nobody wants it.

        A rank may have its bytes before we have the receipt, and the receipt names bad samples,
        so a received step's receipts are waited for.
        """
        step.released = True
        if not step.placements:
            return
        self._steps.pop(step, None)
        step.note_change()
        if received:
            await step.receipts(RECEIPT_WAIT_S)
        held = step.packs_by_worker()
        await cancel_all(*step.calls)
        if not any(other.job == step.job for other in self._steps):
            self._deadlines.forget(step.job)
        if self._releases:
            await asyncio.gather(
                *(
                    self._link.release(
                        step.workers[step.numbers[name]], step.job, step.orders.keys(packs)
                    )
                    for name, packs in held.items()
                )
            )

    async def drained(self, worker: str) -> None:
        """The worker has a successor, or makes room for one: wait until no step has a pack
        there."""
        self._balancer.retire(worker)
        while busy := [step for step in self._steps if step.packs_at(worker)]:
            await busy[0].next_change()

    def load(self) -> dict[str, tuple[int, float]]:
        """By worker: the packs that steps have there, and the work of those that are not
        decoded, in tokens."""
        claimed = self._claimed()
        return {name: (len(keys), self._balancer.queued(name)) for name, keys in claimed.items()}

    def outages(self, job: str) -> tuple[StorageOutage, ...]:
        """The storage that workers wait for with samples of this job, as they last said."""
        return tuple(outage for outage in self._orphans.outages if outage.job == job)

    @property
    def sent_bytes(self) -> tuple[int, int]:
        """What the workers have sent to ranks, over gRPC and through memory, as they last said."""
        return self._orphans.sent_bytes

    def waiting_jobs(self) -> set[str]:
        """The jobs with packs that no worker holds yet."""
        return {step.job for step in self._steps if step.decoding}

    # ---- choosing workers -----------------------------------------------------------------

    async def until_a_worker_is_there(self) -> None:
        """Wait for one that takes orders."""
        loop = asyncio.get_running_loop()
        told_s = loop.time()
        self._see_workers()
        while not self._balancer.candidates():
            if loop.time() - told_s > NO_WORKER_LOG_S:
                told_s = loop.time()
                log.error("no worker is there to decode: %s", self._pool.shortfall())
            await asyncio.sleep(NO_WORKER_PAUSE_S)
            self._see_workers()

    async def _until_workers_were_asked(self) -> None:
        """What workers hold need not be decoded again; one that is silent is not waited for."""
        if self._asker is None or self._asked.is_set():
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._asked.wait(), FIRST_ANSWERS_S)
        self._asked.set()  # the next step does not wait again

    def _see_workers(self) -> None:
        """Look which workers there are. The copies of those that have gone are gone too."""
        for name in self._balancer.refresh():
            for step in self._steps:
                for pack in step.packs_at(name):
                    self._orders.forget(step, pack, name)

    def _candidates(self, step: DispatchedStep, *, silent: bool = True) -> list[WorkerInfo]:
        """Workers that may be given the step's orders: if any, those that its ranks can reach."""
        all_of_them = self._balancer.candidates(silent=silent)
        shunned = step.reachability.shunned
        reached = [w for w in all_of_them if w.worker not in shunned]
        return reached or all_of_them

    def _reached_by(self, step: DispatchedStep, rank: int) -> list[WorkerInfo]:
        """Workers that may be given the step's orders, of those that this rank can reach."""
        avoided = step.reachability.avoided_by(rank)
        return [w for w in self._candidates(step) if w.worker not in avoided]

    def _choose(
        self, step: DispatchedStep, pack: int, among: Sequence[WorkerInfo]
    ) -> WorkerInfo | None:
        """The least loaded of these workers for one more copy of a pack."""
        copies = step.placements[pack].copies
        if len(copies) >= MOST_COPIES:
            return None
        return self._balancer.least_loaded([w for w in among if w.worker not in copies])

    async def _order_all(self, step: DispatchedStep) -> None:
        """One call for each worker, or some where it gets much."""
        shares = self._shared_out(step, range(len(step.placements)))
        orders = step.orders.shared_out(packs for _, packs in shares)
        for (worker, packs), own in zip(shares, orders, strict=True):
            self._orders.make_all(step, packs, worker, own)
            await asyncio.sleep(0)
            if step.released:
                return
        step.ordering, step.ordered_s = False, asyncio.get_running_loop().time()

    def _shared_out(
        self, step: DispatchedStep, packs: Sequence[int]
    ) -> list[tuple[WorkerInfo, NDArray[np.int64]]]:
        """Who is to decode these packs, given in rising order: whoever holds one already; else one
        where its samples are kept, or near its ranks, unless that takes too long: see
        planning/place_packs.py."""
        workers = sorted(self._candidates(step), key=lambda worker: worker.worker)
        if not workers:
            return []  # the watch sees to it
        chosen = np.full(len(packs), -1, np.int64)
        if self._orphans.any_of(step.orders):
            number = {worker.worker: k for k, worker in enumerate(workers)}
            for k, pack in enumerate(packs):
                holder = self._orphans.take(step.orders, pack)
                if holder is not None and holder in number:
                    chosen[k] = number[holder]
                    self._metrics.pack_found(step.job)
        asked, nowhere = np.asarray(packs, np.int64), chosen < 0
        if nowhere.any():
            queued = [self._balancer.queued_per_slot(worker) for worker in workers]
            to_place = asked[nowhere]
            placed = self._affinity.place(
                step.plan,
                step.orders.only(to_place),
                step.placements.work[to_place],
                step.wishes,
                workers,
                queued,
            )
            chosen[nowhere] = placed.worker
            self._metrics.packs_placed(
                step.job,
                work=placed.work,
                cached=placed.cached,
                same_node=placed.same_node,
                same_zone=placed.same_zone,
            )
        shares = zip(workers, grouped(asked, chosen, len(workers)), strict=True)
        return [(worker, own) for worker, own in shares if len(own)]

    # ---- what a rank gets -----------------------------------------------------------------

    async def holders(
        self,
        step: DispatchedStep,
        rank: int,
        packs: NDArray[np.int32],
        *,
        failed: Sequence[str] = (),
        slow: Sequence[str] = (),
    ) -> NDArray[np.int32]:
        """Where a rank is to fetch each of these packs of the step, int[k], repeats allowed, as
        places in the step's `workers`.

        It could not fetch from the workers `failed`; from those `slow` nothing came for a
        while. Packs of its that are not at hand are then ordered again, and waited for a while.
        Raises the reason where a pack cannot be had, WorkerLostError where no worker is there.
        """
        step.asked = True
        held, astray = step.holder[packs], {-1}
        if self._balancer.silent or not step.reachability.intact:
            names = [*step.reachability.avoided_by(rank), *self._balancer.silent]
            astray |= step.numbers_of(names)  # they are few
        if not (failed or slow) and astray.isdisjoint(held.tolist()):
            return held
        wanted, patient = np.unique(packs), bool(failed or slow)
        if slow:
            step.avoid_slow(rank, slow, wanted.tolist())
        for name in failed:
            if step.doubt(rank, name):
                self._ask_again(step, wanted.tolist(), name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLDERS_WAIT_S):
                while not self._all_at_hand(step, wanted, rank, patient):
                    await step.next_change()
        held = step.holder[wanted]
        for place in self._in_question(step, wanted, rank, all_of_them=patient):
            held[place] = step.number_of(self._holder(step, int(wanted[place]), rank))
        return held[np.searchsorted(wanted, packs)]

    def _all_at_hand(
        self, step: DispatchedStep, packs: NDArray[np.int32], rank: int, ready: bool
    ) -> bool:
        """Whether each of these packs is at hand, as below."""
        places = self._in_question(step, packs, rank, all_of_them=ready)
        return not [p for p in packs[places].tolist() if not self._at_hand(step, p, rank, ready)]

    def _in_question(
        self, step: DispatchedStep, packs: NDArray[np.int32], rank: int, *, all_of_them: bool
    ) -> list[int]:
        """The places of those of these packs that may have to be had elsewhere than at their best
        copy. They are looked at one by one, which for all packs of all ranks would take seconds."""
        if all_of_them:
            return list(range(len(packs)))
        at, sole = step.holder[packs].tolist(), (step.placements.call[packs] >= 0).tolist()
        avoided = step.numbers_of(step.reachability.avoided_by(rank))
        astray = avoided | step.numbers_of(self._balancer.silent)
        if not avoided.isdisjoint(compress(at, sole)) and not self._reached_by(step, rank):
            # Nobody is left to ask: what could not be reached is tried once more.
            step.reachability.try_again(rank)
            avoided = set()
        # Of a pack that has one copy there is no better one: where it is silent, it is had there.
        bad = [avoided if alone else astray for alone in sole]
        return [k for k, number in enumerate(at) if number < 0 or number in bad[k]]

    def _ask_again(self, step: DispatchedStep, packs: Sequence[int], worker: str) -> None:
        """Order what the worker should hold from it once more: the same order is decoded once,
        it decodes what it has lost, and does not answer if it is dead."""
        for pack in packs:
            copy = step.placements[pack].copies.get(worker)
            if copy is not None and copy.ready:
                self._orders.make(step, pack, copy.worker)

    def _at_hand(self, step: DispatchedStep, pack: int, rank: int, ready: bool) -> bool:
        """Whether the rank can be sent to a copy, one that is `ready` if it must be. A copy is
        ordered if there is none that it can reach."""
        placement = step.placements[pack]
        if step.released or placement.failure is not None:
            return True
        if reachable := step.reachable(pack, rank):
            return not ready or any(copy.ready for copy in reachable)
        if not placement.may_be_tried:
            return False  # the watch will order it
        self._see_workers()
        worker = self._choose(step, pack, self._reached_by(step, rank))
        if worker is not None:
            self._orders.make(step, pack, worker)
            return not ready
        # Nobody is left to ask: what could not be reached is tried once more.
        step.reachability.try_again(rank)
        return bool(placement.copies) and (not ready or placement.ready)

    def _holder(self, step: DispatchedStep, pack: int, rank: int) -> WorkerInfo:
        placement = step.placements[pack]
        if placement.failure is not None and not isinstance(placement.failure, WorkerLostError):
            raise placement.failure
        placement.failure = None  # of a pack that has failed: it has an object
        best = step.best_copy(pack, rank, self._balancer.workers)
        if best is None:
            raise WorkerLostError(
                f"no worker is there to decode pack {pack} of step {step.plan.step}. Start "
                "workers, or look in their logs for why they ended."
            )
        return best.worker

    # ---- the watch ------------------------------------------------------------------------

    async def _watch(self) -> None:
        while self._steps:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._wake.wait()
            self._wake.clear()
            try:
                self._look_after_steps()
            except Exception:
                log.exception("looking after orders failed; it goes on")

    def _look_after_steps(self) -> None:
        self._see_workers()
        silent, now_s = bool(self._balancer.silent), asyncio.get_running_loop().time()
        for step in [step for step in self._steps if not step.ordering]:
            # No order is overdue sooner, and what cannot be hedged need not be looked at.
            late = now_s - step.ordered_s >= SOONEST_S and self._hedges.left
            if step.asked and (silent or late):
                self._hedge_those_due(step, now_s, silent=silent)
            nowhere = np.flatnonzero(step.holder < 0).tolist()
            nowhere = [pack for pack in nowhere if step.placements.may_be_tried(pack)]
            for worker, packs in self._shared_out(step, nowhere) if nowhere else ():
                self._orders.make_all(step, packs, worker)

    def _hedge_those_due(self, step: DispatchedStep, now_s: float, *, silent: bool) -> None:
        """`silent`: some worker does not answer, with which packs that it holds are too. Each
        worker gets its share in one order."""
        shares: dict[str, tuple[WorkerInfo, list[int]]] = {}
        work = step.placements.work
        try:
            for pack in self._may_be_due(step, now_s, silent=silent):
                if not (silent or self._hedges.left):
                    break
                worker = self._hedged_at(step, pack, now_s)
                if worker is not None:
                    self._balancer.add(worker.worker, int(work[pack]))  # the next one sees it
                    shares.setdefault(worker.worker, (worker, []))[1].append(pack)
        finally:  # what is ordered is counted then
            for worker, packs in shares.values():
                self._balancer.add(worker.worker, -int(work[packs].sum()))
        for worker, packs in shares.values():
            self._orders.make_all(step, np.array(packs, np.int64), worker, hedge=True)

    def _may_be_due(self, step: DispatchedStep, now_s: float, *, silent: bool) -> list[int]:
        """The packs of which a copy may be overdue or at a silent worker: looked at one by one,
        thousands would take longer than is to be gained."""
        of = step.placements
        limits_s = self._deadlines.limit_s(step.job, queued_work=of.queued_work)
        due = of.pending & (now_s - of.ordered_s > limits_s)
        if silent:
            due |= np.isin(step.holder, list(step.numbers_of(self._balancer.silent)))
        return sorted({*np.flatnonzero(due & (of.call >= 0)).tolist(), *of.apart})

    def _hedged_at(self, step: DispatchedStep, pack: int, now_s: float) -> WorkerInfo | None:
        """Who is to decode a pack too; None where it is not due, or nobody can."""
        placement = step.placements[pack]
        copies = placement.copies.values()
        if not copies:
            return None
        silent = all(self._balancer.is_silent(copy.worker.worker) for copy in copies)
        overdue = not placement.ready and all(
            self._is_overdue(step.job, now_s, copy) for copy in copies
        )
        if not silent and not overdue:
            return None
        worker = self._choose(step, pack, self._candidates(step, silent=False))
        if worker is None or not (silent or self._hedges.spend()):
            return None
        why = "does not answer" if silent else "is slow"
        about = (" and ".join(placement.copies), why, pack, worker.worker)
        log.info("%s %s: pack %d is ordered from %s too", *about, extra=step.about)
        self._metrics.pack_hedged(step.job)
        return worker

    def _is_overdue(self, job: str, now_s: float, copy: Copy) -> bool:
        waited_s = now_s - copy.ordered_s
        return waited_s > self._deadlines.limit_s(job, queued_work=copy.queued_work)
