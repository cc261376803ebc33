"""A team's quota of decoded bytes slows planning ahead, and never stops a job."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.sample import DecodedSample
from dataservice.core.team import TeamSpec
from dataservice.core.topology import Topology
from dataservice.engine.api import EndOfData
from dataservice.engine.pack_orders import pack_orders
from dataservice.engine.planner import plan_step
from dataservice.engine.ready_bytes import ReadyBytes, planned_bytes
from dataservice.state.memory import MemoryStateStore
from dataservice.workers.pack import ITEM_DTYPES, assemble
from tests.engine.sessions import leave, open_all, settled, shard_of
from tests.engine.support import Books, make_coordinator, make_setup
from tests.waiting import until


def decoded(sample):
    tokens = np.zeros(sample.lengths.llm_tokens, dtype=np.int32)
    return DecodedSample(
        input_ids=tokens,
        labels=tokens,
        items=tuple(
            np.zeros(item.shape, ITEM_DTYPES[item.modality]) for item in sample.lengths.items
        ),
    )


def test_planned_bytes_are_what_the_workers_will_hold():
    setup = make_setup()
    planned = plan_step(setup, Cursor(), Topology(world_size=4))
    assert planned is not None
    assert planned.plan.pack_degree.max() > 1  # padding counts
    orders = pack_orders(planned.plan, setup.catalog, job="job", digest="d", pipeline="{}")
    packs = [
        assemble(o.samples, [decoded(s) for s in o.samples], degree=o.degree, pad_token_id=0)
        for o in orders
    ]
    assert any(item.size for pack in packs for item in pack.items)
    items = setup.catalog.item_details(planned.plan.sample_ids)
    assert planned_bytes(planned.plan, items) == sum(pack.size_bytes for pack in packs)


def limits(**max_ready_bytes):
    teams = {name: TeamSpec(max_ready_bytes=size) for name, size in max_ready_bytes.items()}
    return lambda: teams


async def waiting(work) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0.01)
    return task


async def test_a_step_waits_for_room_in_its_own_team_only():
    ready = ReadyBytes(limits(a=100))
    never = {"needed": lambda: False}
    await ready.admit("a/one", 60, **never)
    await ready.admit("a/two", 40, **never)
    third = await waiting(ready.admit("a/two", 30, **never))
    await ready.admit("b/one", 10_000, **never)
    assert not third.done()
    await ready.drop("a/two", 40)
    await asyncio.wait_for(third, 30)
    assert ready.held("a") == 90
    cancelled = await waiting(ready.admit("a/one", 30, **never))
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert ready.held("a") == 90


async def test_a_step_that_is_needed_goes_through_whatever_is_held():
    ready, needed = ReadyBytes(limits(a=100)), False
    await ready.admit("a/one", 99, needed=lambda: False)
    task = await waiting(ready.admit("a/two", 5000, needed=lambda: needed))
    assert not task.done()
    assert (ready.holds_back("a/one"), ready.holds_back("a/two")) == (False, True)
    needed = True
    await ready.look_again()
    await asyncio.wait_for(task, 30)
    assert not ready.holds_back("a/two")
    assert ready.held("a") == 5099


async def fetch(coordinator, sessions, step):
    """Every rank asks for a step at the same time, as trainers do."""
    return await asyncio.gather(*(shard_of(coordinator, opened, step) for opened in sessions))


async def steps_ahead(coordinator, job):
    """The steps that an attempt holds once its team's limit lets it hold no more."""
    sessions = await open_all(coordinator, job=job)

    async def is_held_back():
        (seen,) = (await coordinator.health([job], team=None)).jobs
        return seen.health.bytes_full

    await settled(is_held_back)
    (seen,) = (await coordinator.health([job], team=None)).jobs
    leave(coordinator, sessions)
    return seen.health.ready_steps


@pytest.mark.parametrize("most_steps", [0, 1, 4])
async def test_a_job_under_a_quota_trains_the_same_steps_and_holds_no_more(most_steps):
    setup = replace(make_setup(name="a/job"), ready_steps=8)
    sizes, cursor = [], Cursor()
    while (planned := plan_step(setup, cursor, Topology(world_size=2))) is not None:
        items = setup.catalog.item_details(planned.plan.sample_ids)
        sizes.append(planned_bytes(planned.plan, items))
        cursor = planned.next_cursor
    # A step that is needed is let through, even where there is no room for it.
    max_ready_bytes, ahead = max(1, sum(sizes[:most_steps])), max(1, most_steps)
    books = Books()
    coordinator = make_coordinator(
        MemoryStateStore(), books, setup, teams=limits(a=max_ready_bytes)
    )
    await coordinator.submit("a/job", "")
    assert await steps_ahead(coordinator, "a/job") == ahead
    sessions, most = await open_all(coordinator, job="a/job"), 0

    def held() -> int:
        return sum(sizes[step] for step in {key.step for key in books.held})

    for step in range(len(sizes)):
        await fetch(coordinator, sessions, step)
        most = max(most, held())
        # Else several would be let go of at once, where the notes of what they held take a while.
        await until(lambda: min((key.step for key in books.held), default=step) >= step)  # noqa: B023
        await asyncio.sleep(0.01)
        most = max(most, held())
        for opened in sessions:
            await coordinator.commit(opened.session, step)
    # One step that is needed may come on top of what fits, beside one that workers let go of.
    assert most <= max(max_ready_bytes, 2 * max(sizes))
    assert most < sum(sorted(sizes)[-8:])
    leave(coordinator, sessions)
    assert await steps_ahead(coordinator, "a/job") == ahead  # nothing counts as held any more
    await coordinator.stop()


async def test_two_jobs_of_a_team_whose_quota_holds_neither_both_go_on():
    setups = [make_setup(name=name) for name in ("a/one", "a/two")]
    coordinator = make_coordinator(MemoryStateStore(), Books(), *setups, teams=limits(a=1))
    for setup in setups:
        await coordinator.submit(setup.record.name, "")
    one, two = [await open_all(coordinator, job=setup.record.name) for setup in setups]

    async def epoch(sessions) -> int:
        step = 0
        while not isinstance((await fetch(coordinator, sessions, step))[0], EndOfData):
            step += 1
        return step

    async with asyncio.timeout(120):
        assert await asyncio.gather(epoch(one), epoch(two)) == [13, 13]
    await coordinator.stop()
