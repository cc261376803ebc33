"""The workers as the service's config wants them: one served from this process, and the pool."""

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import ServedWorker, WorkerPool
from dataservice.job_pipeline import decoder_of, reader_of
from dataservice.observability.endpoint import serve_metrics
from dataservice.observability.worker_metrics import worker_registry
from dataservice.serving.authority import derived_name
from dataservice.serving.server import serve_worker
from dataservice.serving.tls import TlsSpec, server_credentials
from dataservice.spec import ServiceConfig
from dataservice.workers.host import DecodingHost, HostStats
from dataservice.workers.local_pool import LocalWorkerPool
from dataservice.workers.pipelines import PipelineFactory
from dataservice.workers.pool import PoolConfig
from dataservice.workers.process_decoders import ProcessDecoders
from dataservice.workers.ray_pool import RayPoolConfig, RayWorkerPool, node_host

log = logging.getLogger(__name__)

SCRAPE_LIMIT_S = 5.0
OWN_ADDRESS = "node"  # as worker_host: the address of whichever node a worker runs on


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
    metrics_ports: str | None = None


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
    stopped = host.close
    if settings.metrics_ports is not None:
        stopped = _watched(host, f"{address}:{settings.metrics_ports}", settings.slots, worker)
    try:
        return await serve_worker(
            host,
            worker=worker,
            listen=f"{address}:{settings.ports}",
            secret=settings.secret,
            credentials=server_credentials(settings.tls) if settings.tls is not None else None,
            reflect=settings.reflect,
            on_stopped=stopped,
        )
    except BaseException:
        stopped()
        raise


def _watched(host: DecodingHost, listen: str, slots: int, worker: str) -> Callable[[], None]:
    """Serve the host's metrics; gives what closes both."""
    loop = asyncio.get_running_loop()

    async def stats() -> HostStats:
        return host.stats()

    def read() -> HostStats:  # in a thread of the endpoint; the host lives on the loop
        return asyncio.run_coroutine_threadsafe(stats(), loop).result(SCRAPE_LIMIT_S)

    endpoint = serve_metrics(worker_registry(worker, slots=slots, read=read), listen)
    log.info("%s: metrics at http://%s/metrics", worker, endpoint.address)

    def close() -> None:
        # A scrape that waits for this very loop must not be waited for here.
        threading.Thread(target=endpoint.stop, name="metrics-stop", daemon=True).start()
        host.close()

    return close


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
        metrics_ports=config.worker_metrics_ports,
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
