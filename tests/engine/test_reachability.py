"""A worker that trainers cannot reach, though the coordinator can: found out once."""

import asyncio

import pytest

from dataservice.engine import placement
from dataservice.engine.reachability import FIRST_S, Reachability
from tests.engine.scripted_workers import ORDERS, PACKS, PLAN, held_by, holders, ready, step_of
from tests.waiting import until


@pytest.fixture(autouse=True)
def long_ready(monkeypatch):
    """Whatever is ready has been so for long."""
    monkeypatch.setattr(placement, "STREAM_PATIENCE_S", 0.0)


async def stall(dispatcher, step, rank, worker):
    """Nothing comes to the rank from this worker."""
    await until(lambda: ready(step))
    mine = [pack for pack in PACKS if worker in step.placements[pack].copies]
    assert mine
    return await held_by(dispatcher, step, rank, mine, slow=[worker])


async def test_a_rank_does_not_wait_in_vain_for_the_same_worker_at_every_step(dispatcher):
    paths = Reachability(ranks=8)
    first = await dispatcher.dispatch(PLAN, ORDERS, reachability=paths)
    await stall(dispatcher, first, 0, "w0")
    second = await dispatcher.dispatch(*step_of(1), reachability=paths)
    packs = range(second.plan.packs)
    others = await held_by(dispatcher, second, 1, packs)  # it may be the rank's own fault
    assert "w0" in {info.worker for info in others.values()}
    mine = await held_by(dispatcher, second, 0, packs)
    assert "w0" not in {info.worker for info in mine.values()}


async def test_where_several_ranks_fail_all_go_elsewhere_and_nothing_is_ordered_there(dispatcher):
    paths = Reachability(ranks=8)
    first = await dispatcher.dispatch(PLAN, ORDERS, reachability=paths)
    for rank in (0, 1):
        await stall(dispatcher, first, rank, "w0")
    second = await dispatcher.dispatch(*step_of(1), reachability=paths)
    assert holders(second) == {"w1", "w2"}
    found = await held_by(dispatcher, first, 5, PACKS)
    assert "w0" not in {info.worker for info in found.values()}


async def test_ranks_that_reach_nobody_are_sent_wherever_there_is_somebody(dispatcher, workers):
    paths = Reachability(ranks=2)
    step = await dispatcher.dispatch(PLAN, ORDERS, reachability=paths)
    for name in workers.names:
        for rank in (0, 1):
            paths.avoid(rank, name)
    found = await held_by(dispatcher, step, 0, PACKS)
    assert set(found) == set(PACKS)
    assert holders(await dispatcher.dispatch(*step_of(1), reachability=paths)) == set(workers.infos)


async def test_a_broken_path_is_tried_again_and_then_left_alone_for_longer(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    paths = Reachability(ranks=8)
    for life_s in (FIRST_S, 2 * FIRST_S, 4 * FIRST_S):
        paths.avoid(0, "w0")
        now_s += life_s - 1
        assert paths.avoids(0, "w0")
        assert not paths.avoids(1, "w0")
        now_s += 1
        assert not paths.avoids(0, "w0")
    paths.avoid(0, "w0")
    assert paths.avoids(0, "w0")
    paths.know(frozenset({"w1"}))
    assert not paths.avoids(0, "w0")


async def test_the_only_rank_is_enough_to_shun_a_worker():
    paths = Reachability(ranks=1)
    paths.avoid(0, "w0")
    assert paths.is_shunned("w0")
