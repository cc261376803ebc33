"""A worker that trainers cannot reach, though the coordinator can: found out once."""

import pytest

from dataservice.engine import places, reach
from dataservice.engine.reach import Reach
from tests.engine.scripted_workers import ORDERS, PACKS, PLAN, holders, ready, step_of, until


@pytest.fixture(autouse=True)
def long_ready(monkeypatch):
    """Whatever is ready has been so for long."""
    monkeypatch.setattr(places, "STREAM_PATIENCE_S", 0.0)


async def stall(dispatcher, step, rank, worker):
    """Nothing comes to the rank from this worker."""
    await until(lambda: ready(step))
    mine = [pack for pack in PACKS if worker in step.places[pack].copies]
    assert mine
    return await dispatcher.holders(step, rank, mine, slow=[worker])


async def test_a_rank_does_not_wait_in_vain_for_the_same_worker_at_every_step(dispatcher):
    paths = Reach(ranks=8)
    first = await dispatcher.dispatch(PLAN, ORDERS, reach=paths)
    await stall(dispatcher, first, 0, "w0")
    second = await dispatcher.dispatch(*step_of(1), reach=paths)
    packs = range(second.plan.packs)
    others = await dispatcher.holders(second, 1, packs)  # it may be the rank's own fault
    assert "w0" in {info.worker for info in others.values()}
    mine = await dispatcher.holders(second, 0, packs)
    assert "w0" not in {info.worker for info in mine.values()}


async def test_where_several_ranks_fail_all_go_elsewhere_and_nothing_is_ordered_there(dispatcher):
    paths = Reach(ranks=8)
    first = await dispatcher.dispatch(PLAN, ORDERS, reach=paths)
    for rank in (0, 1):
        await stall(dispatcher, first, rank, "w0")
    second = await dispatcher.dispatch(*step_of(1), reach=paths)
    assert holders(second) == {"w1", "w2"}
    found = await dispatcher.holders(first, 5, PACKS)
    assert "w0" not in {info.worker for info in found.values()}


async def test_ranks_that_reach_nobody_are_sent_wherever_there_is_somebody(dispatcher, workers):
    paths = Reach(ranks=2)
    step = await dispatcher.dispatch(PLAN, ORDERS, reach=paths)
    for name in workers.names:
        for rank in (0, 1):
            paths.avoid(rank, name)
    found = await dispatcher.holders(step, 0, PACKS)
    assert set(found) == set(PACKS)
    assert holders(await dispatcher.dispatch(*step_of(1), reach=paths)) == set(workers.infos)


async def test_a_broken_path_is_tried_again_and_then_left_alone_for_longer(monkeypatch):
    monkeypatch.setattr(reach, "FIRST_S", 0.05)
    paths = Reach(ranks=8)
    paths.avoid(0, "w0")
    assert paths.avoids(0, "w0")
    assert not paths.avoids(1, "w0")
    await until(lambda: not paths.avoids(0, "w0"))
    first = paths._broken["w0"][0]
    paths.avoid(0, "w0")
    again = paths._broken["w0"][0]
    assert again.until_s - first.until_s >= 2 * 0.05 == again.life_s
    paths.know(frozenset({"w1"}))
    assert not paths.avoids(0, "w0")


async def test_the_only_rank_is_enough_to_shun_a_worker():
    paths = Reach(ranks=1)
    paths.avoid(0, "w0")
    assert paths.is_shunned("w0")
