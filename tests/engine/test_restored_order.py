"""After a restart all jobs that ran are opened again, first those that ranks wait for."""

import asyncio
import threading
from dataclasses import replace

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import SpecError
from dataservice.core.job import AttemptRecord, JobRecord
from dataservice.core.job_setup import JobSetup
from dataservice.engine import coordinator as coordinator_module
from dataservice.engine.opening import MOST_WAITING, Openings
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import open_all
from tests.engine.support import Books, make_coordinator, make_setup
from tests.waiting import LIMIT_S, until

AT_ONCE = 3


def that_ran(teams: int, jobs: int) -> MemoryStateStore:
    """A store with so many jobs of each team, each of which has had an attempt."""
    store = MemoryStateStore()
    for name in (f"team-{t}/job-{k:03d}" for t in range(teams) for k in range(jobs)):
        store.put_job(JobRecord(name=name, spec_json="{}", index_fingerprint="f"))
        store.put_attempt(
            AttemptRecord(
                job=name,
                attempt=1,
                world_size=2,
                start_cursor=Cursor().to_json(),
                opened_unix_s=1.0,
            )
        )
    return store


@pytest.fixture
def asked(monkeypatch) -> set[str]:
    """The jobs whose opening has begun or waits."""
    names: set[str] = set()
    run = Openings.run_registered

    async def noted(self, job, work):
        names.add(job)
        return await run(self, job, work)

    monkeypatch.setattr(Openings, "run_registered", noted)
    return names


async def test_a_job_that_a_rank_asks_for_does_not_wait_behind_the_others(asked):
    held, setup = threading.Event(), make_setup(samples=40)
    opened: list[str] = []

    def open_job(record: JobRecord) -> JobSetup:
        opened.append(record.name)
        assert held.wait(LIMIT_S)
        return replace(setup, record=record)

    store = that_ran(teams=3, jobs=MOST_WAITING + 6)
    coordinator = make_coordinator(store, Books(), open_job=open_job, opened_at_once=AT_ONCE)
    await coordinator.start()
    await until(lambda: len(opened) == AT_ONCE)
    wanted = "team-0/job-069"
    ranks = asyncio.create_task(open_all(coordinator, job=wanted))
    await until(lambda: wanted in asked)
    held.set()
    await ranks
    assert wanted in opened[: 2 * AT_ONCE], "before those of its team that nobody asks for"
    await coordinator.restored()
    assert sorted(opened) == [record.name for record in store.jobs()]
    await coordinator.stop()


async def test_while_workers_are_yet_to_come_only_what_ranks_ask_for_is_opened():
    """What starts workers needs the processors that opening a hundred jobs takes."""
    setup, opened = make_setup(samples=40), []

    def open_job(record: JobRecord) -> JobSetup:
        opened.append(record.name)
        return replace(setup, record=record)

    store, books = that_ran(teams=2, jobs=5), Books(alive=[])
    coordinator = make_coordinator(store, books, open_job=open_job)
    await coordinator.start()
    await open_all(coordinator, job="team-1/job-003")
    await asyncio.sleep(0.5)
    assert opened == ["team-1/job-003"]
    books.alive.append("w0")
    await coordinator.restored()
    assert sorted(opened) == [record.name for record in store.jobs()]
    await coordinator.stop()


async def test_jobs_are_restored_also_where_no_worker_comes(monkeypatch):
    monkeypatch.setattr(coordinator_module, "RESTORED_WITHIN_S", 0.05)
    setup, store = make_setup(samples=40), that_ran(teams=1, jobs=3)
    coordinator = make_coordinator(
        store, Books(alive=[]), open_job=lambda record: replace(setup, record=record)
    )
    await coordinator.start()
    await asyncio.wait_for(coordinator.restored(), LIMIT_S)
    await coordinator.stop()


async def test_ranks_of_all_jobs_may_wait_at_once(asked):
    """A service starts again under more jobs of one team than may be submitted at a time."""
    held, setup = threading.Event(), make_setup(samples=40)

    def open_job(record: JobRecord) -> JobSetup:
        assert held.wait(LIMIT_S)
        return replace(setup, record=record)

    store = that_ran(teams=1, jobs=MOST_WAITING + 6)
    coordinator = make_coordinator(store, Books(), open_job=open_job)
    await coordinator.start()
    jobs = [record.name for record in store.jobs()]
    ranks = [asyncio.create_task(open_all(coordinator, job=name)) for name in jobs]
    await until(lambda: asked == set(jobs))
    held.set()
    await asyncio.gather(*ranks)
    await coordinator.stop()


async def test_a_job_is_opened_once_for_all_ranks_that_come_and_go_meanwhile():
    held, opened = threading.Event(), []
    setup = make_setup(samples=40)

    def open_job(record: JobRecord) -> JobSetup:
        opened.append(record.name)
        assert held.wait(LIMIT_S)
        return replace(setup, record=record)

    store = MemoryStateStore()
    store.put_job(JobRecord(name="job", spec_json="{}", index_fingerprint="f"))
    coordinator = make_coordinator(store, Books(), open_job=open_job)
    await coordinator.start()
    for _ in range(20):
        gone = asyncio.create_task(open_all(coordinator, job="job"))
        await asyncio.sleep(0.005)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
    ranks = asyncio.create_task(open_all(coordinator, job="job"))
    await asyncio.sleep(0.02)
    held.set()
    await ranks
    assert opened == ["job"]
    await coordinator.stop()


async def test_ranks_that_wait_for_a_job_that_cannot_be_opened_are_told_by_one_try():
    held, tries = threading.Event(), []

    def open_job(record: JobRecord) -> JobSetup:
        tries.append(record.name)
        assert held.wait(LIMIT_S)
        raise SpecError("its storage is away.")

    store = MemoryStateStore()
    store.put_job(JobRecord(name="job", spec_json="{}", index_fingerprint="f"))
    coordinator = make_coordinator(store, Books(), open_job=open_job)
    await coordinator.start()
    ranks = [asyncio.create_task(open_all(coordinator, job="job")) for _ in range(5)]
    await asyncio.sleep(0.05)
    held.set()
    told = await asyncio.gather(*ranks, return_exceptions=True)
    assert [str(each) for each in told] == ["its storage is away."] * 5
    assert tries == ["job"]
    with pytest.raises(SpecError):
        await open_all(coordinator, job="job")
    assert tries == ["job", "job"], "tried again for who asks then"
    await coordinator.stop()


async def test_a_job_that_fails_unforeseen_keeps_no_other_from_being_restored():
    setup, opened = make_setup(samples=40), []

    def open_job(record: JobRecord) -> JobSetup:
        opened.append(record.name)
        if record.name.endswith("3"):
            raise RuntimeError("a defect of ours")
        return replace(setup, record=record)

    store = that_ran(teams=1, jobs=12)
    coordinator = make_coordinator(store, Books(), open_job=open_job, opened_at_once=2)
    await coordinator.start()
    await coordinator.restored()
    assert sorted(opened) == [record.name for record in store.jobs()]
    await coordinator.stop()
