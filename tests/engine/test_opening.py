"""Jobs are opened several at a time, in turns: no team has all threads, asked ones come first."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from dataservice.core.errors import ConflictError, QuotaError
from dataservice.engine.opening import MOST_WAITING, Openings
from tests.waiting import LIMIT_S, settled, until

AT_ONCE = 3


class Held:
    """Work that waits until all of it is let go; notes in which order it began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go = threading.Event()

    def work(self, name: str) -> Callable[[], str]:
        def run() -> str:
            self.begun.append(name)
            assert self.go.wait(LIMIT_S)
            return name

        return run


@pytest.fixture
def held() -> Held:
    return Held()


async def test_where_there_are_no_teams_jobs_are_opened_in_all_threads(held: Held):
    openings = Openings(at_once=AT_ONCE)
    jobs = [f"job-{k}" for k in range(AT_ONCE + 1)]
    asked = [asyncio.create_task(openings.run_registered(job, held.work(job))) for job in jobs]
    await until(lambda: len(held.begun) == AT_ONCE)
    held.go.set()
    assert await asyncio.gather(*asked) == jobs


async def test_a_team_whose_files_hang_leaves_a_thread_whatever_it_asks_for(held: Held):
    openings = Openings(at_once=AT_ONCE)
    hanging = [asyncio.create_task(openings.run("slow", held.work("slow"))) for _ in range(9)]
    hanging += [
        asyncio.create_task(openings.run_registered(f"slow/{k}", held.work("slow")))
        for k in range(9)
    ]
    await until(lambda: len(held.begun) == openings.most_of("slow"))
    assert await openings.run("other", lambda: "done") == "done"
    assert await openings.run_registered("other/job", lambda: "done") == "done"
    await settled()
    assert len(held.begun) == openings.most_of("slow") == AT_ONCE - 1
    held.go.set()
    await asyncio.gather(*hanging)


async def test_submissions_that_hang_leave_a_thread_to_jobs_that_are_there(held: Held):
    openings = Openings(at_once=AT_ONCE)
    hanging = [asyncio.create_task(openings.run("", held.work("new"))) for _ in range(9)]
    await until(lambda: len(held.begun) == AT_ONCE - 1)
    assert await openings.run_registered("job", lambda: "done") == "done"
    async with openings.gap("restored"):
        assert await openings.run_registered("restored", lambda: "done") == "done"
    held.go.set()
    await asyncio.gather(*hanging)


async def test_what_nobody_asked_for_begins_only_in_a_thread_that_is_free(held: Held):
    openings, asked = Openings(at_once=AT_ONCE), Held()

    async def beside(job: str) -> str:
        async with openings.gap(job):
            await asyncio.sleep(0)  # as one who sets a job up in a task of its own
            return await openings.run_registered(job, held.work(job))

    jobs = [f"beside-{k}" for k in range(AT_ONCE + 3)]
    tasks = [asyncio.create_task(beside(job)) for job in jobs]
    await until(lambda: len(held.begun) == AT_ONCE)
    tasks += [
        asyncio.create_task(openings.run_registered(job, asked.work(job)))
        for job in [f"asked-{k}" for k in range(5)]
    ]
    await settled()
    held.go.set()
    await until(lambda: len(asked.begun) == AT_ONCE)
    await settled()
    assert len(held.begun) == AT_ONCE
    asked.go.set()
    await asyncio.gather(*tasks)
    assert sorted(held.begun) == jobs


async def test_a_gap_is_not_for_a_team_that_has_as_many_threads_as_it_may(held: Held):
    openings = Openings(at_once=AT_ONCE)
    full = [
        asyncio.create_task(openings.run_registered(f"a/{k}", held.work("a")))
        for k in range(AT_ONCE)
    ]
    await until(lambda: len(held.begun) == AT_ONCE - 1)
    entered = []

    async def pass_through(job: str) -> None:
        async with openings.gap(job):
            entered.append(job)

    await pass_through("b/1")
    waiting = asyncio.create_task(pass_through("a/9"))
    await settled()
    assert entered == ["b/1"]
    await pass_through("b/2")  # what opened nothing gives its place back
    held.go.set()
    await asyncio.gather(*full, waiting)
    assert entered == ["b/1", "b/2", "a/9"]


async def test_a_team_may_have_so_many_submissions_waiting_and_no_more(held: Held):
    openings = Openings(at_once=AT_ONCE)
    waiting = [asyncio.create_task(openings.run("a", held.work("a"))) for _ in range(MOST_WAITING)]
    await settled()
    with pytest.raises(QuotaError, match=f"{MOST_WAITING} jobs of this team wait"):
        await openings.run("a", held.work("a"))
    held.go.set()
    await asyncio.gather(*waiting)
    assert await openings.run("a", lambda: "again") == "again"


async def test_what_has_not_begun_when_the_service_stops_never_does(held: Held):
    openings = Openings(at_once=AT_ONCE)
    jobs = [f"job-{k}" for k in range(AT_ONCE)]
    begun = [asyncio.create_task(openings.run_registered(job, held.work(job))) for job in jobs]
    await until(lambda: len(held.begun) == AT_ONCE)
    late = asyncio.create_task(openings.run("", held.work("late")))
    await settled()
    openings.close()
    held.go.set()
    assert await asyncio.gather(*begun) == jobs
    with pytest.raises(ConflictError, match="stopping"):
        await late
    assert "late" not in held.begun
