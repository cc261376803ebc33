"""The quarantine over the wire: in pages, read as the client takes them."""

import asyncio

import grpc
import pytest
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from dataservice.core.job import QuarantineEntry
from dataservice.serving.coordinator_client import CoordinatorClient
from tests.waiting import until

KEY = "k" * 400


def entry(number: int) -> QuarantineEntry:
    return QuarantineEntry(
        job="vlm", attempt=1, step=number, sample_id=7, source="ocr", key=KEY, reason="damaged"
    )


@pytest.fixture
def asked(api) -> list[int]:
    """The steps from which entries were asked for, a thousand each time; of so many `api.kept`."""
    behind: list[int] = []
    api.kept = 100_000

    async def page(name: str, last: QuarantineEntry | None) -> list[QuarantineEntry]:
        assert name == "vlm"
        first = 0 if last is None else last.step + 1
        behind.append(first)
        return [entry(number) for number in range(first, min(first + 1000, api.kept))]

    api.quarantine = page
    return behind


async def test_all_entries_are_listed_page_by_page(coordinator, api, asked):
    api.kept = 2500

    def listed() -> list[QuarantineEntry]:
        client = CoordinatorClient(coordinator, timeout_s=120)
        try:
            return client.quarantine("vlm")
        finally:
            client.close()

    assert [each.step for each in await asyncio.to_thread(listed)] == list(range(2500))
    assert asked == [0, 1000, 2000, 2500]


async def test_no_more_is_read_than_a_client_takes(coordinator, api, asked, channel_to, capfd):
    stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(coordinator))
    call = stub.ListQuarantine(coordinator_pb2.JobRequest(job="vlm"))
    assert (await call.read()).step == 0
    await asyncio.sleep(0.3)
    held = len(asked)
    assert held < 20, "what the sockets hold"
    call.cancel()
    await until(lambda: call.done())
    await asyncio.sleep(0.1)
    assert len(asked) <= held + 1
    assert await call.code() is grpc.StatusCode.CANCELLED
    assert "Traceback" not in capfd.readouterr().err
