"""What a job took is freed when it has ended, without waiting for cycles to be looked for: where
much is planned, that is seldom."""

import asyncio
import gc
import weakref
from collections import Counter

import pytest

from dataservice.core.errors import FencedError, WorldSizeError
from dataservice.core.job import JobRecord
from dataservice.core.job_setup import JobSetup
from dataservice.core.orders import EVERYTHING
from dataservice.core.plan import StepPlan
from dataservice.engine.attempt import Attempt
from dataservice.engine.loop import AttemptLoop
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import open_all, open_rank, train
from tests.engine.support import Books, make_coordinator, make_setup
from tests.waiting import until

HEAVY = (StepPlan, AttemptLoop, Attempt)


@pytest.fixture(autouse=True)
def alive():
    """Counts what has been made since, and lives; cycles are not looked for meanwhile."""
    gc.collect()
    gc.disable()
    # Kept, so that no later object gets the id of one that is gone.
    before = {id(each): each for each in gc.get_objects() if type(each) in HEAVY}

    def alive() -> Counter[str]:
        found = (each for each in gc.get_objects() if type(each) in HEAVY)
        return Counter(type(each).__name__ for each in found if id(each) not in before)

    yield alive
    gc.enable()


async def trained(**more):
    """A coordinator whose job has trained some steps, and the ranks' sessions."""
    coordinator = make_coordinator(MemoryStateStore(), Books(), make_setup(), **more)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 5)
    return coordinator, sessions


async def never_planned(coordinator, opened):
    """Wait for a step beyond those that are planned ahead of the last received one."""
    return await coordinator.shard(
        opened.session, 9, received_step=4, failed_workers=(), wanted=EVERYTHING
    )


async def gone(coordinator, sessions):
    for each in sessions:
        coordinator.close_session(each.session)
    await asyncio.sleep(0.1)


async def deleted(coordinator, sessions):
    await gone(coordinator, sessions)
    await coordinator.delete("job")


async def test_of_a_deleted_job_nothing_stays(alive):
    coordinator, sessions = await trained()
    await until(lambda: alive()["StepPlan"] > 0)  # planned ahead
    await deleted(coordinator, sessions)
    await until(lambda: alive() == {})
    await coordinator.stop()


async def test_of_a_job_that_pauses_no_plan_stays(alive):
    coordinator, sessions = await trained(idle_release_s=0.1)
    await gone(coordinator, sessions)
    await until(lambda: alive() == {"AttemptLoop": 1, "Attempt": 1})
    await coordinator.stop()


async def test_of_an_attempt_that_was_fenced_nothing_stays_though_its_ranks_were_told(alive):
    coordinator, sessions = await trained()
    waiting = [asyncio.create_task(never_planned(coordinator, each)) for each in sessions]
    waiting += [asyncio.create_task(coordinator.session_ended(s.session)) for s in sessions]
    await asyncio.sleep(0.05)
    await gone(coordinator, sessions)
    newer = await open_all(coordinator)
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(end) for end in ends} == {FencedError}
    assert len({str(end) for end in ends}) == 1
    del waiting, ends
    await until(lambda: alive()["AttemptLoop"] == 1)
    await deleted(coordinator, newer)
    await until(lambda: alive() == {})
    await coordinator.stop()


async def test_of_an_attempt_that_never_was_complete_nothing_stays(alive):
    coordinator = make_coordinator(MemoryStateStore(), Books(), make_setup(), timeout_s=0.1)
    await coordinator.submit("job", "")
    with pytest.raises(WorldSizeError):
        await open_rank(coordinator, 0, world=4)
    await coordinator.delete("job")
    await until(lambda: alive() == {})
    await coordinator.stop()


async def test_the_index_goes_with_its_job():
    index = []

    def open_job(_record: JobRecord) -> JobSetup:
        setup = make_setup()
        index.append(weakref.ref(setup.catalog))
        return setup

    coordinator = make_coordinator(MemoryStateStore(), Books(), make_setup(), open_job=open_job)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 5)
    await deleted(coordinator, sessions)
    await until(lambda: [each() for each in index] == [None])
    await coordinator.stop()
