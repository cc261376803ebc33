"""The workers that the service's config names: one served from this process, and the pool."""

import contextlib
import hashlib
import hmac
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

from dataservice_proto.whereabouts import node_and_zone

from dataservice.core import distribution
from dataservice.core.address import join_address
from dataservice.core.authority import derived_name
from dataservice.core.descriptor_limit import raise_descriptor_limit
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import IndexHost, PackHost, ServedWorker, WorkerPool
from dataservice.core.storage_profile import StorageProfile
from dataservice.core.tls import TlsSpec
from dataservice.core.whereabouts import Whereabouts
from dataservice.jobs.storage_profiles import hold_credentials
from dataservice.jobs.worker_pipeline import code_owner, far_sources
from dataservice.observability.logs import configure_logging
from dataservice.observability.traces import open_traces
from dataservice.operate.config import ServiceConfig
from dataservice.operate.loaded_there import LoadedThere
from dataservice.operate.watched_host import WatchedHost, serve_host_metrics
from dataservice.workers.host import DecodingHost
from dataservice.workers.index_processes import IndexProcesses
from dataservice.workers.kept_files import CacheSpec, name_of_folder
from dataservice.workers.local_pool import LocalWorkerPool
from dataservice.workers.nursery import NurseryProcess
from dataservice.workers.pool import PoolConfig
from dataservice.workers.process_decoders import ProcessDecoders
from dataservice.workers.sample_pipelines import PipelineFactory

log = logging.getLogger(__name__)

PIPELINES = "dataservice.jobs.sample_pipeline"  # which the processes of a worker load
OWN_ADDRESS = "node"  # as worker_host: the address of whichever node a worker runs on


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSettings:
    """What a worker process is started with. Ray pickles it, for its own actors only."""

    host: str
    slots: int
    secret: bytes
    custom_processors: dict[str, str]
    decode_timeout_s: float
    decode_memory_bytes: int | None
    held_bytes: int
    reads: int
    read_ahead_bytes: int
    decoded_cache: str | None = None
    decoded_cache_bytes: int = 0
    byte_cache: str | None = None
    byte_cache_bytes: int = 0
    same_node: str = "auto"
    limits: DecodeLimits = DEFAULT_LIMITS
    storage_profiles: Mapping[str, StorageProfile] = field(default_factory=dict)
    tls: TlsSpec | None = None
    reflect: bool = True
    ports: str = "0"
    metrics_ports: str | None = None
    traces: str | None = None
    trace_ratio: float = 1.0
    log_json: bool = False


class ServeHost(Protocol):
    """Serves a host's packs to clients that connect to `listen`, and the coordinator's errands for
    indexes, as `serving.server.serve_worker` does. `on_stopped` runs after the port is closed;
    tickets that are refused are counted, and bytes that are sent. `where` it is, the worker tells
    its pool."""

    async def __call__(
        self,
        host: PackHost,
        *,
        worker: str,
        listen: str,
        secret: bytes,
        tls: TlsSpec | None,
        reflect: bool,
        indexing: IndexHost,
        on_stopped: Callable[[], None],
        refused: Counter[str],
        sent: Counter[str],
        same_node: str,
        where: Whereabouts,
    ) -> ServedWorker: ...


async def serve_worker_process(
    settings: WorkerSettings,
    serve_host: ServeHost,
    worker: str,
    *,
    nursery: NurseryProcess | None = None,
) -> ServedWorker:
    """Serve one decoding worker from this process. `nursery` forks what this process has forked; a
    worker that is given none has one of its own."""
    if not logging.getLogger().handlers:  # it is a process of its own
        configure_logging(json=settings.log_json)
    log.info("%s may have %d files and sockets open", worker, raise_descriptor_limit())
    factory = PipelineFactory(
        reader_for=LoadedThere(
            f"{PIPELINES}:reader_of",
            limits=settings.limits,
            storage_profiles=settings.storage_profiles,
        ),
        decoder_for=LoadedThere(
            f"{PIPELINES}:decoder_of", settings.custom_processors, limits=settings.limits
        ),
        code_owner=code_owner,
        far_sources=far_sources,
        identity=LoadedThere(f"{PIPELINES}:content_identity"),
        hold_credentials=hold_credentials,
    )
    nursery = nursery or NurseryProcess()
    decoders = ProcessDecoders(
        factory,
        slots=settings.slots,
        reads=settings.reads,
        timeout_s=settings.decode_timeout_s,
        memory_bytes=settings.decode_memory_bytes,
        cache=_cache_of(
            settings, "decoded samples", settings.decoded_cache, settings.decoded_cache_bytes
        ),
        ranges=_cache_of(settings, "read bytes", settings.byte_cache, settings.byte_cache_bytes),
        nursery=nursery,
    )
    host = DecodingHost(
        decoders, held_bytes=settings.held_bytes, read_ahead_bytes=settings.read_ahead_bytes
    )
    indexing = IndexProcesses(
        LoadedThere(
            "dataservice.jobs.index_program:run_index_program",
            settings.custom_processors,
            settings.limits,
            settings.storage_profiles,
        ),
        slots=settings.slots,
        code_owner=code_owner,
        memory_bytes=settings.decode_memory_bytes,
        nursery=nursery,
    )
    opened = contextlib.ExitStack()
    opened.callback(host.close)
    opened.callback(indexing.close)
    try:
        await host.start()
        return await _served(host, indexing, settings, serve_host, worker, opened)
    except BaseException:
        opened.close()
        raise


def _cache_of(
    settings: WorkerSettings, what: str, folder: str | None, limit_bytes: int
) -> CacheSpec | None:
    if folder is None:
        return None
    key = hmac.digest(settings.secret, f"dataservice {what}".encode(), "sha256").hex()
    return CacheSpec(folder=folder, limit_bytes=limit_bytes, key=key)


async def _served(
    host: DecodingHost,
    indexing: IndexProcesses,
    settings: WorkerSettings,
    serve_host: ServeHost,
    worker: str,
    opened: contextlib.ExitStack,
) -> ServedWorker:
    """Start the host and its server; closing `opened` closes all that was opened for them."""
    address = settings.host
    if address == OWN_ADDRESS:
        from dataservice.workers.ray_pool import node_host

        address = node_host()
    tracer = None
    if settings.traces is not None:
        tracer = open_traces(settings.traces, ratio=settings.trace_ratio, process=worker)
        # Not on the event loop: a collector that does not answer would block it.
        opened.callback(threading.Thread(target=tracer.close, daemon=True).start)
    refused: Counter[str] = Counter()
    sent: Counter[str] = Counter()
    if settings.metrics_ports is not None:
        listen = join_address(address, settings.metrics_ports)
        opened.callback(
            serve_host_metrics(
                host, listen, slots=settings.slots, worker=worker, refused=refused, sent=sent
            )
        )
    return await serve_host(
        WatchedHost(host, worker=worker, tracer=tracer),
        worker=worker,
        listen=join_address(address, settings.ports),
        secret=settings.secret,
        tls=settings.tls,
        reflect=settings.reflect,
        indexing=indexing,
        on_stopped=opened.close,
        refused=refused,
        sent=sent,
        same_node=settings.same_node,
        where=_whereabouts(settings),
    )


def _whereabouts(settings: WorkerSettings) -> Whereabouts:
    """Where this process is, and the name of what it keeps: of samples if it keeps any."""
    node, zone = node_and_zone()
    kept = settings.decoded_cache or settings.byte_cache
    return Whereabouts(node=node, zone=zone, cache=name_of_folder(kept) if kept else "")


def make_pool(
    config: ServiceConfig, secret: bytes, serve_host: ServeHost, nursery: NurseryProcess
) -> WorkerPool:
    """The pool that the config names, not yet started; `serve_host` serves its workers' packs, and
    `nursery` forks the decoders of those in this process."""
    settings = WorkerSettings(
        host=config.worker_host,
        slots=config.slots_per_worker,
        secret=secret,
        custom_processors=config.custom_processors,
        decode_timeout_s=config.decode_timeout_s,
        decode_memory_bytes=config.decode_memory_bytes,
        held_bytes=config.held_bytes_per_worker,
        reads=config.reads_per_worker,
        read_ahead_bytes=config.read_ahead_bytes_per_worker,
        decoded_cache=config.decoded_cache,
        decoded_cache_bytes=config.decoded_cache_bytes,
        byte_cache=config.byte_cache,
        byte_cache_bytes=config.byte_cache_bytes,
        same_node=config.same_node,
        limits=config.limits,
        storage_profiles=config.storage_profiles,
        tls=config.tls,
        reflect=config.tokens_file is None,
        ports=config.worker_ports or "0",
        metrics_ports=config.worker_metrics_ports,
        traces=config.traces,
        trace_ratio=config.trace_ratio,
        log_json=config.log_json,
    )
    serve = partial(serve_worker_process, settings, serve_host)
    if config.pool == "local":
        size = PoolConfig(
            workers=config.workers,
            min_workers=config.min_workers,
            slots_per_worker=config.slots_per_worker,
            start_timeout_s=config.worker_start_timeout_s,
        )
        return LocalWorkerPool(serve=partial(serve, nursery=nursery), config=size)
    # Ray takes a third of a second to load, and a service with local workers has no use for it.
    from dataservice.workers.ray_pool import RayPoolConfig, RayWorkerPool

    joined = config.ray_address is not None
    return RayWorkerPool(
        serve=serve,
        config=RayPoolConfig(
            workers=config.workers,
            min_workers=config.min_workers,
            slots_per_worker=config.slots_per_worker,
            start_timeout_s=config.worker_start_timeout_s,
            address=config.ray_address,
            runtime_env=config.ray_runtime_env,
            namespace=f"dataservice-{derived_name(secret, 'namespace')}" if joined else None,
            settings=_settings_name(settings),
            outlive=joined and config.keep_workers,
            orphan_after_s=config.orphan_after_s,
            cpus_per_worker=config.slots_per_worker if joined else 0.0,
            log_to_driver=False,
        ),
    )


def _settings_name(settings: WorkerSettings) -> str:
    """Name that is equal for workers of the same release and settings: those are not replaced."""
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))
    release = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    told = replace(settings, secret=b"")
    return derived_name(settings.secret, f"worker {version(distribution.NAME)} {release} {told!r}")
