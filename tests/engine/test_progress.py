"""How far a job is through each source: by what its ranks trained, whoever asks, and when."""

import asyncio
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dataservice.core.cursor import Cursor
from dataservice.engine import progress as progress_view
from dataservice.sources.mixture import Mixture
from tests.engine.sessions import leave, open_all, settled, train
from tests.engine.support import Books, TornSource, all_plans, make_coordinator, make_setup

SOURCES = ("a", "b")
WEIGHTS = (1.0, 0.5)


@pytest.fixture
def store(each_store):
    return each_store


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Whoever looks waits until it is counted, however busy the machine is."""
    monkeypatch.setattr(progress_view, "WAIT_S", 30.0)


def a_job(*, epochs=2, batch=16, **plan):
    """Two sources, the second of which is shown every other epoch."""
    setup = make_setup(batch=batch, **plan)
    stream = Mixture(setup.catalog.sizes, WEIGHTS, seed=3, epochs=epochs)
    return replace(setup, stream=stream, order="o")


async def progress_of(coordinator):
    """Once it is counted."""
    (job,) = (await coordinator.health(["job"], team=None)).jobs
    return job.health.progress


async def begun(store, setup, *, books=None):
    coordinator = make_coordinator(store, books or Books(), setup)
    await coordinator.submit("job", "")
    return coordinator


def drawn(setup, first, last):
    """Samples of each source in these steps' plans, counted one by one."""
    plans = all_plans(setup, 2)[first : last + 1]
    ids = np.concatenate([plan.sample_ids for plan in plans])
    found = Counter(setup.catalog.source_names[n] for n in setup.catalog.source_numbers(ids))
    return [found[source] for source in SOURCES]


async def all_masked(coordinator, source):
    """The progress once everything drawn of this source is on record as bad: what a worker finds
    may be known after the step was trained."""
    progress = None

    async def known():
        nonlocal progress
        progress = await progress_of(coordinator)
        return progress.sources[source].masked == progress.sources[source].drawn

    await settled(known)
    return progress


def in_all(progress):
    return [each.drawn for each in progress.sources]


async def test_before_its_first_attempt_a_job_has_no_progress(store):
    coordinator = await begun(store, a_job())
    assert await progress_of(coordinator) is None
    await open_all(coordinator)
    progress = await progress_of(coordinator)
    assert (progress.step, progress.epoch, progress.epochs) == (-1, 0, 2)
    assert [(each.drawn, each.masked) for each in progress.sources] == [(0, 0), (0, 0)]
    await coordinator.stop()


async def test_what_is_drawn_is_what_the_committed_steps_were_planned_of(store):
    setup = a_job()
    coordinator = await begun(store, setup)
    sessions = await open_all(coordinator)
    for first, steps in ((0, 1), (1, 4), (5, 6)):
        await train(coordinator, sessions, first, steps)
        progress = await progress_of(coordinator)
        assert progress.step == first + steps - 1
        assert in_all(progress) == drawn(setup, 0, progress.step)
    a, b = progress.sources
    assert progress.epoch == 1
    sizes = dict(zip(SOURCES, setup.catalog.sizes, strict=True))
    assert (a.epoch_samples, a.samples) == (sizes["a"], 2 * sizes["a"])
    assert b.samples == sizes["b"]
    assert a.drawn == sizes["a"] + a.epoch_drawn
    await coordinator.stop()


async def test_at_the_end_of_data_everything_is_drawn(store):
    coordinator = await begun(store, a_job())
    await train(coordinator, await open_all(coordinator), 0, 100)
    progress = await progress_of(coordinator)
    assert progress.epoch == 1
    for each in progress.sources:
        assert (each.drawn, each.epoch_drawn) == (each.samples, each.epoch_samples)
    await coordinator.stop()


async def test_a_restarted_service_shows_the_same_progress(store):
    setup = a_job()
    first = await begun(store, setup, books=TornSource())
    await train(first, await open_all(first), 0, 7)
    before = await all_masked(first, 1)
    await first.stop()
    assert before.sources[1].drawn > 0
    second = make_coordinator(store, TornSource(), setup)
    await second.start()
    await second.restored()
    assert await progress_of(second) == before
    await train(second, await open_all(second, rejoin=1), 7, 2)
    assert in_all(await progress_of(second)) == drawn(setup, 0, 8)
    await second.stop()


async def test_another_world_size_that_goes_on_from_a_checkpoint_counts_what_led_to_it(store):
    setup = a_job()
    coordinator = await begun(store, setup, books=TornSource())
    sessions = await open_all(coordinator, world=2)
    await train(coordinator, sessions, 0, 6)
    await all_masked(coordinator, 1)
    leave(coordinator, sessions)
    checkpoint = Cursor.from_json(store.ledger_entry("job", 4, 1).cursor)
    sessions = await open_all(coordinator, world=4, cursor=checkpoint)
    went_back = await progress_of(coordinator)
    assert (went_back.step, in_all(went_back)) == (3, drawn(setup, 0, 3))
    await train(coordinator, sessions, 4, 4)
    progress = await all_masked(coordinator, 1)
    a, b = progress.sources
    assert [a.drawn, b.drawn] == drawn(setup, 0, 7)
    assert (a.masked, b.masked) == (0, b.drawn), "steps that were trained twice count once"
    await coordinator.stop()


async def test_samples_found_bad_after_their_step_was_trained_are_counted_too(store):
    late = asyncio.Event()

    class Late(TornSource):
        async def prepare(self, worker, order):
            receipt = await super().prepare(worker, order)
            await late.wait()
            return receipt

    coordinator = await begun(store, a_job(), books=Late())
    await train(coordinator, await open_all(coordinator), 0, 1)
    before = await progress_of(coordinator)
    assert before.step == 0
    assert before.sources[1].masked == 0 < before.sources[1].drawn
    late.set()
    await all_masked(coordinator, 1)
    await coordinator.stop()


async def test_samples_of_skipped_steps_count_as_drawn(store):
    setup = a_job()
    coordinator = await begun(store, setup)
    await coordinator.skip("job", [(2, 4)], "skip")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 2)
    await train(coordinator, sessions, 5, 2)
    assert in_all(await progress_of(coordinator)) == drawn(setup, 0, 6)
    await coordinator.stop()


async def test_a_window_of_steps_counts_once_its_last_step_is_trained(store):
    setup = a_job(window_steps=4)
    coordinator = await begun(store, setup)
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 6)
    assert in_all(await progress_of(coordinator)) == drawn(setup, 0, 3)
    await train(coordinator, sessions, 6, 2)
    assert in_all(await progress_of(coordinator)) == drawn(setup, 0, 7)
    await coordinator.stop()
