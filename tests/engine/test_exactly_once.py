"""Where a step could be lost or told twice: ranks that come and go, commits, a state that fails."""

import asyncio
import threading
from dataclasses import replace

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import FencedError, NotFoundError, StateError, WorldSizeError
from dataservice.engine.api import EndOfData
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import leave, only_missing, open_all, open_rank, shard_of, train
from tests.engine.support import Books, TornSource, make_coordinator, make_setup
from tests.ledger import ledger_of
from tests.waiting import until


class FullDisk(MemoryStateStore):
    """Keeps what it has; while `full`, the methods named take nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self.full: set[str] = set()

    def _room(self, method: str) -> None:
        if method in self.full:
            raise StateError(f"state.db: database or disk is full ({method}). Free space.")

    def put_ledger(self, entry, contents=()):
        self._room("put_ledger")
        super().put_ledger(entry, contents)

    def commit_step(self, *what):
        self._room("commit_step")
        super().commit_step(*what)

    def add_quarantine(self, entries):
        self._room("add_quarantine")
        super().add_quarantine(entries)

    def put_job(self, *jobs, **more):
        self._room("put_job")
        super().put_job(*jobs, **more)

    def delete_job(self, *names):
        self._room("delete_job")
        super().delete_job(*names)

    def put_attempt(self, attempt):
        self._room("put_attempt")
        super().put_attempt(attempt)


async def begun(store, *, books=None, setup=None):
    coordinator = make_coordinator(store, books or Books(), setup or make_setup())
    await coordinator.submit("job", "")
    return coordinator, await open_all(coordinator)


# ---- a state that cannot be written -------------------------------------------------------


@pytest.mark.parametrize("method", ["put_ledger", "commit_step", "add_quarantine"])
async def test_a_full_disk_ends_the_attempt_and_the_next_goes_on_once_there_is_room(method):
    store, books = FullDisk(), TornSource(torn="a")
    coordinator, sessions = await begun(store, books=books)
    shards = await train(coordinator, sessions, 0, 2)
    store.full = {method}
    with pytest.raises(StateError, match=method):
        await asyncio.wait_for(train(coordinator, sessions, 2, 100), 120.0)
    for opened in sessions:
        with pytest.raises(StateError, match=method):
            await coordinator.session_ended(opened.session)
    assert (await coordinator.jobs())[0].record.name == "job"  # reads are answered
    done = store.last_committed_step("job", 1)
    store.full = set()
    leave(coordinator, sessions)
    checkpoint = Cursor.from_json(shards[1].cursor_after)
    resumed = await open_all(coordinator, cursor=checkpoint)
    after = await train(coordinator, resumed, 2, 100)
    assert [shard.step for shard in shards + after] == list(range(13))
    assert (store.last_committed_step("job", 1), store.last_committed_step("job", 2)) == (done, 12)
    await coordinator.stop()


async def test_an_attempt_that_could_not_be_recorded_begins_once_there_is_room():
    store = FullDisk()
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    store.full = {"put_attempt"}
    told = await asyncio.gather(
        *(open_rank(coordinator, r) for r in (0, 1)), return_exceptions=True
    )
    assert all(isinstance(each, StateError) for each in told)
    store.full = set()
    sessions = await open_all(coordinator)
    assert {opened.attempt for opened in sessions} == {1}
    assert len(await train(coordinator, sessions, 0, 100)) == 13
    await coordinator.stop()


async def test_a_drain_that_could_not_be_recorded_has_not_happened():
    store = FullDisk()
    coordinator, sessions = await begun(store)
    store.full = {"put_job"}
    with pytest.raises(StateError):
        await coordinator.drain("job")
    leave(coordinator, sessions)
    assert {opened.attempt for opened in await open_all(coordinator)} == {2}
    await coordinator.stop()


# ---- ranks that come and go while an attempt begins ---------------------------------------


class SlowAttempts(MemoryStateStore):
    """Recording an attempt, which has `begun`, takes until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def put_attempt(self, attempt):
        self.begun.set()
        assert self.go.wait(60)
        super().put_attempt(attempt)


async def test_the_rank_that_came_last_may_die_and_the_others_still_begin():
    store = SlowAttempts()
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    first = asyncio.create_task(open_rank(coordinator, 0))
    await only_missing(coordinator, 1)
    last = asyncio.create_task(open_rank(coordinator, 1))
    await until(store.begun.is_set)
    last.cancel()
    await asyncio.gather(last, return_exceptions=True)
    store.go.set()
    opened = await asyncio.wait_for(first, 120.0)
    assert opened.attempt == 1
    # Its trainers start again, all of them; the attempt that lacks a rank is fenced.
    coordinator.close_session(opened.session)
    assert {s.attempt for s in await open_all(coordinator)} == {2}
    await coordinator.stop()


async def test_a_start_that_comes_while_another_begins_is_the_attempt_behind_it():
    store = SlowAttempts()
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    first = [asyncio.create_task(open_rank(coordinator, r)) for r in (0, 1)]
    await until(store.begun.is_set)
    second = [asyncio.create_task(open_rank(coordinator, 0))]
    await only_missing(coordinator, 1)
    second.append(asyncio.create_task(open_rank(coordinator, 1)))
    await asyncio.sleep(0)  # where others wait already, a rank joins at once
    store.go.set()
    for told in await asyncio.gather(*first, return_exceptions=True):
        if not isinstance(told, FencedError):  # they may hear of both at once
            assert told.attempt == 1
    sessions = [await each for each in second]
    assert {opened.attempt for opened in sessions} == {2}
    assert len(await train(coordinator, sessions, 0, 100)) == 13
    await coordinator.stop()


async def test_an_attempt_whose_ranks_were_told_that_it_is_over_does_not_begin():
    store, books = SlowAttempts(), Books()
    coordinator = make_coordinator(store, books, make_setup(), timeout_s=0.2)
    await coordinator.submit("job", "")
    opening = [asyncio.create_task(open_rank(coordinator, r)) for r in (0, 1)]
    await until(lambda: any(rank.done() for rank in opening))
    store.go.set()
    for told in await asyncio.gather(*opening, return_exceptions=True):
        assert isinstance(told, WorldSizeError)
    assert not [task for task in asyncio.all_tasks() if "AttemptLoop" in repr(task)]
    assert len(await train(coordinator, await open_all(coordinator), 0, 100)) == 13
    await coordinator.stop()


class SlowDeletion(MemoryStateStore):
    """Deleting a job, which has `begun`, takes until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()

    def delete_job(self, *names):
        self.begun.set()
        assert self.go.wait(60)
        super().delete_job(*names)


async def test_a_job_that_is_deleted_while_ranks_wait_for_others_tells_them():
    store = SlowDeletion()
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    deleting = asyncio.create_task(coordinator.delete("job"))
    await until(store.begun.is_set)
    waiting = asyncio.create_task(open_rank(coordinator, 0, world=3))
    await only_missing(coordinator, 1, 2)
    assert not waiting.done()
    store.go.set()
    await deleting
    with pytest.raises(NotFoundError, match="was deleted"):
        await asyncio.wait_for(waiting, 120.0)
    await coordinator.stop()


async def test_no_attempt_begins_while_its_job_is_deleted():
    store, books = SlowDeletion(), Books()
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    deleting = asyncio.create_task(coordinator.delete("job"))
    await until(store.begun.is_set)
    opening = [asyncio.create_task(open_rank(coordinator, r)) for r in (0, 1)]
    await asyncio.wait(opening, timeout=0.3)
    store.go.set()
    await deleting
    for told in await asyncio.gather(*opening, return_exceptions=True):
        assert isinstance(told, NotFoundError)
    assert not books.held
    await coordinator.stop()


async def test_a_rank_that_comes_back_while_its_job_is_deleted_has_no_step_planned():
    store, books = SlowDeletion(), Books()
    coordinator, sessions = await begun(store, books=books)
    await train(coordinator, sessions, 0, 2)
    await coordinator.stop()
    books.held.clear()
    again = make_coordinator(store, books, make_setup())
    await again.start()
    await again.restored()
    deleting = asyncio.create_task(again.delete("job"))
    await until(store.begun.is_set)
    back = await open_rank(again, 0, rejoin=1)
    asking = asyncio.create_task(shard_of(again, back, 2))
    await asyncio.wait([asking], timeout=0.3)
    store.go.set()
    await deleting
    with pytest.raises(NotFoundError, match="was deleted"):
        await asking
    assert not books.held
    await again.stop()


async def test_trainers_of_a_job_that_could_not_be_deleted_are_told_and_may_begin_anew():
    store = FullDisk()
    coordinator = make_coordinator(store, Books(), make_setup())
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 3)
    leave(coordinator, sessions)
    store.full = {"delete_job"}
    with pytest.raises(StateError, match="disk is full"):
        await coordinator.delete("job")
    with pytest.raises(FencedError, match="which is over"):
        await open_all(coordinator, rejoin=1)
    assert len(await train(coordinator, await open_all(coordinator), 0, 6)) == 6
    await coordinator.stop()


async def test_a_rank_that_comes_while_its_job_is_deleted_waits_for_nobody():
    """It is let in to an attempt only after its index was checked."""
    checking, go = threading.Event(), threading.Event()

    def check():
        checking.set()
        assert go.wait(60)

    setup = replace(make_setup(), require_current=check)
    coordinator = make_coordinator(MemoryStateStore(), Books(), setup)
    await coordinator.submit("job", "")
    opening = asyncio.create_task(open_rank(coordinator, 0))
    await until(checking.is_set)
    await coordinator.delete("job")
    go.set()
    with pytest.raises(NotFoundError, match="was deleted"):
        await asyncio.wait_for(opening, 120.0)
    await coordinator.stop()


# ---- commits ------------------------------------------------------------------------------


async def test_a_commit_of_a_step_that_was_never_handed_out_is_refused_and_changes_nothing():
    store = MemoryStateStore()
    coordinator, sessions = await begun(store)
    await train(coordinator, sessions, 0, 1)
    with pytest.raises(NotFoundError, match="step 50 of job 'job' was never planned in attempt 1"):
        await coordinator.commit(sessions[0].session, 50)
    await train(coordinator, sessions, 1, 100)
    assert all(entry.committed_unix_s is not None for entry in ledger_of(store, "job"))
    await coordinator.stop()


async def test_ranks_that_commit_after_a_restart_what_they_trained_before_are_heard():
    """Rank 1 told of step 3 before the restart, rank 0 after it, before anything is planned."""
    store = MemoryStateStore()
    coordinator, sessions = await begun(store)
    await train(coordinator, sessions, 0, 3)
    for opened in sessions:
        await shard_of(coordinator, opened, 3)
    await coordinator.stop()
    last = store.last_planned_step("job")
    again = make_coordinator(store, Books(), make_setup())
    await again.start()
    sessions = await open_all(again, rejoin=1)
    for opened in sessions:
        await again.commit(opened.session, 3, measured_s=0.5)
    entry = store.ledger_entry("job", 3)
    assert entry.committed_unix_s is not None
    assert entry.measured_s == 0.5
    assert last >= 3
    await again.stop()


async def test_a_restart_decodes_nothing_for_a_job_whose_ranks_do_not_come_back():
    store, books = MemoryStateStore(), Books()
    coordinator, sessions = await begun(store, books=books)
    await train(coordinator, sessions, 0, 3)
    await coordinator.stop()
    planned, books.orders = store.last_planned_step("job"), {}
    again = make_coordinator(store, books, make_setup())
    await again.start()
    await again.restored()
    await asyncio.sleep(0.2)
    assert not books.orders
    status = await again.job("job")
    assert (status.planned_step, status.committed_step) == (planned, 2)
    shards = await train(again, await open_all(again, rejoin=1), 3, 100)
    assert [shard.step for shard in shards] == list(range(3, 13))
    await again.stop()


async def restarted_when_rank_0_has_all_and_rank_1_does_not():
    """Of six steps three are trained; rank 1 has come to step 4."""
    store, setup = MemoryStateStore(), make_setup(samples=96)
    coordinator, sessions = await begun(store, setup=setup)
    await train(coordinator, sessions, 0, 3)
    for step in (3, 4, 5, 6):
        for opened in sessions[: 2 if step < 5 else 1]:
            await shard_of(coordinator, opened, step)
    await coordinator.stop()
    again = make_coordinator(store, Books(), setup)
    await again.start()
    return again


async def test_a_rank_that_has_all_its_data_does_not_keep_the_others_from_theirs_after_a_restart():
    """Its prefetch is through, so it asks for nothing more; what it trains says what it has."""
    again = await restarted_when_rank_0_has_all_and_rank_1_does_not()
    ahead, behind = await open_all(again, rejoin=1)
    async with asyncio.timeout(120):
        for step in (4, 5, 6):
            await again.commit(ahead.session, step - 1)
            got = await shard_of(again, behind, step)
    assert got == EndOfData(steps=6)
    await again.stop()


async def test_ranks_come_to_the_end_after_a_restart_though_one_has_ended_before_it():
    """It trained all and is gone for good, before the others' commits were known."""
    again = await restarted_when_rank_0_has_all_and_rank_1_does_not()
    behind = await open_rank(again, 1, rejoin=1)
    async with asyncio.timeout(120):
        steps = [await shard_of(again, behind, step) for step in (5, 6)]
    assert steps[-1] == EndOfData(steps=6)
    await again.stop()


async def test_each_step_is_committed_once_however_ranks_interleave():
    class Counting(MemoryStateStore):
        def __init__(self) -> None:
            super().__init__()
            self.commits: list[int] = []

        def commit_step(self, job, attempt, step, *rest):
            super().commit_step(job, attempt, step, *rest)
            self.commits.append(step)

    store = Counting()
    coordinator, sessions = await begun(store)
    for step in range(13):
        await asyncio.gather(*(shard_of(coordinator, opened, step) for opened in sessions))
        await coordinator.commit(sessions[step % 2].session, step)
        if step % 3 == 2:  # the other tells of three at once
            await coordinator.commit(sessions[0].session, step)
            await coordinator.commit(sessions[1].session, step)
    for opened in sessions:
        await coordinator.commit(opened.session, 12)
    assert store.commits == list(range(13))
    await coordinator.stop()


# ---- steps planned again ------------------------------------------------------------------


async def test_a_step_planned_again_for_a_rank_that_is_gone_is_not_left_at_the_workers():
    """The rank's call is cancelled while its step is made again; another asks for the same."""
    store, books = MemoryStateStore(), Books()
    coordinator, sessions = await begun(store, books=books)
    await train(coordinator, sessions, 0, 6)
    await coordinator.stop()
    again = make_coordinator(store, books, make_setup())
    await again.start()
    sessions = await open_all(again, rejoin=1)
    call = asyncio.create_task(shard_of(again, sessions[0], 2))
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await train(again, sessions, 2, 100)
    for opened in sessions:
        await shard_of(again, opened, 13)
    await until(lambda: not any(key.step < 13 for key in books.held))
    await again.stop()
