"""A scripted data service on 127.0.0.1: real gRPC servers and real bytes, faults on demand.

Two replicas train steps of two waves. In wave 0 they share pack 0 (degree 2), each encoding
one of its two images; in wave 1 replica 0 has pack 1 and replica 1 is idle but encodes its
sound. Everything follows from the step's number.
"""

import itertools
import socket
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import numpy as np
import pytest
from dataservice_proto.columns import TICKET, TicketColumns, columns_of
from dataservice_proto.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

from tests.trainer_client.scripted_shard import (
    AUDIO,
    VISION,
    Microbatch,
    Part,
    Phase,
    ScriptedShard,
)
from trainer_client import ShardDataset

JOB = "vlm-sft"
CHUNK_BYTES = 700
Code = grpc.StatusCode
Array = np.ndarray


def digest_of(step: int) -> str:
    return f"digest-{step}"


def sequence_of(step: int, pack: int, cp_rank: int) -> dict[str, Array]:
    """Local tokens of a pack's member: 8 of pack 0's 16 tokens, all 5 of pack 1."""
    tokens = 8 if pack == 0 else 5
    ids = np.arange(tokens, dtype=np.int32) + 1000 * step + 100 * pack + 10 * cp_rank
    return {"input_ids": ids, "labels": ids + 1, "position_ids": np.arange(tokens, dtype=np.int32)}


def item_of(step: int, pack: int, item: int) -> Array:
    """Pack 0 has two images of odd byte counts, pack 1 one sound."""
    rng = np.random.default_rng([step, pack, item])
    if pack == 0:
        return rng.integers(0, 256, size=(1, 13 + item, 17, 3), dtype=np.uint8)
    return rng.standard_normal(333).astype(np.float32)


def rank_shard(step: int, rank: int) -> ScriptedShard:
    """The shard, with where its parts lie: pack 0 on `w0`, pack 1 on `w1`."""
    image = Phase(
        modality=VISION, encodes=[(0, [rank])], send_rows=[0, 1], send_splits=[1, 1],
        recv_splits=[1, 1], recv_positions=[2, 5],
    )  # fmt: skip
    sound = Phase(
        modality=AUDIO,
        encodes=[(1, [0])] if rank == 1 else [],
        send_rows=[0, 1, 2] if rank == 1 else [],
        send_splits=[3, 0] if rank == 1 else [0, 0],
        recv_splits=[0, 0] if rank == 1 else [0, 3],
        recv_positions=[] if rank == 1 else [1, 2, 3],
    )
    first = Microbatch(
        pack=0, cp_group=[0, 1], cp_rank=rank, seconds=0.5, sample_ids=[10 * step, 7],
        cu_seqlens=[0, 8, 16], lengths=[7, 8], phases=[image],
    )  # fmt: skip
    second = Microbatch(pack=-1, cp_group=[rank], phases=[sound])
    if rank == 0:
        second.pack, second.seconds = 1, 0.25
        second.sample_ids, second.cu_seqlens, second.lengths = [3], [0, 5], [5]
    other = Part("w1", 1, member=0) if rank == 0 else Part("w1", 1, items=(0,))
    return ScriptedShard(
        head=coordinator_pb2.RankShard(
            job=JOB, attempt=1, step=step, rank=rank, replica=rank, plan_digest=digest_of(step),
            cursor_after=f"cursor-{step + 1}", loss_tokens=18, predicted_s=0.75, samples=3,
        ),
        microbatches=[first, second],
        summary={
            "pack_wave": [0, 1], "pack_degree": [2, 1], "pack_replicas": [0, 1, 0],
            "pack_tokens": [16, 5], "pack_seconds": [0.5, 0.25],
        },
        parts=[Part("w0", 0, member=rank), Part("w0", 0, items=(rank,)), other],
    )  # fmt: skip


@dataclass
class Fault:
    """A refusal: status, message, and the service's error class if it names one."""

    code: grpc.StatusCode
    message: str
    error_class: str = ""

    def raise_in(self, context: grpc.ServicerContext) -> None:
        if self.error_class:
            context.set_trailing_metadata((("dataservice-error", self.error_class),))
        context.abort(self.code, self.message)


class ScriptedWorker(worker_pb2_grpc.WorkerServicer):
    """Streams parts; `faults`, `corrupt` and `drop_after` each spoil that many next calls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps: list[int] = []  # of every call
        self.faults: list[Fault] = []
        self.corrupt = 0
        self.drop_after: list[int] = []  # messages sent before the stream breaks
        self.release = threading.Event()
        self.release.set()

    @property
    def calls(self) -> int:
        return len(self.steps)

    def Prepare(self, request, context):
        raise NotImplementedError

    def Release(self, request, context):
        raise NotImplementedError

    def Fetch(self, request, context):
        self.steps.append(request.ticket.step)
        if self.faults:
            self.faults.pop(0).raise_in(context)
        drop_after = self.drop_after.pop(0) if self.drop_after else None
        for number, message in enumerate(self._messages(request.ticket)):
            if number == drop_after:
                context.abort(Code.UNAVAILABLE, "worker died")
            yield message
            while not self.release.wait(0.05):
                if not context.is_active():
                    return

    def _messages(self, ticket: worker_pb2.Ticket) -> Iterator[worker_pb2.FetchChunk]:
        step, wanted = ticket.step, ticket.tensors
        known = TicketColumns(
            columns_of(ticket, TICKET), sequences=ticket.sequences, parts=ticket.parts
        )
        place = list(ticket.workers).index(self.name.removesuffix("-spare"))
        for number, part in enumerate(known.parts_at(place)):
            if part.items:
                tensors = [("item", item_of(step, part.pack, item)) for item in part.items]
            else:
                held = sequence_of(step, part.pack, part.member)
                tensors = [(n, a) for n, a in held.items() if not wanted or n in wanted]
            raw = b"".join(array.tobytes() for _, array in tensors)
            header = worker_pb2.PartHeader(
                part=number,
                size_bytes=len(raw),
                crc32=zlib.crc32(raw),
                tensors=[
                    worker_pb2.TensorHeader(name=name, dtype=a.dtype.str, shape=a.shape)
                    for name, a in tensors
                ],
            )
            if self.corrupt:
                self.corrupt -= 1
                raw = bytes([raw[0] ^ 1]) + raw[1:]
            yield worker_pb2.FetchChunk(header=header)
            for start in range(0, len(raw), CHUNK_BYTES):
                yield worker_pb2.FetchChunk(data=raw[start : start + CHUNK_BYTES])


@dataclass
class Claim:
    rank: int
    session: str
    complete: bool = False  # every rank has claimed: it stays so when the first of them leaves
    ended: threading.Event = field(default_factory=threading.Event)
    fault: Fault | None = None


class ScriptedCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Two ranks (`ranks` of them must open), `steps` steps, claims that live with streams."""

    def __init__(self, steps: int, ranks: int) -> None:
        self.steps = steps
        self.ranks = ranks
        self.attempt = 0
        self.sessions = 0
        self.claims: dict[int, Claim] = {}
        self.opens: list[coordinator_pb2.OpenSessionRequest] = []
        self.asks: list[coordinator_pb2.GetShardRequest] = []
        self.commits: list[int] = []
        self.measured_s: dict[int, float] = {}
        self.phase_s: dict[int, dict[str, float]] = {}
        self.reports: list[coordinator_pb2.ReportRequest] = []
        self.report_every_s = 0.0  # none
        self.reports_along = False  # as a service of before has it
        self.commit_calls = 0
        self.metadata: list[dict[str, str]] = []
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.planned = threading.Event()  # clear it and no step is planned
        self.planned.set()
        self.changed = threading.Condition()
        self.addresses: dict[str, str] = {}
        self.skipped: set[int] = set()
        self.edit: Callable[[ScriptedShard], None] = lambda shard: None
        self.streams = True  # False: as a service that knows no GetShards
        self.calls = 0  # of GetShards
        self.questions_a_call: int | None = None  # after which it ends
        self.large = False  # the groups of the whole step do not come with shards
        self.summaries: list[int] = []  # steps whose groups were asked for

    def next_of(self, step: int) -> int:
        """The first step from this one on that is not skipped."""
        return next(n for n in range(step, 99) if n not in self.skipped)

    # The methods that the client never calls.
    SubmitJob = ListJobs = DrainJob = DeleteJob = ExplainStep = None

    def GetJob(self, request, context):
        return context.abort(Code.NOT_FOUND, "no such job")

    def OpenSession(self, request, context):
        self.opens.append(request)
        self._fault("OpenSession", context)
        if request.job != JOB:
            Fault(Code.NOT_FOUND, f"no job {request.job!r}", "NotFoundError").raise_in(context)
        claim = self._claim(request, context)
        self.metadata.append(dict(context.invocation_metadata()))
        if not context.add_callback(claim.ended.set):
            claim.ended.set()  # the client has gone already
        try:
            with self.changed:
                granted = lambda: claim.complete or claim.ended.is_set()  # noqa: E731
                while not self.changed.wait_for(granted, 0.05):
                    pass
            start = int(request.cursor.removeprefix("cursor-") or 0)
            yield coordinator_pb2.SessionEvent(
                attempt=self.attempt,
                session=claim.session,
                start_step=start,
                report_every_s=self.report_every_s,
                reports_along=self.reports_along,
            )
            claim.ended.wait()
            if claim.fault:
                claim.fault.raise_in(context)
        finally:
            with self.changed:
                if self.claims.get(request.rank) is claim:
                    del self.claims[request.rank]
                self.changed.notify_all()

    def GetShards(self, requests, context):
        self.calls += 1
        if not self.streams:
            return super().GetShards(requests, context)
        some = itertools.islice(requests, self.questions_a_call)
        return (self.GetShard(request, context) for request in some)

    def GetShard(self, request, context):
        self.asks.append(request)
        self._fault("GetShard", context)
        claim = self._session(request.session, context)
        if request.trained:
            self._fault("CommitStep", context)
        for trained in request.trained:
            self._trained(trained)
        while not self.planned.wait(0.05):
            if not context.is_active():
                return coordinator_pb2.GetShardResponse()
        if request.step in self.skipped:
            return coordinator_pb2.GetShardResponse(
                skipped=coordinator_pb2.SkippedSteps(next_step=self.next_of(request.step))
            )
        if request.step >= self.steps:
            return coordinator_pb2.GetShardResponse(
                end_of_data=coordinator_pb2.EndOfData(steps=self.steps)
            )
        shard = rank_shard(request.step, claim.rank)
        wanted = request.wanted
        shard.tensors = ["input_ids", "position_ids"] * wanted.tokens + ["labels"] * wanted.labels
        if not (wanted.tokens or wanted.media):
            for microbatch in shard.microbatches:
                microbatch.phases.clear()
        shard.parts = [p for p in shard.parts if (wanted.media if p.items else shard.tensors)]
        blamed = {*request.failed_workers, *request.slow_workers}
        for name in ("w0", "w1"):
            holder = f"{name}-spare" if name in blamed else name
            shard.addresses[name] = self.addresses[holder]
        shard.with_summary = not self.large
        self.edit(shard)
        return coordinator_pb2.GetShardResponse(shard=shard.message())

    def GetStepSummary(self, request, context):
        self._fault("GetStepSummary", context)
        claim = self._session(request.session, context)
        self.summaries.append(request.step)
        return rank_shard(request.step, claim.rank).summary_message()

    def CommitStep(self, request, context):
        self._fault("CommitStep", context)
        self._session(request.session, context)
        self.commit_calls += 1
        self._trained(request)
        return coordinator_pb2.CommitStepResponse()

    def _trained(self, request) -> None:
        with self.changed:
            if request.step in self.commits:
                return  # it came along another way
            self.commits.append(request.step)
            if request.HasField("measured_s"):
                self.measured_s[request.step] = request.measured_s
                self.phase_s[request.step] = dict(request.phase_s)

    def Report(self, request, context):
        self._fault("Report", context)
        self.reports.append(request)
        return coordinator_pb2.ReportResponse()

    def _claim(self, request, context) -> Claim:
        with self.changed:
            if request.rank in self.claims:
                message = f"rank {request.rank} is held by another client"
                Fault(Code.ALREADY_EXISTS, message, "RankClaimedError").raise_in(context)
            self.sessions += 1
            if not request.rejoin_attempt and not self.claims:
                self.attempt += 1
            claim = Claim(request.rank, f"session-{self.sessions}")
            self.claims[request.rank] = claim
            if len(self.claims) >= self.ranks:
                for each in self.claims.values():
                    each.complete = True
            self.changed.notify_all()
            return claim

    def _session(self, session: str, context) -> Claim:
        for claim in list(self.claims.values()):
            if claim.session == session:
                return claim
        return context.abort(Code.NOT_FOUND, "no such session")

    def _fault(self, method: str, context) -> None:
        if self.faults[method]:
            self.faults[method].pop(0).raise_in(context)


class Service:
    """The coordinator, two workers and a spare for each, all killable."""

    sequence_of = staticmethod(sequence_of)
    item_of = staticmethod(item_of)
    rank_shard = staticmethod(rank_shard)

    def __init__(self, *, steps: int = 4, ranks: int = 1) -> None:
        self.coordinator = ScriptedCoordinator(steps, ranks)
        names = ("w0", "w1", "w0-spare", "w1-spare")
        self.workers = {name: ScriptedWorker(name) for name in names}
        self._servers: dict[str, tuple[grpc.Server, ThreadPoolExecutor]] = {}
        self._ports: dict[str, socket.socket] = {}
        self.addresses = self.coordinator.addresses
        for name in ("coordinator", *names):
            self.start(name)

    @property
    def address(self) -> str:
        return self.addresses["coordinator"]

    def start(self, name: str, credentials: grpc.ServerCredentials | None = None) -> None:
        """Serve; on the former port if it was served before."""
        if name not in self.addresses:
            self._ports[name] = reserved_port()
            self.addresses[name] = f"127.0.0.1:{self._ports[name].getsockname()[1]}"
        pool = ThreadPoolExecutor(max_workers=12)
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        if name == "coordinator":
            coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self.coordinator, server)
        else:
            worker_pb2_grpc.add_WorkerServicer_to_server(self.workers[name], server)
        if credentials is None:
            server.add_insecure_port(self.addresses[name])
        else:
            server.add_secure_port(self.addresses[name], credentials)
        self._servers[name] = (server, pool)  # first: whoever it serves may kill it
        server.start()

    def kill(self, name: str) -> None:
        """Close the port and every connection at once."""
        server, pool = self._servers.pop(name)
        server.stop(None).wait()
        pool.shutdown()

    def close(self) -> None:
        for worker in self.workers.values():
            worker.release.set()
        self.coordinator.planned.set()
        for name in list(self._servers):
            self.kill(name)
        for port in self._ports.values():
            port.close()

    def fail(self, method: str, code: str, message: str, error_class: str = "") -> None:
        """Have the next call of a coordinator's method, or of a worker, refused."""
        fault = Fault(Code[code], message, error_class)
        if method in self.workers:
            self.workers[method].faults.append(fault)
        else:
            self.coordinator.faults[method].append(fault)

    def end_session(self, rank: int, code: str = "", message: str = "", cls: str = "") -> None:
        """End a rank's stream, with an error or as if it simply stopped.

        Its session is unknown from here on, however long the stream takes to end.
        """
        with self.coordinator.changed:
            claim = self.coordinator.claims.pop(rank)
        claim.fault = Fault(Code[code], message, cls) if code else None
        claim.ended.set()

    def dataset(self, rank: int = 0, **options: object) -> ShardDataset:
        """A client of this service. No deadline passes by itself, even on a busy machine; a test
        of one shortens it, and only where nothing else can pass it first."""
        known = {"job": JOB, "rank": rank, "world_size": 2}
        deadlines = {"connect_timeout_s": 60.0, "timeout_s": 60.0, "stall_timeout_s": 60.0}
        return ShardDataset(self.address, **{**known, **deadlines, **options})  # type: ignore[arg-type]


def reserved_port() -> socket.socket:
    """A port that nobody else is given, also while its server is down: a socket that is bound and
    never listens, beside which a server with SO_REUSEADDR (as gRPC's) can listen."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind(("127.0.0.1", 0))
    return port


@pytest.fixture(autouse=True)
def a_busy_machine_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's own limits, for a machine on which any thread may stand still for seconds."""
    for name in (
        "run.CLOSING_FLUSH_S",
        "run.JOIN_S",
        "session.CLAIM_GRACE_S",
        "session.STALE_SESSION_S",
        "transport.PROBE_S",
        "transport.REASON_S",
    ):
        monkeypatch.setattr(f"trainer_client.{name}", 60.0)


@pytest.fixture
def make_service() -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(**options: int) -> Service:
        made.append(Service(**options))
        return made[-1]

    yield make
    for service in made:
        service.close()


@pytest.fixture
def service(make_service: Callable[..., Service]) -> Service:
    return make_service()


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Iterator[None]:
    yield
    left = [t.name for t in threading.enumerate() if t.name.startswith("shard-") and t.is_alive()]
    assert not left, f"still running: {left}"
