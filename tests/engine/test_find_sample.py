"""A sample's steps, from the ledger: every attempt's, and nobody else's."""

import asyncio
import threading
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from dataservice.core.errors import NotFoundError, QuotaError
from dataservice.core.job import QuarantineEntry
from dataservice.engine import find_sample
from dataservice.engine.explain import MOST_OF_TEAM
from dataservice.sources.mixture import Mixture
from tests.engine.sessions import leave, open_all, train
from tests.engine.support import make_coordinator, make_setup
from tests.ledger import ledger_of
from tests.waiting import until


@pytest.fixture
def store(each_store):
    return each_store


async def all_of(coordinator, sample, *, from_step=0):
    """As the command does: asked again until the ledger's end."""
    found, steps = await coordinator.find_sample("job", sample, from_step), []
    steps += found.steps
    while found.next_step is not None:
        found = await coordinator.find_sample("job", sample, found.next_step)
        steps += found.steps
    return found.ref, steps


@pytest.mark.parametrize("window", [1, 4])
async def test_a_sample_is_found_in_the_steps_that_trained_it_and_in_no_other(store, books, window):
    setup = make_setup(window_steps=window)
    setup = replace(setup, stream=Mixture(setup.catalog.sizes, [1.0, 1.0], seed=0, epochs=2))
    coordinator = make_coordinator(store, books, setup)
    await coordinator.submit("job", "")
    first = await train(coordinator, await open_all(coordinator), 0, 20)
    await until(lambda: store.last_planned_step("job") == 22)  # ready_steps is 3
    trained = defaultdict(list)
    for step, shard in enumerate(first):
        plan = (await coordinator.explain("job", step, None)).plan
        assert plan.digest == shard.plan_digest
        for sample in plan.sample_ids.tolist():
            trained[sample].append((step, 1, "committed"))
    planned = {entry.step for entry in ledger_of(store, "job")} - set(range(20))
    for sample in range(0, setup.catalog.samples, 17):
        ref, steps = await all_of(coordinator, sample)
        ((known, _),) = setup.catalog.details(np.array([sample]))
        assert ref == known
        committed = [(s.step, s.attempt, s.fate) for s in steps if s.fate == "committed"]
        assert committed == trained[sample]
        assert {s.step for s in steps if s.fate == "planned"} <= planned
    await coordinator.stop()


async def test_each_attempt_that_came_to_a_step_is_told_with_its_fate(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    for _ in range(2):
        sessions = await open_all(coordinator)
        await train(coordinator, sessions, 0, 2)
        leave(coordinator, sessions)
    sample = int((await coordinator.explain("job", 1, None)).plan.sample_ids[0])
    _, steps = await all_of(coordinator, sample)
    assert [(s.step, s.attempt, s.fate) for s in steps][:2] == [
        (1, 1, "committed"),
        (1, 2, "committed"),
    ]
    store.add_quarantine(
        [
            QuarantineEntry(
                job="job", attempt=2, step=1, sample_id=sample, source="a", key="k", reason="torn"
            )
        ]
    )
    _, steps = await all_of(coordinator, sample)
    assert [s.masked for s in steps] == ["", "torn"]
    await coordinator.stop()


async def test_a_request_goes_a_bounded_way_and_says_where_to_go_on(store, books, monkeypatch):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    await train(coordinator, await open_all(coordinator), 0, 9)
    sample = int((await coordinator.explain("job", 7, None)).plan.sample_ids[0])
    _, whole = await all_of(coordinator, sample)
    for name, value in (("MOST_STEPS", 3), ("MOST_DRAWN", 16 * 2)):
        with monkeypatch.context() as patch:
            patch.setattr(find_sample, name, value)
            found = await coordinator.find_sample("job", sample, 0)
            assert (found.steps, found.next_step) == ((), 3 if name == "MOST_STEPS" else 2)
            assert (await all_of(coordinator, sample))[1] == whole
    assert (await all_of(coordinator, sample, from_step=8))[1] == []
    assert (await all_of(coordinator, sample, from_step=-5))[1] == whole
    await coordinator.stop()


async def test_an_id_that_no_sample_has_is_refused(store, books):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    for sample in (-1, 200):
        with pytest.raises(NotFoundError, match=f"no sample {sample}: the index has ids 0 to 199"):
            await coordinator.find_sample("job", sample, 0)
    with pytest.raises(NotFoundError, match="no job 'other'"):
        await coordinator.find_sample("other", 0, 0)
    await coordinator.stop()


async def test_a_team_may_ask_only_so_often_at_once(store, books, monkeypatch):
    coordinator = make_coordinator(store, books, make_setup())
    await coordinator.submit("job", "")
    looked, go_on = store.last_planned_step, threading.Event()
    monkeypatch.setattr(
        store, "last_planned_step", lambda job: looked(job) if go_on.wait(20) else None
    )
    asked = [
        asyncio.create_task(coordinator.find_sample("job", 0, 0)) for _ in range(MOST_OF_TEAM + 1)
    ]
    await until(lambda: any(each.done() for each in asked))  # while the others are answered
    go_on.set()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert sum(isinstance(answer, QuotaError) for answer in answers) == 1
    await coordinator.stop()
