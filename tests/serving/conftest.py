"""Real servers on loopback: a worker over a real host, a coordinator over an api in memory."""

import asyncio
from dataclasses import replace

import grpc.aio
import numpy as np
import pytest
from dataservice_proto.v1 import worker_pb2

from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    RankClaimedError,
    SpecError,
    WorkerLostError,
)
from dataservice.core.health import (
    OTHERS,
    Diagnosed,
    Finding,
    FleetHealth,
    JobHealth,
    JobProgress,
    RankHealth,
    ServiceHealth,
    SourceHealth,
    SourceProgress,
)
from dataservice.core.index_orders import IndexPlaces, IndexProgress, IndexResult, IndexWaiting
from dataservice.core.job import CostRecord, JobRecord, LedgerEntry, SkipRecord
from dataservice.core.orders import (
    PackKey,
    PackOrder,
    PackSample,
    PartSpec,
    RankShard,
    StorageOutage,
)
from dataservice.core.plan import StageReport, StepPlan
from dataservice.core.ports import SampleDecoder, WorkerInfo
from dataservice.core.sample import (
    ByteSpan,
    DecodedSample,
    ItemLengths,
    Modality,
    RawSample,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.tickets import holder_key, holder_of, prove, sign_ticket, ticket_for
from dataservice.core.topology import Topology
from dataservice.engine.api import (
    EndOfData,
    FoundSample,
    JobStatus,
    NamedPack,
    ReplayedStep,
    SampleStep,
    SessionOpened,
    SkippedSteps,
    StepExplanation,
    StepFate,
    WorkerStatus,
)
from dataservice.engine.ready_step import step_summary
from dataservice.engine.shards import columns_of, cut_step
from dataservice.serving import wire_packs
from dataservice.serving.server import serve_coordinator, serve_worker
from dataservice.workers.host import DecodingHost
from dataservice.workers.sample_pipelines import PipelineFactory
from dataservice.workers.thread_decoders import ThreadDecoders
from soak.gate import Gate

SECRET = b"a secret of 32 bytes for testing"
WORKER = "worker-0.1"
NEVER_S = 4_000_000_000
SESSION = "a rank's session"
HOLDER = holder_of(SESSION)

OTHERWISE = {
    "content": "differs",
    "note": "s/b is another",
    "packs": (NamedPack(pack=1, samples=("s/a", "s/b")),),
}


class TinyPipeline(SampleDecoder):
    """Reads nothing from disk: a sample's arrays follow from its id."""

    pad_token_id = 0

    def read(self, ref):
        return RawSample(key=ref.key, record={"id": ref.sample_id})

    def decode(self, raw, planned, epoch=None, places=()):
        seed = np.random.default_rng(raw.record["id"])
        ids = seed.integers(1, 1000, planned.llm_tokens, dtype=np.int32)
        return DecodedSample(
            input_ids=ids,
            labels=ids + 1,
            items=tuple(
                seed.integers(0, 256, item.shape, dtype=np.uint8)
                if item.modality is Modality.VISION
                else seed.standard_normal(item.shape, dtype=np.float32)
                for item in planned.items
            ),
        )


def make_order(*, pack=0, samples=2, degree=1, tokens=8, shapes=((1, 2, 2, 3), (16,))):
    """Samples with one item per shape; 4 axes are vision, 1 is audio."""
    items = tuple(
        ItemLengths(
            modality=Modality.VISION if len(shape) == 4 else Modality.AUDIO,
            encoder_tokens=4,
            llm_tokens=1,
            position=place,
            shape=shape,
        )
        for place, shape in enumerate(shapes)
    )
    return PackOrder(
        key=PackKey(job="vlm", step=5, plan_digest="ab" * 16, pack=pack),
        degree=degree,
        pipeline="{}",
        samples=tuple(
            PackSample(
                ref=SampleRef(
                    sample_id=n, source="s", key=f"k{n}", location=SampleLocation(file="f")
                ),
                lengths=SampleLengths(llm_tokens=tokens, loss_tokens=tokens, items=items),
            )
            for n in range(samples)
        ),
    )


def make_ticket(*parts, worker=WORKER, secret=SECRET, expires_unix_s=NEVER_S):
    ticket = ticket_for({worker: parts}, rank=0, holder=HOLDER, expires_unix_s=expires_unix_s)
    return sign_ticket(ticket, secret)


def make_fetch(ticket, session=SESSION):
    """What the rank of this session asks for with a ticket."""
    proof = prove(ticket, WORKER, holder_key(holder_of(session), SECRET)) if session else b""
    return worker_pb2.FetchRequest(ticket=wire_packs.ticket_to_proto(ticket), proof=proof)


def make_plan(step=5):
    """Two packs over two replicas, one with an image."""
    return StepPlan(
        step=step,
        replicas=2,
        waves=1,
        cost_version="v1",
        predicted_s=0.5,
        sample_ids=np.array([4, 9, 2], dtype=np.int64),
        sample_epoch=np.zeros(3, dtype=np.int32),
        sample_tokens=np.array([8, 6, 4], dtype=np.int32),
        sample_loss_tokens=np.array([4, 3, 2], dtype=np.int32),
        pack_offsets=np.array([0, 2, 3], dtype=np.int64),
        pack_samples=np.array([2, 0, 1], dtype=np.int32),
        pack_wave=np.array([0, 0], dtype=np.int32),
        pack_seconds=np.array([0.5, 0.25]),
        replica_offsets=np.array([0, 1, 2], dtype=np.int64),
        pack_replicas=np.array([1, 0], dtype=np.int32),
        item_sample=np.array([0], dtype=np.int32),
        item_modality=np.array([0], dtype=np.int8),
        item_encoder_tokens=np.array([4], dtype=np.int32),
        item_llm_tokens=np.array([1], dtype=np.int32),
        item_position=np.array([2], dtype=np.int32),
        item_replica=np.array([0], dtype=np.int32),
        stages=(
            StageReport(
                stage="pack", algorithm="isf", unit="packs", before=3, after=2, lower_bound=1.5
            ),
        ),
    )


def make_shard(*, rank=0, step=5):
    plan = make_plan(step)
    digest = plan.digest
    return RankShard(
        job="vlm",
        attempt=1,
        step=step,
        rank=rank,
        replica=rank,
        plan_digest=digest,
        cursor_after=Cursor(step=step + 1).to_json(),
        loss_tokens=9,
        samples=3,
        predicted_s=0.5,
        columns=columns_of(cut_step(plan), rank),
        ticket=make_ticket(PartSpec(key=make_order().key, cp_rank=0)),
        summary=step_summary(plan, digest),
    )


def make_health(jobs):
    """A service whose jobs all wait for source `ocr`."""
    found = Finding(severity="slow", text="rank 1 waits: source `ocr` decodes at 0.6 of need")
    return ServiceHealth(
        jobs=tuple(Diagnosed(health=make_job_health(job), findings=(found,)) for job in jobs),
        fleet=FleetHealth(
            workers=3,
            wanted_workers=4,
            slots=6,
            slots_per_worker=2,
            busy_slots=5.5,
            waiting_teams=("", OTHERS),
            grpc_bytes=3 * 2**40,
            same_node_bytes=5 * 2**40,
        ),
        troubles=("the state store has not answered for 12 s",),
    )


def make_job_health(job):
    """Every field with a value of its own."""
    rank = RankHealth(
        rank=1, client="host:1", live=True, received_step=44, committed_step=43, quiet_s=1.5,
        wait_s=0.25, untrained_steps=11,
    )  # fmt: skip
    source = SourceHealth(
        source="ocr", samples=8.0, read_s=0.5, decode_s=2.5, usual_s=0.125, quarantined=3,
        budget_used=0.75, read_cpu_s=0.125, decode_cpu_s=1.25,
    )  # fmt: skip
    drawn = SourceProgress(
        source="ocr", epoch_drawn=12, epoch_samples=40, drawn=52, samples=120, masked=5
    )
    return JobHealth(
        job=job,
        attempt=2,
        world_size=4,
        missing_ranks=(2, 3),
        forming_s=7.0,
        draining=True,
        ended=True,
        committed_step=43,
        planned_step=47,
        ready_steps=4,
        decoded_steps=1,
        window_steps=5,
        steps=20,
        step_s=1.5,
        plan_s=0.375,
        share_slots=2.25,
        ranks=(rank,),
        sources=(source,),
        failure="source `ocr` cannot be read",
        report_every_s=2.5,
        steps_per_s=0.5,
        samples_per_s=128.0,
        plan_gap=0.0625,
        room_s=0.03125,
        bytes_full=True,
        outages=(StorageOutage(job=job, source="s", away_s=31.5, reason="503"),),
        progress=JobProgress(step=43, epoch=1, epochs=3, sources=(drawn,)),
    )


class CoordinatorInMemory:
    """engine.api.CoordinatorApi with as little behind it as the calls need."""

    def __init__(self):
        self.known = {}
        self.claims = {}
        self.launches = []
        self.reads_loss_weights = []
        self.closed = []
        self.committed = []
        self.phases = []
        self.reports = []
        self.asked_health = []
        self.recosted = []
        self.skips = []
        self.failed_workers = []
        self.slow_workers = []
        self.wanted = []
        self.ended = {}
        self.world_complete = asyncio.Event()
        self.world_complete.set()

    async def submit(self, spec_yaml, base_directory, *, team="", max_jobs=None):
        if ":" not in spec_yaml:
            raise SpecError(f"job file {spec_yaml!r} is not YAML with a name.")
        name = spec_yaml.split(":")[1].strip()
        record = JobRecord(name=name, spec_json="{}", index_fingerprint=base_directory)
        return self.known.setdefault(name, JobStatus(record=record, samples=600))

    async def jobs(self):
        return [self.known[name] for name in sorted(self.known)]

    def job_names(self):
        return sorted(self.known)

    async def job(self, name):
        if name not in self.known:
            raise NotFoundError(f"there is no job {name!r}. `dataservice job list` shows all.")
        return self.known[name]

    async def drain(self, name):
        status = await self.job(name)
        self.known[name] = replace(status, record=replace(status.record, state="draining"))
        return self.known[name]

    async def delete(self, name):
        await self.job(name)
        if self.claims:
            raise ConflictError(f"trainers use job {name!r}. Stop them, then delete it.")
        del self.known[name]

    async def recost(self, job, cost_json, from_step):
        await self.job(job)
        if from_step is not None and from_step < 12:
            raise ConflictError(f"step {from_step} was planned already.")
        self.recosted.append((job, cost_json, from_step))
        return CostRecord(
            job=job, from_step=from_step or 12, cost_json=cost_json, cost_version="v2",
            recorded_unix_s=1.0,
        )  # fmt: skip

    async def find_sample(self, job, sample_id, from_step):
        await self.job(job)
        spans = (ByteSpan(name="line 3", offset_bytes=2**40, size_bytes=7),)
        location = SampleLocation(file="memory/a.jsonl", spans=spans, row_group=1, row=2)
        ref = SampleRef(sample_id=sample_id, source="s", key="b", location=location, crc32=9)
        if from_step:
            return FoundSample(ref=replace(ref, crc32=None), steps=(), next_step=None)
        steps = (
            SampleStep(step=3, attempt=1, fate="committed", masked="torn"),
            SampleStep(step=3, attempt=2, fate="planned"),
        )
        return FoundSample(ref=ref, steps=steps, next_step=2_000)

    async def explain(self, job, step, attempt):
        await self.job(job)
        plan = make_plan(step)
        entry = LedgerEntry(
            job=job,
            attempt=attempt or 7,
            step=step,
            cursor=Cursor(step=step).to_json(),
            plan_digest=plan.digest,
            world_size=2,
            cost_version="v1",
            planned_unix_s=1.0,
            committed_unix_s=2.0,
            measured_s=None if attempt == 2 else 0.75,
            content=None if attempt == 2 else b"\x00what",
        )
        keys = ("s/a", "s/b", "s/c")
        return StepExplanation(
            attempt=entry.attempt,
            cursor=Cursor(step=step),
            topology=Topology(world_size=4, ranks_per_replica=2),
            plan=plan,
            sample_keys=keys,
            quarantined=("s/b: truncated",),
            fates=(StepFate(attempt=1, fate="skipped"), StepFate(attempt=7, fate="committed")),
            entry=None if attempt == 1 else entry,
            skipped_by=self.skips[0] if attempt == 1 else None,
        )

    async def replay(self, job, first_step, last_step, attempt, *, content=False):
        await self.job(job)
        for step in range(first_step, last_step + 1):
            digest = make_plan(step).digest
            yield ReplayedStep(
                step=step,
                attempt=attempt or 7,
                ledger_digest=digest,
                plan_digest=digest,
                **OTHERWISE if content else {},
            )

    async def skip(self, job, ranges, action):
        await self.job(job)
        made = [
            SkipRecord(
                job=job, number=n, first_step=first, last_step=last, action=action,
                from_attempt=2, recorded_unix_s=3.5,
            )
            for n, (first, last) in enumerate(ranges, start=1)
        ]  # fmt: skip
        self.skips += made
        return made

    async def index(self, spec_yaml, base_directory, *, team, source, errand):
        yield IndexWaiting(why="1 of 1 workers are being started")
        yield IndexPlaces(places=3)
        yield IndexProgress(rows=2, size_bytes=2**40)
        yield IndexResult(place=1, size_bytes=0, damage=f"{source} of {base_directory}")
        if errand == "fail":
            raise WorkerLostError("worker-0.1 is gone")
        yield IndexResult(place=0, size_bytes=4)
        yield b"PAR1"

    async def open_session(
        self,
        *,
        job,
        rank,
        world_size,
        cursor,
        client,
        rejoin_attempt,
        launch,
        reads_loss_weights,
        where,
    ):
        self.launches.append(launch)
        self.reads_loss_weights.append(reads_loss_weights)
        if job == "explode":
            raise KeyError("a private detail")
        if rank in self.claims:
            raise RankClaimedError(f"rank {rank} is held by {self.claims[rank]}.")
        self.claims[rank] = client
        try:
            await self.world_complete.wait()
        except asyncio.CancelledError:
            del self.claims[rank]
            raise
        session = f"{job}/{rank}"
        self.ended[session] = asyncio.get_running_loop().create_future()
        return SessionOpened(session=session, attempt=rejoin_attempt or 1, start=cursor)

    async def session_ended(self, session):
        await self.ended[session]

    def fence(self, session):
        self.ended[session].set_exception(FencedError("attempt 2 has replaced attempt 1."))

    def close_session(self, session):
        self.closed.append(session)
        del self.claims[int(session.rpartition("/")[2])]

    async def workers(self):
        info = WorkerInfo(worker=WORKER, address="a:1", slots=2, state="draining")
        return [WorkerStatus(info=info, packs=3, outstanding_tokens=7.5)]

    async def restart_workers(self, workers):
        if workers not in ((), (WORKER,)):
            raise NotFoundError(f"there is no worker {workers[0]}; there are {WORKER}.")
        return [WORKER]

    async def shard(self, session, step, *, received_step, failed_workers, slow_workers, wanted):
        self.slow_workers.append(slow_workers)
        if not session:
            raise NotFoundError("no such session.")
        self.failed_workers.append(failed_workers)
        self.wanted.append(wanted)
        if step >= 10:
            return EndOfData(steps=10)
        if any(skip.first_step <= step <= skip.last_step for skip in self.skips):
            return SkippedSteps(next_step=max(skip.last_step for skip in self.skips) + 1)
        return make_shard(rank=int(session.rpartition("/")[2]), step=step)

    async def summary(self, session, step):
        if not session:
            raise NotFoundError("no such session.")
        return step_summary(make_plan(step), make_plan(step).digest)

    async def commit(self, session, step, *, measured_s=None, phase_s=None):
        self.committed.append(
            (session, step) if measured_s is None else (session, step, measured_s)
        )
        self.phases.append(phase_s)

    async def report(self, session, report):
        if not session:
            raise NotFoundError("no such session.")
        self.reports.append((session, report))

    async def health(self, jobs, *, team):
        self.asked_health.append((tuple(jobs), team))
        for job in jobs:
            await self.job(job)
        return make_health(jobs)


def make_host(pipeline):
    factory = PipelineFactory(reader_for=lambda _: pipeline, decoder_for=lambda _: pipeline)
    return DecodingHost(ThreadDecoders(factory, slots=2))


@pytest.fixture
def make():
    """The builders above, for tests that cannot import this file."""

    class Builders:
        order = staticmethod(make_order)
        ticket = staticmethod(make_ticket)
        fetch = staticmethod(make_fetch)
        plan = staticmethod(make_plan)
        shard = staticmethod(make_shard)
        host = staticmethod(make_host)
        health = staticmethod(make_health)
        pipeline = TinyPipeline
        secret = SECRET
        worker = WORKER

    return Builders


@pytest.fixture
async def host():
    pipeline = TinyPipeline()
    host = make_host(pipeline)
    yield host
    host.close()


@pytest.fixture
async def worker(host):
    """A served worker as the engine knows it."""
    served = await serve_worker(
        host, worker=WORKER, listen="127.0.0.1:0", secret=SECRET, grace_s=0.0
    )
    yield WorkerInfo(worker=WORKER, address=served.address, slots=2)
    await served.stop()


@pytest.fixture
async def api():
    return CoordinatorInMemory()


@pytest.fixture
async def coordinator(api):
    """The address of a served coordinator."""
    handle = await serve_coordinator(api, "127.0.0.1:0")
    yield handle.address
    await handle.stop(0.0)


@pytest.fixture
async def channel_to():
    """Open channels that are closed after the test."""
    channels = []

    def connect(address):
        channels.append(grpc.aio.insecure_channel(address))
        return channels[-1]

    yield connect
    for channel in channels:
        await channel.close()


@pytest.fixture
def network():
    """Real sockets between a client and a server, which can fail as a network does."""
    with Gate() as gate:
        yield gate
