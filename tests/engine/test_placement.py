"""Where packs are: most are rows of columns, and those with a history have objects."""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dataservice.core.order_columns import PackOrders
from dataservice.core.orders import PackOrder, PackReceipt
from dataservice.core.ports import WorkerInfo
from dataservice.core.receipts import PackAnswers, PackReceipts
from dataservice.engine.delivered import Delivered
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.load_balancer import LoadBalancer
from dataservice.engine.placement import NOWHERE, Copy, DispatchedStep, Placements, grouped
from dataservice.engine.reachability import Reachability
from tests.engine.scripted_workers import ORDERS, PACKS, PLAN, Workers, held_by, ready
from tests.waiting import until

WORKER = WorkerInfo(worker="w", address="a:1", slots=1)


def ordered(*packs: int) -> tuple[Placements, int]:
    """Of four packs of work 1, 2, 3, 4 these are ordered, in a call with this number."""
    of = Placements(np.array([1, 2, 3, 4]))
    call = of.begin_call(WORKER)
    of.order(np.array(packs), call, 10.0, np.arange(1.0, 1.0 + len(packs)))
    return of, call


def test_what_is_read_of_a_pack_changes_nothing_and_what_is_owned_does() -> None:
    of, call = ordered(0, 2)
    (copy,) = of[2].copies.values()
    assert (copy.worker, copy.call, copy.ordered_s, copy.queued_work) == (WORKER, call, 10.0, 2.0)
    copy.ready_s = 11.0
    assert not of[2].ready
    of.own(2).copies["w"].ready_s = 11.0
    assert of[2].ready
    assert of.own(2) is of[2]
    assert list(of.apart) == [2]
    assert [each.work for each in of] == [1, 2, 3, 4]
    assert [len(each.copies) for each in of] == [1, 0, 1, 0]


def test_a_copy_counts_as_long_as_the_pack_has_it() -> None:
    of, call = ordered(0, 2)
    assert of.copy_of(1, call) is None
    assert of.copy_of(0, call + 1) is None
    assert of.copy_of(0, call) is not None
    of.own(0).copies.clear()
    assert of.copy_of(0, call) is None


@pytest.mark.parametrize("owned", [False, True])
def test_a_receipt_is_due_until_it_is_noted(owned: bool) -> None:
    of, call = ordered(0, 2)
    if owned:
        of.own(2)
    of.answer(np.array([0]), 11.0)
    of.note(np.array([0]), call)
    assert of.any_due
    of.note(np.array([2]), call)
    assert not of.any_due


def test_work_leaves_the_queue_once() -> None:
    of, _ = ordered(0, 2)
    assert of.answer(np.array([0, 2]), 11.0) == 4
    assert of.answer(np.array([0, 2]), 12.0) == 0
    assert of.pending.tolist() == [False, True, False, True]


async def test_packs_that_are_ordered_once_and_come_have_no_objects(
    dispatcher: Dispatcher, workers: Workers
) -> None:
    step = await dispatcher.dispatch(PLAN, ORDERS)
    assert step.decoding
    await until(lambda: ready(step))
    await held_by(dispatcher, step, 0, PACKS)
    assert sorted(p for packs in step.packs_by_worker().values() for p in packs) == list(PACKS)
    await dispatcher.release(step, received=True)
    assert not step.decoding
    assert not step.placements.apart


@pytest.mark.parametrize("seed", range(20))
def test_each_worker_has_the_packs_with_a_copy_there(seed: int) -> None:
    draw, packs = np.random.default_rng(seed), 40
    workers = [WorkerInfo(worker=f"w{k}", address="a:1", slots=1) for k in range(draw.integers(6))]
    step = DispatchedStep(
        plan=PLAN,
        orders=PackOrders.of(ORDERS),
        placements=Placements(np.ones(packs, np.int64)),
        reachability=Reachability(),
        delivered=Delivered(PLAN, PackOrders.of(ORDERS)),
    )
    copies: dict[str, set[int]] = {}
    for worker in workers:
        call, number = step.placements.begin_call(worker), step.number_of(worker)
        nowhere = np.flatnonzero(step.placements.call == NOWHERE)
        own = nowhere[draw.random(len(nowhere)) < 0.3]
        step.placements.order(own, call, 0.0, np.zeros(len(own)))
        step.holder[own] = number
        for pack in draw.choice(packs, size=4, replace=False).tolist():
            copy = Copy(worker=worker, call=call, ordered_s=0.0, queued_work=1.0, hedge=True)
            step.placements.own(pack).copies[worker.worker] = copy
            step.note_holder(pack)
    for pack, placement in enumerate(step.placements):
        for name in placement.copies:
            copies.setdefault(name, set()).add(pack)
    assert step.packs_by_worker() == {name: sorted(own) for name, own in copies.items()}
    for worker in workers:
        assert step.packs_at(worker.worker) == sorted(copies[worker.worker])


def test_grouped_packs_keep_their_order_and_a_worker_may_have_none() -> None:
    by_worker = grouped(np.array([3, 5, 7, 8]), np.array([2, 0, 2, 0], np.int32), 3)
    assert [own.tolist() for own in by_worker] == [[5, 8], [], [3, 7]]
    assert grouped(np.empty(0, np.int64), np.empty(0, np.int32), 0) == []


async def test_only_packs_that_were_lost_have_objects(
    dispatcher: Dispatcher, workers: Workers
) -> None:
    workers.stick("w1")
    step = await dispatcher.dispatch(PLAN, ORDERS)
    lost = step.packs_at("w1")
    workers.kill("w1", noticed=True)
    await until(lambda: ready(step))
    assert lost
    assert sorted(step.placements.apart) == lost
    assert not step.packs_at("w1")


class TwiceToldWorkers(Workers):
    """They tell of each pack twice, in a message and again in another."""

    async def order(
        self, worker: WorkerInfo, orders: Sequence[PackOrder]
    ) -> AsyncGenerator[PackAnswers, None]:
        receipts = [replace(await self.prepare(worker, order), bad_samples=()) for order in orders]
        for told in (receipts + receipts[::-1], receipts):
            yield PackAnswers(receipts=PackReceipts.of(told))


@pytest.fixture
def workers() -> Workers:
    return TwiceToldWorkers()


async def test_a_pack_that_is_told_of_twice_counts_once(
    dispatcher: Dispatcher,
    workers: Workers,
    balancers: list[LoadBalancer],
    receipts: list[PackReceipt],
) -> None:
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: ready(step))
    await dispatcher.release(step, received=True)
    assert sorted(receipt.key.pack for receipt in receipts) == list(PACKS)
    assert not any(map(balancers[0].queued, workers.infos))
