"""Errands for indexes among workers: their bounds, whose turn it is, what a lost worker costs."""

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from dataservice.core.errors import SourceError, SpecError, WorkerLostError
from dataservice.core.index_orders import IndexPlaces, IndexProgress, IndexWaiting
from dataservice.core.ports import WorkerInfo
from dataservice.core.team import TeamSpec
from dataservice.engine import index_desk
from dataservice.engine.index_desk import IndexDesk
from dataservice.engine.opening import Openings
from dataservice.engine.shares import Shares
from tests.waiting import settled, until


def worker(number, *, slots=1, state="serving"):
    return WorkerInfo(worker=f"worker-{number}.1", address="", slots=slots, state=state)


@dataclass
class Workers:
    """A pool and the link to it. Errands run until they are let go; `begun` has them in order."""

    infos: list = field(default_factory=lambda: [worker(0), worker(1)])
    begun: list = field(default_factory=list)
    running: list = field(default_factory=list)
    lost: set = field(default_factory=set)
    go: dict = field(default_factory=dict)
    read: list = field(default_factory=list)
    short: str = "2 of 2 workers are missing."

    def workers(self):
        return tuple(self.infos)

    def shortfall(self):
        return self.short

    async def index(self, info, order):
        self.begun.append((order.errand, info.worker))
        if info.worker in self.lost:
            raise WorkerLostError(f"{info.worker} is gone")
        self.running.append(order.errand)
        try:
            yield IndexProgress(rows=1, size_bytes=10)
            await self.go.setdefault(order.errand, asyncio.Event()).wait()
            yield b"bytes"
        finally:
            self.running.remove(order.errand)

    def read_sources(self, text, base, team):
        self.read.append((text, team))
        if text == "bad":
            raise SpecError("the job file is bad")
        return {"a": f"pipeline of {team}", "b": ""}

    def desk(self, **teams):
        return IndexDesk(
            pool=self,
            link=self,
            read_sources=self.read_sources,
            shares=Shares(teams=lambda: teams, pool=self),
            openings=Openings(at_once=2),
        )


async def taken(desk, errand, team="", source="a", text="good"):
    answers = desk.index(text, "/", team=team, source=source, errand=errand)
    async with aclosing(answers):
        return [answer async for answer in answers]


def begin(desk, *errands, team=""):
    return [asyncio.create_task(taken(desk, errand, team)) for errand in errands]


async def test_an_errand_is_told_its_places_and_what_the_worker_says():
    workers = Workers()
    (asked,) = begin(workers.desk(), "x")
    await until(lambda: "x" in workers.go)
    workers.go["x"].set()
    assert await asked == [IndexPlaces(places=2), IndexProgress(rows=1, size_bytes=10), b"bytes"]


async def test_a_worker_has_one_errand_for_four_slots_and_the_others_wait():
    workers = Workers(infos=[worker(0, slots=2), worker(1, slots=9), worker(2, state="draining")])
    asked = begin(workers.desk(), *"vwxyz")
    await until(lambda: len(workers.running) == 3)
    await settled()
    assert len(workers.running) == 3
    assert sorted(name for _, name in workers.begun) == ["worker-0.1", "worker-1.1", "worker-1.1"]
    for errand in "vwxyz":
        workers.go.setdefault(errand, asyncio.Event()).set()
    await asyncio.gather(*asked)


async def test_a_team_that_comes_late_is_served_before_the_errands_that_wait_already():
    workers = Workers(infos=[worker(0)])
    desk = workers.desk()
    first = begin(desk, "a1", "a2", "a3", team="a")
    await until(lambda: workers.running == ["a1"])
    second = begin(desk, "b1", team="b")
    await settled()
    for errand in ("a1", "a2", "a3", "b1"):
        workers.go.setdefault(errand, asyncio.Event()).set()
    await asyncio.gather(*first, *second)
    assert [errand for errand, _ in workers.begun][:2] == ["a1", "b1"]


async def test_a_team_whose_decoding_is_limited_has_so_much_of_the_places():
    workers = Workers(infos=[worker(number, slots=4) for number in range(4)])
    desk = workers.desk(small=TeamSpec(max_decode_cpus=8))
    asked = begin(desk, *"wxyz", team="small")
    await until(lambda: len(workers.running) == 2)
    await settled()
    assert len(workers.running) == 2, "half of the slots, so half of the four places"
    others = begin(desk, "o", team="other")
    await until(lambda: "o" in workers.running)
    for errand in "wxyzo":
        workers.go.setdefault(errand, asyncio.Event()).set()
    answers = await asyncio.gather(*asked, *others)
    assert [each[0].places for each in answers] == [2, 2, 2, 2, 4]


async def test_a_worker_that_was_lost_is_passed_over_for_a_while():
    workers = Workers(lost={"worker-0.1"})
    desk = workers.desk()
    with pytest.raises(WorkerLostError, match=r"worker-0.1 is gone"):
        await taken(desk, "x")
    workers.go["x"] = asyncio.Event()
    workers.go["x"].set()
    for _ in range(3):
        await taken(desk, "x")
    assert [name for _, name in workers.begun[1:]] == ["worker-1.1"] * 3


async def test_a_caller_that_leaves_ends_its_errand_and_gives_its_place_back():
    workers = Workers(infos=[worker(0)])
    desk = workers.desk()
    gone, waiting, last = begin(desk, "gone", "waiting", "last")
    await until(lambda: workers.running == ["gone"])
    waiting.cancel()
    gone.cancel()
    await until(lambda: workers.running == ["last"])
    workers.go["last"].set()
    await last
    assert [errand for errand, _ in workers.begun] == ["gone", "last"]


async def test_an_errand_waits_for_workers_that_are_to_come_and_is_told_why_there_are_none(
    monkeypatch,
):
    monkeypatch.setattr(index_desk, "LOOK_S", 0.01)
    workers = Workers(infos=[])
    answers = workers.desk().index("good", "/", team="", source="a", errand="x")
    async with aclosing(answers):
        assert await anext(answers) == IndexWaiting(why="2 of 2 workers are missing.")
        workers.short = "there is no room"
        assert await anext(answers) == IndexWaiting(why="there is no room")
        workers.infos.append(worker(5))
        assert await anext(answers) == IndexPlaces(places=1)
        assert await anext(answers) == IndexProgress(rows=1, size_bytes=10)


async def test_a_caller_that_leaves_before_there_are_workers_leaves_its_place_to_the_next(
    monkeypatch,
):
    monkeypatch.setattr(index_desk, "LOOK_S", 0.01)
    workers = Workers(infos=[])
    desk = workers.desk()
    gone, last = begin(desk, "gone", "last")
    await settled()
    gone.cancel()
    await asyncio.wait({gone})
    workers.infos.append(worker(0))
    await until(lambda: workers.running == ["last"])
    workers.go["last"].set()
    await last
    assert [errand for errand, _ in workers.begun] == ["last"]


async def test_a_job_file_is_read_once_for_many_errands_and_again_where_it_was_bad():
    workers = Workers()
    desk = workers.desk()
    for errand in "xyz":
        workers.go[errand] = asyncio.Event()
        workers.go[errand].set()
        await taken(desk, errand, "a")
    await taken(desk, "x", "b")
    assert workers.read == [("good", "a"), ("good", "b")]
    for _ in range(2):
        with pytest.raises(SpecError, match="the job file is bad"):
            await taken(desk, "x", text="bad")
    assert len(workers.read) == 4
    with pytest.raises(SpecError, match="has no source 'c'; it has a, b"):
        await taken(desk, "x", source="c")


async def test_an_errand_that_fails_gives_its_place_back():
    workers = Workers(infos=[worker(0)])
    desk = workers.desk()

    async def refusing(info, order):
        raise SourceError("the source is empty")
        yield  # a generator

    index, workers.index = workers.index, refusing
    with pytest.raises(SourceError, match="is empty"):
        await taken(desk, "x")
    workers.index = index
    workers.go["x"] = asyncio.Event()
    workers.go["x"].set()
    await taken(desk, "x")
