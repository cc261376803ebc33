"""A job above its limits is refused before it costs anything, and a rank's word moves no limit."""

import asyncio
from dataclasses import replace

import pytest

from dataservice.core.errors import QuotaError
from dataservice.core.job import BatchSize
from dataservice.core.job_limits import EpochSize, JobLimits
from dataservice.engine.explain import MOST_OF_TEAM
from dataservice.sources.mixture import Mixture
from tests.engine.sessions import open_all, open_rank, shard_of, train
from tests.engine.support import Books, make_coordinator, make_setup
from tests.ledger import ledger_of


def limited(*, name="job", known=True, batch=None, solver="threshold", **limits):
    """The usual job of 200 samples; its size is `known` before it is drawn."""
    setup = make_setup(name=name, solver=solver)
    tokens = float(setup.catalog.llm_tokens.sum())
    size = EpochSize(samples=200.0, tokens=tokens) if known else None
    limits = JobLimits(**limits)
    return replace(setup, job_limits=limits, epoch_size=size, batch=batch or setup.batch)


@pytest.mark.parametrize(
    ("limit", "value", "more"),
    [
        ("max_replica_samples", 7, {}),
        ("max_replica_tokens", 500, {}),
        ("max_waves", 1, {}),
        ("max_dp_replicas", 1, {"solver": "dp"}),
    ],
)
async def test_an_attempt_that_is_too_large_for_its_ranks_is_refused_when_it_opens(
    store, books, limit, value, more
):
    coordinator = make_coordinator(store, books, limited(**{limit: value}, **more))
    await coordinator.submit("job", "")
    with pytest.raises(QuotaError, match=f"job_limits.{limit}"):
        await open_rank(coordinator, 0)
    assert store.last_attempt("job") is None
    await coordinator.stop()


async def test_the_same_job_opens_on_more_ranks(store, books):
    coordinator = make_coordinator(store, books, limited(max_replica_samples=7))
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator, world=4)
    assert len(await train(coordinator, sessions, 0, 3)) == 3
    await coordinator.stop()


@pytest.mark.parametrize(
    ("limit", "value"),
    [
        ("max_step_samples", 15),
        ("max_replica_samples", 7),
        ("max_step_tokens", 500),
        ("max_waves", 1),
        ("max_step_bytes", 5000),
        ("max_replica_bytes", 2500),
    ],
)
async def test_a_step_above_a_limit_ends_its_attempt_before_anything_is_decoded(
    store, books, limit, value
):
    coordinator = make_coordinator(store, books, limited(known=False, **{limit: value}))
    await coordinator.submit("job", "")
    with pytest.raises(QuotaError, match=f"job_limits.{limit}"):
        await shard_of(coordinator, (await open_all(coordinator))[0], 0)
    assert not ledger_of(store, "job")
    assert not books.orders
    await coordinator.stop()


async def test_a_batch_of_tokens_that_draws_too_many_samples_ends_its_attempt(store, books):
    setup = limited(known=False, batch=BatchSize(tokens=100_000), max_step_samples=50)
    coordinator = make_coordinator(store, books, with_lengths(setup))
    await coordinator.submit("job", "")
    with pytest.raises(QuotaError, match="max_step_samples"):
        await shard_of(coordinator, (await open_all(coordinator))[0], 0)
    await coordinator.stop()


def with_lengths(setup):
    catalog = setup.catalog
    stream = Mixture(catalog.sizes, [1.0, 1.0], seed=0, epochs=1, llm_tokens=catalog.llm_tokens)
    return replace(setup, stream=stream)


async def test_a_team_has_a_few_steps_planned_again_at_once_and_no_more(store, books):
    names = ("one/job", "two/job")
    coordinator = make_coordinator(store, books, *(limited(name=name) for name in names))
    for name in names:
        await coordinator.submit(name, "")
        sessions = await open_all(coordinator, job=name)
        await train(coordinator, sessions, 0, 2)
    replays = [coordinator.replay("one/job", 0, 1, None) for _ in range(MOST_OF_TEAM)]
    for each in replays:
        assert (await anext(each)).step == 0
    with pytest.raises(QuotaError, match="at once"):
        await coordinator.explain("one/job", 0, None)
    assert (await coordinator.explain("two/job", 0, None)).attempt == 1
    await replays[0].aclose()
    assert (await coordinator.explain("one/job", 0, None)).attempt == 1
    for each in replays:
        await each.aclose()
    await coordinator.stop()


class NeverDone(Books):
    """Workers that decode for ever."""

    async def prepare(self, worker, order):
        self.orders.setdefault(order.key, []).append(worker.worker)
        await asyncio.Event().wait()


@pytest.mark.long
async def test_ranks_that_say_they_have_what_was_never_decoded_get_no_further(store):
    coordinator = make_coordinator(store, NeverDone(), limited(), idle_release_s=60)
    await coordinator.submit("job", "")
    sessions = await open_all(coordinator)

    async def rush():
        for step in range(12):
            await asyncio.gather(*(shard_of(coordinator, each, step) for each in sessions))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(rush(), 1.0)
    planned = (await coordinator.job("job")).planned_step + 1
    assert planned <= 2 * 3 + 1, "twice the ready steps"
    await coordinator.stop()
