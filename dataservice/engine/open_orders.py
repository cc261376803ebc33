"""Orders of packs at workers, each seen through to its end; `dispatch.py` decides which are made.

Contract. An order is a task. However it ends (answered, failed, cancelled), its work leaves the
worker's queue once. Unanswered, it also leaves the pack's copies, so a pack without copies is one
that must be ordered again: `wake` is set then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

from dataservice.core.errors import ServiceError, WorkerLostError
from dataservice.core.orders import PackReceipt
from dataservice.core.ports import WorkerInfo, WorkerLink
from dataservice.engine.hedging import OrderDeadlines
from dataservice.engine.load_balancer import LoadBalancer
from dataservice.engine.placement import Copy, DispatchedStep, PackPlacement
from dataservice.engine.tasks import cancel_all

log = logging.getLogger(__name__)

# Failures of a pack's orders in a row after which the ranks that wait are told.
ORDER_TRIES = 8
RETRY_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0

OnReceipt = Callable[[DispatchedStep, PackReceipt], Awaitable[None]]


class OpenOrders:
    """Makes orders, and keeps the copies of their packs true."""

    def __init__(
        self,
        link: WorkerLink,
        balancer: LoadBalancer,
        deadlines: OrderDeadlines,
        *,
        on_receipt: OnReceipt,
        wake: asyncio.Event,
    ) -> None:
        self._link = link
        self._balancer = balancer
        self._deadlines = deadlines
        self._on_receipt = on_receipt
        self._wake = wake
        self._releases: set[asyncio.Task[None]] = set()

    def make(
        self, step: DispatchedStep, pack: int, worker: WorkerInfo, *, hedge: bool = False
    ) -> None:
        """Order a pack from a worker. The same order twice is decoded once."""
        placement = step.placements[pack]
        copy = Copy(
            worker=worker,
            ordered_s=asyncio.get_running_loop().time(),
            queued_work=self._balancer.queued_per_slot(worker) + placement.work,
            hedge=hedge,
        )
        self._balancer.add(worker.worker, placement.work)
        placement.copies[worker.worker] = copy
        if not placement.ready:
            step.pending.add(pack)
        copy.task = asyncio.create_task(self._have_prepared(step, pack, copy))
        # Not in the task: one that is cancelled before its first turn runs no line of its own.
        copy.task.add_done_callback(lambda _: self._ended(step, pack, copy))
        step.note_holder(pack)
        step.note_change()

    def forget(self, step: DispatchedStep, pack: int, worker: str) -> None:
        """The worker no longer has its copy, and will not have it."""
        placement = step.placements[pack]
        copy = placement.copies.pop(worker)
        if copy.task is not None:
            copy.task.cancel()
        if not placement.ready:
            step.pending.add(pack)
        step.note_holder(pack)
        step.note_change()
        self._wake.set()

    async def stop(self, steps: Iterable[DispatchedStep]) -> None:
        """Cancel the orders of these steps, and the releases that are under way."""
        orders = [copy.task for step in steps for _, copy in step.copies()]
        await cancel_all(*orders, *self._releases)

    async def _have_prepared(self, step: DispatchedStep, pack: int, copy: Copy) -> None:
        placement, name = step.placements[pack], copy.worker.worker
        try:
            receipt = await self._link.prepare(copy.worker, placement.order)
        except WorkerLostError as error:
            log.warning("%s lost pack %d: %s", name, pack, error, extra=step.about)
            _note_failure(placement, error)
            self._balancer.replace(name)
        except ServiceError as error:
            log.error("%s refused pack %d: %s", name, pack, error, extra=step.about)
            _note_failure(placement, error)
        except Exception as error:
            log.exception("ordering pack %d from %s failed", pack, name, extra=step.about)
            _note_failure(placement, ServiceError(f"{name} could not be asked: {error!r}"))
        else:
            step.delivered.take(receipt)
            self._deadlines.note(step.job, work=placement.work, decode_s=receipt.decode_s)
            self._note_ready(step, pack, copy)
            try:
                await self._on_receipt(step, receipt)
            except ServiceError as error:
                log.error("pack %d's receipt was not noted: %s", pack, error, extra=step.about)

    def _ended(self, step: DispatchedStep, pack: int, copy: Copy) -> None:
        placement, name = step.placements[pack], copy.worker.worker
        self._balancer.add(name, -placement.work)
        copy.task = None  # cancelled, its traceback would keep the step, and the step it
        if not copy.ready and placement.copies.get(name) is copy:
            self.forget(step, pack, name)

    def _note_ready(self, step: DispatchedStep, pack: int, copy: Copy) -> None:
        placement = step.placements[pack]
        copy.ready_s = asyncio.get_running_loop().time()
        placement.tries, placement.failure = 0, None
        step.pending.discard(pack)
        others = [each for each in placement.copies.values() if not each.ready]
        for loser in [each for each in others if each.hedge or copy.hedge]:
            del placement.copies[loser.worker.worker]
            assert loser.task is not None, "an order that is not ready is under way"
            loser.task.cancel()
            # Ranks that wait there are told that it is not held, and come for other tickets.
            release = self._link.release(loser.worker, step.job, [placement.order.key])
            task = asyncio.create_task(release)
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)
        step.note_holder(pack)
        step.note_change()


def _note_failure(placement: PackPlacement, error: ServiceError) -> None:
    pause_s = RETRY_PAUSE_S * 2.0 ** (placement.tries - 1) if placement.tries else 0.0
    placement.not_before_s = asyncio.get_running_loop().time() + min(pause_s, LONGEST_PAUSE_S)
    placement.tries += 1
    placement.error = error
    if placement.tries >= ORDER_TRIES:
        placement.failure = error
