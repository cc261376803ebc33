"""A job file that changes: accepted where samples and order stay, for attempts yet to begin."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.cut_microbatches import microbatches
from dataservice.core.cost import ContextCost
from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    ConflictError,
    CursorMismatchError,
    IndexStaleError,
    QuotaError,
)
from dataservice.core.job import BatchSize, JobRecord
from dataservice.core.job_setup import JobSetup
from dataservice.core.plan_options import CostModel, PlanOptions
from dataservice.engine import registration, versions
from dataservice.engine.coordinator import Coordinator
from dataservice.engine.spec_changes import spec_changes
from dataservice.sources.mixture import Mixture
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import leave, only_missing, open_all, open_rank, shard_of, train
from tests.engine.support import Books, make_coordinator, make_setup
from tests.ledger import ledger_of
from tests.waiting import until

FILE: dict[str, Any] = {
    "job": "job",
    "sources": [{"name": "a", "url": "here/a", "weight": 1.0}],
    "pipeline": {"tokenizer": "here/tokenizer"},
    "seed": 0,
    "epochs": 1,
    "batch": {"samples": 16},
    "plan": {"memory_tokens": 512, "window_steps": 1, "cost": {}},
    "ready_steps": 3,
}
DEAR = CostModel(
    llm=ContextCost(attention_s_per_token2=1e-5, linear_s_per_token=1e-5, group_s=1e-3)
)
DEARER = CostModel(
    llm=ContextCost(attention_s_per_token2=3e-5, linear_s_per_token=1e-5, group_s=1e-3)
)


def job_file(**changes: Any) -> str:
    return json.dumps({**FILE, **changes})


def plan(**changes: Any) -> dict[str, Any]:
    return {**FILE["plan"], **changes}


def as_said(data: JobSetup, record: JobRecord) -> JobSetup:
    """The setup of the same data that a job file asks for."""
    said = json.loads(record.spec_json)
    options = {**said["plan"], "cost": CostModel.from_dict(said["plan"]["cost"])}
    return replace(
        data,
        record=record,
        stream=Mixture(data.catalog.sizes, [1.0, 1.0], seed=0, epochs=said["epochs"]),
        batch=BatchSize(**said["batch"]),
        options=PlanOptions(**options),
        ready_steps=said["ready_steps"],
        order=f"seed-{said['seed']}",
        revise=as_said,
    )


def opened(record: JobRecord) -> JobSetup:
    """A job, opened: its order is that of its seed, wherever its files lie."""
    said = json.loads(record.spec_json)
    if said["pipeline"]["tokenizer"].startswith("gone/"):
        raise IndexStaleError("there is no such folder.")
    setup = as_said(make_setup(seed=said["seed"]), record)
    return replace(setup, record=replace(record, order=setup.order, index_fingerprint="f"))


def service(store: Any, *, open_job: Callable[[JobRecord], JobSetup] = opened) -> Coordinator:
    def read_job(text: str, _base: str, _team: str) -> list[JobRecord]:
        return [JobRecord(name="job", spec_json=text, index_fingerprint="")]

    return make_coordinator(store, Books(), read_job=read_job, open_job=open_job)


@pytest.fixture
def store(each_store):
    return each_store


async def all_as_recorded(coordinator: Coordinator, store: Any) -> int:
    """How many steps there are in the ledger, each of which plans again to the same digest."""
    entries = ledger_of(store, "job")
    for entry in entries:
        explained = await coordinator.explain("job", entry.step, entry.attempt)
        assert explained.plan.digest == entry.plan_digest
    for number in {entry.attempt for entry in entries}:
        steps = [entry.step for entry in entries if entry.attempt == number]
        async for step in coordinator.replay("job", min(steps), max(steps), number):
            assert step.plan_digest == step.ledger_digest
    return len(entries)


@pytest.mark.parametrize(
    "changes",
    [
        {"plan": plan(memory_tokens=1024)},
        {"batch": {"samples": 10}},
        {"epochs": 2},
        {"ready_steps": 1},
        {"plan": plan(cost=DEAR.to_dict())},
        {"plan": plan(strategy="packing")},
        {"sources": [{"name": "a", "url": "there/a", "weight": 1.0}]},
        {"pipeline": {"tokenizer": "there/tokenizer"}},
    ],
    ids=str,
)
async def test_what_leaves_samples_and_order_holds_from_the_next_attempt_on(store, changes):
    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    await coordinator.skip("job", [(4, 4)], "skip")
    sessions = await open_all(coordinator)
    trained = [await shard_of(coordinator, opened, 0) for opened in sessions]
    await until(lambda: len(ledger_of(store, "job")) == 3)  # ready_steps is 3
    status = await coordinator.submit(job_file(**changes), "")
    assert (status.record.spec_version, status.attempt_version, status.pending) == (2, 1, True)
    assert status.skips
    key = next(iter(changes))
    assert key in status.versions[1].changes
    # The attempt that runs goes on as it began.
    assert len({shard.plan_digest for shard in trained}) == 1
    leave(coordinator, sessions)
    checkpoint = Cursor.from_json(trained[0].cursor_after)
    sessions = await open_all(coordinator, cursor=checkpoint)
    seen = [await shard_of(coordinator, opened, 1) for opened in sessions]
    assert {each.attempt for each in sessions} == {2}
    status = await coordinator.job("job")
    assert (status.attempt_version, status.pending) == (2, False)
    assert [(v.first_attempt, v.last_attempt) for v in status.versions] == [(1, 1), (2, 2)]
    batch = changes.get("batch", FILE["batch"])["samples"]
    first_members = [m for shard in seen for m in microbatches(shard.columns) if m.cp_rank == 0]
    assert sum(len(m.sample_ids) for m in first_members) == batch
    assert await all_as_recorded(coordinator, store) > 2
    await coordinator.stop()


async def test_the_running_attempt_plans_on_by_its_own_version(store):
    expected = service(MemoryStateStore())
    await expected.submit(job_file(), "")
    undisturbed = await train(expected, await open_all(expected), 0, 100)
    await expected.stop()

    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    sessions = await open_all(coordinator)
    shards = await train(coordinator, sessions, 0, 2)
    await coordinator.submit(job_file(plan=plan(memory_tokens=2048), batch={"samples": 5}), "")
    shards += await train(coordinator, sessions, 2, 100)
    assert [s.plan_digest for s in shards] == [s.plan_digest for s in undisturbed]
    await coordinator.stop()


async def test_a_restart_brings_the_attempt_back_under_the_version_it_began_with(store):
    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    await train(coordinator, await open_all(coordinator), 0, 3)
    await coordinator.submit(job_file(batch={"samples": 5}), "")
    await coordinator.stop()

    again = service(store)
    await again.start()
    await again.restored()
    assert (await again.job("job")).pending
    sessions = await open_all(again, rejoin=1)
    assert len(await train(again, sessions, 3, 100)) == 10  # 13 steps of 16 samples
    assert await all_as_recorded(again, store) == 13
    leave(again, sessions)
    assert len(await train(again, await open_all(again), 0, 100)) == 40
    assert await all_as_recorded(again, store) == 53
    await again.stop()


async def test_a_job_whose_files_have_moved_goes_on_with_its_old_attempts(store):
    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    await train(coordinator, await open_all(coordinator), 0, 3)
    await coordinator.stop()

    def moved(record: JobRecord) -> JobSetup:
        if json.loads(record.spec_json)["pipeline"]["tokenizer"].startswith("here/"):
            raise IndexStaleError("there is no folder here/.")
        return opened(record)

    again = service(store, open_job=moved)
    await again.start()
    await again.restored()
    with pytest.raises(IndexStaleError):
        await open_all(again, rejoin=1)
    status = await again.submit(job_file(pipeline={"tokenizer": "there/tokenizer"}), "")
    assert status.record.spec_version == 2
    sessions = await open_all(again, rejoin=1)
    assert len(await train(again, sessions, 3, 100)) == 10
    assert await all_as_recorded(again, store) == 13
    await again.stop()


async def test_other_data_are_refused_by_what_differs_and_no_remedy_kills_a_checkpoint(store):
    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    with pytest.raises(ConflictError) as refused:
        await coordinator.submit(job_file(seed=7, epochs=3), "")
    said = str(refused.value)
    assert "seed: 0 → 7" in said
    assert "epochs" not in said
    assert "Checkpoints of the job would not fit" in said
    assert "Restore what differs" in said
    assert "under another name, as a run from the beginning" in said
    assert "would take its ledger, skips and quarantine along" in said
    status = await coordinator.job("job")
    assert (status.record.spec_version, status.versions) == (1, ())
    assert len(store.specs("job")) == 1
    await coordinator.stop()


async def test_two_versions_are_compared_once_and_a_list_of_jobs_compares_none(store, monkeypatch):
    compared = []

    def counted(before: str, after: str) -> Any:
        compared.append((before, after))
        return spec_changes(before, after)

    monkeypatch.setattr(versions, "spec_changes", counted)
    coordinator = service(store)
    for epochs in range(1, 5):
        await coordinator.submit(job_file(epochs=epochs), "")
    (listed,) = await coordinator.jobs()
    shown = [await coordinator.job("job") for _ in range(3)]
    assert len(compared) == 3
    assert [v.changes for v in shown[0].versions] == ["", "epochs: 1 → 2", "epochs: 2 → 3",
                                                      "epochs: 3 → 4"]  # fmt: skip
    assert [each.versions for each in shown] == [shown[0].versions] * 3
    assert (listed.record.spec_version, listed.versions) == (4, ())
    await coordinator.stop()


async def test_a_job_has_so_many_versions_and_is_told_so(store, monkeypatch):
    monkeypatch.setattr(registration, "MOST_VERSIONS", 2)
    coordinator = service(store)
    for epochs in (1, 2):
        await coordinator.submit(job_file(epochs=epochs), "")
    with pytest.raises(QuotaError, match=r"has 2 versions .* under another name"):
        await coordinator.submit(job_file(epochs=3), "")
    assert (await coordinator.submit(job_file(epochs=2), "")).record.spec_version == 2
    await coordinator.stop()


async def test_the_same_file_again_is_no_version_and_an_older_one_again_is_a_newer_one(store):
    coordinator = service(store)
    for text, version in (
        (job_file(), 1),
        (job_file(), 1),
        (job_file(epochs=2), 2),
        (job_file(epochs=2), 2),
        (job_file(), 3),
    ):
        assert (await coordinator.submit(text, "")).record.spec_version == version
    await coordinator.stop()


async def test_a_version_that_cannot_be_opened_changes_nothing(store):
    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    with pytest.raises(IndexStaleError):
        await coordinator.submit(job_file(pipeline={"tokenizer": "gone/tokenizer"}), "")
    assert (await coordinator.job("job")).record.spec_json == job_file()
    assert len(store.specs("job")) == 1
    await coordinator.stop()


@pytest.mark.parametrize(("again", "version"), [(job_file(), 1), (job_file(epochs=2), 2)])
async def test_a_drained_job_that_is_submitted_again_takes_new_attempts(store, again, version):
    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    await coordinator.drain("job")
    with pytest.raises(ConflictError, match=r"takes no new attempt\. Submit its job file again"):
        await open_all(coordinator)
    submitted = await coordinator.submit(again, "")
    assert (submitted.record.state, submitted.record.spec_version) == ("active", version)
    assert submitted.notes == ("the job was draining, and takes new attempts again",)
    assert (await coordinator.submit(again, "")).notes == ()
    assert [each.state for each in store.jobs()] == ["active"]
    assert await open_all(coordinator)
    await coordinator.stop()


async def test_a_recorded_cost_stays_over_a_version_that_leaves_costs_alone(store):
    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    await coordinator.recost("job", json.dumps(DEAR.to_dict()), 5)
    await coordinator.submit(job_file(batch={"samples": 10}), "")
    await train(coordinator, await open_all(coordinator), 0, 100)
    versions = {entry.step: entry.cost_version for entry in ledger_of(store, "job")}
    assert {versions[step] for step in range(5)} == {CostModel().version}
    assert {versions[step] for step in range(5, 20)} == {DEAR.version}
    await coordinator.stop()


async def test_a_version_with_costs_of_its_own_replaces_those_recorded_before(store):
    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 1)
    await coordinator.recost("job", json.dumps(DEAR.to_dict()), 6)
    await coordinator.submit(job_file(plan=plan(cost=DEARER.to_dict())), "")
    await train(coordinator, sessions, 1, 8)
    leave(coordinator, sessions)
    sessions = await open_all(coordinator)
    await train(coordinator, sessions, 0, 6)
    costs = {(e.attempt, e.step): e.cost_version for e in ledger_of(store, "job")}
    assert {costs[1, step] for step in range(6)} == {CostModel().version}
    assert {costs[1, step] for step in range(6, 9)} == {DEAR.version}
    assert {costs[2, step] for step in range(6)} == {DEARER.version}
    # What is recorded later holds for every version.
    record = await coordinator.recost("job", json.dumps(DEAR.to_dict()), None)
    assert (record.spec_version, record.from_step < 13) == (2, True)
    await train(coordinator, sessions, 6, 100)
    last = ledger_of(store, "job")[-1]
    assert (last.attempt, last.step, last.cost_version) == (2, 12, DEAR.version)
    await all_as_recorded(coordinator, store)
    await coordinator.stop()


async def test_a_version_submitted_while_ranks_open_waits_for_the_attempt_behind_theirs(store):
    coordinator = service(store)
    await coordinator.submit(job_file(), "")
    first = asyncio.create_task(open_rank(coordinator, 0))
    await only_missing(coordinator, 1)
    await coordinator.submit(job_file(batch={"samples": 5}), "")
    sessions = [await open_rank(coordinator, 1), await first]
    assert (await coordinator.job("job")).pending
    assert len(await train(coordinator, sessions[::-1], 0, 100)) == 13
    await coordinator.stop()


# ---- inside a window of steps -------------------------------------------------------------

WINDOWED = job_file(plan=plan(window_steps=4))


async def checkpoints(store) -> list[Cursor]:
    """The cursor behind each of the first eight steps, whose windows have four."""
    coordinator = service(store)
    await coordinator.submit(WINDOWED, "")
    shards = await train(coordinator, await open_all(coordinator), 0, 8)
    await coordinator.stop()
    return [Cursor.from_json(shard.cursor_after) for shard in shards]


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": {"samples": 8}},
        {"plan": plan(window_steps=2)},
        {"plan": plan(window_steps=4, memory_tokens=1024)},
    ],
    ids=str,
)
async def test_inside_a_window_of_steps_it_must_be_split_as_before(store, changes):
    cursors = await checkpoints(store)
    assert [cursor.step_in_window for cursor in cursors] == [1, 2, 3, 0, 1, 2, 3, 0]
    coordinator = service(store)
    await coordinator.start()
    await coordinator.restored()
    await coordinator.submit(job_file(**changes), "")
    inside, between = cursors[5], cursors[3]
    with pytest.raises(CursorMismatchError) as refused:
        await open_all(coordinator, cursor=inside)
    said = str(refused.value)
    assert "at step 6 lies inside a window of steps" in said
    assert "batch 16 samples, plan.window_steps 4" in said
    assert "submit the former values and train to the end of the window" in said
    assert "last checkpoint before step 5" in said
    sessions = await open_all(coordinator, cursor=between)
    rest = await train(coordinator, sessions, 4, 100)
    ids = [i for s in rest for m in microbatches(s.columns) for i in m.sample_ids]
    assert rest
    assert len(ids) == len(set(ids))
    await coordinator.stop()


async def test_inside_a_window_what_does_not_split_it_may_change(store):
    cursors = await checkpoints(store)
    coordinator = service(store)
    await coordinator.start()
    await coordinator.restored()
    await coordinator.submit(job_file(plan=plan(window_steps=4, cost=DEAR.to_dict())), "")
    sessions = await open_all(coordinator, cursor=cursors[5])
    assert len(await train(coordinator, sessions, 6, 100)) == 7
    await coordinator.stop()
