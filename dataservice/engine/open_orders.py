"""Orders of packs at workers, each seen through to its end; `dispatch.py` decides which are made.

Contract. Packs are ordered together, those of a worker in one call, and a call is a task. However
an order ends (answered, failed, given up, cancelled), its work leaves the worker's queue once.
Unanswered, it also leaves the pack's copies, so a pack without copies is one that must be ordered
again: `wake` is set then.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import ServiceError, WorkerLostError
from dataservice.core.order_columns import PackOrders
from dataservice.core.ports import WorkerInfo, WorkerLink
from dataservice.core.receipts import PackReceipts
from dataservice.engine.hedging import OrderDeadlines
from dataservice.engine.load_balancer import LoadBalancer
from dataservice.engine.placement import APART, NOWHERE, Copy, DispatchedStep, PackPlacement
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
        self.make_all(step, np.array([pack]), worker, hedge=hedge)

    def make_all(
        self,
        step: DispatchedStep,
        packs: NDArray[np.int64],
        worker: WorkerInfo,
        orders: PackOrders | None = None,
        *,
        hedge: bool = False,
    ) -> None:
        """Order packs from a worker, in as few calls as their samples fit into. `orders` are theirs
        where they are at hand."""
        now_s, of = asyncio.get_running_loop().time(), step.placements
        number, call = step.number_of(worker), of.begin_call(worker)
        work = of.work[packs].cumsum()
        queued_work = self._balancer.queued_per_slot(worker) + work / worker.slots
        new = of.call[packs] == NOWHERE
        if hedge:
            new[:] = False
        of.order(packs[new], call, now_s, queued_work[new])
        step.holder[packs[new]] = number
        for place in np.flatnonzero(~new).tolist():
            copy = Copy(
                worker=worker,
                call=call,
                ordered_s=now_s,
                queued_work=float(queued_work[place]),
                hedge=hedge,
            )
            self._add(step, int(packs[place]), copy)
        self._balancer.add(worker.worker, int(work[-1]) if len(work) else 0)
        for own in _split(step.orders.only(packs) if orders is None else orders):
            opened = _OpenCall(
                number=call, worker=worker, packs=packs[own.places], orders=own.orders
            )
            task = asyncio.create_task(self._have_prepared(step, opened))
            step.calls.add(task)
            # Not in the task: one that is cancelled before its first turn runs no line of its own.
            task.add_done_callback(partial(self._ended, step, opened))
        step.note_change()

    def _add(self, step: DispatchedStep, pack: int, copy: Copy) -> None:
        """A copy of a pack that has others, or had."""
        placement = step.placements.own(pack)
        if (again := placement.copies.pop(copy.worker.worker, None)) is not None:
            self._leave(placement, again)
        placement.copies[copy.worker.worker] = copy
        step.placements.pending[pack] = not placement.ready
        step.note_holder(pack)

    def forget(self, step: DispatchedStep, pack: int, worker: str) -> None:
        """The worker no longer has its copy, and will not have it."""
        placement = step.placements.own(pack)
        self._leave(placement, placement.copies.pop(worker))
        step.placements.pending[pack] = not placement.ready
        step.note_holder(pack)
        step.note_change()
        self._wake.set()

    async def stop(self, steps: Iterable[DispatchedStep]) -> None:
        """Cancel the orders of these steps, and the releases that are under way."""
        await cancel_all(*(call for step in steps for call in step.calls), *self._releases)

    async def _have_prepared(self, step: DispatchedStep, call: "_OpenCall") -> None:
        """See the packs of a call through."""
        name = call.worker.worker
        try:
            async with aclosing(self._link.order(call.worker, call.orders)) as answered:
                async for answers in answered:
                    self._take_failures(step, call, answers.failures)
                    await self._take(step, call, answers.receipts)
        except WorkerLostError as error:
            log.warning("%s lost %d packs: %s", name, call.left.sum(), error, extra=step.about)
            self._fail(step, call, error)
            self._balancer.replace(name)
        except ServiceError as error:
            log.error("%s refused %d packs: %s", name, call.left.sum(), error, extra=step.about)
            self._fail(step, call, error)
        except Exception as error:
            log.exception("ordering packs from %s failed", name, extra=step.about)
            self._fail(step, call, ServiceError(f"{name} could not be asked: {error!r}"))

    def _take_failures(
        self, step: DispatchedStep, call: "_OpenCall", failures: Mapping[int, ServiceError]
    ) -> None:
        """Take why some packs could not be made. A copy that was given up meanwhile is none of
        ours."""
        name = call.worker.worker
        for number, error in failures.items():
            (place,) = call.take(np.array([number])).tolist()
            if (
                place < 0
                or step.placements.copy_of(pack := int(call.packs[place]), call.number) is None
            ):
                continue
            log.error("%s refused pack %d: %s", name, number, error, extra=step.about)
            _note_failure(step.placements.own(pack), error)
            self.forget(step, pack, name)
            if isinstance(error, WorkerLostError):
                self._balancer.replace(name)

    async def _take(self, step: DispatchedStep, call: "_OpenCall", answered: PackReceipts) -> None:
        """Take receipts of some packs, as `_take_failures`."""
        places, of = call.take(answered.pack), step.placements
        packs = call.packs[places]
        calls = np.where(places < 0, NOWHERE, of.call[packs])
        kept, now_s = calls == call.number, asyncio.get_running_loop().time()
        done = of.answer(packs[kept], now_s)
        for k in np.flatnonzero(calls == APART).tolist():
            pack = int(packs[k])
            copy = of.copy_of(pack, call.number)
            if copy is not None:
                kept[k] = True
                done += self._answer(step, pack, copy, now_s)
        if not kept.any():
            return
        packs, receipts = packs[kept], answered.only(kept)
        decoded = zip(of.work[packs].tolist(), receipts.decode_s.tolist(), strict=True)
        self._deadlines.note(step.job, decoded)
        self._balancer.add(call.worker.worker, -done)
        step.delivered.take(receipts)
        step.note_change()
        try:
            await self._on_receipts(step, receipts)
        except ServiceError as error:
            log.error("receipts were not noted: %s", error, extra=step.about)
        finally:
            of.note(packs, call.number)
            step.note_change()

    def _answer(self, step: DispatchedStep, pack: int, copy: Copy, now_s: float) -> int:
        """A copy of a pack with an object is ready. Returns the work that leaves its worker's
        queue."""
        placement = step.placements.own(pack)
        done = placement.work if copy.queued else 0
        copy.queued, copy.ready_s = False, now_s
        placement.tries, placement.failure = 0, None
        step.placements.pending[pack] = False
        if len(placement.copies) > 1:
            self._give_up_others(step, pack, copy)
        return done

    def _fail(self, step: DispatchedStep, call: "_OpenCall", error: ServiceError) -> None:
        for pack in call.packs[call.left].tolist():
            if step.placements.copy_of(pack, call.number) is not None:
                _note_failure(step.placements.own(pack), error)

    def _ended(self, step: DispatchedStep, call: "_OpenCall", task: "asyncio.Task[None]") -> None:
        """The call is over: what it did not answer is ordered again."""
        step.calls.discard(task)  # cancelled, its traceback would keep the step, and the step it
        for pack in call.packs[call.left].tolist():
            if step.placements.copy_of(pack, call.number) is not None:
                self.forget(step, pack, call.worker.worker)

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


class _OpenCall:
    """Packs ordered in one call, or in one of some that have a number together: `packs` int64[k]
    are their places in the step, and `left` bool[k] those that are not answered."""

    def __init__(
        self, *, number: int, worker: WorkerInfo, packs: NDArray[np.int64], orders: PackOrders
    ) -> None:
        self.number = number
        self.worker = worker
        self.packs = packs
        self.orders = orders
        self.left = np.ones(len(packs), bool)
        # A step that is decoded again to be compared has only some of its plan's packs.
        self._place_of = {pack: place for place, pack in enumerate(orders.pack.tolist())}

    def take(self, packs: NDArray[np.int64]) -> NDArray[np.int64]:
        """These packs of the plan are answered: their places in the call, -1 where one was before.
        Raises KeyError where one was not ordered."""
        places = np.array([self._place_of[pack] for pack in packs.tolist()], np.int64)
        new = np.zeros(len(places), bool)
        new[np.unique(places, return_index=True)[1]] = True
        new &= self.left[places]
        self.left[places] = False
        return np.where(new, places, -1)


class _Part(NamedTuple):
    places: slice
    orders: PackOrders


def _split(orders: PackOrders) -> Iterator[_Part]:
    """The orders of each call, and where they are among all."""
    start, samples = 0, 0
    for place, count in enumerate(orders.counts.tolist()):
        samples += count
        if place > start and samples > MOST_SAMPLES:
            yield _Part(slice(start, place), orders[start:place])
            start, samples = place, count
    yield _Part(slice(start, len(orders)), orders[start:])


def _note_failure(placement: PackPlacement, error: ServiceError) -> None:
    pause_s = RETRY_PAUSE_S * 2.0 ** (placement.tries - 1) if placement.tries else 0.0
    placement.not_before_s = asyncio.get_running_loop().time() + min(pause_s, LONGEST_PAUSE_S)
    placement.tries += 1
    placement.error = error
    if placement.tries >= ORDER_TRIES:
        placement.failure = error
