"""A job file with further sources: they wait, in the attempt that runs too, until they are brought
in."""

import asyncio
import json
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import ConflictError, CursorMismatchError, PlanningError, SpecError
from dataservice.core.job import BatchSize, ErrorBudget, JobRecord, MixtureChange
from dataservice.core.job_setup import JobSetup
from dataservice.core.sample import SampleLengths, SampleLocation
from dataservice.engine import registration
from dataservice.engine.coordinator import Coordinator
from dataservice.engine.planner import check_fits
from dataservice.sources.memory import MemoryCatalog
from dataservice.sources.mixture import Mixture
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import leave, only_missing, open_all, open_rank, train
from tests.engine.support import (
    MEMORY_TOKENS,
    Books,
    make_coordinator,
    make_setup,
    sample_lengths,
    samples_by_step,
)
from tests.waiting import LIMIT_S

HELD = {"a": 60, "b": 70, "c": 40, "d": 30}
WEIGHTS = {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.0}
LOUD = "weighs its loss"


def rows(name: str, *, longest: int = 0) -> list[tuple[str, SampleLocation, SampleLengths]]:
    rng = np.random.default_rng(ord(name))
    made = [sample_lengths(rng) for _ in range(HELD[name])]
    if longest:
        made[0] = SampleLengths(llm_tokens=longest, loss_tokens=1, items=())
    return [(f"{k}", SampleLocation(file=name), each) for k, each in enumerate(made)]


def job_file(names: str, **changes: Any) -> str:
    sources = [{"name": name, "weight": WEIGHTS[name]} for name in names]
    return json.dumps({"job": "job", "sources": sources, "mixture_changes": [], **changes})


def as_said(data: JobSetup, record: JobRecord) -> JobSetup:
    """The setup of a version of the job file; it knows as many sources as the newest."""
    said = json.loads(record.spec_json)
    file_changes = [MixtureChange(**each) for each in said["mixture_changes"]]
    names = data.catalog.source_names
    stream = Mixture(
        data.catalog.sizes,
        [WEIGHTS[name] for name in names],
        seed=0,
        epochs=3,
        names=names,
        changes={f"file{place}": change for place, change in enumerate(file_changes)},
    )
    options = replace(data.options, memory_tokens=said.get("memory_tokens", MEMORY_TOKENS))
    loud = (1.0,) * len(names) if LOUD in said or data.loss_weights else ()
    return replace(
        data,
        record=record,
        stream=stream,
        options=options,
        loss_weights=loud,
        revise=as_said,
    )


def opened(record: JobRecord) -> JobSetup:
    """A job, opened: the names of its order are its sources and the number of its changes."""
    said = json.loads(record.spec_json)
    names = "".join(source["name"] for source in said["sources"])
    changes = len(said["mixture_changes"])
    longest = said.get("longest", 0)
    catalog = MemoryCatalog({name: rows(name, longest=longest * (name > "b")) for name in names})
    order = f"{names}{changes}"
    setup = replace(
        make_setup(),
        catalog=catalog,
        batch=BatchSize(samples=16),
        order=order,
        earlier_orders={f"{names[:m]}{c}" for m in range(2, len(names) + 1) for c in range(4)},
        budgets={name: ErrorBudget(min_bad_samples=2) for name in names},
    )
    return as_said(setup, replace(record, order=order, index_fingerprint="f"))


def read_job(text: str, _base: str, _team: str) -> list[JobRecord]:
    return [JobRecord(name="job", spec_json=text, index_fingerprint="")]


def service(store: Any, books: Books | None = None, **ports: Any) -> Coordinator:
    ports = {"read_job": read_job, "open_job": opened, **ports}
    return make_coordinator(store, books or Books(), **ports)


@pytest.fixture
def store(each_store):
    return each_store


async def training(
    store: Any, books: Books | None = None, *, steps: int = 0, **ports: Any
) -> tuple[Coordinator, Any, Any]:
    """A service whose job of sources a and b is trained by two ranks: it, their sessions, and the
    shards of the first `steps`."""
    coordinator = service(store, books, **ports)
    await coordinator.submit(job_file("ab"), "")
    sessions = await open_all(coordinator)
    return coordinator, sessions, await train(coordinator, sessions, 0, steps) if steps else []


async def undisturbed() -> dict[int, list[int]]:
    store = MemoryStateStore()
    coordinator = service(store)
    await coordinator.submit(job_file("ab"), "")
    await train(coordinator, await open_all(coordinator), 0, 100)
    steps = await samples_by_step(coordinator, store, 1)
    await coordinator.stop()
    return steps


def first_with_added(steps: dict[int, list[int]]) -> int:
    """The step from which on all but the last, which is short, have samples that were added."""
    has = {step: max(ids) >= HELD["a"] + HELD["b"] for step, ids in steps.items()}
    del has[max(has)]
    first = next(step for step in has if has[step])
    assert all(has[step] == (step >= first) for step in has)
    return first


async def test_what_was_added_changes_no_step_until_it_is_brought_in(store):
    expected = await undisturbed()
    coordinator, sessions, shards = await training(store, steps=4)
    status = await coordinator.submit(job_file("abc"), "")
    assert (status.record.spec_version, status.record.order) == (2, "abc0")
    assert status.samples == sum(HELD[name] for name in "abc")
    await train(coordinator, sessions, 4, 100)
    assert await samples_by_step(coordinator, store, 1) == expected
    leave(coordinator, sessions)
    checkpoint = Cursor.from_json(shards[-1].cursor_after)
    assert checkpoint.order == "ab0"
    sessions = await open_all(coordinator, cursor=checkpoint, world=4)
    shards = await train(coordinator, sessions, 4, 100)
    resumed = await samples_by_step(coordinator, store, 2)
    assert resumed == {step: ids for step, ids in expected.items() if step >= 4}
    assert Cursor.from_json(shards[-1].cursor_after).order == "abc0"
    await coordinator.stop()


@pytest.mark.parametrize("restarted", [False, True])
async def test_the_attempt_that_runs_draws_it_from_its_change_on_and_a_restart_draws_the_same(
    store, restarted
):
    expected = await undisturbed()
    coordinator, sessions, _ = await training(store, steps=4)
    await coordinator.submit(job_file("abc"), "")
    change = await coordinator.change_mixture("job", {"c": 1.0}, 12)
    if restarted:
        await coordinator.stop()
        coordinator = service(store)
        await coordinator.start()
        await coordinator.restored()
        sessions = await open_all(coordinator, rejoin=1)
    shards = await train(coordinator, sessions, 4, 100)
    steps = await samples_by_step(coordinator, store, 1)
    assert change.from_step == 12
    assert {step: ids for step, ids in steps.items() if step < 12} == {
        step: ids for step, ids in expected.items() if step < 12
    }
    assert first_with_added(steps) == 12
    counts = np.bincount(np.concatenate(list(steps.values())), minlength=170)
    assert set(counts[:130]) == {3}
    assert set(counts[130:]) <= {1, 2, 3}
    assert counts[130:].max() - counts[130:].min() <= 1
    assert Cursor.from_json(shards[-1].cursor_after).order == "abc0"
    async for step in coordinator.replay("job", 0, max(steps), 1):
        assert step.plan_digest == step.ledger_digest
    await coordinator.stop()


async def test_a_change_in_the_file_holds_from_the_next_start_on_and_a_late_one_begins_there(store):
    expected = await undisturbed()
    coordinator, sessions, _ = await training(store, steps=3)
    changes = [{"weights": {"c": 1.0}, "from_step": 5}, {"weights": {"d": 1.0}, "from_epoch": 1}]
    await coordinator.submit(job_file("abcd", mixture_changes=changes), "")
    shards = await train(coordinator, sessions, 3, 100)
    assert await samples_by_step(coordinator, store, 1) == expected
    leave(coordinator, sessions)
    late = Cursor.from_json(shards[8].cursor_after)
    assert (late.step, late.epoch) == (12, 1)
    for attempt, cursor in ((2, Cursor()), (3, late)):
        sessions = await open_all(coordinator, cursor=cursor)
        await train(coordinator, sessions, cursor.step, 100)
        steps = await samples_by_step(coordinator, store, attempt)
        assert first_with_added(steps) == max(5, cursor.step)
        of_d = np.bincount(np.concatenate(list(steps.values())), minlength=200)[170:]
        assert of_d.sum() >= 30
        assert of_d.max() - of_d.min() <= 1
        leave(coordinator, sessions)
    assert await samples_by_step(coordinator, store, 1) == expected
    await coordinator.stop()


async def test_a_version_submitted_while_ranks_open_is_joined_by_all_of_them(store):
    coordinator = service(store)
    await coordinator.submit(job_file("ab"), "")
    shards = await train(coordinator, sessions := await open_all(coordinator), 0, 2)
    leave(coordinator, sessions)
    cursor = Cursor.from_json(shards[-1].cursor_after)
    first = asyncio.create_task(open_rank(coordinator, 0, cursor=cursor))
    await only_missing(coordinator, 1)
    await coordinator.submit(job_file("abc"), "")
    sessions = [await open_rank(coordinator, 1, cursor=cursor), await first]
    assert len(await train(coordinator, sessions[::-1], 2, 100)) == 23
    await coordinator.stop()


async def test_a_cursor_behind_the_added_source_does_not_fit_a_job_without_it(store):
    coordinator = service(store)
    await coordinator.submit(job_file("abc"), "")
    sessions = await open_all(coordinator)
    shards = await train(coordinator, sessions, 0, 2)
    leave(coordinator, sessions)
    await coordinator.delete("job")
    await coordinator.submit(job_file("ab"), "")
    newer = Cursor.from_json(shards[-1].cursor_after)
    with pytest.raises(CursorMismatchError, match="of sources that this one lacks"):
        await open_rank(coordinator, 0, cursor=newer)
    await coordinator.delete("job")
    # Registered anew with all of them, it takes the checkpoints of both files.
    await coordinator.submit(job_file("abcd"), "")
    for cursor in (newer, replace(newer, order="ab0")):
        sessions = await open_all(coordinator, cursor=cursor)
        await train(coordinator, sessions, 2, 2)
        leave(coordinator, sessions)
    await coordinator.stop()


async def test_what_was_added_stays_and_its_bad_samples_count(store):
    books = Books()
    coordinator, sessions, _ = await training(store, books, steps=1)
    await coordinator.submit(job_file("abc"), "")
    with pytest.raises(ConflictError, match="Source 'c' is missing: a source stays in its job"):
        await coordinator.submit(job_file("ab"), "")
    books.masks.update(range(130, 170))
    await coordinator.change_mixture("job", {"c": 1.0}, 8)
    with pytest.raises(Exception, match=r"source 'c' of job 'job': 2 of its last \d+ samples"):
        await train(coordinator, sessions, 1, 100)
    await coordinator.stop()


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (job_file("acb"), "put new ones behind them all"),
        (job_file("ba"), "keep them in their places"),
        (job_file("ad"), "Source 'b' is missing"),
        (
            job_file(
                "ab",
                sources=[{"name": n, "weight": w} for n, w in zip("abc", (1, 1, 0.5), strict=True)],
            ),
            "Source 'c' is new and has weight 0.5: give it weight 0, and bring it in",
        ),
    ],
    ids=["inserted", "reordered", "renamed", "weighed"],
)
async def test_other_files_are_refused_with_what_to_do(store, file, why):
    def other_order(record: JobRecord) -> JobSetup:
        return replace(opened(record), earlier_orders=())

    coordinator = make_coordinator(
        store,
        Books(),
        read_job=lambda text, *_: [JobRecord(name="job", spec_json=text, index_fingerprint="")],
        open_job=other_order,
    )
    await coordinator.submit(job_file("ab"), "")
    with pytest.raises(ConflictError, match=why) as refused:
        await coordinator.submit(file, "")
    assert "Checkpoints of the job would not fit" in str(refused.value)
    assert len(store.specs("job")) == 1
    await coordinator.stop()


async def test_a_source_whose_samples_the_ranks_cannot_hold_is_refused(store):
    coordinator, sessions, _ = await training(store)
    with pytest.raises(PlanningError, match="sample c/0 has 9000 tokens"):
        await coordinator.submit(job_file("abc", longest=9000), "")
    await train(coordinator, sessions, 0, 100)
    await coordinator.stop()


async def test_the_event_loop_does_not_look_through_what_was_added(store, monkeypatch):
    looking = []

    def check(setup, topology):
        looking.append(threading.current_thread().name)
        check_fits(setup, topology)

    coordinator, _, _ = await training(store)
    monkeypatch.setattr(registration, "check_fits", check)
    await coordinator.submit(job_file("abc"), "")
    assert len(looking) == 2  # the last attempt, by the newest version and by its own
    assert all(name.startswith("planning") for name in looking)
    await coordinator.stop()


async def test_a_sample_that_the_running_version_has_no_memory_for_is_refused(store):
    coordinator, sessions, _ = await training(store)
    # The file brings its own memory along, which the attempt that runs does not get.
    grown = job_file("abc", longest=1500, memory_tokens=2048)
    with pytest.raises(PlanningError, match="sample c/0 has 1500 tokens"):
        await coordinator.submit(grown, "")
    leave(coordinator, sessions)
    assert (await coordinator.submit(grown, "")).record.spec_version == 2
    await coordinator.stop()


async def test_a_change_that_leaves_the_trainers_at_work_no_source_is_refused(store):
    """The file brings c in from the next start on: they train by the file before it."""
    coordinator, sessions, shards = await training(store, steps=3)
    brings_in = [{"weights": {"c": 1.0}, "from_step": 5}]
    await coordinator.submit(job_file("abc", mixture_changes=brings_in), "")
    only_c = {"a": 0.0, "b": 0.0}
    with pytest.raises(SpecError, match=r"attempt 1 trains by version 1 .* nothing is left"):
        await coordinator.change_mixture("job", only_c, 20)
    assert store.mixtures("job") == []
    leave(coordinator, sessions)
    await coordinator.change_mixture("job", only_c, 20)
    await coordinator.stop()
    # A version that would have nothing left stands in the way of nobody.
    coordinator = service(store)
    await coordinator.start()
    await coordinator.restored()
    sessions = await open_all(coordinator, cursor=Cursor.from_json(shards[-1].cursor_after))
    await train(coordinator, sessions, 3, 20)
    steps = await samples_by_step(coordinator, store, 2)
    assert min(min(ids) for step, ids in steps.items() if step >= 20) >= HELD["a"] + HELD["b"]
    async for step in coordinator.replay("job", 0, 2, 1):
        assert step.plan_digest == step.ledger_digest
    await coordinator.stop()


async def test_a_replay_that_began_before_leaves_no_version_without_the_added_source(store):
    coordinator = service(store)
    for file, steps in ((job_file("ab"), 12), (job_file("ab", ready_steps=9), 2)):
        await coordinator.submit(file, "")
        sessions = await open_all(coordinator)
        await train(coordinator, sessions, 0, steps)
        leave(coordinator, sessions)
    replay = coordinator.replay("job", 0, 9, None)
    first = await anext(replay)
    await coordinator.submit(job_file("abc"), "")
    steps = [first, *[step async for step in replay]]
    assert (steps[0].attempt, steps[9].attempt) == (2, 1)
    assert not any(step.differs for step in steps)
    await coordinator.change_mixture("job", {"c": 1.0}, None)
    await coordinator.stop()


async def test_a_skipped_step_is_explained_with_the_changes_that_were_late(store):
    coordinator, sessions, shards = await training(store, steps=5)
    leave(coordinator, sessions)
    brings_in = [{"weights": {"c": 1.0}, "from_step": 2}]
    await coordinator.submit(job_file("abc", mixture_changes=brings_in), "")
    await coordinator.skip("job", [(4, 7)], "skip")
    cursor = Cursor.from_json(shards[3].cursor_after)
    await train(coordinator, await open_all(coordinator, cursor=cursor), 8, 1)
    begun = [(await coordinator.explain("job", step, 2)).cursor.begun for step in range(4, 9)]
    assert begun == [f"file0@{cursor.epoch}:{cursor.position}"] * 5
    await coordinator.stop()


def storing_slowly(store: Any) -> tuple[threading.Event, threading.Event]:
    """From here on the store waits before it stores a job: it has begun to, and it may go on."""
    begun, go_on, put_job = threading.Event(), threading.Event(), store.put_job

    def slowly(*jobs: JobRecord, **more: Any) -> None:
        begun.set()
        assert go_on.wait(LIMIT_S)
        put_job(*jobs, **more)

    store.put_job = slowly
    return begun, go_on


async def test_a_job_deleted_while_its_file_is_submitted_is_gone(store):
    coordinator = service(store)
    await coordinator.submit(job_file("ab"), "")
    begun, go_on = storing_slowly(store)
    submitting = asyncio.create_task(coordinator.submit(job_file("abc"), ""))
    await asyncio.to_thread(begun.wait, LIMIT_S)
    deleting = asyncio.create_task(coordinator.delete("job"))
    await asyncio.wait([deleting], timeout=0.2)
    go_on.set()
    await asyncio.wait([submitting, deleting])
    deleting.result()
    assert store.jobs() == []
    assert coordinator.job_names() == []
    await coordinator.stop()


async def test_whoever_submits_may_be_gone_before_it_is_done(store):
    """What the store has of a job, the service has."""
    coordinator, sessions, _ = await training(store)
    begun, go_on = storing_slowly(store)
    submitting = asyncio.create_task(coordinator.submit(job_file("abc"), ""))
    await asyncio.to_thread(begun.wait, LIMIT_S)
    submitting.cancel()
    await asyncio.wait([submitting])
    go_on.set()
    await coordinator.change_mixture("job", {"c": 1.0}, None)
    assert (await coordinator.job("job")).record.spec_version == 2
    await train(coordinator, sessions, 0, 100)
    await coordinator.stop()


async def test_training_goes_on_while_the_validation_of_a_grown_file_is_opened(store):
    opening, go_on = threading.Event(), threading.Event()

    def both(text: str, *_: str) -> list[JobRecord]:
        names = ["job", "job:validation"][: 1 + ('"c"' in text)]
        return [JobRecord(name=name, spec_json=text, index_fingerprint="") for name in names]

    def slowly(record: JobRecord) -> JobSetup:
        if record.name != "job":
            opening.set()
            assert go_on.wait(LIMIT_S)
        return opened(record)

    coordinator, sessions, _ = await training(store, read_job=both, open_job=slowly)
    submitting = asyncio.create_task(coordinator.submit(job_file("abc"), ""))
    await asyncio.to_thread(opening.wait, LIMIT_S)
    await asyncio.wait_for(train(coordinator, sessions, 0, 100), LIMIT_S)
    assert not submitting.done()
    go_on.set()
    assert (await submitting).record.spec_version == 2
    await coordinator.stop()


async def test_a_rank_that_comes_back_reads_the_weights_of_what_was_added(store):
    coordinator = service(store)
    await coordinator.submit(job_file("ab"), "")
    leave(coordinator, await open_all(coordinator))
    await coordinator.submit(job_file("abc", **{LOUD: True}), "")
    with pytest.raises(ConflictError, match="would train all samples alike"):
        await open_rank(coordinator, 0, rejoin=1, reads_loss_weights=False)
    await open_rank(coordinator, 0, rejoin=1)
    await coordinator.stop()


async def test_ranks_that_would_not_weigh_its_loss_are_to_be_stopped_first(store):
    coordinator = service(store)
    await coordinator.submit(job_file("ab"), "")
    first, second = (open_rank(coordinator, r, reads_loss_weights=r == 0) for r in range(2))
    sessions = await asyncio.gather(first, second)
    loud = job_file("abc", **{LOUD: True})
    with pytest.raises(ConflictError, match=r"trainers of a release that does not .*Stop them"):
        await coordinator.submit(loud, "")
    leave(coordinator, sessions)
    assert (await coordinator.submit(loud, "")).record.spec_version == 2
    await coordinator.stop()
