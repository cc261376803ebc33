"""Workers die, fall silent, are slow, refuse, lose packs and cannot be reached."""

import asyncio
import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dataservice.core.errors import SpecError
from dataservice.core.orders import StorageOutage
from dataservice.core.ports import WorkerInfo
from dataservice.core.whereabouts import Whereabouts
from dataservice.engine import dispatch, open_orders, orphaned_packs, placement
from dataservice.engine.affinity import PackWishes
from tests.engine.scripted_workers import (
    ORDERS,
    PACKS,
    PLAN,
    held_by,
    holders,
    holders_of,
    ready,
    step_of,
)
from tests.waiting import until


def nothing_queued(balancers, workers):
    """No work is counted as queued at any worker that there ever was."""
    (balancer,) = balancers
    return not any(map(balancer.queued, workers.held))


async def test_packs_are_spread_by_work_and_a_released_step_leaves_nothing(
    dispatcher, balancers, workers, receipts
):
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: ready(step))
    assert {name for name, _ in workers.ordered} == set(workers.infos)
    assert len(workers.ordered) == PLAN.packs
    assert sorted(workers.calls) == sorted(workers.infos)  # one for all packs of each
    holders = await held_by(dispatcher, step, 0, PACKS)
    assert all(ORDERS[p].key in workers.held[holders[p].worker] for p in PACKS)
    await dispatcher.release(step, received=True)
    assert not any(workers.held.values())
    assert sorted(r.key.pack for r in receipts) == list(PACKS)
    assert nothing_queued(balancers, workers)
    assert dispatcher.load() == {}


async def test_the_watch_leaves_a_step_alone_until_all_of_it_is_ordered(
    dispatcher, workers, monkeypatch
):
    pause = asyncio.sleep

    async def slowly(seconds: float) -> None:
        """The watch looks several times between the orders to two workers."""
        await pause(seconds or 5 * dispatch.TICK_S)

    first = await dispatcher.dispatch(PLAN, ORDERS)  # from now on the watch looks
    await until(lambda: ready(first))
    workers.calls.clear()
    workers.ordered.clear()
    plan, orders = step_of(1)
    monkeypatch.setattr(dispatch.asyncio, "sleep", slowly)
    step = await dispatcher.dispatch(plan, orders)
    await until(lambda: ready(step))
    assert Counter(pack.pack for _, pack in workers.ordered) == dict.fromkeys(range(plan.packs), 1)
    assert sorted(workers.calls) == sorted(workers.infos)


async def test_packs_that_a_dead_worker_leaves_are_ordered_in_one_call_for_each_worker(
    dispatcher, workers
):
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: ready(step))
    left = sum("w0" in place.copies for place in step.placements)
    workers.calls.clear()
    workers.kill("w0", noticed=True)
    await until(lambda: ready(step) and "w0" not in {*holders(step)})
    assert left > len(workers.calls)
    assert max(Counter(workers.calls).values()) == 1


@pytest.mark.parametrize("noticed", [True, False])
async def test_what_a_dead_worker_held_or_decoded_is_ordered_again(
    dispatcher, workers, counts, noticed
):
    workers.stick("w1")
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: all(p.ready for p in step.placements if "w1" not in p.copies))
    for name in ("w0", "w1"):  # one has decoded, one is decoding
        workers.kill(name, noticed=noticed)
    workers.unstick("w1")
    if noticed:
        await until(lambda: ready(step) and not {"w0", "w1"} & {*holders(step)})
    else:  # nobody knows of w0 until a rank tells
        await until(lambda: "w1" in workers.replaced)
    found = await held_by(dispatcher, step, 0, PACKS, failed=["w0"])
    assert not {"w0", "w1"} & {info.worker for info in found.values()}
    assert all(ORDERS[p].key in workers.held[found[p].worker] for p in PACKS)
    assert all(place.tries == 0 for place in step.placements)
    assert sorted(counts.lost) == ["w0", "w1"]
    assert "w0" not in counts.queued


async def test_a_slow_pack_that_ranks_wait_for_is_hedged_within_the_budget(
    hedged_soon, dispatcher, workers, counts
):
    workers.stick("w2")
    step = await dispatcher.dispatch(PLAN, ORDERS)
    stuck = [p for p in PACKS if "w2" in step.placements[p].copies]
    assert len(stuck) > 2
    await until(lambda: all(step.placements[p].ready for p in PACKS if p not in stuck))
    await asyncio.sleep(0.3)
    assert counts.hedged == 0  # no rank has asked for the step
    await held_by(dispatcher, step, 0, PACKS)
    await until(lambda: counts.hedged == 2)
    await asyncio.sleep(0.3)
    assert counts.hedged == 2, "and no more"
    await until(lambda: sum(step.placements[p].ready for p in stuck) == 2)
    hedged = [p for p in stuck if step.placements[p].ready]
    assert len(hedged) == counts.hedged
    # The slow order is taken back, and ranks are sent to where the pack is.
    assert all("w2" not in step.placements[p].copies for p in hedged)
    at = await held_by(dispatcher, step, 0, hedged)
    assert "w2" not in {info.worker for info in at.values()}
    assert workers.replaced == []
    workers.unstick("w2")
    await until(lambda: ready(step))
    await dispatcher.release(step, received=True)
    await until(lambda: not any(workers.held.values()))


@pytest.mark.parametrize(("decode_s", "hedged"), [(0.0, True), (60.0, False)])
async def test_a_slower_pace_of_all_moves_the_yardstick(
    hedged_soon, dispatcher, workers, counts, decode_s, hedged
):
    workers.decode_s = decode_s
    first = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: ready(first))
    workers.stick("w2")
    plan, orders = step_of(1)
    second = await dispatcher.dispatch(plan, orders)
    assert "w2" in holders(second)
    await held_by(dispatcher, second, 0, range(plan.packs))
    if hedged:
        await until(lambda: counts.hedged)
    else:
        await asyncio.sleep(0.5)  # fifteen times the soonest
        assert not counts.hedged
    workers.unstick("w2")


async def test_packs_at_a_silent_worker_are_ordered_elsewhere_without_replacing_it(
    dispatcher, workers, counts
):
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: ready(step))
    await held_by(dispatcher, step, 0, PACKS)
    made = len(workers.calls)
    workers.set_state("w0", "silent")
    await until(lambda: all(holders_of(workers, o.key) != ["w0"] for o in ORDERS))
    found = await held_by(dispatcher, step, 0, PACKS)
    assert "w0" not in {info.worker for info in found.values()}
    assert workers.replaced == counts.lost == []
    assert len(workers.calls) - made <= len(workers.names) - 1, "one a worker, not one a pack"
    await dispatcher.release(step, received=False)
    assert not any(workers.held.values())


async def test_a_worker_that_a_rank_cannot_reach_is_avoided_for_that_rank_alone(
    dispatcher, workers
):
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: ready(step))
    mine = [p for p in PACKS if "w0" in step.placements[p].copies]
    first = await held_by(dispatcher, step, 0, mine, failed=["w0"])
    assert {info.worker for info in first.values()} == {"w0"}  # it lives, and holds them
    second = await held_by(dispatcher, step, 0, mine, failed=["w0"])
    assert "w0" not in {info.worker for info in second.values()}
    assert all(ORDERS[p].key in workers.held[second[p].worker] for p in mine)
    everyone = {info.worker for info in (await held_by(dispatcher, step, 1, PACKS)).values()}
    assert workers.replaced == []
    assert everyone <= set(workers.infos)
    for name in workers.names[1:]:  # and when it reaches nobody, it tries all again
        for _ in range(2):
            last = await held_by(dispatcher, step, 0, mine, failed=[name])
    assert len(last) == len(mine)


async def test_a_stalled_stream_moves_the_rank_only_if_the_pack_had_long_been_ready(
    dispatcher, workers, monkeypatch
):
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: ready(step))
    mine = [p for p in PACKS if "w0" in step.placements[p].copies]
    monkeypatch.setattr(placement, "STREAM_PATIENCE_S", 600.0)
    soon = await held_by(dispatcher, step, 0, mine, slow=["w0"])
    assert {info.worker for info in soon.values()} == {"w0"}
    monkeypatch.setattr(placement, "STREAM_PATIENCE_S", 0.0)
    late = await held_by(dispatcher, step, 0, mine, slow=["w0"])
    assert "w0" not in {info.worker for info in late.values()}


async def test_a_pack_that_its_worker_has_lost_is_decoded_there_again(dispatcher, workers):
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: ready(step))
    mine = [p for p in PACKS if "w0" in step.placements[p].copies]
    workers.held["w0"].clear()
    found = await held_by(dispatcher, step, 0, mine, failed=["w0"])
    assert all(ORDERS[p].key in workers.held[found[p].worker] for p in mine)


async def test_a_pack_that_everyone_refuses_is_told_to_the_ranks_with_its_reason(
    dispatcher, balancers, workers
):
    workers.refuses.update(workers.names)
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: step.placements[0].failure is not None)
    assert len([k for _, k in workers.ordered if k == ORDERS[0].key]) == open_orders.ORDER_TRIES
    with pytest.raises(SpecError, match="no such processor"):
        await held_by(dispatcher, step, 0, [0])
    await until(lambda: nothing_queued(balancers, workers))  # the other packs are refused too


@pytest.fixture
def late(workers):
    """No worker is there yet; these are the ones that come."""
    coming = dict(workers.infos)
    workers.infos.clear()
    return coming


async def dispatched_once_there(dispatcher, workers, late):
    """The step is ordered when its workers have come, and not before."""
    waiting = asyncio.create_task(dispatcher.dispatch(PLAN, ORDERS))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    workers.infos.update(late)
    step = await waiting
    await until(lambda: ready(step))


async def test_steps_wait_for_as_long_as_there_is_no_worker(dispatcher, workers, late):
    await dispatched_once_there(dispatcher, workers, late)


async def test_a_draining_worker_gets_no_orders_and_is_not_counted_as_lost(
    dispatcher, workers, counts
):
    step = await dispatcher.dispatch(PLAN, ORDERS)
    await until(lambda: ready(step))
    workers.set_state("w0", "draining")
    drained = asyncio.create_task(dispatcher.drained("w0"))
    other = await dispatcher.dispatch(*step_of(1))
    assert "w0" not in holders(other)
    assert "w0" in {i.worker for i in (await held_by(dispatcher, step, 0, PACKS)).values()}
    assert not drained.done()
    await dispatcher.release(step, received=True)
    await drained
    del workers.infos["w0"]
    await until(lambda: counts.retired == ["w0"])
    assert counts.lost == []


async def test_a_worker_that_drains_and_ends_between_two_looks_is_not_counted_as_lost(
    dispatcher, workers, counts
):
    await dispatcher.dispatch(PLAN, ORDERS)
    await dispatcher.drained("w9")  # another's name changes nothing
    empty = workers.infos["w0"] = WorkerInfo(worker="w0", address="a:1", slots=1)
    drained = asyncio.create_task(dispatcher.drained(empty.worker))
    await asyncio.sleep(0)
    drained.cancel()
    del workers.infos["w0"]
    await until(lambda: counts.retired == ["w0"])
    assert counts.lost == []


async def test_storage_that_workers_wait_for_is_known_by_job(dispatcher, workers, monkeypatch):
    monkeypatch.setattr(dispatch, "ASK_EVERY_S", 0.01)
    away = StorageOutage(job="a/j", source="far", away_s=3.0, reason="503")
    workers.outages = (away, replace(away, job="b/j"))
    await dispatcher.start()
    await until(lambda: dispatcher.outages("a/j") == (away,) * len(workers.infos))
    workers.outages = ()
    await until(lambda: dispatcher.outages("a/j") == ())


async def test_packs_left_by_a_former_coordinator_are_used_or_released(
    dispatcher, workers, counts, monkeypatch
):
    monkeypatch.setattr(orphaned_packs, "ASK_EVERY_S", 0.01)
    monkeypatch.setattr(dispatch, "ASK_EVERY_S", 0.01)
    former = {order.key: f"w{order.key.pack % 3}" for order in ORDERS}
    for key, name in former.items():
        workers.held[name].add(key)
    stray = replace(ORDERS[0].key, plan_digest="another")
    workers.held["w2"].add(stray)
    await dispatcher.start()
    step = await dispatcher.dispatch(PLAN, ORDERS)
    assert {key: name for name, key in workers.ordered}.items() <= former.items()
    await until(lambda: ready(step))
    assert {key: name for name, key in workers.ordered} == former
    assert counts.found == len(former)
    monkeypatch.setattr(orphaned_packs, "GRACE_S", 0.0)
    await until(lambda: stray not in workers.held["w2"])
    await until(lambda: workers.asked > 9)
    assert {key for held in workers.held.values() for key in held} == set(former)


async def test_packs_left_by_a_former_coordinator_are_used_though_their_workers_come_late(
    dispatcher, workers, late, counts
):
    former = {order.key: f"w{order.key.pack % 3}" for order in ORDERS}
    for key, name in former.items():
        workers.held[name].add(key)
    await dispatcher.start()
    await dispatched_once_there(dispatcher, workers, late)
    assert {key: name for name, key in workers.ordered} == former
    assert counts.found == len(former)


async def test_a_worker_that_does_not_say_what_it_holds_delays_no_start(
    dispatcher, workers, counts, monkeypatch
):
    """Nor does it hide what the others hold."""
    monkeypatch.setattr(dispatch, "FIRST_ANSWERS_S", 0.05)
    workers.mute.add("w1")
    workers.held["w0"].add(ORDERS[0].key)
    await dispatcher.start()
    assert workers.asked == 0
    step = await dispatcher.dispatch(PLAN, ORDERS)
    assert workers.asked == len(workers.infos)
    await until(lambda: ready(step))
    assert holders_of(workers, ORDERS[0].key) == ["w0"]
    assert counts.found == 1


async def test_nothing_leaks_over_a_hundred_losses_at_random(
    hedged_soon, dispatcher, balancers, workers, counts, monkeypatch
):
    monkeypatch.setattr(dispatch, "HOLDERS_WAIT_S", 10.0)  # where all workers are stuck
    rng = random.Random(7)
    steps = [step_of(n) for n in range(3)]
    live = [await dispatcher.dispatch(*each) for each in steps]
    for blow in range(100):
        name = rng.choice(workers.names)
        match rng.randrange(4):
            case 0:
                workers.kill(name, noticed=True)
            case 1:
                workers.kill(name, noticed=False)
            case 2:
                if name not in workers.stuck:
                    workers.stick(name)
                workers.kill(name, noticed=rng.random() < 0.5)
            case 3:
                workers.set_state(name, rng.choice(["silent", "serving"]))
        for stuck in list(workers.stuck):
            if rng.random() < 0.3:
                workers.unstick(stuck)
        step = live[blow % 3]
        asking = held_by(dispatcher, step, blow % 2, PACKS[:3], failed=rng.sample(workers.names, 1))
        if rng.random() < 0.5:
            await asking
        else:
            asking.close()
            await asyncio.sleep(0.001 * rng.randrange(5))
        if rng.random() < 0.1:
            await dispatcher.release(step, received=rng.random() < 0.5)
            live[blow % 3] = await dispatcher.dispatch(*steps[blow % 3])
    for stuck in list(workers.stuck):
        workers.unstick(stuck)
    for name in workers.names:
        workers.set_state(name, "serving")
        if name in workers.dead:
            workers.kill(name, noticed=True)
    await until(lambda: all(ready(s) and holders(s) <= set(workers.infos) for s in live))
    for step in live:
        found = await held_by(dispatcher, step, 9, range(step.plan.packs))
        keys = [order.key for order in step.orders]
        assert all(keys[p] in workers.held[info.worker] for p, info in found.items())
        await dispatcher.release(step, received=True)
    await until(lambda: not any(workers.held[name] for name in workers.infos))
    assert nothing_queued(balancers, workers)
    assert (dispatcher.load(), dispatcher.waiting_jobs()) == ({}, set())
    assert set(counts.queued) <= set(workers.infos)
    assert not any(counts.queued.values())
    assert len(counts.lost) == len(set(counts.lost))


def kept_at(workers, name):
    """Wishes by which all of PLAN's samples are kept at one worker's cache."""
    for each, info in workers.infos.items():
        workers.infos[each] = replace(info, where=Whereabouts(cache=each, node=each))
    replicas = [Whereabouts(node=name)] * PLAN.replicas
    return PackWishes(keys=np.zeros(0, np.uint32), replicas=replicas)


async def test_packs_that_one_worker_draws_are_still_shared_out_within_the_bound(
    dispatcher, workers
):
    step = await dispatcher.dispatch(PLAN, ORDERS, wishes=kept_at(workers, "w2"))
    await until(lambda: ready(step))
    work = Counter()
    for each in step.placements:
        (holder,) = each.copies
        work[holder] += each.work
    mean = work.total() / 3
    assert set(work) == set(workers.infos)
    assert work["w2"] == max(work.values())
    assert max(work.values()) <= 1.1 * mean + max(p.work for p in step.placements)


async def test_a_slow_worker_that_draws_packs_is_hedged_all_the_same(
    hedged_soon, dispatcher, workers, counts
):
    workers.stick("w2")
    step = await dispatcher.dispatch(PLAN, ORDERS, wishes=kept_at(workers, "w2"))
    stuck = [p for p in PACKS if "w2" in step.placements[p].copies]
    # On a busy machine others would be overdue as well, and take the two hedges that there are.
    await until(lambda: all(step.placements[p].ready for p in PACKS if p not in stuck))
    await held_by(dispatcher, step, 0, PACKS)
    await until(lambda: counts.hedged == 2)
    await until(lambda: sum(step.placements[p].ready for p in stuck) == 2)
    workers.unstick("w2")
    await until(lambda: ready(step))


async def test_a_worker_that_draws_packs_and_dies_leaves_them_to_the_others(dispatcher, workers):
    workers.stick("w2")
    step = await dispatcher.dispatch(PLAN, ORDERS, wishes=kept_at(workers, "w2"))
    workers.kill("w2", noticed=True)
    workers.unstick("w2")
    await until(lambda: ready(step) and "w2" not in holders(step))
