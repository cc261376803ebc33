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
import importlib
import json
import logging
import secrets
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
from pydantic import TypeAdapter

from dataservice.core.errors import SpecError, StateError
from dataservice.core.job import JobRecord, SourceSpec
from dataservice.core.ports import SampleMeasurer, ServedWorker, WorkerPool
from dataservice.decode.pipeline import Pipeline, PipelineSpec, build_pipeline
from dataservice.decode.processors.base import VisionProcessor
from dataservice.engine.coordinator import Coordinator
from dataservice.engine.setup import JobSetup
from dataservice.observability.metrics import (
    MetricsEndpoint,
    PrometheusMetrics,
    serve_metrics,
)
from dataservice.planning.compose import step_limits
from dataservice.planning.options import PlanOptions
from dataservice.planning.packs.limits import IsfLimits
from dataservice.planning.warm import warm_up
from dataservice.serving.server import ServerHandle, serve_coordinator, serve_worker
from dataservice.serving.worker_link import GrpcWorkerLink
from dataservice.sources.catalog import IndexedCatalog, open_catalog, require_same_index
from dataservice.sources.index import IndexSummary, build_index
from dataservice.sources.mixture import Mixture
from dataservice.sources.reader import SourceReader
from dataservice.spec import JobSpec, ServiceConfig, job_from_json, read_job
from dataservice.state.sqlite import SqliteStateStore
from dataservice.workers.host import DecodingHost
from dataservice.workers.local_pool import LocalWorkerPool
from dataservice.workers.pool import PoolConfig
from dataservice.workers.ray_pool import RayPoolConfig, RayWorkerPool

log = logging.getLogger(__name__)

SECRET_BYTES = 32
Progress = Callable[[str, int, int, int], None]
"""Told (source, rows done, bytes done, bytes in all)."""


# ---- indexing -----------------------------------------------------------------------------


def index_job(
    spec: JobSpec,
    *,
    custom_processors: dict[str, str],
    processes: int = 1,
    progress: Progress | None = None,
) -> list[IndexSummary]:
    """Index every source of a job; what is current is kept. Raises SourceError, SpecError."""
    make_measurer = partial(_make_measurer, _pipeline_json(spec.pipeline), custom_processors)
    return [
        build_index(
            source,
            out_dir=spec.index,
            make_measurer=make_measurer,
            workers=processes,
            progress=partial(progress, source.name) if progress is not None else None,
        )
        for source in spec.sources
    ]


def _make_measurer(pipeline_json: str, custom_processors: dict[str, str]) -> SampleMeasurer:
    return _pipeline_of(pipeline_json, custom_processors)


# ---- jobs ---------------------------------------------------------------------------------


def job_record(spec_yaml: str, base_directory: str) -> JobRecord:
    """A job file as the store keeps it. Raises SpecError."""
    spec = read_job(spec_yaml, Path(base_directory or "."))
    return JobRecord(
        name=spec.job,
        spec_json=spec.model_dump_json(),
        index_fingerprint="",
        created_unix_s=time.time(),
    )


def open_job(record: JobRecord, *, custom_processors: dict[str, str]) -> JobSetup:
    """Open a job's index and options. Raises IndexStaleError, SourceError, SpecError."""
    spec = job_from_json(record.spec_json)
    load_pipeline = partial(_pipeline_of, _pipeline_json(spec.pipeline), custom_processors)
    pipeline = load_pipeline()
    catalog = open_catalog(spec.sources, spec.index, pipeline.fingerprint)
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
        pipeline=_worker_pipeline(spec),
        ready_steps=spec.ready_steps,
        order=_sample_order(catalog, spec),
        limits=_isf_limits(catalog, spec.plan),
        require_current=lambda: require_same_index(
            spec.sources, spec.index, load_pipeline().fingerprint, catalog.fingerprint
        ),
        ranks_per_replica=spec.topology.tensor_parallel * spec.topology.pipeline_parallel,
        pipeline_stages=spec.topology.pipeline_parallel,
        replicas_per_node=spec.topology.replicas_per_node,
    )


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


# ---- pipelines, as workers get them -------------------------------------------------------

_PIPELINE = TypeAdapter(PipelineSpec)
_SOURCES = TypeAdapter(list[SourceSpec])


def _pipeline_json(spec: PipelineSpec) -> str:
    return _PIPELINE.dump_json(spec).decode()


def _worker_pipeline(spec: JobSpec) -> str:
    """What a worker needs of a job, as JSON: its sources and its pipeline."""
    return json.dumps(
        {
            "sources": _SOURCES.dump_python(spec.sources, mode="json"),
            "pipeline": _PIPELINE.dump_python(spec.pipeline, mode="json"),
        },
        sort_keys=True,
    )


def _pipeline_of(pipeline_json: str, custom_processors: dict[str, str]) -> Pipeline:
    """Raises SpecError when the tokenizer, template or a processor cannot be loaded."""
    spec = _PIPELINE.validate_json(pipeline_json)
    return build_pipeline(spec, custom_processors=load_processors(custom_processors))


def load_processors(paths: dict[str, str]) -> dict[str, type[VisionProcessor]]:
    """Import the operator's own processors, `name: package.module:Class`. Raises SpecError."""
    return {name: _load_processor(name, path) for name, path in paths.items()}


def _load_processor(name: str, path: str) -> type[VisionProcessor]:
    module, _, attribute = path.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute or "?")
    except Exception as error:  # the operator's own module may raise anything
        raise SpecError(
            f"custom processor {name!r} is {path!r}, which cannot be imported: "
            f"{type(error).__name__}: {error}. Give `package.module:Class` of an installed "
            "package in the service's config."
        ) from error
    if not isinstance(loaded, type) or not {"plan_image", "plan_video"} <= set(dir(loaded)):
        raise SpecError(
            f"custom processor {name!r} is {path!r}, which is no class with plan_image and "
            "plan_video. See VisionProcessor in dataservice/decode/processors/base.py."
        )
    return cast(type[VisionProcessor], loaded)


# ---- workers ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What a worker process is started with; pickled by Ray to its own actors only."""

    host: str
    slots: int
    secret: bytes
    custom_processors: dict[str, str]


async def serve_worker_process(settings: WorkerSettings, worker: str) -> ServedWorker:
    """Serve one decoding worker from this process."""
    host = DecodingHost(
        reader_for=_reader_of,
        decoder_for=partial(_decoder_of, settings.custom_processors),
        slots=settings.slots,
    )
    return await serve_worker(
        host,
        worker=worker,
        listen=f"{settings.host}:0",
        secret=settings.secret,
        on_stopped=host.close,
    )


def _reader_of(worker_pipeline: str) -> SourceReader:
    return SourceReader(_SOURCES.validate_python(json.loads(worker_pipeline)["sources"]))


def _decoder_of(custom_processors: dict[str, str], worker_pipeline: str) -> Pipeline:
    return _pipeline_of(json.dumps(json.loads(worker_pipeline)["pipeline"]), custom_processors)


def make_pool(config: ServiceConfig, secret: bytes) -> WorkerPool:
    """The pool that the config names, not yet started."""
    serve = partial(
        serve_worker_process,
        WorkerSettings(
            host=config.worker_host,
            slots=config.slots_per_worker,
            secret=secret,
            custom_processors=config.custom_processors,
        ),
    )
    if config.pool == "local":
        size = PoolConfig(workers=config.workers, slots_per_worker=config.slots_per_worker)
        return LocalWorkerPool(serve=serve, config=size)
    return RayWorkerPool(
        serve=serve,
        config=RayPoolConfig(
            workers=config.workers,
            slots_per_worker=config.slots_per_worker,
            address=config.ray_address,
            cpus_per_worker=config.slots_per_worker if config.ray_address else 0.0,
            log_to_driver=False,
        ),
    )


# ---- the service --------------------------------------------------------------------------


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
    """Compile the planner, open the state, start the workers, restore the jobs, and serve. On
    an error whatever was started is stopped again."""
    load_processors(config.custom_processors)
    await asyncio.to_thread(warm_up)
    async with contextlib.AsyncExitStack() as started:
        metrics, endpoint = PrometheusMetrics(), None
        if config.metrics_listen is not None:
            endpoint = serve_metrics(metrics, config.metrics_listen)
            started.push_async_callback(asyncio.to_thread, endpoint.stop)
        store = SqliteStateStore(Path(config.state_dir))
        started.callback(store.close)
        secret = _secret(config)
        pool = make_pool(config, secret)
        started.push_async_callback(pool.stop)
        await pool.start()
        coordinator = Coordinator(
            store=store,
            pool=pool,
            link=GrpcWorkerLink(secret),
            read_job=job_record,
            open_job=partial(open_job, custom_processors=config.custom_processors),
            ticket_secret=secret,
            attempt_timeout_s=config.attempt_timeout_s,
            metrics=metrics,
        )
        started.push_async_callback(coordinator.stop)
        await coordinator.start()
        server = await serve_coordinator(coordinator, config.listen)
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
            path.touch(mode=0o600)
            path.write_bytes(secrets.token_bytes(SECRET_BYTES))
        secret = path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"the secret file {path} cannot be read: {error.strerror}. Check secret_file, or "
            "leave it out to have one made in state_dir."
        ) from error
    if len(secret) < SECRET_BYTES:
        raise SpecError(
            f"the secret in {path} has {len(secret)} bytes; it needs at least {SECRET_BYTES}. "
            f"Make one with `head -c {SECRET_BYTES} /dev/urandom > FILE`."
        )
    return secret
