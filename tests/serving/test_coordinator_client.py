import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import ConflictError, NotFoundError, SpecError, WorkerLostError
from dataservice.core.index_orders import IndexPlaces, IndexProgress, IndexResult, IndexWaiting
from dataservice.core.limits import OpeningLimits
from dataservice.engine.api import NamedPack, ReplayedStep
from dataservice.serving import coordinator_client
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.serving.status_codes import ServiceUnreachableError


@pytest.fixture
async def client(coordinator):
    """The blocking client, each call made in a thread so that the server's loop turns."""
    blocking = CoordinatorClient(coordinator, timeout_s=30)

    def ask(name, args, named):
        answer = getattr(blocking, name)(*args, **named)
        return list(answer) if isinstance(answer, Iterator) else answer

    class InThread:
        def __getattr__(self, name):
            return lambda *args, **named: asyncio.to_thread(ask, name, args, named)

    yield InThread()
    await asyncio.to_thread(blocking.close)


async def test_jobs_are_submitted_listed_shown_drained_and_deleted(client):
    status = await client.submit("name: b", "/jobs")
    assert (status.record.name, status.record.index_fingerprint) == ("b", "/jobs")
    assert (status.planned_step, status.committed_step, status.samples) == (-1, -1, 600)
    await client.submit("name: a", "/jobs")
    assert [job.record.name for job in await client.jobs()] == ["a", "b"]
    assert await client.job("b") == status
    assert (await client.drain("b")).record.state == "draining"
    await client.delete("b")
    assert [job.record.name for job in await client.jobs()] == ["a"]


async def test_a_step_is_explained_with_its_whole_plan(client, make):
    await client.submit("name: vlm", "")
    explained = await client.explain("vlm", 3)
    assert explained.attempt == 7
    assert explained.plan.digest == explained.plan_digest == explained.ledger_plan_digest
    assert explained.plan.stages == make.plan().stages
    assert explained.cursor == Cursor(step=3).to_json()
    assert (explained.committed, explained.world_size, explained.ranks_per_replica) == (True, 4, 2)
    assert {fate.attempt: fate.fate for fate in explained.fates} == {1: "skipped", 7: "committed"}
    assert (explained.as_recorded, explained.skipped_by) == (True, None)
    assert not replace(explained, ledger_plan_digest="another").as_recorded
    assert explained.sample_keys == ("s/a", "s/b", "s/c")
    assert explained.quarantined == ("s/b: truncated",)
    assert (explained.cost_version, explained.measured_s) == ("v1", 0.75)
    other = await client.explain("vlm", 3, attempt=2)
    assert (other.attempt, other.measured_s) == (2, None)
    assert (explained.content, other.content) == (b"\x00what", b"")


async def test_a_sample_is_found_with_its_place_and_its_steps(client):
    await client.submit("name: vlm", "")
    found = await client.find_sample("vlm", 2**40)
    assert (found.ref.sample_id, found.ref.source, found.ref.key) == (2**40, "s", "b")
    location = found.ref.location
    assert (location.file, location.row_group, location.row) == ("memory/a.jsonl", 1, 2)
    ((name, offset, size),) = [(s.name, s.offset_bytes, s.size_bytes) for s in location.spans]
    assert (name, offset, size, found.ref.crc32) == ("line 3", 2**40, 7, 9)
    assert [(s.step, s.attempt, s.fate, s.masked) for s in found.steps] == [
        (3, 1, "committed", "torn"),
        (3, 2, "planned", ""),
    ]
    assert found.next_step == 2_000
    last = await client.find_sample("vlm", 1, found.next_step)
    assert (last.steps, last.next_step, last.ref.crc32) == ((), None, None)
    with pytest.raises(NotFoundError, match="there is no job 'x'"):
        await client.find_sample("x", 1)


async def test_a_step_that_was_skipped_is_explained_by_its_record(client):
    await client.submit("name: vlm", "")
    (record,) = await client.skip("vlm", [(2, 5)])
    assert (record.first_step, record.last_step, record.action) == (2, 5, "skip")
    assert (record.from_attempt, record.job, record.recorded_unix_s) == (2, "vlm", 3.5)
    explained = await client.explain("vlm", 3, attempt=1)
    assert replace(explained.skipped_by, job="vlm") == record
    assert explained.as_recorded
    assert (explained.ledger_plan_digest, explained.committed) == ("", False)
    (undone,) = await client.skip("vlm", [(2, 2)], "train")
    assert undone.action == "train"


async def test_a_range_is_replayed_step_by_step(client, make):
    await client.submit("name: vlm", "")
    steps = await client.replay("vlm", 3, 5)
    assert [step.step for step in steps] == [3, 4, 5]
    assert all(s.plan_digest == s.ledger_digest == make.plan(s.step).digest for s in steps)
    assert {(step.content, step.note, step.packs) for step in steps} == {("", "", ())}
    (again,) = await client.replay("vlm", 3, 3, content=True)
    assert (again.content, again.note, again.differs) == ("differs", "s/b is another", True)
    assert again.packs == (NamedPack(pack=1, samples=("s/a", "s/b")),)
    with pytest.raises(NotFoundError, match="there is no job 'x'"):
        await client.replay("x", 3, 5)


async def test_other_costs_are_taken_from_a_step_on(client, api):
    await client.submit("name: vlm", "")
    assert await client.recost("vlm", "{}") == (12, "v2")
    assert await client.recost("vlm", "{}", 20) == (20, "v2")
    assert api.recosted == [("vlm", "{}", None), ("vlm", "{}", 20)]
    with pytest.raises(ConflictError, match="step 0 was planned already"):
        await client.recost("vlm", "{}", 0)


async def test_the_service_s_errors_come_back_as_themselves(client, api):
    with pytest.raises(NotFoundError, match="there is no job 'x'"):
        await client.job("x")
    with pytest.raises(SpecError, match="not YAML"):
        await client.submit("?", "")
    await client.submit("name: vlm", "")
    api.claims[0] = "host:1"
    with pytest.raises(ConflictError, match="trainers use"):
        await client.delete("vlm")


def test_an_unreachable_service_is_named_with_what_to_check():
    with (
        CoordinatorClient("127.0.0.1:1") as client,
        pytest.raises(ServiceUnreachableError, match=r"at 127.0.0.1:1.*dataservice serve"),
    ):
        client.jobs()


def test_a_service_that_does_not_answer_in_time_is_named_too():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            CoordinatorClient(address, timeout_s=0.2) as client,
            pytest.raises(ServiceUnreachableError, match=r"within 0.2 s"),
        ):
            client.jobs()


@pytest.mark.parametrize(
    ("asked", "of", "limit_s"),
    [
        ("jobs", (), 0.2),
        ("drain", ("vlm",), 0.2),
        ("submit", ("name: vlm", ""), 0.3),
        ("recost", ("vlm", "{}"), 0.3),
        ("change_mixture", ("vlm", {"web": 1.0}), 0.3),
        ("explain", ("vlm", 0), 0.3),
        ("find_sample", ("vlm", 0), 0.3),
    ],
)
def test_what_may_open_a_job_is_waited_for_longer(monkeypatch, asked, of, limit_s):
    monkeypatch.setattr(coordinator_client, "ANSWERED_S", 0.2)
    monkeypatch.setattr(coordinator_client, "OPENED_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            CoordinatorClient(address) as client,
            pytest.raises(ServiceUnreachableError, match=f"within {limit_s:g} s"),
        ):
            getattr(client, asked)(*of)


def test_a_job_that_a_service_opens_by_its_limits_is_waited_for():
    assert OpeningLimits().timeout_s < coordinator_client.OPENED_S


@pytest.mark.parametrize(("content", "limit_s"), [(False, 1.0), (True, 3600.0)])
async def test_a_replay_whose_next_step_does_not_come_is_given_up(
    api, coordinator, monkeypatch, content, limit_s
):
    seen, limits_s = [], []

    class Timer(threading.Timer):
        """Runs out only where no step comes, however slow the machine is."""

        def __init__(self, limit_s, act):
            limits_s.append(limit_s)
            super().__init__(0.0 if len(seen) == 3 else 120.0, act)

    monkeypatch.setattr(coordinator_client, "threading", SimpleNamespace(Timer=Timer))

    async def replay(job, first_step, last_step, attempt, content=False):
        for step in range(first_step, last_step):
            yield ReplayedStep(step=step, attempt=1, ledger_digest="", plan_digest="")
        await asyncio.Event().wait()

    api.replay = replay

    def ask():
        with CoordinatorClient(coordinator, timeout_s=1.0) as client:
            try:
                for step in client.replay("vlm", 0, 3, content=content):
                    seen.append(step.step)
            except ServiceUnreachableError as error:
                return str(error)
        raise AssertionError("it ended by itself")

    told = await asyncio.to_thread(ask)
    assert (seen, limits_s) == ([0, 1, 2], [limit_s] * 4)
    assert f"did not answer within {limit_s:g} s" in told


async def test_an_errand_for_an_index_is_answered_as_it_is_carried_out(coordinator):
    def asked(errand):
        with CoordinatorClient(coordinator) as client:
            told = []
            try:
                told.extend(client.index("job: a", "/jobs", "s", errand))
            except WorkerLostError as error:
                told.append(str(error))
            return told

    answers = [
        IndexWaiting(why="1 of 1 workers are being started"),
        IndexPlaces(places=3),
        IndexProgress(rows=2, size_bytes=2**40),
        IndexResult(place=1, size_bytes=0, damage="s of /jobs"),
    ]
    done = await asyncio.to_thread(asked, "{}")
    assert done == [*answers, IndexResult(place=0, size_bytes=4), b"PAR1"]
    assert await asyncio.to_thread(asked, "fail") == [*answers, "worker-0.1 is gone"]
