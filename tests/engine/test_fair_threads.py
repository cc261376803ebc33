"""Heavy work in threads: teams take turns by seconds, and none has all threads."""

import asyncio
import gc
import threading
import weakref
from functools import partial

import pytest

from dataservice.core.team import TeamSpec
from dataservice.engine.fair_threads import FairThreads
from tests.waiting import until


class Gates:
    """Work that runs until it is let go; notes in which order it began."""

    def __init__(self):
        self.begun = []
        self._gates = {}

    def work(self, name):
        self._gates[name] = threading.Event()
        return partial(self._run, name)

    def _run(self, name):
        self.begun.append(name)
        assert self._gates[name].wait(60)
        return name

    def let_go(self, *names):
        for name in names:
            self._gates[name].set()


@pytest.fixture
def gates():
    return Gates()


class Clock:
    """The time of the event loop, which only the work done moves on."""

    def __init__(self):
        self.now_s, self.served = 0.0, []
        asyncio.get_running_loop().time = lambda: self.now_s

    def work(self, name, seconds):
        self.served.append(name)
        self.now_s += seconds


async def test_one_thread_serves_teams_by_the_seconds_they_took():
    clock, threads = Clock(), FairThreads("t", threads=1)
    heavy = [threads.run("a/x", partial(clock.work, "a", 0.05)) for _ in range(6)]
    light = [threads.run("b/x", partial(clock.work, "b", 0.001)) for _ in range(6)]
    await asyncio.gather(*heavy, *light)
    threads.close()
    assert "".join(clock.served) == "abbbbbbaaaaa"


async def test_a_team_of_twice_the_weight_gets_twice_the_seconds():
    teams = {"a": TeamSpec(weight=2), "b": TeamSpec(weight=1)}
    clock, threads = Clock(), FairThreads("t", threads=1, teams=lambda: teams)
    await asyncio.gather(
        *(
            threads.run(f"{name}/x", partial(clock.work, name, 1.0))
            for name in "ab"
            for _ in range(12)
        )
    )
    threads.close()
    assert clock.served[:12].count("a") == 8, clock.served


async def test_a_team_never_has_all_threads(gates):
    threads = FairThreads("t", threads=2)
    names = [f"a{k}" for k in range(3)]
    first = [asyncio.create_task(threads.run("a/x", gates.work(name))) for name in names]
    await until(lambda: gates.begun)
    other = asyncio.create_task(threads.run("b/x", gates.work("b")))
    await until(lambda: "b" in gates.begun)
    assert gates.begun == ["a0", "b"]
    gates.let_go("b", *names)
    assert await other == "b"
    assert await asyncio.gather(*first) == names
    threads.close()


async def test_without_teams_the_jobs_have_all_threads_and_take_turns(gates):
    threads = FairThreads("t", threads=2)
    names = ["x0", "x1", "x2", "x3", "y0"]
    work = [asyncio.create_task(threads.run(name[0], gates.work(name))) for name in names]
    await until(lambda: len(gates.begun) == 2)
    assert set(gates.begun) == {"x0", "x1"}  # in threads, of which either may be the quicker
    gates.let_go("x0")
    await until(lambda: len(gates.begun) == 3)
    assert gates.begun[2] == "y0"
    gates.let_go(*names)
    assert await asyncio.gather(*work) == names
    threads.close()


@pytest.mark.parametrize("team", ["", "a/"])
async def test_a_job_whose_work_hangs_leaves_a_thread_to_the_others_of_its_team(gates, team):
    threads = FairThreads("t", threads=4, may_hang=True)
    hung = [asyncio.create_task(threads.run(f"{team}x", gates.work(f"x{k}"))) for k in range(6)]
    await until(lambda: gates.begun)
    other = asyncio.create_task(threads.run(f"{team}y", gates.work("y")))
    await until(lambda: "y" in gates.begun)
    assert len(gates.begun) <= threads.most_of(team.rstrip("/"))
    gates.let_go("y", *(f"x{k}" for k in range(6)))
    assert await other == "y"
    assert await asyncio.gather(*hung) == [f"x{k}" for k in range(6)]
    threads.close()


async def test_work_that_nobody_wants_any_more_is_never_begun(gates):
    threads = FairThreads("t", threads=1)
    first = asyncio.create_task(threads.run("a/x", gates.work("first")))
    await until(lambda: gates.begun)
    gone = asyncio.create_task(threads.run("a/x", gates.work("gone")))
    last = asyncio.create_task(threads.run("a/x", gates.work("last")))
    await asyncio.sleep(0)
    gone.cancel()
    first.cancel()  # under way: it goes on, and its thread is free behind it
    gates.let_go("first", "gone", "last")
    assert await last == "last"
    assert gates.begun == ["first", "last"]
    threads.close()


async def test_what_work_raises_is_raised_and_its_thread_goes_on():
    threads = FairThreads("t", threads=1)
    with pytest.raises(ZeroDivisionError):
        await threads.run("a/x", lambda: 1 // 0)
    assert await threads.run("a/x", lambda: 7) == 7
    threads.close()


async def test_teams_that_are_through_leave_nothing_behind():
    class Name(str):
        """A job's name, of which one can see whether anybody still has it."""

    async def run(job):
        await threads.run(job, lambda: None)
        return weakref.ref(job)

    threads = FairThreads("t", threads=2)
    jobs = await asyncio.gather(*(run(Name(f"t{k}/x")) for k in range(50)))
    gc.collect()
    assert not any(job() for job in jobs)
    threads.close()
