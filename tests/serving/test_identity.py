"""Who may call what: every method of the coordinator, over real sockets and a real engine."""

import asyncio
import os
import resource
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from traceback import format_exception

import grpc
import grpc.aio
import pytest
import yaml
from dataservice_proto.columns import VERSION
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from dataservice.core.errors import QuotaError, SpecError, TokenError
from dataservice.core.team import Identity, TeamSpec
from dataservice.core.tokens import token_digest
from dataservice.operate.tokens_file import TokensFile, expiry, make_token, read_tokens
from dataservice.serving import coordinator_servicer
from dataservice.serving.access_control import RULES, AccessControl
from dataservice.serving.identity import Caller
from dataservice.serving.limits import Limits
from dataservice.serving.server import serve_coordinator
from dataservice.state.memory import MemoryStateStore
from tests.engine.support import Books, make_coordinator, make_setup

SERVICE = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"]
METHODS = {method.name: method for method in SERVICE.methods}
OF_A_JOB = sorted(n for n, m in METHODS.items() if "job" in m.input_type.fields_by_name)
OF_A_SESSION = sorted(n for n, m in METHODS.items() if "session" in m.input_type.fields_by_name)
CHANGES = sorted(name for name, rule in RULES.items() if rule.role != "reader")
JOBS = ("vision/a", "vision/a:validation", "vision/c", "audio/bells")
Code = grpc.StatusCode


def entry(token, **fields):
    return {"name": token, "role": "team", "sha256": token_digest(token).hex(), **fields}


ENTRIES = [
    entry("vision", team="vision"),
    entry("vision-next", team="vision"),
    entry("vision-reader", team="vision", role="reader"),
    entry("audio", team="audio"),
    entry("audio-late", team="audio", expires="2020-01-01"),
    entry("operator", role="admin"),
]


@dataclass
class Served:
    """A coordinator with one job of each team, behind tokens."""

    address: str
    tokens: object
    engine: object

    def write(self, entries):
        self.tokens.write_text(yaml.safe_dump(entries))


@asynccontextmanager
async def served(tmp_path, *, teams=None, limits=None, jobs=("vision/a", "audio/bells")):
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(yaml.safe_dump(ENTRIES))
    access = AccessControl(authenticate=TokensFile(tokens, look_s=0.0), teams=teams, limits=limits)
    setups = [make_setup(name=name, memory_tokens=2048) for name in JOBS]
    engine = make_coordinator(MemoryStateStore(), Books(), *setups)
    await engine.start()
    for name in jobs:
        await engine.submit(name, "")
    handle = await serve_coordinator(engine, "127.0.0.1:0", access=access)
    yield Served(address=handle.address, tokens=tokens, engine=engine)
    await handle.stop(0)
    await engine.stop()


@pytest.fixture
async def service(tmp_path):
    async with served(tmp_path) as running:
        yield running


@pytest.fixture
def ask(service, channel_to):
    """Call a method by its name: (status, message); OK and the last answer where it succeeds."""

    async def ask(method, token=None, header=None, **fields):
        descriptor = METHODS[method]
        call_of = channel_to(service.address)
        kind = call_of.unary_stream if descriptor.server_streaming else call_of.unary_unary
        call = kind(
            f"/{SERVICE.full_name}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(descriptor.output_type).FromString,
        )
        given = header or (None if token is None else f"Bearer {token}")
        limit_s = 120  # the first plan of a machine compiles its kernels
        metadata = () if given is None else (("authorization", given),)
        request = GetMessageClass(descriptor.input_type)(**fields)
        try:
            if not descriptor.server_streaming:
                return Code.OK, await call(request, metadata=metadata, timeout=limit_s)
            answers = call(request, metadata=metadata, timeout=limit_s)
            last = await answers.read()
            answers.cancel()
            return (Code.OK, last) if last is not grpc.aio.EOF else (await answers.code(), None)
        except grpc.aio.AioRpcError as failed:
            return failed.code(), failed.details()

    return ask


@pytest.fixture
async def session(service, channel_to):
    """Open the one rank of a job and hold it."""
    calls = []

    async def session(token, job="a"):
        stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(service.address))
        request = coordinator_pb2.OpenSessionRequest(
            columns=VERSION, job=job, rank=0, world_size=1, client="h:1"
        )
        calls.append(stub.OpenSession(request, metadata=(("authorization", f"Bearer {token}"),)))
        return (await calls[-1].read()).session, calls[-1]

    yield session
    for call in calls:
        call.cancel()


# ---- every method -------------------------------------------------------------------------


def test_every_method_has_a_rule_and_every_rule_a_method():
    assert set(RULES) == set(METHODS)


async def test_a_method_without_a_rule_is_answered_to_nobody(ask, monkeypatch):
    monkeypatch.delitem(RULES, "GetJob")
    code, message = await ask("GetJob", "operator", job="vision/a")
    assert code is Code.PERMISSION_DENIED
    assert "no rule says who may call GetJob" in message


@pytest.mark.parametrize("method", METHODS)
async def test_no_method_answers_without_a_token_that_is_known_and_valid(ask, method):
    refused = [
        (await ask(method), "the call carries none"),
        (await ask(method, "wrong"), "not one of this service's"),
        (await ask(method, header="Basic dmlzaW9u"), "not one of this service's"),
        (await ask(method, header="vision"), "not one of this service's"),
        (await ask(method, "audio-late"), "token 'audio-late' expired at 2020-01-01"),
    ]
    for (code, message), reason in refused:
        assert code is Code.UNAUTHENTICATED
        assert reason in message


@pytest.mark.parametrize("method", CHANGES)
async def test_a_reader_changes_nothing(ask, method):
    code, message = await ask(method, "vision-reader")
    assert code is Code.PERMISSION_DENIED
    assert (
        f"'vision-reader' has role reader, and {method} needs role {RULES[method].role}" in message
    )


@pytest.mark.parametrize("method", [name for name, rule in RULES.items() if rule.role == "admin"])
async def test_a_team_cannot_do_what_is_for_admins(ask, method):
    code, message = await ask(method, "vision")
    assert code is Code.PERMISSION_DENIED
    assert f"has role team, and {method} needs role admin" in message
    assert (await ask(method, "operator"))[0] is Code.OK


@pytest.mark.parametrize("method", OF_A_JOB)
async def test_another_team_s_job_is_answered_as_one_that_never_was(ask, method):
    steps = [coordinator_pb2.StepRange(first_step=1, last_step=2)]
    needed = {
        "OpenSession": {"world_size": 1, "columns": VERSION},
        "SkipSteps": {"ranges": steps},
    }.get(method, {})
    for theirs, nobody_s in (("bells", "drums"), ("audio/bells", "audio/drums")):
        there = await ask(method, "vision", job=theirs, **needed)
        nowhere = await ask(method, "vision", job=nobody_s, **needed)
        assert there[0] is nowhere[0] is Code.NOT_FOUND
        assert there[1].replace("bells", "drums") == nowhere[1]
        assert "registered: a." in there[1]


@pytest.mark.parametrize("method", OF_A_SESSION)
async def test_another_team_s_session_is_answered_as_one_that_never_was(ask, session, method):
    theirs, _ = await session("audio", "bells")
    refused = await ask(method, "vision", session=theirs, step=0)
    assert refused == await ask(method, "vision", session="nobody's", step=0)
    assert refused[0] is Code.NOT_FOUND
    for own in ("GetShard", method):
        assert (await ask(own, "audio", session=theirs, step=0))[0] is Code.OK


# ---- names --------------------------------------------------------------------------------


async def test_a_team_sees_its_own_jobs_by_plain_names_and_an_admin_all_by_full_ones(ask):
    _, own = await ask("ListJobs", "vision-reader")
    assert [job.name for job in own.jobs] == ["a"]
    _, every = await ask("ListJobs", "operator")
    assert [job.name for job in every.jobs] == ["audio/bells", "vision/a"]
    for token, given, told in [
        ("vision", "a", "a"),
        ("vision", "vision/a", "a"),
        ("operator", "vision/a", "vision/a"),
    ]:
        code, job = await ask("GetJob", token, job=given)
        assert (code, job.name) == (Code.OK, told)
    assert (await ask("GetJob", "operator", job="a"))[0] is Code.NOT_FOUND


async def test_a_validation_has_the_caller_s_name_too(tmp_path, channel_to):
    async with served(tmp_path, jobs=("vision/a", "vision/a:validation", "audio/bells")) as running:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(running.address))
        for token, given, told in [("vision", "a", "a"), ("operator", "vision/a", "vision/a")]:
            metadata = (("authorization", f"Bearer {token}"),)
            request = coordinator_pb2.JobRequest(job=given)
            job = await stub.GetJob(request, metadata=metadata)
            assert (job.name, job.validation.name) == (told, f"{told}:validation")
            health = coordinator_pb2.GetHealthRequest(job=given)
            seen = await stub.GetHealth(health, metadata=metadata)
            assert [each.job for each in seen.jobs] == [told, f"{told}:validation"]
        audio = (("authorization", "Bearer audio"),)
        request = coordinator_pb2.JobRequest(job="vision/a:validation")
        with pytest.raises(grpc.aio.AioRpcError, match="no job") as refused:
            await stub.GetJob(request, metadata=audio)
        assert refused.value.code() is Code.NOT_FOUND


async def test_a_shard_and_errors_carry_the_caller_s_names(ask, session):
    name, _ = await session("vision")
    _, answer = await ask("GetShard", "vision", session=name, step=0, received_step=-1)
    assert answer.shard.job == "a"
    assert answer.shard.ticket.job == "vision/a"
    _, held = await ask("DeleteJob", "vision", job="a")
    assert "job 'a' is in use by h:1" in held
    _, held = await ask("DeleteJob", "operator", job="vision/a")
    assert "job 'vision/a' is in use" in held


def test_errors_about_data_keep_their_paths():
    caller = Caller(identity=Identity(team="vision", role="team", name=""))
    text = "job 'vision/a' reads 'vision/a' of /data/vision/a"
    assert str(caller.told(TokenError(text))) == "job 'a' reads 'a' of /data/vision/a"
    assert str(caller.told(SpecError(text))) == text


async def test_a_job_is_submitted_for_the_caller_s_team(tmp_path, channel_to):
    seen = []
    async with served(tmp_path) as running:

        async def submit(spec_yaml, base_directory, *, team, max_jobs):
            seen.append((team, max_jobs))
            return await running.engine.job("vision/a")

        running.engine.submit = submit
        stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(running.address))
        for token in ("vision", "audio", "operator"):
            await stub.SubmitJob(
                coordinator_pb2.SubmitJobRequest(spec_yaml="a"),
                metadata=(("authorization", f"Bearer {token}"),),
            )
    assert seen == [("vision", 1000), ("audio", 1000), ("", 1000)]


# ---- rotation -----------------------------------------------------------------------------


async def test_tokens_are_added_and_taken_away_without_a_restart(service, ask):
    service.write([*ENTRIES[1:], entry("fresh", team="vision")])
    assert (await ask("ListJobs", "vision"))[0] is Code.UNAUTHENTICATED
    assert (await ask("ListJobs", "fresh"))[0] is Code.OK


@pytest.mark.parametrize(
    "broken", ["", "- name: [", "- {name: a, token: dst_x}", "- {expires: 2026-11-31}", None]
)
async def test_a_tokens_file_that_breaks_keeps_the_old_ones(service, ask, caplog, broken):
    service.tokens.unlink() if broken is None else service.tokens.write_text(broken)
    assert (await ask("ListJobs", "vision"))[0] is Code.OK
    assert (await ask("ListJobs", "wrong"))[0] is Code.UNAUTHENTICATED
    assert caplog.text.count("the tokens in use stay") == 1
    assert "dst_x" not in caplog.text


async def test_a_session_ends_with_its_token_and_is_opened_again_with_the_next(
    service, ask, session, monkeypatch
):
    monkeypatch.setattr(coordinator_servicer, "TOKEN_CHECK_S", 0.05)
    name, call = await session("vision")
    service.write(ENTRIES[1:])
    with pytest.raises(grpc.aio.AioRpcError, match="with the team's new token") as ended:
        await call.read()
    assert ended.value.code() is Code.UNAVAILABLE
    assert (await ask("GetShard", "vision-next", session=name))[0] is Code.NOT_FOUND
    _, call = await session("vision-next")
    await asyncio.sleep(0.2)
    assert not call.done()


# ---- limits -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "fields", "told"),
    [
        ("SubmitJob", {"spec_yaml": "x" * (2**20 + 1)}, "spec_yaml has 1,048,577 bytes"),
        ("SubmitJob", {"base_directory": "x" * 5000}, "at most 4,096"),
        ("GetJob", {"job": "ü" * 300}, "job has 600 bytes"),
        ("RecostJob", {"job": "a", "cost_json": "x" * 70_000}, "cost_json"),
        ("OpenSession", {"job": "a", "world_size": 10**6}, "world_size has 1,000,000 ranks"),
        ("OpenSession", {"job": "a", "world_size": 1, "client": "x" * 600}, "client"),
        ("GetShard", {"failed_workers": ["w"] * 5000}, "failed_workers has 5,000 entries"),
        ("GetShard", {"failed_workers": ["w" * 600]}, "failed_workers has 600 bytes"),
    ],
)
async def test_a_request_that_is_too_large_is_refused_with_the_limit(ask, method, fields, told):
    code, message = await ask(method, "vision", **fields)
    assert code is Code.INVALID_ARGUMENT
    assert told in message


@pytest.mark.parametrize("method", METHODS)
async def test_a_request_that_is_no_message_harms_nobody(service, ask, channel_to, method):
    kind = "unary_stream" if METHODS[method].server_streaming else "unary_unary"
    for garbage in (b"\xff" * 64, b"\x0a\x03\xff\xfe\xfd", os.urandom(4096)):
        call = getattr(channel_to(service.address), kind)(f"/{SERVICE.full_name}/{method}")
        answer = call(garbage, metadata=(("authorization", "Bearer vision"),), timeout=20)
        with suppress(grpc.aio.AioRpcError):
            await (answer.read() if kind == "unary_stream" else answer)
        answer.cancel()
    assert (await ask("ListJobs", "vision"))[0] is Code.OK


async def test_a_team_has_so_many_calls_open_and_other_teams_are_not_counted(tmp_path, channel_to):
    async with served(tmp_path, limits=Limits(calls_per_team=1)) as running:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(running.address))
        vision, audio = ((("authorization", f"Bearer {team}"),) for team in ("vision", "audio"))
        request = coordinator_pb2.OpenSessionRequest(
            columns=VERSION, job="a", rank=0, world_size=1, client="h:1"
        )
        call = stub.OpenSession(request, metadata=vision)
        await call.read()
        listing = coordinator_pb2.ListJobsRequest()
        with pytest.raises(grpc.aio.AioRpcError, match="1 calls of this team") as refused:
            await stub.ListJobs(listing, metadata=vision)
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        await stub.ListJobs(listing, metadata=audio)
        call.cancel()
        while True:
            with suppress(grpc.aio.AioRpcError):
                await stub.ListJobs(listing, metadata=vision)
                break


async def test_a_team_has_so_many_jobs(tmp_path, channel_to):
    async with served(tmp_path, teams={"vision": TeamSpec(max_jobs=1)}) as running:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(running.address))
        vision = (("authorization", "Bearer vision"),)

        def submit(name):
            return stub.SubmitJob(coordinator_pb2.SubmitJobRequest(spec_yaml=name), metadata=vision)

        assert (await submit("vision/a")).name == "a"  # it is there already
        with pytest.raises(grpc.aio.AioRpcError, match="has 1 jobs, and may have 1") as refused:
            await submit("vision/c")
        assert refused.value.code() is Code.RESOURCE_EXHAUSTED
        await stub.DeleteJob(coordinator_pb2.JobRequest(job="a"), metadata=vision)
        assert (await submit("vision/c")).name == "c"


async def test_two_jobs_submitted_at_once_do_not_pass_one_quota():
    setups = [make_setup(name=name) for name in ("v/a", "v/b", "w/c")]
    engine = make_coordinator(MemoryStateStore(), Books(), *setups)
    done = await asyncio.gather(
        engine.submit("v/a", "", team="v", max_jobs=1),
        engine.submit("v/b", "", team="v", max_jobs=1),
        engine.submit("w/c", "", team="w", max_jobs=1),
        return_exceptions=True,
    )
    refused = [isinstance(each, QuotaError) for each in done]
    # Which of the two comes first, the threads that read their files decide.
    assert (sorted(refused[:2]), done[2].record.name) == ([False, True], "w/c")


# ---- an open service, and what is beside the service's own calls ---------------------------


async def test_without_tokens_everyone_is_an_admin_whatever_they_show(coordinator, channel_to):
    stub = coordinator_pb2_grpc.CoordinatorStub(channel_to(coordinator))
    metadata = (("authorization", "Bearer anything"),)
    submitted = await stub.SubmitJob(
        coordinator_pb2.SubmitJobRequest(spec_yaml="name: vlm"), metadata=metadata
    )
    assert submitted.name == "vlm"


async def test_reflection_is_off_where_tokens_are_asked_for(service, channel_to):
    call = reflection_pb2_grpc.ServerReflectionStub(
        channel_to(service.address)
    ).ServerReflectionInfo()
    with suppress(grpc.aio.AioRpcError):  # the refusal may come before what is written
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    assert await call.code() is Code.UNIMPLEMENTED


# ---- the tokens file ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ([entry("a", role="boss")], "0.role: "),
        ([entry("a")], "role team needs a team"),
        ([entry("a", team="a/b")], "0.team: "),
        ([{**entry("a", team="a"), "sha256": "abc"}], "0.sha256: "),
        ([entry("a", team="a"), entry("a", team="b")], "has name 'a' twice"),
        ([entry("a", team="a"), {**entry("a", team="b"), "name": "b"}], "has sha256 "),
        ({"tokens": []}, "valid list"),
        ([], "at least 1"),
    ],
)
def test_a_tokens_file_that_is_wrong_says_where(tmp_path, entries, told):
    (tmp_path / "tokens").write_text(yaml.safe_dump(entries))
    with pytest.raises(SpecError, match=f"tokens file .*{told}"):
        read_tokens(tmp_path / "tokens")


@pytest.mark.parametrize("value", ["2026-11-31", "!!bool dst_x", "!!int dst_x"])
def test_a_value_that_is_none_is_told_without_showing_it(tmp_path, value):
    (tmp_path / "tokens").write_text(f"- {{name: a, expires: {value}}}")
    with pytest.raises(SpecError, match="has a value that cannot be read, such as a date") as told:
        read_tokens(tmp_path / "tokens")
    assert "dst_x" not in "".join(format_exception(told.value))


def test_a_token_is_random_recognisable_and_in_the_file_only_as_its_hash(tmp_path):
    now = datetime.now(tz=UTC)
    token, record = make_token(team="vision", role="team", expires=now + timedelta(days=1))
    other, _ = make_token(team="vision", role="team")
    assert token.startswith("dst_")
    assert len({token, other, token[4:12], other[4:12]}) == 4
    written = yaml.safe_dump([record.model_dump(mode="json", exclude_none=True)])
    assert token[4:] not in written
    (tmp_path / "tokens").write_text(written)
    tokens = TokensFile(tmp_path / "tokens")
    assert tokens(token) == Identity(team="vision", role="team", name=record.name)
    tokens = TokensFile(tmp_path / "tokens", clock=lambda: now.timestamp() + 86_400)
    with pytest.raises(TokenError, match=f"{record.name!r} expired"):
        tokens(token)


def test_tokens_that_could_not_be_read_for_a_moment_are_taken_up_after_it(tmp_path, caplog):
    (old, was), (new, now) = (make_token(team="vision", role="team") for _ in range(2))
    file = tmp_path / "tokens"
    file.write_text(yaml.safe_dump([was.model_dump(mode="json", exclude_none=True)]))
    tokens = TokensFile(file, look_s=0.0)
    file.write_text(yaml.safe_dump([now.model_dump(mode="json", exclude_none=True)]))
    with no_files_can_be_opened():
        assert tokens(old).name == tokens(old).name == was.name
    assert caplog.text.count("the tokens in use stay") == 1
    assert tokens(new).name == now.name
    with pytest.raises(TokenError, match="not one of this service's"):
        tokens(old)


@contextmanager
def no_files_can_be_opened():
    """As where a process has all the descriptors that it may have, or may not read a file."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_an_end_is_a_time_from_now_a_date_or_never():
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert expiry("90d", now) == datetime(2026, 4, 1, tzinfo=UTC)
    assert expiry("2026-12-31", now) == datetime(2026, 12, 31, tzinfo=UTC)
    assert expiry("never", now) is None
    for wrong in ("90", "soon", "2025-12-31", "0d"):
        with pytest.raises(SpecError, match=wrong):
            expiry(wrong, now)
