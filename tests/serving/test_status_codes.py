import asyncio
import inspect

import grpc
import grpc.aio
import pytest

from dataservice.core import errors
from dataservice.core.errors import ServiceError
from dataservice.serving.status_codes import answered, error_of, is_unreachable, status_of

EVERY_ERROR = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, ServiceError)
]


@pytest.fixture
async def call(channel_to):
    """Make a real call whose handler raises this."""
    raised = []

    async def handler(request, context):
        async with answered(context, "Test"):
            raise raised[-1]

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.T", {"M": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    remote = channel_to(f"127.0.0.1:{port}").unary_unary("/t.T/M")

    async def call(error):
        raised.append(error)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await remote(b"")
        return failed.value

    yield call
    await server.stop(0)


@pytest.mark.parametrize("kind", EVERY_ERROR)
async def test_every_error_comes_back_as_itself(call, kind):
    failed = await call(kind("value 7 > limit 5; größer wählen"))
    assert failed.code() is status_of(kind(""))
    assert not is_unreachable(failed)
    received = error_of(failed)
    assert type(received) is kind
    assert str(received) == "value 7 > limit 5; größer wählen"


async def test_a_caller_that_leaves_while_it_is_answered_is_no_failure_of_the_service(call, caplog):
    caplog.set_level("INFO")
    failed = await call(grpc.aio.InternalError("Failed execute_batch"))
    assert failed.details() == "the answer was not sent: Failed execute_batch"
    assert "Test: the caller has left: Failed execute_batch" in caplog.text
    assert "failed unexpectedly" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.NotFoundError, "NOT_FOUND"),
        (errors.RankClaimedError, "ALREADY_EXISTS"),
        (errors.WorldSizeError, "FAILED_PRECONDITION"),
        (errors.CursorMismatchError, "FAILED_PRECONDITION"),
        (errors.FencedError, "ABORTED"),
        (errors.SpecError, "INVALID_ARGUMENT"),
        (errors.PlanningError, "INVALID_ARGUMENT"),
        (errors.IndexStaleError, "FAILED_PRECONDITION"),
        (errors.TicketError, "PERMISSION_DENIED"),
        (errors.WorkerLostError, "UNAVAILABLE"),
        (errors.StateError, "INTERNAL"),
    ],
)
def test_each_error_has_the_status_that_callers_act_on(kind, code):
    assert status_of(kind("")).name == code


async def test_a_long_message_is_cut_to_what_headers_carry(call):
    failed = await call(errors.SpecError("ü" * 100_000))
    assert isinstance(error_of(failed), errors.SpecError)
    assert 500 < len(failed.details()) < 4000


async def test_what_nobody_meant_to_raise_keeps_its_details(call, caplog):
    failed = await call(ValueError("a private path"))
    assert failed.code() is grpc.StatusCode.INTERNAL
    assert "private" not in failed.details()
    assert "a private path" in caplog.text
    assert type(error_of(failed)) is ServiceError


async def test_a_status_of_a_stranger_is_understood_by_its_code(channel_to):
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    remote = channel_to(f"127.0.0.1:{port}").unary_unary("/t.T/Missing")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await remote(b"")
    assert type(error_of(failed.value)) is ServiceError
    await server.stop(0)


async def test_nobody_there_is_unreachable(channel_to):
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await channel_to("127.0.0.1:1").unary_unary("/t.T/M")(b"")
    assert is_unreachable(failed.value)


async def test_cancellation_is_not_answered():
    class NoAnswer:
        async def abort(self, *_):
            raise AssertionError("a cancelled call was answered")

    with pytest.raises(asyncio.CancelledError):
        async with answered(NoAnswer(), "Test"):
            raise asyncio.CancelledError
