"""Damaged and absurd requests of every RPC, sent to a running service over a socket.

Each is answered with a deliberate status; the service still works afterwards.
"""

import asyncio
import json
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
import yaml
from dataservice_proto.columns import VERSION
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc, worker_pb2
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from dataservice.app import Service, start_service
from dataservice.core.authority import COMMAND_METADATA, command_token
from dataservice.jobs.indexing import index_job
from dataservice.jobs.job_file import read_job
from dataservice.operate.config import ServiceConfig
from tests.decode.files import Kitchen
from tests.fuzz.campaign import FACTOR, SEED, Tally
from tests.fuzz.mutate import mutated

CALLS_AT_ONCE = 16
# Enough on a busy machine; a call that waits by its nature, as for other ranks, takes all of it.
CALL_S = 5.0
# What a client may be told. UNKNOWN and INTERNAL are bugs of ours, except UNKNOWN with these
# words: it is gRPC's own answer to bytes that are no message of the type.
FINE = frozenset(
    {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.DEADLINE_EXCEEDED,  # it waits, as for other ranks
    }
)
NOT_A_MESSAGE = "DecodeError"
NUMBERS = (0, 1, 2, -1, 7, 255, 2**31 - 1, -(2**31), 2**53)
LARGE_NUMBERS = (*NUMBERS, 2**63 - 1, -(2**63))
DOUBLES = (0.0, 1.0, -1.0, 1e308, float("inf"), float("nan"))


class Requests:
    """Requests of one service: each field from what is plausible or absurd."""

    def __init__(self, service: ServiceDescriptor, texts: Sequence[str], seed: str) -> None:
        self._service = service
        self._texts = texts
        self._rng = random.Random(seed)

    def some(self, count: int) -> Iterator[tuple[MethodDescriptor, bytes]]:
        """Requests of all methods in turn; two of three damaged on their way."""
        for number in range(count):
            method = self._service.methods[number % len(self._service.methods)]
            message = GetMessageClass(method.input_type)()
            self._fill(message, 0)
            data = message.SerializeToString()
            if self._rng.random() < 0.66:
                data = mutated(data or b"\0", [data or b"\0"], self._rng)
            yield method, data

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self._rng.random() < 0.15 or depth > 4:
                continue
            if field.message_type and field.message_type.GetOptions().map_entry:
                key, value = field.message_type.fields
                if value.message_type is None:
                    getattr(message, field.name)[self._value(key)] = self._value(value)
            elif field.is_repeated:
                for _ in range(self._rng.choice((0, 1, 2, 20))):
                    if field.message_type:
                        self._fill(getattr(message, field.name).add(), depth + 1)
                    else:
                        getattr(message, field.name).append(self._value(field))
            elif field.message_type:
                self._fill(getattr(message, field.name), depth + 1)
            else:
                setattr(message, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> object:
        rng = self._rng
        kind = field.cpp_type
        if field.enum_type is not None:
            return rng.choice([value.number for value in field.enum_type.values])
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return rng.randbytes(rng.choice((0, 32, 1000)))
            return rng.choice(self._texts)
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            return rng.choice(DOUBLES)
        if kind == FieldDescriptor.CPPTYPE_INT64:
            return rng.choice(LARGE_NUMBERS)
        return (
            abs(rng.choice(NUMBERS[:7])) if "UINT" in _kind_name(kind) else rng.choice(NUMBERS[:8])
        )


def _kind_name(kind: int) -> str:
    return {FieldDescriptor.CPPTYPE_UINT32: "UINT32", FieldDescriptor.CPPTYPE_UINT64: "UINT64"}.get(
        kind, "INT32"
    )


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Service, str]]:
    """A service with one job, and the text of its job file."""
    (folder / "tokenizer").mkdir()
    Kitchen(folder / "tokenizer")
    lines = [json.dumps({"text": f"the cat {k}"}) for k in range(40)]
    (folder / "a.jsonl").write_text("\n".join(lines))
    job = yaml.safe_dump(
        {
            "job": "fuzzed",
            "sources": [{"name": "src", "format": "jsonl", "url": "a.jsonl"}],
            "index": "index",
            "pipeline": {"tokenizer": "tokenizer"},
            "batch": {"samples": 4},
            "plan": {"memory_tokens": 512},
        }
    )
    index_job(read_job(job, folder), custom_processors={})
    config = ServiceConfig(
        listen="127.0.0.1:0", state_dir=str(folder / "state"), workers=1, pool="local"
    )
    (folder / "state").mkdir()
    service = await start_service(config)
    await service.staffing
    try:
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            await stub.SubmitJob(
                coordinator_pb2.SubmitJobRequest(spec_yaml=job, base_directory=str(folder))
            )
        yield service, job
    finally:
        await service.stop(0.5)


async def answer(
    channel: grpc.aio.Channel,
    method: MethodDescriptor,
    data: bytes,
    metadata: Sequence[tuple[str, str]],
) -> tuple[grpc.StatusCode, str]:
    """The status of one call; of a stream, after its first few messages."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    call: grpc.aio.UnaryStreamCall = channel.unary_stream(path)(
        data, timeout=CALL_S, metadata=metadata
    )
    try:
        for _ in range(3):
            if await call.read() is grpc.aio.EOF:
                break
        else:
            call.cancel()
            return grpc.StatusCode.OK, ""
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return await call.code(), await call.details() or ""


async def answers(
    address: str,
    requests: Iterator[tuple[MethodDescriptor, bytes]],
    metadata: Sequence[tuple[str, str]] = (),
) -> Counter[grpc.StatusCode]:
    """Send all, some at once; the statuses. Raises AssertionError that names the first few
    requests whose answer is no deliberate one."""
    statuses: Counter[grpc.StatusCode] = Counter()
    wrong: list[str] = []
    async with grpc.aio.insecure_channel(address) as channel:

        async def caller() -> None:
            for method, data in requests:
                code, details = await answer(channel, method, data, metadata)
                statuses[code] += 1
                refused = code is grpc.StatusCode.UNKNOWN and NOT_A_MESSAGE in details
                if code not in FINE and not refused:
                    wrong.append(f"{method.name}({data[:300].hex()}): {code.name}: {details}")

        await asyncio.gather(*(caller() for _ in range(CALLS_AT_ONCE)))
    assert not wrong, f"{len(wrong)} of FUZZ_SEED={SEED}:\n" + "\n".join(wrong[:5])
    return statuses


def verdicts(statuses: Counter[grpc.StatusCode]) -> dict[str, int]:
    accepted = statuses[grpc.StatusCode.OK]
    return {"accepted": accepted, "refused": statuses.total() - accepted}


def texts(job: str, folder: Path) -> list[str]:
    """What strings in requests are: names that exist, and what a name should not be."""
    return [
        "fuzzed", "fuzzed", "src", job, job.replace("fuzzed", "other"), str(folder), "", "0", "a",
        "\0", "../" * 50, "x" * 20_000, "é😀", '{"epoch": 0, "position": 0}', "{}", "[" * 5000,
        '{"version": 1}', '{"version": 1, "step": 1e400, "order": ""}', "fuzzed/0",
        '{"llm": {"attention_s_per_token2": 1e-9, "linear_s_per_token": 1e400}}',
        '{"epoch": 0, "position": 999999999999, "step": 3, "step_in_window": 0, "order": "", '
        '"version": 1}', "127.0.0.1:1", "worker-0.1",
    ]  # fmt: skip


async def test_damaged_requests_to_the_coordinator_get_deliberate_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, tally: Tally
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with running(tmp_path) as (service, job):
        descriptor = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            claim = stub.OpenSession(
                coordinator_pb2.OpenSessionRequest(columns=VERSION, job="fuzzed", world_size=1)
            )
            session = (await claim.read()).session
            words = [*texts(job, tmp_path), *[session] * 10]
            requests = Requests(descriptor, words, f"{SEED} coordinator")
            statuses = await answers(service.address, requests.some(int(1000 * FACTOR)))
            tally("gRPC, coordinator", verdicts(statuses))
            assert len(statuses) > 3
            claim.cancel()
            await stub.SubmitJob(
                coordinator_pb2.SubmitJobRequest(spec_yaml=job, base_directory=str(tmp_path))
            )
            jobs = await stub.ListJobs(coordinator_pb2.ListJobsRequest())
            assert "fuzzed" in [each.name for each in jobs.jobs]


@pytest.mark.parametrize("commands", [True, False], ids=["coordinator", "stranger"])
async def test_damaged_requests_to_a_worker_get_deliberate_answers(
    tmp_path: Path, commands: bool, caplog: pytest.LogCaptureFixture, tally: Tally
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with running(tmp_path) as (service, job):
        (worker,) = service.pool.workers()
        secret = (tmp_path / "state" / "secret").read_bytes()
        metadata = [(COMMAND_METADATA, command_token(secret))] if commands else []
        descriptor = worker_pb2.DESCRIPTOR.services_by_name["Worker"]
        requests = Requests(descriptor, texts(job, tmp_path), f"{SEED} worker {commands}")
        statuses = await answers(worker.address, requests.some(int(300 * FACTOR)), metadata)
        tally(f"gRPC, worker, {'coordinator' if commands else 'stranger'}", verdicts(statuses))
        refused = [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT]
        assert sum(statuses[code] for code in refused) > statuses.total() // 20
        assert [each.worker for each in service.pool.workers()] == [worker.worker]
