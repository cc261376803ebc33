"""An index that is still being read: steps wait for their own rows of it, and no other job does."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataservice.core.errors import IndexStaleError
from dataservice.core.job_setup import JobSetup
from dataservice.engine.coordinator import FETCHING_THREADS
from tests.engine.sessions import open_all, shard_of, train
from tests.engine.support import make_coordinator, make_setup
from tests.waiting import LIMIT_S, until


class LateCatalog:
    """A catalog of which rows come once the door is open; says which were asked for unfetched."""

    at_hand = False

    def __init__(self, setup: JobSetup) -> None:
        self._catalog = setup.catalog
        self.door = threading.Event()
        self.fetched: set[int] = set()
        self.fetching = 0
        self.not_fetched: set[int] = set()
        self.error: Exception | None = None

    def fetch(self, sample_ids):
        self.fetching += 1
        assert self.door.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        self.fetched |= set(np.asarray(sample_ids).tolist())

    def columns(self, sample_ids):
        return self._asked("columns", sample_ids)

    def item_details(self, sample_ids):
        return self._asked("item_details", sample_ids)

    def loss_weights(self, sample_ids):
        return self._asked("loss_weights", sample_ids)

    def _asked(self, what: str, sample_ids: Any) -> Any:
        self.not_fetched |= set(np.asarray(sample_ids).tolist()) - self.fetched
        return getattr(self._catalog, what)(sample_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)


def late_setup(name: str) -> Any:
    setup = make_setup(name=name)
    return replace(setup, catalog=LateCatalog(setup), loss_weights=(1.0, 2.0))


@pytest.fixture
def late():
    setup = late_setup("late")
    yield setup
    setup.catalog.door.set()


@pytest.fixture
async def coordinator(late, store, books):
    made = make_coordinator(store, books, late, make_setup(name="other"), planning_threads=1)
    for name in ("late", "other"):
        await made.submit(name, "")
    return made


async def test_other_jobs_are_planned_while_it_waits(coordinator, late):
    waiting = await open_all(coordinator, job="late")
    await until(lambda: late.catalog.fetching)
    others = await open_all(coordinator, job="other")
    assert len(await train(coordinator, others, 0, 5)) == 5
    late.catalog.door.set()
    assert len(await train(coordinator, waiting, 0, 3)) == 3


async def test_a_team_whose_indexes_do_not_answer_keeps_no_other_from_fetching(store, books):
    stuck = [late_setup(f"red/{k}") for k in range(FETCHING_THREADS + 1)]
    free = late_setup("blue/job")
    free.catalog.door.set()
    coordinator = make_coordinator(store, books, *stuck, free)
    for setup in (*stuck, free):
        await coordinator.submit(setup.record.name, "")
        if setup is not free:
            await open_all(coordinator, job=setup.record.name)
    await until(lambda: sum(s.catalog.fetching for s in stuck) == FETCHING_THREADS - 1)
    sessions = await open_all(coordinator, job="blue/job")
    assert len(await train(coordinator, sessions, 0, 2)) == 2
    for setup in stuck:
        setup.catalog.door.set()


async def test_no_step_asks_for_rows_that_were_not_fetched(coordinator, late):
    late.catalog.door.set()
    sessions = await open_all(coordinator, job="late")
    assert len(await train(coordinator, sessions, 0, 5)) == 5
    assert late.catalog.not_fetched == set()


async def test_once_all_is_at_hand_nothing_is_fetched(coordinator, late):
    late.catalog.at_hand = True
    sessions = await open_all(coordinator, job="late")
    assert len(await train(coordinator, sessions, 0, 3)) == 3
    assert late.catalog.fetching == 0


async def test_an_index_found_to_be_damaged_ends_its_attempt_with_that_error(coordinator, late):
    late.catalog.error = IndexStaleError("it holds other samples")
    late.catalog.door.set()
    sessions = await open_all(coordinator, job="late")
    with pytest.raises(IndexStaleError, match="other samples"):
        await asyncio.wait_for(shard_of(coordinator, sessions[0], 0), LIMIT_S)
    others = await open_all(coordinator, job="other")
    assert len(await train(coordinator, others, 0, 2)) == 2
