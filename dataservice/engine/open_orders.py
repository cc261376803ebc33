"""Orders of packs at workers, each seen through to its end; `dispatch.py` decides which are made.

Contract. Packs are ordered together, those of a worker in one call, and a call is a task. However
an order ends (answered, failed, given up, cancelled), its work leaves the worker's queue once.
Unanswered, it also leaves the pack's copies, so a pack without copies is one that must be ordered
again: `wake` is set then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from functools import partial

import numpy as np

from dataservice.core.errors import ServiceError, WorkerLostError
from dataservice.core.order_columns import PackOrders
from dataservice.core.ports import WorkerInfo, WorkerLink
from dataservice.core.receipts import PackAnswers, PackReceipts
from dataservice.engine.hedging import OrderDeadlines
from dataservice.engine.load_balancer import LoadBalancer
from dataservice.engine.placement import Copy, DispatchedStep, PackPlacement
from dataservice.engine.tasks import cancel_all

log = logging.getLogger(__name__)

# Failures of a pack's orders in a row after which the ranks that wait are told.
ORDER_TRIES = 8
RETRY_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0

# Samples ordered in one call. They nearly always fit into a message; else they are sent in some.
MOST_SAMPLES = 8192

OnReceipts = Callable[[DispatchedStep, PackReceipts], Awaitable[None]]


class OpenOrders:
    """Makes orders, and keeps the copies of their packs true."""

    def __init__(
        self,
        link: WorkerLink,
        balancer: LoadBalancer,
        deadlines: OrderDeadlines,
        *,
        on_receipts: OnReceipts,
        wake: asyncio.Event,
    ) -> None:
        self._link = link
        self._balancer = balancer
        self._deadlines = deadlines
        self._on_receipts = on_receipts
        self._wake = wake
        self._releases: set[asyncio.Task[None]] = set()

    def make(
        self, step: DispatchedStep, pack: int, worker: WorkerInfo, *, hedge: bool = False
    ) -> None:
        """Order a pack from a worker. The same order twice is decoded once."""
        self.make_all(step, [pack], worker, hedge=hedge)

    def make_all(
        self,
        step: DispatchedStep,
        packs: Sequence[int],
        worker: WorkerInfo,
        orders: PackOrders | None = None,
        *,
        hedge: bool = False,
    ) -> None:
        """Order packs from a worker, in as few calls as their samples fit into. `orders` are theirs
        where they are at hand."""
        now_s = asyncio.get_running_loop().time()
        queued, number = self._balancer.queued_per_slot(worker), step.number_of(worker)
        made: dict[int, Copy] = {}
        alone, work = [], 0
        for pack in packs:
            placement = step.placements[pack]
            work += placement.work
            made[pack] = copy = Copy(
                worker=worker,
                ordered_s=now_s,
                queued_work=queued + work / worker.slots,
                hedge=hedge,
            )
            if (again := placement.copies.pop(worker.worker, None)) is not None:
                self._leave(placement, again)
            if placement.copies:
                placement.copies[worker.worker] = copy
                step.note_holder(pack)
                if not placement.ready:
                    step.pending.add(pack)
            else:
                placement.copies[worker.worker] = copy
                alone.append(pack)
        step.pending.update(alone)
        step.holder[alone] = number
        self._balancer.add(worker.worker, work)
        for some, own in _split(made, step.orders.only(packs) if orders is None else orders):
            task = asyncio.create_task(self._have_prepared(step, worker, some, own))
            step.calls.add(task)
            # Not in the task: one that is cancelled before its first turn runs no line of its own.
            task.add_done_callback(partial(self._ended, step, worker, some))
        step.note_change()

    def forget(self, step: DispatchedStep, pack: int, worker: str) -> None:
        """The worker no longer has its copy, and will not have it."""
        placement = step.placements[pack]
        self._leave(placement, placement.copies.pop(worker))
        if not placement.ready:
            step.pending.add(pack)
        step.note_holder(pack)
        step.note_change()
        self._wake.set()

    async def stop(self, steps: Iterable[DispatchedStep]) -> None:
        """Cancel the orders of these steps, and the releases that are under way."""
        await cancel_all(*(call for step in steps for call in step.calls), *self._releases)

    async def _have_prepared(
        self, step: DispatchedStep, worker: WorkerInfo, copies: dict[int, Copy], orders: PackOrders
    ) -> None:
        """See packs through; those that are answered leave `copies`."""
        name = worker.worker
        try:
            # A step that is decoded again to be compared has only some of its plan's packs.
            place_of = dict(zip(orders.pack.tolist(), copies, strict=True))
            async with aclosing(self._link.order(worker, orders)) as call:
                async for answers in call:
                    await self._take(step, name, copies, answers, place_of)
        except WorkerLostError as error:
            log.warning("%s lost %d packs: %s", name, len(copies), error, extra=step.about)
            self._fail(step, copies, error)
            self._balancer.replace(name)
        except ServiceError as error:
            log.error("%s refused %d packs: %s", name, len(copies), error, extra=step.about)
            self._fail(step, copies, error)
        except Exception as error:
            log.exception("ordering packs from %s failed", name, extra=step.about)
            self._fail(step, copies, ServiceError(f"{name} could not be asked: {error!r}"))

    async def _take(
        self,
        step: DispatchedStep,
        name: str,
        copies: dict[int, Copy],
        answers: PackAnswers,
        place_of: Mapping[int, int],
    ) -> None:
        """Take what became of some packs, which have their places in the step. A copy that was
        given up meanwhile is none of ours."""
        for number, error in answers.failures.items():
            pack = place_of[number]
            copy = copies.pop(pack, None)
            if copy is None or step.placements[pack].copies.get(name) is not copy:
                continue
            log.error("%s refused pack %d: %s", name, number, error, extra=step.about)
            _note_failure(step.placements[pack], error)
            self.forget(step, pack, name)
            if isinstance(error, WorkerLostError):
                self._balancer.replace(name)
        job, now_s = step.job, asyncio.get_running_loop().time()
        taken: list[Copy] = []
        decoded: list[tuple[float, float]] = []
        kept, done = np.ones(len(answers.receipts), bool), 0
        told = zip(answers.receipts.pack.tolist(), answers.receipts.decode_s.tolist(), strict=True)
        for k, (number, decode_s) in enumerate(told):
            pack = place_of[number]
            placement, copy = step.placements[pack], copies.pop(pack, None)
            if copy is None or placement.copies.get(name) is not copy:
                kept[k] = False
                continue
            taken.append(copy)
            decoded.append((placement.work, decode_s))
            if copy.queued:
                copy.queued, done = False, done + placement.work
            copy.ready_s = now_s
            placement.tries, placement.failure = 0, None
            step.pending.discard(pack)
            if len(placement.copies) > 1:
                self._give_up_others(step, pack, copy)
        if not taken:
            return
        self._deadlines.note(job, decoded)
        self._balancer.add(name, -done)
        receipts = answers.receipts.only(kept)
        step.delivered.take(receipts)
        step.note_change()
        try:
            await self._on_receipts(step, receipts)
        except ServiceError as error:
            log.error("receipts were not noted: %s", error, extra=step.about)
        finally:
            for copy in taken:
                copy.noted = True
            step.note_change()

    def _fail(self, step: DispatchedStep, copies: dict[int, Copy], error: ServiceError) -> None:
        for pack, copy in copies.items():
            if step.placements[pack].copies.get(copy.worker.worker) is copy:
                _note_failure(step.placements[pack], error)

    def _ended(
        self,
        step: DispatchedStep,
        worker: WorkerInfo,
        copies: dict[int, Copy],
        call: "asyncio.Task[None]",
    ) -> None:
        """The call is over: what it did not answer is ordered again."""
        step.calls.discard(call)  # cancelled, its traceback would keep the step, and the step it
        for pack, copy in copies.items():
            self._leave(step.placements[pack], copy)
            if step.placements[pack].copies.get(worker.worker) is copy:
                self.forget(step, pack, worker.worker)

    def _leave(self, placement: PackPlacement, copy: Copy) -> None:
        """The pack's work leaves the worker's queue, once."""
        if copy.queued:
            copy.queued = False
            self._balancer.add(copy.worker.worker, -placement.work)

    def _give_up_others(self, step: DispatchedStep, pack: int, copy: Copy) -> None:
        """A copy is ready: hedges of it, or what it was the hedge of, are not waited for."""
        placement = step.placements[pack]
        others = [each for each in placement.copies.values() if not each.ready]
        for loser in [each for each in others if each.hedge or copy.hedge]:
            del placement.copies[loser.worker.worker]
            self._leave(placement, loser)
            # Ranks that wait there are told that it is not held, and come for another ticket.
            release = self._link.release(loser.worker, step.job, [step.orders.key(pack)])
            task = asyncio.create_task(release)
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)
        step.note_holder(pack)


def _split(
    made: dict[int, Copy], orders: PackOrders
) -> Iterator[tuple[dict[int, Copy], PackOrders]]:
    """The packs of each call, and their orders."""
    copies, start, samples = list(made.items()), 0, 0
    for place, count in enumerate(orders.counts.tolist()):
        samples += count
        if place > start and samples > MOST_SAMPLES:
            yield dict(copies[start:place]), orders[start:place]
            start, samples = place, count
    yield dict(copies[start:]), orders[start:]


def _note_failure(placement: PackPlacement, error: ServiceError) -> None:
    pause_s = RETRY_PAUSE_S * 2.0 ** (placement.tries - 1) if placement.tries else 0.0
    placement.not_before_s = asyncio.get_running_loop().time() + min(pause_s, LONGEST_PAUSE_S)
    placement.tries += 1
    placement.error = error
    if placement.tries >= ORDER_TRIES:
        placement.failure = error
