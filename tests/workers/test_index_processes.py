"""A worker's processes that index: what they say arrives, and nothing of theirs stays."""

import asyncio
import os

import psutil
import pytest

from dataservice.core.errors import SourceError, SpecError, WorkerLostError
from dataservice.core.index_orders import IndexOrder, IndexProgress, IndexResult
from dataservice.workers.index_processes import CHUNK_BYTES, IndexProcesses
from tests.workers.index_programs import Obedient


@pytest.fixture
async def processes(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    made = IndexProcesses(
        Obedient(), slots=8, code_owner=lambda pipeline: pipeline or None, silent_s=1.0
    )
    yield made
    made.close()


async def answers(processes, errand, pipeline=""):
    order = IndexOrder(pipeline=pipeline, errand=errand)
    return [answer async for answer in processes.index(order)]


async def until(holds):
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def nurseries():
    return [each for each in psutil.Process().children() if each.name() == "nursery"]


def descriptors():
    return len(os.listdir("/proc/self/fd"))


async def test_answers_come_in_order_and_a_result_s_bytes_behind_it(processes):
    size_bytes = 2 * CHUNK_BYTES + 256
    told, torn, result, *data = await answers(processes, str(size_bytes))
    assert told == IndexProgress(rows=2, size_bytes=30)
    assert torn == IndexResult(place=0, size_bytes=0, damage="torn")
    assert result == IndexResult(place=1, size_bytes=size_bytes)
    assert b"".join(data) == bytes(range(256)) * (size_bytes // 256)
    assert [len(each) for each in data] == [CHUNK_BYTES, CHUNK_BYTES, 256]


@pytest.mark.parametrize(
    ("errand", "kind", "said"),
    [
        ("die", WorkerLostError, r"died of SIGKILL.*the operator may raise decode_memory_bytes"),
        ("babble", WorkerLostError, r"an answer that says nothing"),
        ("hang", SourceError, r"has said nothing for 1 s, and was ended"),
        ("refuse", SourceError, r"^the source is empty$"),
    ],
)
async def test_what_ends_an_errand_is_raised_and_the_next_is_carried_out(
    processes, errand, kind, said
):
    with pytest.raises(kind, match=said):
        await answers(processes, errand)
    assert len(await answers(processes, "256")) == 4


async def test_nothing_of_an_errand_stays_open_however_it_ends(processes):
    await answers(processes, "256")
    before = descriptors()
    for _ in range(3):
        await answers(processes, "256")
        leaving = processes.index(IndexOrder(pipeline="", errand=str(4 * CHUNK_BYTES)))
        for _ in range(4):  # to within the bytes of the result
            await anext(leaving)
        await leaving.aclose()
        for pause_s in (0.0, 0.1):  # while its process is being started, and later
            hanging = asyncio.create_task(answers(processes, "hang"))
            await asyncio.sleep(pause_s)
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
    # Processes take a moment to end.
    await until(lambda: descriptors() <= before and not processes.process_ids)


async def test_an_errand_whose_pipeline_is_refused_starts_no_process():
    def refuse(_pipeline: str) -> str:
        raise SpecError("this is no job's pipeline")

    refusing = IndexProcesses(Obedient(), slots=8, code_owner=refuse)
    # An earlier test's nursery may end meanwhile, so that fewer are left than there were.
    before, nurseries_before = descriptors(), set(nurseries())
    for _ in range(3):
        with pytest.raises(SpecError, match="no job's pipeline"):
            await answers(refusing, "0")
    assert descriptors() <= before
    assert set(nurseries()) <= nurseries_before
    assert not refusing.process_ids
    refusing.close()


async def test_as_many_errands_run_as_there_are_places(processes):
    hanging = [asyncio.create_task(answers(processes, "hang")) for _ in range(3)]
    await until(lambda: len(processes.process_ids) == 2)  # a quarter of the slots
    await asyncio.sleep(0.1)
    assert len(processes.process_ids) == 2
    ended = await asyncio.gather(*hanging, return_exceptions=True)
    assert [type(each) for each in ended] == [SourceError] * 3


async def test_a_team_s_own_code_is_given_no_credentials(processes):
    *_, plain = await answers(processes, "credentials")
    assert b"hidden" in plain
    *_, plain = await answers(processes, "credentials", pipeline="a team's code")
    assert plain == b"null"


async def test_closing_ends_what_runs(processes):
    hanging = asyncio.create_task(answers(processes, "hang"))
    await until(lambda: processes.process_ids)
    processes.close()
    with pytest.raises(WorkerLostError):
        await hanging
    with pytest.raises(WorkerLostError, match="the worker is ending"):
        await answers(processes, "256")
