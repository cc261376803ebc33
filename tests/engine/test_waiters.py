"""Thousands that wait for one thing: whoever comes, wakes or leaves is looked for in no list."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import FencedError, NotFoundError
from dataservice.core.topology import Topology
from dataservice.engine.attempt import Attempt
from dataservice.engine.tasks import SharedWork
from dataservice.engine.waiters import Waiters
from tests.engine.counted import searches

MANY = 50


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def begun(call: Callable[[], Awaitable[Any]]) -> list[asyncio.Task[Any]]:
    """Many tasks that wait in this call."""

    async def wait() -> Any:
        return await call()

    tasks = [asyncio.create_task(wait()) for _ in range(MANY)]
    await turns()
    assert not any(task.done() for task in tasks)
    return tasks


async def most_searched(
    tasks: list[asyncio.Task[Any]], end: Callable[[], object]
) -> tuple[int, list[Any]]:
    """How often the list that is searched most is, while these tasks end; and how they did."""
    with searches() as found:
        end()
        await turns()
    assert all(task.done() for task in tasks)
    return max(map(len, found.values()), default=0), await asyncio.gather(
        *tasks, return_exceptions=True
    )


def attempt_of_many() -> Attempt:
    return Attempt(job="job", number=3, topology=Topology(world_size=MANY), start=Cursor())


async def test_all_who_wait_are_woken_once_in_the_order_in_which_they_came() -> None:
    waiters, woken = Waiters(), list[int]()

    async def wait(number: int) -> None:
        await waiters.next_change()
        woken.append(number)

    tasks = [asyncio.create_task(wait(number)) for number in range(3)]
    await turns()
    tasks[1].cancel()
    await turns()
    assert len(waiters) == 2
    waiters.wake()
    waiters.wake()
    await turns()
    assert woken == [0, 2]
    assert len(waiters) == 0


async def test_one_that_is_cancelled_as_it_is_woken_takes_nobody_s_turn() -> None:
    waiters = Waiters()
    first, second = (asyncio.create_task(waiters.next_change()) for _ in range(2))
    await turns()
    waiters.wake()
    first.cancel()
    later = asyncio.create_task(waiters.next_change())
    await turns()
    assert (first.cancelled(), second.done(), later.done()) == (True, True, False)
    later.cancel()


def _begins(attempt: Attempt) -> None:
    attempt.complete_now()


def _ends(attempt: Attempt) -> None:
    attempt.end(FencedError("replaced"))


@pytest.mark.parametrize("change", [_begins, _ends])
async def test_ranks_that_wait_for_an_attempt_are_looked_for_in_no_list(
    change: Callable[[Attempt], None],
) -> None:
    attempt = attempt_of_many()
    tasks = await begun(lambda: attempt.wait_complete(60.0))
    searched, ended = await most_searched(tasks, lambda: change(attempt))
    assert searched <= 1
    assert {str(each) for each in ended} == {"None" if change is _begins else "replaced"}


async def test_nor_are_those_whose_session_ends_or_who_leave_it() -> None:
    attempt = attempt_of_many()
    told, leaving = await begun(attempt.ended), await begun(attempt.ended)
    searched, _ = await most_searched(leaving, lambda: [task.cancel() for task in leaving[::-1]])
    assert searched <= 1
    searched, ended = await most_searched(told, lambda: _ends(attempt))
    assert searched <= 1
    assert len({id(each) for each in ended}) == MANY  # each is told by an error of its own


async def test_work_that_many_ask_for_is_done_once_and_goes_on_when_they_leave() -> None:
    work, go, runs = SharedWork[str](), asyncio.Event(), list[int]()

    async def make() -> str:
        runs.append(1)
        await go.wait()
        return "made"

    staying, leaving = [await begun(lambda: work.result(3, make)) for _ in range(2)]
    searched, _ = await most_searched(leaving, lambda: [task.cancel() for task in leaving[::-1]])
    assert searched <= 1
    searched, ended = await most_searched(staying, go.set)
    assert searched <= 1
    assert ended == ["made"] * MANY
    assert (runs, work.tasks) == ([1], [])
    assert await work.result(3, make) == "made"  # of what has ended nothing is kept
    assert len(runs) == 2


async def test_whoever_asked_for_work_is_told_why_it_failed_or_that_it_is_not_wanted() -> None:
    work, wanted = SharedWork[str](), True

    async def fail() -> str:
        raise NotFoundError("step 9 was never planned")

    async def hang() -> str:
        await asyncio.Event().wait()
        return "never"

    with pytest.raises(NotFoundError, match="step 9"):
        await work.result(9, fail)
    asked = await begun(lambda: work.result_while(lambda: wanted, 10, hang))
    wanted = False
    searched, ended = await most_searched(asked, work.look_again)
    assert searched <= 1
    assert ended == [None] * MANY
    (task,) = work.tasks
    task.cancel()
    await turns()
    assert work.tasks == []
