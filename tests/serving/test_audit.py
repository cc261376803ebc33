"""The audit log: what is in it, what never is, and that it survives rotation."""

import json
import os
import resource

import grpc
import grpc.aio
import pytest
import yaml
from dataservice_proto.columns import VERSION
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from dataservice.core.errors import SpecError
from dataservice.operate.tokens_file import TokensFile, make_token
from dataservice.serving.access_control import AccessControl
from dataservice.serving.audit import CHANGES, REFUSALS, SESSIONS, AuditLog, Event
from dataservice.serving.server import serve_coordinator
from tests.waiting import until


@pytest.fixture
def lines(tmp_path):
    """Every line of the log, as an object."""
    return lambda name="audit.log": [
        json.loads(line) for line in (tmp_path / name).read_text().splitlines()
    ]


def event(outcome="ok", **fields):
    about = {"request": "r1", "token": "vision-1", "team": "vision", "role": "team"}
    about |= {"peer": "ipv4:10.0.0.7:5000", "method": "DrainJob", "job": "vision/a"}
    return Event(**{**about, "outcome": outcome, **fields})


@pytest.fixture
async def called(api, tmp_path, channel_to):
    """A stub behind tokens and an audit log, and the tokens."""
    made = {
        name: make_token(team=team, role=role, name=name)
        for name, team, role in [
            ("vision-1", "vision", "team"),
            ("vision-eyes", "vision", "reader"),
            ("audio-1", "audio", "team"),
        ]
    }
    entries = [record.model_dump(mode="json", exclude_none=True) for _, record in made.values()]
    (tmp_path / "tokens").write_text(yaml.safe_dump(entries))
    audit = AuditLog(tmp_path / "audit.log")
    access = AccessControl(authenticate=TokensFile(tmp_path / "tokens"), audit=audit)
    handle = await serve_coordinator(api, "127.0.0.1:0", access=access)
    stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(handle.address))

    async def call(method, name, **fields):
        token = made[name][0] if name in made else name
        kind = {"SubmitJob": "SubmitJobRequest", "ListJobs": "ListJobsRequest"}
        request = getattr(coordinator_pb2, kind.get(method, "JobRequest"))(**fields)
        try:
            return await getattr(stub, method)(
                request, metadata=(("authorization", f"Bearer {token}"),)
            )
        except grpc.aio.AioRpcError as failed:
            return failed.code()

    call.stub, call.tokens = stub, {name: token for name, (token, _) in made.items()}
    yield call
    await handle.stop(0)
    audit.close()


async def test_changes_and_refusals_are_told_and_reads_are_not(called, api, lines):
    await called("SubmitJob", "vision-1", spec_yaml="name: vision/a", base_directory="/jobs")
    await called("GetJob", "vision-1", job="a")
    await called("ListJobs", "vision-eyes")
    await called("DrainJob", "vision-1", job="a")
    await called("DeleteJob", "vision-1", job="none")
    await called("GetJob", "vision-1", job="none")
    await called("DeleteJob", "vision-eyes", job="a")
    await called("GetJob", "audio-1", job="vision/a")
    await called("ListJobs", "dst_" + "x" * 40)
    told = [
        (line["token"], line["team"], line["role"], line["method"], line["job"], line["outcome"])
        for line in lines()
    ]
    assert told == [
        ("vision-1", "vision", "team", "SubmitJob", "vision/a", "ok"),
        ("vision-1", "vision", "team", "DrainJob", "vision/a", "ok"),
        ("vision-1", "vision", "team", "DeleteJob", "vision/none", "NotFoundError"),
        ("vision-eyes", "vision", "reader", "DeleteJob", "", "RoleError"),
        ("audio-1", "audio", "team", "GetJob", "audio/vision/a", "NotFoundError"),
        ("", "", "", "ListJobs", "", "TokenError"),
    ]
    assert len({line["request"] for line in lines()}) == len(told)
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in lines())
    assert all(line["time"].endswith("Z") for line in lines())
    assert "role reader" in lines()[3]["reason"]


async def test_sessions_are_told_when_they_open_and_close_and_shards_are_not(
    called, api, lines, make
):
    metadata = (("authorization", f"Bearer {called.tokens['vision-1']}"),)
    request = coordinator_pb2.OpenSessionRequest(
        columns=VERSION, job="a", rank=0, world_size=1, client="host:1"
    )
    call = called.stub.OpenSession(request, metadata=metadata)
    session = (await call.read()).session
    shard = coordinator_pb2.GetShardRequest(session=session, step=5)
    await called.stub.GetShard(shard, metadata=metadata)
    other = (("authorization", f"Bearer {called.tokens['audio-1']}"),)
    with pytest.raises(grpc.aio.AioRpcError):
        await called.stub.GetShard(shard, metadata=other)
    call.cancel()
    await until(lambda: lines()[-1]["outcome"] == "closed")
    told = [(line["token"], line["method"], line["job"], line["outcome"]) for line in lines()]
    assert told[0] == ("vision-1", "OpenSession", "vision/a", "opened")
    assert told[1][:3] == ("audio-1", "GetShard", "vision/a")
    assert told[2:] == [("vision-1", "OpenSession", "vision/a", "closed")]
    assert lines()[0]["reason"] == "rank 0, host:1"
    assert lines()[0]["request"] == lines()[2]["request"]


async def test_no_token_is_ever_in_it(called, lines, tmp_path):
    for name, token in called.tokens.items():
        await called("DrainJob", name, job=token)
        await called("SubmitJob", name, spec_yaml=token)
    await called("DrainJob", "dst_" + "y" * 40, job="dst_" + "z" * 40)
    text = (tmp_path / "audit.log").read_text()
    assert len(lines()) == 2 * len(called.tokens) + 1
    assert "dst_..." in text
    for token in (*called.tokens.values(), "y" * 40, "z" * 40):
        assert token.removeprefix("dst_") not in text


def test_a_line_is_one_line_whatever_is_in_it(tmp_path, lines):
    log = AuditLog(tmp_path / "audit.log")
    log.change(event(job='a\n{"outcome": "forged"}', reason="x" * 10_000))
    log.close()
    (line,) = lines()
    assert (line["outcome"], len(line["reason"])) == ("ok", 500)


def test_a_file_that_was_moved_away_is_opened_anew(tmp_path, lines):
    log = AuditLog(tmp_path / "audit.log")
    log.change(event("first"))
    os.rename(tmp_path / "audit.log", tmp_path / "audit.log.1")
    log.change(event("second"))
    (tmp_path / "audit.log").unlink()
    log.change(event("third"))
    log.close()
    assert [line["outcome"] for line in lines("audit.log.1")] == ["first"]
    assert [line["outcome"] for line in lines()] == ["third"]


def test_lines_are_added_to_what_was_there(tmp_path, lines):
    for outcome in ("first", "second"):
        log = AuditLog(tmp_path / "audit.log")
        log.change(event(outcome))
        log.close()
    assert [line["outcome"] for line in lines()] == ["first", "second"]
    assert (tmp_path / "audit.log").stat().st_mode & 0o007 == 0


@pytest.mark.parametrize(
    ("kind", "bound", "left_out"),
    [("refusal", REFUSALS, "refusals_left_out"), ("session", SESSIONS, "sessions_left_out")],
)
def test_a_team_s_flood_is_counted_and_leaves_others_and_changes_their_lines(
    tmp_path, lines, kind, bound, left_out
):
    now_s, (at_once, per_s) = [1000.0], bound
    log = AuditLog(tmp_path / "audit.log", clock=lambda: now_s[0])
    note = getattr(log, kind)
    for _ in range(at_once + 30):
        note(event("flood"))
    note(event("other", team="audio"))
    log.change(event("ok"))
    now_s[0] += 1 / per_s
    note(event("again"))
    note(event("again"))
    log.close()
    told = [(line["outcome"], line.get(left_out)) for line in lines()]
    assert told[:at_once] == [("flood", None)] * at_once
    assert told[at_once:] == [("other", None), ("ok", 30), ("again", None)]


async def test_more_changes_than_are_recorded_are_refused_and_not_made(called, api, lines):
    await called("SubmitJob", "vision-1", spec_yaml="name: vision/a", base_directory="/jobs")
    made = 1
    while not isinstance(answer := await called("DrainJob", "vision-1", job="a"), grpc.StatusCode):
        made += 1
    assert answer is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert made >= CHANGES[0]
    assert await called("DrainJob", "audio-1", job="a") is grpc.StatusCode.NOT_FOUND
    outcomes = [line["outcome"] for line in lines() if line["team"] == "vision"]
    assert outcomes == ["ok"] * made + ["QuotaError"]


def test_a_log_that_cannot_be_written_costs_no_call(tmp_path, caplog):
    log = AuditLog(tmp_path / "folder.log")
    (tmp_path / "folder.log").unlink()
    (tmp_path / "folder.log").mkdir()
    log.change(event("ok"))
    log.close()
    assert "misses a line: Is a directory" in caplog.text
    with pytest.raises(SpecError, match=r"cannot be written: Is a directory\. Make it writable"):
        AuditLog(tmp_path / "folder.log")
    with pytest.raises(SpecError, match=r"No such file or directory\. Make its folder, or choose"):
        AuditLog(tmp_path / "no" / "folder.log")


def test_a_log_that_is_made_is_its_owner_s_alone_and_one_that_is_there_its_group_s(tmp_path):
    before = os.umask(0)
    try:
        path = tmp_path / "audit.log"
        AuditLog(path).close()
        assert path.stat().st_mode & 0o777 == 0o600
        path.chmod(0o644)
        AuditLog(path).close()
        assert path.stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_line_that_a_full_disk_cut_off_spoils_no_other(tmp_path, caplog):
    audit, file = AuditLog(tmp_path / "audit.log"), tmp_path / "audit.log"
    audit.change(event(job="vision/first"))
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 20, most[1]))
    try:
        audit.change(event(job="vision/cut-off"))
        audit.change(event(job="vision/not-begun"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    audit.change(event(job="vision/last"))
    audit.close()
    assert caplog.text.count("misses a line") == 2
    first, torn, last = file.read_text().splitlines()
    assert [json.loads(line)["job"] for line in (first, last)] == ["vision/first", "vision/last"]
    assert len(torn) == 20
