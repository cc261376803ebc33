import asyncio
import os
import signal
import subprocess
import sys

import grpc
import grpc.aio
import pytest
from dataservice_proto.columns import VERSION
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from dataservice.core.cursor import Cursor
from dataservice.core.errors import TokenError
from dataservice.core.health import RankReport
from dataservice.core.orders import WantedParts
from dataservice.core.team import Identity
from dataservice.serving import wire_health, wire_shards
from dataservice.serving.access_control import AccessControl
from dataservice.serving.channels import Keepalive
from dataservice.serving.server import serve_coordinator
from soak.gate import through_gate
from tests.waiting import until

RAISES = grpc.aio.AioRpcError


@pytest.fixture
def stub(coordinator, channel_to):
    return coordinator_pb2_grpc.CoordinatorStub(channel_to(coordinator))


def opening(rank=0, job="vlm", **fields):
    return coordinator_pb2.OpenSessionRequest(
        columns=VERSION, job=job, rank=rank, world_size=2, client="host:1", **fields
    )


async def status_of(call):
    """(code, message, the error's class as sent) of a call that fails."""
    with pytest.raises(RAISES) as failed:
        await call
    kind = dict(failed.value.trailing_metadata()).get("dataservice-error")
    return failed.value.code(), failed.value.details(), kind


async def test_an_open_session_names_itself_and_holds_its_claim(stub, api):
    cursor = Cursor(step=12, position=3)
    call = stub.OpenSession(opening(cursor=cursor.to_json(), rejoin_attempt=4))
    event = await call.read()
    assert (event.session, event.attempt, event.start_step) == ("vlm/0", 4, 12)
    assert api.claims == {0: "host:1"}
    assert api.closed == []
    call.cancel()


async def test_what_a_client_calls_itself_cannot_act_where_it_is_shown(stub, api):
    request = opening()
    request.client = "\x1b]0;owned\x07\u202ehost:1"
    call = stub.OpenSession(request)
    await call.read()
    assert api.claims == {0: r"\x1b]0;owned\x07\u202ehost:1"}
    call.cancel()


async def test_a_session_says_of_which_launch_it_is_and_no_terminal_obeys_it(stub, api):
    call = stub.OpenSession(opening(launch="torchrun:\x1b[2Jnone@a:1"))
    await call.read()
    assert api.launches == [r"torchrun:\x1b[2Jnone@a:1"]
    call.cancel()


async def test_only_a_client_that_says_so_reads_loss_weights(stub, api):
    for rank, said in enumerate((True, False)):
        request = opening(rank=rank)
        request.loss_weights = said
        await stub.OpenSession(request).read()
    assert api.reads_loss_weights == [True, False]


async def test_a_session_without_a_cursor_starts_at_the_beginning(stub):
    call = stub.OpenSession(opening())
    assert (await call.read()).start_step == 0
    call.cancel()


async def test_cancelling_the_stream_releases_its_claim(stub, api, make):
    call = stub.OpenSession(opening())
    await call.read()
    call.cancel()
    await until(lambda: api.closed == ["vlm/0"])
    again = stub.OpenSession(opening())
    assert (await again.read()).session == "vlm/0"
    again.cancel()


async def test_cancelling_before_the_world_is_complete_gives_the_claim_up(stub, api, make):
    api.world_complete.clear()
    call = stub.OpenSession(opening())
    reading = asyncio.ensure_future(call.read())
    await until(lambda: api.claims)
    call.cancel()
    await until(lambda: not api.claims)
    await asyncio.gather(reading, return_exceptions=True)
    assert api.closed == []


CLIENT = """
import sys, time, grpc
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1])
stub = coordinator_pb2_grpc.CoordinatorStub(channel)
request = coordinator_pb2.OpenSessionRequest(
    columns=2, job="vlm", rank=1, world_size=2, client="c:2"
)
call = stub.OpenSession(request)
print(next(call).session, flush=True)
time.sleep(600)
"""


async def test_a_killed_client_releases_its_claim(coordinator, api, make):
    command = [sys.executable, "-c", CLIENT, coordinator]
    with subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert (await asyncio.to_thread(process.stdout.readline)).strip() == "vlm/1"
            assert api.claims == {1: "c:2"}
        finally:
            os.kill(process.pid, signal.SIGKILL)
    await until(lambda: api.closed == ["vlm/1"])
    assert api.claims == {}


async def test_a_client_behind_a_dead_network_loses_its_claim(api, make, network, channel_to):
    # Pings that a busy machine answers late are no dead network.
    keepalive = Keepalive(interval_s=0.3, timeout_s=3.0)
    handle = await serve_coordinator(api, "127.0.0.1:0", keepalive=keepalive)
    address = through_gate(network.control, handle.address)
    stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(address))
    call = stub.OpenSession(opening())
    await call.read()
    network.silence(lambda to: to == handle.address)
    await until(lambda: api.closed == ["vlm/0"])
    call.cancel()
    await handle.stop(0)


async def test_a_fenced_session_ends_with_the_reason(stub, api):
    call = stub.OpenSession(opening())
    await call.read()
    api.fence("vlm/0")
    assert await status_of(call.read()) == (
        grpc.StatusCode.ABORTED,
        "attempt 2 has replaced attempt 1.",
        "FencedError",
    )
    assert api.closed == ["vlm/0"]


async def test_two_clients_of_one_rank_are_told_who_holds_it(stub):
    call = stub.OpenSession(opening())
    await call.read()
    code, message, kind = await status_of(stub.OpenSession(opening()).read())
    assert (code, kind) == (grpc.StatusCode.ALREADY_EXISTS, "RankClaimedError")
    assert "held by host:1" in message
    call.cancel()


async def test_a_damaged_cursor_is_refused(stub):
    code, message, kind = await status_of(stub.OpenSession(opening(cursor="{}")).read())
    assert (code, kind) == (grpc.StatusCode.FAILED_PRECONDITION, "CursorMismatchError")
    assert "not a cursor" in message


async def test_an_unexpected_error_keeps_its_details_in_the_log(stub, caplog):
    code, message, kind = await status_of(stub.OpenSession(opening(job="explode")).read())
    assert (code, kind) == (grpc.StatusCode.INTERNAL, "ServiceError")
    assert "private" not in message
    incident = message.split("error ")[1][:8]
    assert f"error {incident}" in caplog.text
    assert "a private detail" in caplog.text


async def test_a_shard_comes_with_the_summary_of_its_step(stub, api, make):
    session = stub.OpenSession(opening(rank=1))
    await session.read()
    answer = await stub.GetShard(
        coordinator_pb2.GetShardRequest(
            session="vlm/1",
            step=5,
            received_step=4,
            failed_workers=["worker-0.1"],
            slow_workers=["worker-1.1"],
        )
    )
    assert wire_shards.rank_shard_from_proto(answer.shard) == make.shard(rank=1, step=5)
    assert api.failed_workers == [("worker-0.1",)]
    assert api.slow_workers == [("worker-1.1",)]
    assert api.wanted == [WantedParts()]
    session.cancel()


async def test_a_rank_may_ask_for_some_parts_or_for_none(stub, api):
    for wanted in (
        WantedParts(tokens=False, media=False),
        WantedParts(tokens=False, media=False, labels=False),
    ):
        await stub.GetShard(
            coordinator_pb2.GetShardRequest(
                session="vlm/0", step=5, wanted=wire_shards.wanted_parts_to_proto(wanted)
            )
        )
        assert api.wanted.pop() == wanted


def question(step: int, **more) -> coordinator_pb2.GetShardRequest:
    return coordinator_pb2.GetShardRequest(session="vlm/1", step=step, **more)


async def test_one_call_answers_the_questions_of_many_steps_in_turn(stub, api, make):
    session = stub.OpenSession(opening(rank=1))
    await session.read()
    call = stub.GetShards()
    for step in (4, 5):
        trained = [coordinator_pb2.TrainedStep(step=step - 1)]
        await call.write(question(step, received_step=step - 1, trained=trained))
        answer = await call.read()
        assert wire_shards.rank_shard_from_proto(answer.shard) == make.shard(rank=1, step=step)
    assert api.committed == [("vlm/1", 3), ("vlm/1", 4)]
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert await call.code() is grpc.StatusCode.OK
    session.cancel()


async def test_a_refusal_ends_the_call_of_many_questions_with_its_reason(stub):
    call = stub.GetShards()
    await call.write(question(5, failed_workers=["w"] * 5000))
    with pytest.raises(grpc.aio.AioRpcError, match="failed_workers has 5,000 entries"):
        await call.read()


async def test_bytes_that_are_no_question_are_refused_with_what_is_to_be_done(api, channel_to):
    handle = await serve_coordinator(api, "127.0.0.1:0")
    method = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
    call = channel_to(handle.address).stream_stream(f"/{method}/GetShards")()
    await call.write(b"\xff")
    with pytest.raises(grpc.aio.AioRpcError, match=r"no GetShardRequest\. Run one release") as told:
        await call.read()
    assert told.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await handle.stop(0.0)


async def test_a_call_that_waits_for_a_question_holds_up_no_service_that_stops(api, channel_to):
    handle = await serve_coordinator(api, "127.0.0.1:0")
    call = coordinator_pb2_grpc.CoordinatorStub(channel_to(handle.address)).GetShards()
    await call.write(question(5))
    await call.read()
    waiting = asyncio.ensure_future(call.read())
    await handle.stop(grace_s=60.0)
    with pytest.raises(grpc.aio.AioRpcError, match="is stopping") as ended:
        await waiting
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_call_of_many_questions_ends_with_the_token_that_opened_it(
    api, channel_to, monkeypatch
):
    monkeypatch.setattr("dataservice.serving.coordinator_servicer.TOKEN_CHECK_S", 0.0)
    known = [True]

    def authenticate(_token: str | None) -> Identity:
        if known[0]:
            return Identity(name="vision", team="vision", role="team")
        raise TokenError("no such token")

    access = AccessControl(authenticate=authenticate)
    handle = await serve_coordinator(api, "127.0.0.1:0", access=access)
    call = coordinator_pb2_grpc.CoordinatorStub(channel_to(handle.address)).GetShards()
    await call.write(question(5))
    await call.read()
    known[0] = False
    await call.write(question(6))
    with pytest.raises(grpc.aio.AioRpcError, match="token of this session was replaced"):
        await call.read()
    await handle.stop(0.0)


async def test_the_groups_of_a_step_are_asked_for_by_themselves(stub, make):
    for step in (5, 6, 5):
        request = coordinator_pb2.GetStepSummaryRequest(session="vlm/0", step=step)
        answer = await stub.GetStepSummary(request)
        assert answer.plan_digest == make.plan(step).digest
        assert (answer.packs, answer.pack_degree) == (2, b"\x01\x01")


async def test_a_client_that_reads_other_columns_is_refused_by_name(stub, api):
    old = opening(rank=1)
    for version, reads in ((0, "none, as before version 1"), (7, "version 7")):
        old.columns = version
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.OpenSession(old).read()
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert f"as columns of version {VERSION}; the client of rank 1" in refused.value.details()
        assert reads in refused.value.details()
    assert not api.claims


async def test_steps_that_were_trained_are_told_along_with_the_next_call(stub, api):
    trained = [
        coordinator_pb2.TrainedStep(step=3, measured_s=0.5, phase_s={"llm": 0.25}),
        coordinator_pb2.TrainedStep(step=4),
    ]
    await stub.GetShard(coordinator_pb2.GetShardRequest(session="vlm/0", step=5, trained=trained))
    assert api.committed == [("vlm/0", 3, 0.5), ("vlm/0", 4)]
    assert api.phases == [{"llm": 0.25}, {}]


async def test_how_a_rank_fares_is_told_along_with_its_question(stub, api):
    event = await stub.OpenSession(opening()).read()
    assert event.reports_along
    report = coordinator_pb2.ReportRequest(step=4, steps=2, waited_s=0.5, waiting_s=0.25)
    question = coordinator_pb2.GetShardRequest(session="vlm/0", step=5, report=report)
    await stub.GetShard(question)
    assert api.reports == [("vlm/0", RankReport(step=4, steps=2, waited_s=0.5, waiting_s=0.25))]
    question.report.waited_s = -1.0
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.GetShard(question)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_end_of_the_data_says_how_many_steps_there_were(stub):
    answer = await stub.GetShard(coordinator_pb2.GetShardRequest(session="vlm/0", step=10))
    assert answer.WhichOneof("result") == "end_of_data"
    assert answer.end_of_data.steps == 10


async def test_a_rank_that_asks_for_a_skipped_step_is_told_the_next(stub, api):
    await api.submit("name: vlm", "")
    await api.skip("vlm", [(3, 6)], "skip")
    request = coordinator_pb2.GetShardRequest(session="vlm/0", step=4, received_step=2)
    answer = await stub.GetShard(request)
    assert (answer.WhichOneof("result"), answer.skipped.next_step) == ("skipped", 7)


async def test_a_commit_reaches_the_engine(stub, api):
    await stub.CommitStep(coordinator_pb2.CommitStepRequest(session="vlm/0", step=3))
    assert api.committed == [("vlm/0", 3)]


async def test_a_commit_carries_the_seconds_a_rank_has_measured(stub, api):
    request = coordinator_pb2.CommitStepRequest(session="vlm/0", step=3, measured_s=0.0)
    await stub.CommitStep(request)
    assert api.committed == [("vlm/0", 3, 0.0)]


async def test_a_commit_carries_what_the_seconds_went_to_by_phases_that_are_known(stub, api):
    phases = {"vision": 0.25, "llm": 1.5, "exchange": 0.0, "waiting": 0.5, "dreaming": 9.0}
    request = coordinator_pb2.CommitStepRequest(
        session="vlm/0", step=3, measured_s=2.0, phase_s=phases
    )
    await stub.CommitStep(request)
    assert api.phases == [{"vision": 0.25, "llm": 1.5, "exchange": 0.0, "waiting": 0.5}]


async def test_phases_of_an_older_client_count_for_those_that_plans_predict(stub, api):
    phases = {
        "llm_forward": 0.5,
        "llm_backward": 1.0,
        "exchange": 0.25,
        "bubble": 2.0,
        "other": 1.0,
    }
    await stub.CommitStep(
        coordinator_pb2.CommitStepRequest(session="vlm/0", step=3, measured_s=5.0, phase_s=phases)
    )
    assert api.phases == [{"llm": 1.5, "exchange": 0.25, "waiting": 2.0, "gradients": 1.0}]


@pytest.mark.parametrize("seconds", [-1.0, 1e308, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["measured_s", "phase_s"])
async def test_seconds_that_cannot_be_are_refused(stub, api, name, seconds):
    given = seconds if name == "measured_s" else {"exchange": seconds}
    request = coordinator_pb2.CommitStepRequest(session="vlm/0", step=3, **{name: given})
    with pytest.raises(grpc.aio.AioRpcError, match="from 0 to 1e"):
        await stub.CommitStep(request)
    assert api.committed == []


async def test_more_phases_than_there_can_be_are_refused(stub, api):
    phases = {f"phase-{number}": 0.1 for number in range(33)}
    request = coordinator_pb2.CommitStepRequest(session="vlm/0", step=3, phase_s=phases)
    with pytest.raises(grpc.aio.AioRpcError, match="has 33 phases; at most 32 are taken"):
        await stub.CommitStep(request)
    assert api.committed == []


# ---- health -------------------------------------------------------------------------------


async def test_a_rank_tells_of_itself(stub, api):
    session = stub.OpenSession(opening(rank=1))
    await session.read()
    request = coordinator_pb2.ReportRequest(
        session="vlm/1", step=7, steps=5, waited_s=0.5, waiting_s=0.25
    )
    await stub.Report(request)
    assert api.reports == [("vlm/1", RankReport(step=7, steps=5, waited_s=0.5, waiting_s=0.25))]
    session.cancel()


@pytest.mark.parametrize(
    "wrong", [{"steps": -1}, {"waited_s": float("nan")}, {"waiting_s": -0.1}], ids=str
)
async def test_a_report_that_cannot_be_is_refused(stub, api, wrong):
    code, _, kind = await status_of(
        stub.Report(coordinator_pb2.ReportRequest(session="vlm/0", **wrong))
    )
    assert (code, kind) == (grpc.StatusCode.INVALID_ARGUMENT, "SpecError")
    assert api.reports == []


async def test_health_is_told_with_every_number_of_it(stub, api, make):
    await api.submit("name: vlm", "")
    await api.submit("name: asr", "")
    answer = await stub.GetHealth(coordinator_pb2.GetHealthRequest())
    assert wire_health.health_from_proto(answer) == make.health(["asr", "vlm"])
    answer = await stub.GetHealth(coordinator_pb2.GetHealthRequest(job="vlm"))
    assert wire_health.health_from_proto(answer) == make.health(["vlm"])
    assert api.asked_health == [(("asr", "vlm"), None), (("vlm",), None)]


async def test_the_health_of_a_job_that_is_not_there_is_an_error(stub):
    code, _, kind = await status_of(stub.GetHealth(coordinator_pb2.GetHealthRequest(job="no")))
    assert (code, kind) == (grpc.StatusCode.NOT_FOUND, "NotFoundError")


# ---- the end ------------------------------------------------------------------------------


async def test_stopping_ends_sessions_at_once_and_tells_them_to_come_back(api, channel_to):
    handle = await serve_coordinator(api, "127.0.0.1:0")
    stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(handle.address))
    call = stub.OpenSession(opening())
    await call.read()
    stopping = asyncio.create_task(handle.stop(grace_s=60.0))
    code, message, _ = await status_of(call.read())
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "Open the session again" in message
    await stopping
    assert api.closed == ["vlm/0"]
    await handle.stop()
