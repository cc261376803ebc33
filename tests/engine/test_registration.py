"""A job and its validation are registered together or not at all, and change each by its rules."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from dataservice.core.errors import (
    ConflictError,
    IndexStaleError,
    NotFoundError,
    QuotaError,
    StateError,
)
from dataservice.core.job import JobRecord
from dataservice.core.job_setup import JobSetup
from dataservice.engine.coordinator import Coordinator
from dataservice.state.memory import MemoryStateStore
from tests.engine.sessions import leave, only_missing, open_all, open_rank, train
from tests.engine.support import Books, make_coordinator, make_setup

BOTH = ["job", "job:validation"]


def read_job(text: str, _base: str, _team: str) -> list[JobRecord]:
    """A file says of each job what decides its order, and what does not."""
    return [
        JobRecord(name=name, spec_json=json.dumps(said), index_fingerprint="")
        for name, said in json.loads(text).items()
    ]


def open_job(record: JobRecord) -> JobSetup:
    said = json.loads(record.spec_json)
    if said["seed"] == "gone":
        raise IndexStaleError("there is no index.")
    setup = make_setup(seed=said["seed"])
    order = f"seed-{said['seed']}"
    record = replace(record, order=order, index_fingerprint="f")
    revise = lambda setup, record: replace(setup, record=record)  # noqa: E731
    return replace(setup, record=record, order=order, revise=revise)


def file(job: Any = 0, validation: Any = 0, *, batch: int = 1) -> str:
    sources = [{"name": "texts", "weight": 1.0}]
    said = {"job": {"seed": job, "batch": batch, "sources": sources}}
    if validation is not None:
        said["job:validation"] = {"seed": validation, "batch": batch, "sources": sources}
    return json.dumps(said)


def service(store: Any) -> Coordinator:
    return make_coordinator(store, Books(), read_job=read_job, open_job=open_job)


@pytest.fixture
def store(each_store):
    return each_store


def stored(store: Any) -> dict[str, tuple[int, int]]:
    """The version and the seed of each job."""
    return {
        each.name: (each.spec_version, json.loads(each.spec_json)["seed"]) for each in store.jobs()
    }


async def passed_over(coordinator: Coordinator) -> None:
    """A pass of validation, from its beginning to its end."""
    sessions = await open_all(coordinator, job="job:validation")
    await train(coordinator, sessions, 0, 100)
    leave(coordinator, sessions)


async def test_both_are_registered_told_and_deleted_together(store):
    coordinator = service(store)
    status = await coordinator.submit(file(), "")
    assert [each.record.name for each in status.with_validation] == BOTH
    assert [*stored(store)] == coordinator.job_names() == BOTH
    assert [each.validation for each in await coordinator.jobs()] == [None, None]
    health = await coordinator.health(["job"], team=None)
    assert [each.health.job for each in health.jobs] == BOTH
    await coordinator.delete("job")
    assert [*stored(store)] == coordinator.job_names() == []
    await coordinator.stop()


async def test_a_validation_that_cannot_be_opened_keeps_its_job_out(store):
    coordinator = service(store)
    with pytest.raises(IndexStaleError, match="the validation of job 'job': there is no index"):
        await coordinator.submit(file(validation="gone"), "")
    assert [*stored(store)] == coordinator.job_names() == []
    await coordinator.stop()


async def test_what_is_wrong_with_one_leaves_the_other_in_its_version(store):
    coordinator = service(store)
    await coordinator.submit(file(), "")
    with pytest.raises(ConflictError, match="this file is not that of job 'job' any more"):
        await coordinator.submit(file(job=7, batch=2), "")
    with pytest.raises(IndexStaleError, match="the validation of job 'job'"):
        await coordinator.submit(file(validation="gone", batch=2), "")
    assert stored(store) == {"job": (1, 0), "job:validation": (1, 0)}
    await coordinator.submit(file(batch=2), "")
    assert stored(store) == {"job": (2, 0), "job:validation": (2, 0)}
    await coordinator.stop()


async def test_a_full_disk_registers_neither():
    class FullDisk(MemoryStateStore):
        def put_job(self, *jobs, **more):
            raise StateError("the disk is full.")

    coordinator = service(FullDisk())
    with pytest.raises(StateError):
        await coordinator.submit(file(), "")
    assert coordinator.job_names() == []
    await coordinator.stop()


async def test_other_sources_begin_the_validation_anew_until_a_pass_has_begun(store):
    coordinator = service(store)
    await coordinator.submit(file(validation=None), "")
    await coordinator.submit(file(validation=1), "")
    await coordinator.submit(file(validation=2), "")
    assert stored(store) == {"job": (1, 0), "job:validation": (1, 2)}
    await passed_over(coordinator)
    with pytest.raises(ConflictError, match="`dataservice job delete job:validation`"):
        await coordinator.submit(file(validation=3), "")
    assert stored(store)["job:validation"] == (1, 2)
    await coordinator.submit(file(validation=None), "")
    assert stored(store)["job:validation"] == (1, 2), "it stays where the file leaves it out"
    await coordinator.delete("job:validation")
    await coordinator.submit(file(validation=3), "")
    assert stored(store) == {"job": (1, 0), "job:validation": (1, 3)}
    await passed_over(coordinator)
    await coordinator.stop()


async def test_ranks_that_gather_for_a_pass_hold_its_sources(store):
    coordinator = service(store)
    await coordinator.submit(file(), "")
    waiting = asyncio.create_task(open_rank(coordinator, 0, job="job:validation"))
    await only_missing(coordinator, 1, job="job:validation")
    with pytest.raises(ConflictError):
        await coordinator.submit(file(validation=1), "")
    waiting.cancel()
    await asyncio.wait([waiting])
    await coordinator.submit(file(validation=1), "")
    assert stored(store)["job:validation"] == (1, 1)
    await coordinator.stop()


async def test_both_count_in_what_a_team_may_have():
    coordinator = service(MemoryStateStore())
    with pytest.raises(QuotaError, match="has 0 jobs, this file is 2 with its validation"):
        await coordinator.submit(file(), "", max_jobs=1)
    assert coordinator.job_names() == []
    await coordinator.submit(file(), "", max_jobs=2)
    await coordinator.submit(file(batch=2), "", max_jobs=2)
    await coordinator.stop()


async def test_a_pass_over_a_job_without_validation_says_what_to_write():
    coordinator = service(MemoryStateStore())
    await coordinator.submit(file(validation=None), "")
    with pytest.raises(NotFoundError, match=r"Write `validation: \{sources: \[\.\.\.\]\}`"):
        await open_rank(coordinator, 0, job="job:validation")
    with pytest.raises(NotFoundError, match="registered: job"):
        await open_rank(coordinator, 0, job="other:validation")
    await coordinator.stop()


async def test_a_job_in_use_by_a_pass_is_not_deleted(store):
    coordinator = service(store)
    await coordinator.submit(file(), "")
    sessions = await open_all(coordinator, job="job:validation")
    with pytest.raises(ConflictError, match="job 'job:validation' is in use"):
        await coordinator.delete("job")
    assert [*stored(store)] == coordinator.job_names() == BOTH
    leave(coordinator, sessions)
    await coordinator.delete("job")
    await coordinator.stop()


async def test_draining_a_job_lets_its_attempt_validate_to_its_end():
    coordinator = service(MemoryStateStore())
    await coordinator.submit(file(), "")
    await open_all(coordinator)
    status = await coordinator.drain("job")
    assert [each.record.state for each in status.with_validation] == ["draining", "active"]
    await passed_over(coordinator)
    await coordinator.stop()


async def test_a_drained_validation_that_is_submitted_again_may_be_passed_over(store):
    coordinator = service(store)
    await coordinator.submit(file(), "")
    await coordinator.drain("job:validation")
    submitted = await coordinator.submit(file(), "")
    assert submitted.notes == ("its validation was draining, and takes new attempts again",)
    await passed_over(coordinator)
    await coordinator.stop()


async def test_a_restart_knows_both(store):
    coordinator = service(store)
    await coordinator.submit(file(), "")
    await passed_over(coordinator)
    await coordinator.stop()
    again = service(store)
    await again.start()
    await again.restored()
    status = await again.job("job")
    assert [each.record.name for each in status.with_validation] == BOTH
    await passed_over(again)
    assert store.last_attempt("job:validation").attempt == 2
    await again.stop()
