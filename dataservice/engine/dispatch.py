"""Give each pack of a step to one worker, and keep it available until it is released.

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
                        nothing is ordered for their job: see `reach.py`.
  A pack that is        refused time and again is reported to the ranks that need it.
Releasing a step cancels its orders, and workers drop what they hold for it. Whatever they
hold that no step claims (a former coordinator's order, a release that did not arrive) is
found by asking them: it is used when it is ordered again, and released after a while.
"""

import asyncio
import contextlib
import heapq
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence

from dataservice.core.errors import WorkerLostError
from dataservice.core.orders import PackKey, PackOrder, PackReceipt
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Metrics, NoMetrics, WorkerInfo, WorkerLink, WorkerPool
from dataservice.engine.ordering import Ordering
from dataservice.engine.pace import HedgeBudget
from dataservice.engine.pack_orders import decode_work
from dataservice.engine.places import Copy, DispatchedStep, PackPlace
from dataservice.engine.reach import Reach
from dataservice.engine.unclaimed import ASK_EVERY_S, UnclaimedPacks

log = logging.getLogger(__name__)

TICK_S = 0.5
# Workers that hold or decode one pack at once.
MOST_COPIES = 3
RECEIPT_WAIT_S = 10.0
# How long one question of a rank waits for its packs to be at hand.
HOLDERS_WAIT_S = 10.0
NO_WORKER_PAUSE_S = 0.5
NO_WORKER_LOG_S = 30.0


class Dispatcher:
    """Orders packs from workers, for all jobs of the coordinator."""

    def __init__(
        self,
        pool: WorkerPool,
        link: WorkerLink,
        *,
        on_receipt: Callable[[PackReceipt], Awaitable[None]],
        metrics: Metrics | None = None,
    ) -> None:
        self._link = link
        self._metrics = metrics or NoMetrics()
        self._ordering = Ordering(pool, link, on_receipt=on_receipt, metrics=self._metrics)
        self._unclaimed = UnclaimedPacks(pool, link)
        self._budget = HedgeBudget()
        self._releases = True
        self._watcher: asyncio.Task[None] | None = None
        self._asker: asyncio.Task[None] | None = None

    # ---- life -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Learn what the workers hold already; ask them again now and then."""
        await self._unclaimed.ask(self._claimed)
        self._asker = asyncio.create_task(self._ask_now_and_then())

    def let_be(self) -> None:
        """From now on workers keep what they hold, also of steps that are released."""
        self._releases = False

    async def stop(self) -> None:
        """Forget all steps."""
        own = [task for task in (self._watcher, self._asker) if task is not None]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
        await self._ordering.stop()

    async def _ask_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            self._ordering.see_workers()
            try:
                await self._unclaimed.ask(self._claimed)
            except Exception:
                log.exception("asking workers what they hold failed; it goes on")

    def _claimed(self) -> dict[str, set[PackKey]]:
        """The packs that steps have at each worker."""
        claimed: dict[str, set[PackKey]] = {}
        for place in (place for step in self._ordering.steps for place in step.places):
            for name in place.copies:
                claimed.setdefault(name, set()).add(place.order.key)
        return claimed

    # ---- steps ----------------------------------------------------------------------------

    async def dispatch(
        self, plan: StepPlan, orders: Sequence[PackOrder], *, reach: Reach | None = None
    ) -> DispatchedStep:
        """Choose a worker for each pack, least work first in line, and start decoding. Waits
        for as long as no worker is there. `reach` is what the ranks' earlier steps found out."""
        await self._until_a_worker_is_there()
        places = [
            PackPlace(order=order, work=work)
            for order, work in zip(orders, decode_work(plan).tolist(), strict=True)
        ]
        step = DispatchedStep(
            plan=plan, places=places, pending=set(range(plan.packs)), reach=reach or Reach()
        )
        step.reach.know(frozenset(self._ordering.alive))
        if not places:
            return step  # a window of steps may fit into one: the others have no samples
        self._ordering.steps[step] = None
        self._budget.earn(plan.packs)
        self._order_all(step)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        return step

    def _order_all(self, step: DispatchedStep) -> None:
        """O(packs · log workers)."""
        ordering = self._ordering
        workers = {worker.worker: worker for worker in self._takers(step)}
        lines = [(ordering.line_of(worker), name) for name, worker in workers.items()]
        heapq.heapify(lines)
        for pack, place in enumerate(step.places):
            holder = workers.get(self._unclaimed.take(place.order.key) or "")
            if holder is not None:
                ordering.order(step, pack, holder)
                self._metrics.pack_found(step.job)
                continue
            name = lines[0][1]
            ordering.order(step, pack, workers[name])
            heapq.heapreplace(lines, (ordering.line_of(workers[name]), name))

    def _takers(self, step: DispatchedStep, *, silent: bool = True) -> list[WorkerInfo]:
        """Workers that may be given the step's orders: if any, those that its ranks can reach."""
        takers = self._ordering.takers(silent=silent)
        return [w for w in takers if not step.reach.is_shunned(w.worker)] or takers

    async def _until_a_worker_is_there(self) -> None:
        loop = asyncio.get_running_loop()
        told_s = loop.time()
        self._ordering.see_workers()
        while not self._ordering.takers():
            if loop.time() - told_s > NO_WORKER_LOG_S:
                told_s = loop.time()
                log.error("no worker is there to decode; start some, or look in their logs")
            await asyncio.sleep(NO_WORKER_PAUSE_S)
            self._ordering.see_workers()

    async def release(self, step: DispatchedStep, *, received: bool) -> None:
        """Free the workers' memory: every rank has `received` the step, or nobody wants it.

        A rank may have its bytes before we have the receipt, and the receipt names bad samples,
        so a received step's receipts are waited for.
        """
        step.released = True
        if not step.places:
            return
        self._ordering.steps.pop(step, None)
        step.note_change()
        if received:
            await self._receipts(step)
        packs: dict[str, tuple[WorkerInfo, list[PackKey]]] = {}
        tasks = []
        for place in step.places:
            for name, copy in place.copies.items():
                packs.setdefault(name, (copy.worker, []))[1].append(place.order.key)
                tasks += [copy.task] if copy.task is not None else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not any(other.job == step.job for other in self._ordering.steps):
            self._ordering.pace.forget(step.job)
        if self._releases:
            await asyncio.gather(
                *(self._link.release(worker, step.job, keys) for worker, keys in packs.values())
            )

    async def _receipts(self, step: DispatchedStep) -> None:
        due = [
            copy.task
            for place in step.places
            for copy in place.copies.values()
            if copy.task is not None and (copy.ready or not place.ready)
        ]
        if due:
            await asyncio.wait(due, timeout=RECEIPT_WAIT_S)

    async def drained(self, worker: str) -> None:
        """The worker has a successor, or makes room for one: wait until no step has a pack
        there."""
        self._ordering.retiring.add(worker)
        while True:
            busy = [step for step in self._ordering.steps if step.has_pack_at(worker)]
            if not busy:
                return
            await busy[0].next_change()

    def load(self) -> dict[str, tuple[int, float]]:
        """By worker: the packs that steps have there, and the work of those that are not
        decoded, in tokens."""
        lines = self._ordering.lines
        return {name: (len(keys), lines.of(name)) for name, keys in self._claimed().items()}

    def waiting_jobs(self) -> set[str]:
        """The jobs with packs that no worker holds yet."""
        return {step.job for step in self._ordering.steps if step.pending}

    # ---- what a rank gets -----------------------------------------------------------------

    async def holders(
        self,
        step: DispatchedStep,
        rank: int,
        packs: Iterable[int],
        *,
        failed: Sequence[str] = (),
        slow: Sequence[str] = (),
    ) -> dict[int, WorkerInfo]:
        """Where a rank is to fetch these packs of the step.

        It could not fetch from the workers `failed`; from those `slow` nothing came for a
        while. Packs of its that are not at hand are then ordered again, and waited for a while.
        Raises the reason when a pack cannot be had, WorkerLostError when no worker is there.
        """
        wanted = list(packs)
        step.asked = True
        step.avoid_slow(rank, slow, wanted)
        for name in failed:
            if step.doubt(rank, name):
                self._ask_again(step, wanted, name)
        patient = bool(failed or slow)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HOLDERS_WAIT_S):
                while True:
                    missing = [p for p in wanted if not self._at_hand(step, p, rank, patient)]
                    if not missing:
                        break
                    await step.next_change()
        return {pack: self._holder(step, pack, rank) for pack in wanted}

    def _ask_again(self, step: DispatchedStep, packs: Sequence[int], worker: str) -> None:
        """Order what the worker should hold from it once more: the same order is decoded once,
        it decodes what it has lost, and does not answer if it is dead."""
        for pack in packs:
            copy = step.places[pack].copies.get(worker)
            if copy is not None and copy.ready:
                self._ordering.order(step, pack, copy.worker)

    def _at_hand(self, step: DispatchedStep, pack: int, rank: int, ready: bool) -> bool:
        """Whether the rank can be sent to a copy, one that is `ready` if it must be. A copy is
        ordered if there is none that it can reach."""
        place, ordering = step.places[pack], self._ordering
        if step.released or place.failure is not None:
            return True
        reachable = step.reachable(pack, rank)
        if reachable:
            return not ready or any(copy.ready for copy in reachable)
        if asyncio.get_running_loop().time() < place.not_before_s:
            return False  # the watch will order it
        ordering.see_workers()
        others = [
            worker
            for worker in ordering.takers()
            if worker.worker not in place.copies and not step.reach.avoids(rank, worker.worker)
        ]
        worker = ordering.shortest_line(others)
        if worker is not None and len(place.copies) < MOST_COPIES:
            ordering.order(step, pack, worker)
            return not ready
        # Nobody is left to ask: what could not be reached is tried once more.
        step.reach.try_again(rank)
        return bool(place.copies) and (not ready or place.ready)

    def _holder(self, step: DispatchedStep, pack: int, rank: int) -> WorkerInfo:
        place = step.places[pack]
        if place.failure is not None and not isinstance(place.failure, WorkerLostError):
            raise place.failure
        place.failure = None
        best = step.best_copy(pack, rank, self._ordering.alive)
        if best is None:
            raise WorkerLostError(
                f"no worker is there to decode pack {pack} of step {step.plan.step}. Start "
                "workers, or look in their logs for why they ended."
            )
        return best.worker

    # ---- the watch ------------------------------------------------------------------------

    async def _watch(self) -> None:
        ordering = self._ordering
        while ordering.steps:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await ordering.wake.wait()
            ordering.wake.clear()
            try:
                self._look_after_steps()
            except Exception:
                log.exception("looking after orders failed; it goes on")

    def _look_after_steps(self) -> None:
        ordering = self._ordering
        ordering.see_workers()
        silent = any(info.state == "silent" for info in ordering.alive.values())
        for step in ordering.steps:
            for pack in range(step.plan.packs) if silent else sorted(step.pending):
                place = step.places[pack]
                if not place.copies:
                    self._order_anew(step, pack)
                elif step.asked and len(place.copies) < MOST_COPIES:
                    self._hedge_if_due(step, pack)

    def _order_anew(self, step: DispatchedStep, pack: int) -> None:
        place, ordering = step.places[pack], self._ordering
        if place.failure is None and asyncio.get_running_loop().time() >= place.not_before_s:
            worker = ordering.shortest_line(self._takers(step))
            if worker is not None:
                ordering.order(step, pack, worker)

    def _hedge_if_due(self, step: DispatchedStep, pack: int) -> None:
        place, ordering = step.places[pack], self._ordering
        copies = place.copies.values()
        silent = all(ordering.is_silent(copy.worker.worker) for copy in copies)
        overdue = not place.ready and all(self._is_overdue(step.job, copy) for copy in copies)
        if not silent and not overdue:
            return
        takers = self._takers(step, silent=False)
        worker = ordering.shortest_line([w for w in takers if w.worker not in place.copies])
        if worker is None or not (silent or self._budget.spend()):
            return
        why = "does not answer" if silent else "is slow"
        about = (" and ".join(place.copies), why, pack, worker.worker)
        log.info("%s %s: pack %d is ordered from %s too", *about, extra=step.about)
        self._metrics.pack_hedged(step.job)
        ordering.order(step, pack, worker, hedge=True)

    def _is_overdue(self, job: str, copy: Copy) -> bool:
        waited_s = asyncio.get_running_loop().time() - copy.ordered_s
        return waited_s > self._ordering.pace.limit_s(job, line=copy.line)
