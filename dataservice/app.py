"""The whole service, put together: the one place that sees every room.

    job file ──► index ──► catalog ─┐
                                    ├─► Coordinator ──► gRPC :50051 ──► trainer ranks
    state dir ──► SQLite ───────────┤        │                               ▲
                                    │        ▼ pack orders                   │ parts
    service config ──► Ray pool ────┴──► workers: read → decode → assemble ──┘

A newcomer's path: this file → engine/loop.py → planning/compose.py.
"""

import asyncio
import contextlib
import hashlib
import logging
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np

from dataservice.access import TokensFile
from dataservice.core.errors import SpecError, StateError
from dataservice.core.job import ErrorBudget, JobRecord
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleMeasurer, ServedWorker, WorkerPool
from dataservice.core.team import NO_TEAM, full_name, team_of
from dataservice.engine.coordinator import Coordinator
from dataservice.engine.setup import JobSetup
from dataservice.job_pipeline import (
    decoder_of,
    load_processors,
    pipeline_json,
    pipeline_of,
    reader_of,
    worker_pipeline,
)
from dataservice.observability.diagnosis import diagnose
from dataservice.observability.metrics import (
    MetricsEndpoint,
    PrometheusMetrics,
    serve_metrics,
)
from dataservice.planning.compose import step_limits
from dataservice.planning.options import PlanOptions
from dataservice.planning.packs.limits import IsfLimits
from dataservice.planning.warm import warm_up
from dataservice.serving.audit import AuditLog
from dataservice.serving.authority import derived_name
from dataservice.serving.border import Border
from dataservice.serving.server import (
    ServerHandle,
    serve_coordinator,
    serve_health,
    serve_worker,
)
from dataservice.serving.tls import TlsSpec, is_loopback, server_credentials
from dataservice.serving.worker_link import GrpcWorkerLink
from dataservice.sources.catalog import IndexedCatalog, open_catalog, require_same_index
from dataservice.sources.index import IndexSummary, build_index
from dataservice.sources.mixture import Mixture
from dataservice.sources.roots import Roots
from dataservice.spec import (
    JobSpec,
    ServiceConfig,
    job_from_json,
    read_job,
    require_allowed,
)
from dataservice.state.sqlite import SqliteStateStore
from dataservice.workers.host import DecodingHost
from dataservice.workers.local_pool import LocalWorkerPool
from dataservice.workers.pipelines import PipelineFactory
from dataservice.workers.pool import PoolConfig
from dataservice.workers.process_decoders import ProcessDecoders
from dataservice.workers.ray_pool import RayPoolConfig, RayWorkerPool, node_host

log = logging.getLogger(__name__)

SECRET_BYTES = 32
OWN_ADDRESS = "node"  # as worker_host: the address of whichever node a worker runs on
Progress = Callable[[str, int, int, int], None]
"""Told (source, rows done, bytes done, bytes in all)."""


# ---- indexing -----------------------------------------------------------------------------


def index_job(
    spec: JobSpec,
    *,
    custom_processors: dict[str, str],
    processes: int = 1,
    progress: Progress | None = None,
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> list[IndexSummary]:
    """Index every source of a job; what is current is kept. Raises SourceError, SpecError."""
    make_measurer = partial(_make_measurer, pipeline_json(spec.pipeline), custom_processors, limits)
    return [
        build_index(
            source,
            out_dir=spec.index,
            make_measurer=make_measurer,
            workers=processes,
            progress=partial(progress, source.name) if progress is not None else None,
            limits=limits,
        )
        for source in spec.sources
    ]


def _make_measurer(
    pipeline: str, custom_processors: dict[str, str], limits: DecodeLimits
) -> SampleMeasurer:
    return pipeline_of(pipeline, custom_processors, limits)


# ---- jobs ---------------------------------------------------------------------------------


def job_record(
    spec_yaml: str,
    base_directory: str,
    team: str = NO_TEAM,
    *,
    allowed_roots: Sequence[str] | None = None,
) -> JobRecord:
    """A team's job file as the store keeps it. Raises SpecError."""
    roots = _roots(allowed_roots, team)
    spec = read_job(spec_yaml, Path(base_directory or "."), roots)
    return JobRecord(
        name=full_name(team, spec.job),
        spec_json=spec.model_dump_json(),
        index_fingerprint="",
        created_unix_s=time.time(),
    )


def _roots(allowed: Sequence[str] | None, team: str) -> Roots | None:
    return None if allowed is None else Roots.of(allowed, team)


def open_job(
    record: JobRecord,
    *,
    custom_processors: dict[str, str],
    limits: DecodeLimits = DEFAULT_LIMITS,
    allowed_roots: Sequence[str] | None = None,
) -> JobSetup:
    """Open a job's index and options. Raises IndexStaleError, SourceError, SpecError."""
    spec = job_from_json(record.spec_json)
    roots = _roots(allowed_roots, team_of(record.name))
    if roots is not None:
        require_allowed(spec, roots)  # what the operator allows may have changed
    load_pipeline = partial(pipeline_of, pipeline_json(spec.pipeline), custom_processors, limits)
    pipeline = load_pipeline()
    catalog = open_catalog(
        spec.sources, spec.index, pipeline.fingerprint, limits=limits, roots=roots
    )
    _require_drawn(spec, catalog.sizes)
    mixture = Mixture(
        catalog.sizes,
        [source.weight for source in spec.sources],
        seed=spec.seed,
        epochs=spec.epochs,
        llm_tokens=catalog.llm_tokens,
    )
    return JobSetup(
        record=_with_fingerprint(record, catalog.fingerprint),
        stream=mixture,
        catalog=catalog,
        batch=spec.batch,
        options=spec.plan,
        pipeline=worker_pipeline(spec.sources, spec.pipeline, roots),
        ready_steps=spec.ready_steps,
        order=_sample_order(catalog, spec),
        limits=_isf_limits(catalog, spec.plan),
        budgets={each.name: each.error_budget or spec.error_budget for each in spec.sources},
        require_current=lambda: require_same_index(
            spec.sources, spec.index, load_pipeline().fingerprint, catalog.fingerprint
        ),
        ranks_per_replica=spec.topology.tensor_parallel * spec.topology.pipeline_parallel,
        pipeline_stages=spec.topology.pipeline_parallel,
        virtual_stages=spec.topology.virtual_stages,
        replicas_per_node=spec.topology.replicas_per_node,
    )


def same_job(stored: JobRecord, submitted: JobRecord) -> bool:
    """Whether two job files differ in nothing but their error budgets, by today's defaults."""
    specs = (job_from_json(stored.spec_json), job_from_json(submitted.spec_json))
    first, second = (
        spec.model_copy(
            update={
                "error_budget": ErrorBudget(),
                "sources": [replace(source, error_budget=None) for source in spec.sources],
            }
        )
        for spec in specs
    )
    return first == second


def _sample_order(catalog: IndexedCatalog, spec: JobSpec) -> str:
    """Names the order in which the mixture yields samples: what decides it, digested."""
    decides = (catalog.fingerprint, spec.seed, [source.weight for source in spec.sources])
    return hashlib.blake2b(repr(decides).encode(), digest_size=6).hexdigest()


def _isf_limits(catalog: IndexedCatalog, options: PlanOptions) -> IsfLimits | None:
    """Found once, over every sample of the job, where the plan packs by ISF."""
    if options.window_steps == 1 and options.stages.pack != "isf":
        return None
    return step_limits(catalog.lengths(np.arange(catalog.samples)), options, method="search")


def _require_drawn(spec: JobSpec, sizes: Sequence[int]) -> None:
    """A source whose weight rounds to no sample would be left out without a word."""
    for source, size in zip(spec.sources, sizes, strict=True):
        drawn = source.weight * size * spec.epochs
        if drawn < 0.5:
            raise SpecError(
                f"source {source.name!r} gives no sample: weight {source.weight:g} of its {size} "
                f"samples over {spec.epochs} epochs is {drawn:.2g}. Raise its weight to "
                f"{1 / (size * spec.epochs):.2g} or more, or leave the source out."
            )


def _with_fingerprint(record: JobRecord, fingerprint: str) -> JobRecord:
    if record.index_fingerprint not in ("", fingerprint):
        raise StateError(
            f"job {record.name!r} was registered over index {record.index_fingerprint[:12]}, "
            f"which is now {fingerprint[:12]}: its sources were indexed again. Its plans would "
            "change under a running training; restore the old index, or delete the job and "
            "submit it again."
        )
    return JobRecord(
        name=record.name,
        spec_json=record.spec_json,
        index_fingerprint=fingerprint,
        state=record.state,
        created_unix_s=record.created_unix_s,
    )


# ---- workers ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What a worker process is started with; pickled by Ray to its own actors only."""

    host: str
    slots: int
    secret: bytes
    custom_processors: dict[str, str]
    decode_timeout_s: float
    decode_memory_bytes: int | None
    held_bytes: int
    limits: DecodeLimits = DEFAULT_LIMITS
    tls: TlsSpec | None = None
    reflect: bool = True
    ports: str = "0"


async def serve_worker_process(settings: WorkerSettings, worker: str) -> ServedWorker:
    """Serve one decoding worker from this process."""
    factory = PipelineFactory(
        reader_for=partial(reader_of, limits=settings.limits),
        decoder_for=partial(decoder_of, settings.custom_processors, limits=settings.limits),
    )
    decoders = ProcessDecoders(
        factory,
        slots=settings.slots,
        timeout_s=settings.decode_timeout_s,
        memory_bytes=settings.decode_memory_bytes,
    )
    host = DecodingHost(decoders, held_bytes=settings.held_bytes)
    try:
        await host.start()
        return await _served(host, settings, worker)
    except BaseException:
        host.close()
        raise


async def _served(host: DecodingHost, settings: WorkerSettings, worker: str) -> ServedWorker:
    address = node_host() if settings.host == OWN_ADDRESS else settings.host
    return await serve_worker(
        host,
        worker=worker,
        listen=f"{address}:{settings.ports}",
        secret=settings.secret,
        credentials=server_credentials(settings.tls) if settings.tls is not None else None,
        reflect=settings.reflect,
        on_stopped=host.close,
    )


def make_pool(config: ServiceConfig, secret: bytes) -> WorkerPool:
    """The pool that the config names, not yet started."""
    settings = WorkerSettings(
        host=config.worker_host,
        slots=config.slots_per_worker,
        secret=secret,
        custom_processors=config.custom_processors,
        decode_timeout_s=config.decode_timeout_s,
        decode_memory_bytes=config.decode_memory_bytes,
        held_bytes=config.held_bytes_per_worker,
        limits=config.limits,
        tls=config.tls,
        reflect=config.tokens_file is None,
        ports=config.worker_ports or "0",
    )
    serve = partial(serve_worker_process, settings)
    if config.pool == "local":
        size = PoolConfig(
            workers=config.workers,
            slots_per_worker=config.slots_per_worker,
            start_timeout_s=config.worker_start_timeout_s,
        )
        return LocalWorkerPool(serve=serve, config=size)
    joined = config.ray_address is not None
    return RayWorkerPool(
        serve=serve,
        config=RayPoolConfig(
            workers=config.workers,
            slots_per_worker=config.slots_per_worker,
            start_timeout_s=config.worker_start_timeout_s,
            address=config.ray_address,
            namespace=f"dataservice-{derived_name(secret, 'namespace')}" if joined else None,
            settings=_settings_name(settings),
            outlive=joined and config.keep_workers,
            orphan_after_s=config.orphan_after_s,
            cpus_per_worker=config.slots_per_worker if joined else 0.0,
            log_to_driver=False,
        ),
    )


def _settings_name(settings: WorkerSettings) -> str:
    """The same for workers that need not be replaced: of this release, with these settings."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    release = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    told = replace(settings, secret=b"")
    return derived_name(settings.secret, f"worker {version('dataservice')} {release} {told!r}")


# ---- the service --------------------------------------------------------------------------


def make_border(config: ServiceConfig, started: contextlib.AsyncExitStack) -> Border:
    """Who is let in, as the config says; what is opened for it is closed with `started`. Raises
    SpecError."""
    audit = None
    if config.audit_log is not None:
        audit = AuditLog(Path(config.audit_log))
        started.callback(audit.close)
    if not is_loopback(config.listen.rpartition(":")[0]):
        if config.tokens_file is None:
            log.warning("insecure: there is no tokens_file, whoever reaches us is an admin")
        if config.tls is None:
            log.warning("insecure: without tls, tokens and samples can be read on their way")
    if config.tokens_file is None:
        return Border(teams=config.teams, audit=audit)
    return Border(
        authenticate=TokensFile(Path(config.tokens_file)), teams=config.teams, audit=audit
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A running service. `address` is where trainers connect."""

    server: ServerHandle
    pool: WorkerPool
    metrics: MetricsEndpoint | None
    started: contextlib.AsyncExitStack

    @property
    def address(self) -> str:
        """host:port of the coordinator."""
        return self.server.address

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new calls, let open ones end, then stop what was started, last first."""
        await self.server.stop(grace_s)
        await self.started.aclose()


async def start_service(config: ServiceConfig) -> Service:
    """Open the state, compile the planner, start the workers, restore the jobs, and serve. On
    an error whatever was started is stopped again."""
    load_processors(config.custom_processors)
    async with contextlib.AsyncExitStack() as started:
        border = make_border(config, started)
        store = SqliteStateStore(Path(config.state_dir))
        started.callback(store.close)
        await asyncio.to_thread(warm_up)
        metrics, endpoint = PrometheusMetrics(), None
        if config.metrics_listen is not None:
            endpoint = serve_metrics(metrics, config.metrics_listen)
            started.push_async_callback(asyncio.to_thread, endpoint.stop)
        secret = _secret(config)
        pool = make_pool(config, secret)
        started.push_async_callback(pool.stop)
        await pool.start()
        coordinator = Coordinator(
            store=store,
            pool=pool,
            link=GrpcWorkerLink(secret, tls=config.tls.client if config.tls is not None else None),
            read_job=partial(job_record, allowed_roots=config.allowed_roots),
            open_job=partial(
                open_job,
                custom_processors=config.custom_processors,
                limits=config.limits,
                allowed_roots=config.allowed_roots,
            ),
            ticket_secret=secret,
            attempt_timeout_s=config.attempt_timeout_s,
            idle_release_s=config.idle_release_s,
            metrics=metrics,
            teams=lambda: config.teams,
            same_job=same_job,
            diagnose=diagnose,
            wanted_workers=config.workers,
        )
        started.push_async_callback(coordinator.stop)
        await coordinator.start()
        credentials = server_credentials(config.tls) if config.tls is not None else None
        server = await serve_coordinator(
            coordinator, config.listen, border=border, credentials=credentials
        )
        started.push_async_callback(server.stop, 0.0)  # where what follows fails
        if config.health_listen is not None:
            probed = await serve_health(server.health, config.health_listen)
            started.push_async_callback(probed.stop, 0.0)
        return Service(server=server, pool=pool, metrics=endpoint, started=started.pop_all())


async def serve_until_signal(config: ServiceConfig, *, ready: Callable[[Service], None]) -> None:
    """Serve until SIGTERM or SIGINT, then stop gracefully. `ready` is told once it serves."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()
    service = await start_service(config)
    # After the pool: Ray installs handlers of its own when it starts.
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    try:
        ready(service)
        await asked.wait()
        log.info("stopping: open calls have 5 s to end")
    finally:
        await service.stop()


def _secret(config: ServiceConfig) -> bytes:
    """The secret that coordinator and workers share; made on first use, readable by us alone."""
    path = Path(config.secret_file or Path(config.state_dir) / "secret")
    try:
        if not path.exists() and config.secret_file is None:
            making = path.with_name(f"{path.name}.part")  # a full disk leaves no short secret
            making.unlink(missing_ok=True)
            making.touch(mode=0o600)
            making.write_bytes(secrets.token_bytes(SECRET_BYTES))
            making.replace(path)
        secret = path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"the secret file {path} cannot be read or made: {error.strerror}. Check secret_file, "
            "or leave it out to have one made in state_dir."
        ) from error
    if len(secret) < SECRET_BYTES:
        raise SpecError(
            f"the secret in {path} has {len(secret)} bytes; it needs at least {SECRET_BYTES}. "
            f"Make one with `head -c {SECRET_BYTES} /dev/urandom > FILE`."
        )
    return secret
