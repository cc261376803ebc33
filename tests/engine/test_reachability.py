"""A worker that trainers cannot reach, though the coordinator can: found out once."""

import asyncio
import random

import numpy as np
import pytest

from dataservice.core.cursor import Cursor
from dataservice.engine import placement
from dataservice.engine.pack_orders import pack_orders
from dataservice.engine.planner import plan_step
from dataservice.engine.reachability import FIRST_S, LONGEST_S, Reachability
from tests.engine.counted import calls_of
from tests.engine.scripted_workers import ORDERS, PACKS, PLAN, held_by, holders, ready, step_of
from tests.engine.support import make_setup
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
    assert paths.shunned == {"w0"}


class Remembered:
    """The same, looked up among all that ever was."""

    def __init__(self):
        self.paths = {}

    def broken(self, now_s):
        return {path for path, (until_s, _) in self.paths.items() if now_s < until_s}

    def avoid(self, path, now_s):
        until_s, life_s = self.paths.get(path, (-np.inf, 0.0))
        if now_s >= until_s:
            life_s = min(2 * life_s, LONGEST_S) if now_s < until_s + life_s else FIRST_S
            self.paths[path] = now_s + life_s, life_s

    def forget(self, gone):
        self.paths = {path: known for path, known in self.paths.items() if not gone(*path)}


@pytest.mark.parametrize("seed", range(20))
async def test_what_is_remembered_is_what_looking_at_all_there_ever_was_tells(monkeypatch, seed):
    draw, now_s = random.Random(seed), 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    paths, known = Reachability(ranks=5), Remembered()
    names = {f"w{k}" for k in range(4)}
    for _ in range(300):
        now_s += draw.expovariate(1 / 20)
        rank, worker = draw.randrange(5), draw.choice(sorted(names))
        what = draw.choices(["avoid", "try again", "end", "wait"], [20, 2, 1, 1])[0]
        if what == "avoid":
            paths.avoid(rank, worker)
            known.avoid((rank, worker), now_s)
        elif what == "try again":
            paths.try_again(rank)
            known.forget(lambda of, _, rank=rank: of == rank)
        elif what == "end":
            names = names - {worker} | {f"w{len(names)}-{now_s}"}
            paths.know(frozenset(names))
            known.forget(lambda _, at, names=names: at not in names)
        else:
            now_s += draw.choice([FIRST_S, 3 * FIRST_S, 2 * LONGEST_S])
        broken = known.broken(now_s)
        shunned = {name for name in names if sum(at == name for _, at in broken) >= 2}
        assert paths.shunned == shunned
        for each in range(5):
            avoided = {name for name in names if (each, name) in broken} | shunned
            assert paths.avoided_by(each) == avoided
            assert {name for name in names if paths.avoids(each, name)} == avoided


async def test_what_a_rank_is_told_takes_as_many_calls_however_many_ranks_avoid_a_worker():
    def calls(ranks):
        paths = Reachability(ranks=1000)
        for rank in range(ranks):
            paths.avoid(rank, "w0")
        return calls_of(lambda: (paths.avoided_by(999), paths.avoids(999, "w0"), paths.shunned))

    assert calls(800) == calls(2)


async def test_a_path_that_holds_is_forgotten(monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    paths = Reachability(ranks=1000)

    def calls():
        return calls_of(lambda: (paths.avoided_by(1), paths.try_again(1), paths.know(frozenset())))

    before = calls()
    for rank in range(500):
        paths.avoid(rank, "w0")
    now_s = 2 * FIRST_S
    assert not paths.avoided_by(1)
    assert calls() == before


def wide_step(batch):
    """A step of many packs, and its orders."""
    setup = make_setup(samples=2000, batch=batch)
    plan = plan_step(setup, Cursor(), setup.topology(2)).plan
    return plan, pack_orders(plan, setup.catalog, job="job", digest="d", pipeline="{}")


async def calls_of_a_question(dispatcher, workers, plan, orders, amiss):
    """The calls of a rank's question for all packs of a step, which are at hand. One rank avoids a
    worker, two avoid all of them, or one is silent."""
    paths = Reachability(ranks=8)
    step = await dispatcher.dispatch(plan, orders, reachability=paths)
    await until(lambda: ready(step))
    if amiss == "one rank avoids one":
        paths.avoid(7, "w1")
    elif amiss == "two ranks avoid all":
        for name in workers.names:
            paths.avoid(6, name)
            paths.avoid(7, name)
    else:
        workers.set_state("w1", "silent")
        await asyncio.sleep(0.05)
    question = dispatcher.holders(step, 0, np.arange(plan.packs, dtype=np.int32))
    told = []

    def ask():
        try:
            question.send(None)
        except StopIteration as answer:
            told.append(answer.value)

    made = calls_of(ask)
    assert told[0].tolist() == step.holder.tolist()
    await dispatcher.release(step, received=True)
    return made


@pytest.mark.parametrize("amiss", ["one rank avoids one", "two ranks avoid all", "one is silent"])
async def test_other_ranks_of_more_packs_take_no_more_calls(dispatcher, workers, amiss):
    steps = [wide_step(batch) for batch in (64, 512)]
    few, many = [await calls_of_a_question(dispatcher, workers, *step, amiss) for step in steps]
    assert steps[1][0].packs > 4 * steps[0][0].packs
    assert many < few + 20
