"""An index that is still being read: steps wait for their own rows of it, and no other job does."""

import asyncio
import re
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataservice.core.errors import IndexStaleError, PlanningError
from dataservice.core.job_setup import JobSetup
from dataservice.core.memory import MemoryModel
from dataservice.engine import loop
from dataservice.engine.coordinator import FETCHING_THREADS
from tests.engine.sessions import open_all, shard_of, train
from tests.engine.support import make_coordinator, make_setup
from tests.waiting import LIMIT_S, until


class LateCatalog:
    """A catalog of which rows come once the door is open; says which were asked for unfetched by
    threads that are not there to fetch."""

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

    def close(self) -> None:
        """Its storage hangs from now on, and no rows are kept."""
        self.door.clear()
        self.fetched.clear()
        self.fetching = 0

    def details(self, sample_ids):
        return self._asked("details", sample_ids)

    def columns(self, sample_ids):
        return self._asked("columns", sample_ids)

    def item_details(self, sample_ids):
        return self._asked("item_details", sample_ids)

    def loss_weights(self, sample_ids):
        return self._asked("loss_weights", sample_ids)

    def _asked(self, what: str, sample_ids: Any) -> Any:
        unknown = set(np.asarray(sample_ids).tolist()) - self.fetched
        if unknown and threading.current_thread().name.startswith("fetching"):
            self.fetch(sample_ids)
        else:
            self.not_fetched |= unknown
        return getattr(self._catalog, what)(sample_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)


def late_setup(name: str, **plan: object) -> Any:
    setup = make_setup(name=name, **plan)
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


async def explained(coordinator, sessions):
    shown = await coordinator.explain("late", 1, None)
    assert len(shown.sample_keys) == len(shown.plan.sample_ids)


async def found(coordinator, sessions):
    assert (await coordinator.find_sample("late", 7, 0)).ref.sample_id == 7


async def replayed(coordinator, sessions):
    assert [step.differs async for step in coordinator.replay("late", 0, 1, None)] == [False] * 2


async def summed(coordinator, sessions):
    assert (await coordinator.summary(sessions[0].session, 1)).samples == 16


@pytest.mark.parametrize("asking", [explained, found, replayed, summed])
async def test_who_asks_about_its_steps_keeps_no_other_job_from_being_planned(
    coordinator, store, late, asking, monkeypatch
):
    monkeypatch.setattr(loop, "SUMMARIES_KEPT", 0)
    late.catalog.door.set()
    sessions = await open_all(coordinator, job="late")
    await train(coordinator, sessions, 0, 2)
    await until(lambda: store.last_planned_step("late") == 4)  # ready_steps is 3
    late.catalog.close()
    asked = [asyncio.create_task(asking(coordinator, sessions)) for _ in range(2)]
    await until(lambda: late.catalog.fetching or late.catalog.not_fetched)
    assert late.catalog.not_fetched == set()
    others = await open_all(coordinator, job="other")
    assert len(await train(coordinator, others, 0, 3)) == 3
    late.catalog.door.set()
    await asyncio.gather(*asked)
    assert late.catalog.not_fetched == set()


async def test_a_step_that_is_decoded_again_is_looked_up_in_threads_that_fetch(store, books, late):
    late = replace(late, loss_weights=())  # so that planning it asks for no rows
    late.catalog.door.set()
    coordinator = make_coordinator(store, books, late)
    await coordinator.submit("late", "")
    await train(coordinator, await open_all(coordinator, job="late"), 0, 2)
    await until(lambda: store.ledger_entry("late", 1).content is not None)
    await until(lambda: store.last_planned_step("late") == 4)  # ready_steps is 3
    late.catalog.fetched.clear()
    steps = [step async for step in coordinator.replay("late", 0, 1, None, content=True)]
    assert [step.content for step in steps] == ["same"] * 2
    assert late.catalog.not_fetched == set()


@pytest.mark.parametrize(
    "plan",
    [
        {"memory_tokens": 8},
        {"memory": MemoryModel(budget_bytes=51_200.0, llm_token_bytes=100.0,
                               vision_token_bytes=300.0)},
    ],
)  # fmt: skip
async def test_ranks_that_cannot_hold_a_sample_are_told_while_its_storage_hangs(store, books, plan):
    late = late_setup("late", **plan)
    coordinator = make_coordinator(store, books, late)
    await coordinator.submit("late", "")
    said = r"sample (\d+) of source ([ab]) \(`.* --source \2 --sample \1` shows it\) has \d+ "
    with pytest.raises(PlanningError, match=said) as raised:
        await open_all(coordinator, world=4, job="late")
    number, source = re.search(said, str(raised.value)).groups()
    assert (late.catalog.fetching, late.catalog.not_fetched) == (0, set())
    late.catalog.at_hand = True
    with pytest.raises(PlanningError, match=f"sample {source}/.* has") as raised:
        await open_all(coordinator, world=4, job="late")
    assert f"{int(number) + late.catalog.sizes[0] * (source == 'b'):06d} has" in str(raised.value)


async def test_an_index_found_to_be_damaged_ends_its_attempt_with_that_error(coordinator, late):
    late.catalog.error = IndexStaleError("it holds other samples")
    late.catalog.door.set()
    sessions = await open_all(coordinator, job="late")
    with pytest.raises(IndexStaleError, match="other samples"):
        await asyncio.wait_for(shard_of(coordinator, sessions[0], 0), LIMIT_S)
    others = await open_all(coordinator, job="other")
    assert len(await train(coordinator, others, 0, 2)) == 2
