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
import gc
import logging
import secrets
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dataservice.access import TokensFile
from dataservice.core.errors import SpecError
from dataservice.core.ports import WorkerPool
from dataservice.engine.coordinator import Coordinator
from dataservice.fleet import make_pool
from dataservice.job_pipeline import load_processors
from dataservice.job_setup import job_record, open_job, same_job
from dataservice.observability.diagnosis import diagnose
from dataservice.observability.endpoint import MetricsEndpoint, serve_metrics
from dataservice.observability.metrics import PrometheusMetrics
from dataservice.observability.traces import TracedMetrics, open_traces
from dataservice.planning.warm import warm_up
from dataservice.serving.audit import AuditLog
from dataservice.serving.border import Border
from dataservice.serving.server import ServerHandle, serve_coordinator, serve_health
from dataservice.serving.tls import is_loopback, server_credentials
from dataservice.serving.worker_link import GrpcWorkerLink
from dataservice.spec import ServiceConfig
from dataservice.state.sqlite import SqliteStateStore

log = logging.getLogger(__name__)

SECRET_BYTES = 32


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


def make_metrics(config: ServiceConfig, started: contextlib.AsyncExitStack) -> PrometheusMetrics:
    """What is told of steps: series, and spans where the config names a collector."""
    if config.traces is None:
        return PrometheusMetrics()
    tracer = open_traces(config.traces, ratio=config.trace_ratio, process="coordinator")
    started.push_async_callback(asyncio.to_thread, tracer.close)
    return TracedMetrics(tracer)


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
        metrics, endpoint = make_metrics(config, started), None
        metrics.team_weights({name: team.weight for name, team in config.teams.items()})
        if config.metrics_listen is not None:
            endpoint = serve_metrics(metrics.registry, config.metrics_listen)
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
    # A step may be a million objects, none of them in a cycle: looking for cycles as often as
    # Python does by itself takes twice the time of making them.
    gc.freeze()
    gc.set_threshold(100_000, 50, 50)
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
