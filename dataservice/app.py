"""Puts the whole service together: the one place that imports every room.

    job file ──► index ──► catalog ─┐
                                    ├─► Coordinator ──► gRPC :50051 ──► trainer ranks
    state dir ──► SQLite ───────────┤        │                               ▲
                                    │        ▼ pack orders                   │ parts
    service config ──► Ray pool ────┴──► workers: read → decode → assemble ──┘

A newcomer's path: this file → engine/loop.py → planning/compose.py.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dataservice.core import garbage
from dataservice.core.address import is_loopback, split_address
from dataservice.core.descriptor_limit import raise_descriptor_limit
from dataservice.core.errors import SpecError
from dataservice.core.ports import WorkerPool
from dataservice.core.private_files import others_may
from dataservice.core.state_store import StateStore
from dataservice.core.threads import CallThreads
from dataservice.engine.fair_threads import FairThreads
from dataservice.engine.tasks import cancel_all
from dataservice.jobs.own_code import load_processors
from dataservice.observability.diagnosis import diagnose
from dataservice.observability.endpoint import MetricsEndpoint, serve_metrics
from dataservice.observability.metrics import PrometheusMetrics
from dataservice.observability.traces import TracedMetrics, open_traces
from dataservice.operate.config import ServiceConfig
from dataservice.operate.fleet import make_pool
from dataservice.operate.freed_memory import give_back_now_and_then, keep_for_next_step
from dataservice.operate.ledger_age import archive_now_and_then
from dataservice.operate.stopping import Ending, StopGuard, in_thread
from dataservice.operate.tokens_file import TokensFile
from dataservice.operate.watchdog import Watchdog
from dataservice.serving.access_control import AccessControl
from dataservice.serving.audit import AuditLog
from dataservice.serving.binding import require_free
from dataservice.serving.health_ports import HealthPort, OwnRequest
from dataservice.serving.server import ServerHandle, serve_coordinator, serve_worker
from dataservice.serving.worker_link import GrpcWorkerLink
from dataservice.state.directory import SECRET, hold
from dataservice.state.sqlite import SqliteStateStore
from dataservice.workers.nursery import NurseryProcess

if TYPE_CHECKING:
    from dataservice.sources.index_cache import IndexCache

log = logging.getLogger(__name__)

SECRET_BYTES = 32
# Parts of `stop_within_s`; the pool of workers has a limit of its own.
COORDINATOR_STOP_S = 10.0
STOP_CALL_S = 5.0
_in_starting = CallThreads("starting", 2)
# They load the planner, Parquet and codecs, which takes a second and a half of a processor: more
# than all else here, and all that Ray and the workers need to be started is loaded without them.
_HEAVY = (
    "dataservice.engine.coordinator",
    "dataservice.jobs.opener",
    "dataservice.planning.warm",
    "dataservice.sources.index_cache",
)


def make_access_control(config: ServiceConfig, started: contextlib.AsyncExitStack) -> AccessControl:
    """The access control that the config describes; closing `started` closes what it opened.
    Raises SpecError."""
    audit = None
    if config.audit_log is not None:
        audit = AuditLog(Path(config.audit_log))
        started.callback(audit.close)
    if not is_loopback(split_address(config.listen)[0]):
        if config.tokens_file is None:
            log.warning("insecure: there is no tokens_file, whoever reaches us is an admin")
        if config.tls is None:
            log.warning("insecure: without tls, tokens and samples can be read on their way")
    if config.tokens_file is None:
        return AccessControl(teams=config.teams, audit=audit)
    return AccessControl(
        authenticate=TokensFile(Path(config.tokens_file)), teams=config.teams, audit=audit
    )


def make_metrics(
    config: ServiceConfig, started: contextlib.AsyncExitStack, ending: Ending
) -> PrometheusMetrics:
    """The metrics of steps, with their spans where the config names a collector."""
    if config.traces is None:
        return PrometheusMetrics()
    tracer = open_traces(config.traces, ratio=config.trace_ratio, process="coordinator")
    _stop_in_thread(started, ending, "traces", tracer.close)
    return TracedMetrics(tracer)


def make_index_cache(config: ServiceConfig) -> "IndexCache":
    """Where the config has opened indexes kept."""
    from dataservice.sources.index_cache import NO_CACHE, IndexCache

    if not config.index_cache_bytes:
        return NO_CACHE
    # /tmp is often in memory, which would stay taken when the service has ended.
    kept = Path("/var/tmp")
    if "TMPDIR" in os.environ or not kept.is_dir():
        kept = Path(tempfile.gettempdir())
    own = kept / f"dataservice-index-{os.geteuid()}"
    return IndexCache(Path(config.index_cache or own), config.index_cache_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A running service. `address` is where trainers connect; `left` names what could not be
    stopped. `staffing` is done once the workers are there, and fails where they cannot start."""

    server: ServerHandle
    pool: WorkerPool
    staffing: "asyncio.Task[None]"
    store: StateStore
    metrics: MetricsEndpoint | None
    started: contextlib.AsyncExitStack
    left: list[str]
    on_stopping: Callable[[], None]

    @property
    def address(self) -> str:
        """host:port of the coordinator."""
        return self.server.address

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new calls, let open ones end, then stop what was started, in reverse order. What
        does not end within its limit is abandoned and named in `left`."""
        self.on_stopping()
        await self.server.stop(grace_s)
        await self.started.aclose()


async def start_service(
    config: ServiceConfig, *, tell: Callable[[str], None] = log.info
) -> Service:
    """Have the workers start, and beside them open the state, load and compile the planner, restore
    the jobs, and serve; ranks that come sooner than workers wait for them. After an error
    everything that was started is stopped again. `tell` hears of each part that takes time, before
    it begins."""
    load_processors(config.custom_processors)
    descriptors = raise_descriptor_limit()
    log.info("%d files and sockets may be open here; each rank takes one", descriptors)
    ending = Ending()
    async with contextlib.AsyncExitStack() as started:
        # Of two services over one state, the second takes no worker of the first. It makes the
        # folder, where the audit log may lie too.
        held = started.enter_context(hold(Path(config.state_dir)))
        access = make_access_control(config, started)
        for listen in (config.listen, config.health_listen, config.metrics_listen):
            if listen is not None:
                require_free(listen)  # before what takes minutes at a first start
        secret = shared_secret(config)
        nursery = NurseryProcess()  # for the workers of this process and what opens jobs
        pool = make_pool(config, secret, serve_worker, nursery)
        started.push_async_callback(pool.stop)
        tell(_starts_workers(config))
        staffing = asyncio.create_task(pool.start())
        started.push_async_callback(cancel_all, staffing)
        tell("loading the planner and the codecs")
        for module in _HEAVY:
            await _in_starting(import_module, module)
        from dataservice.core.kernels import load_kernels
        from dataservice.engine.coordinator import Coordinator
        from dataservice.jobs.opener import JobOpener
        from dataservice.planning.warm import warm_up

        opener = JobOpener(
            custom_processors=config.custom_processors,
            limits=config.limits,
            allowed_roots=config.roots,
            opening=config.job_opening,
            job_limits=config.job_limits,
            storage_profiles=config.storage_profiles,
            code_packages=config.packages,
            cache=make_index_cache(config),
            nursery=nursery,
        )
        _stop_in_thread(started, ending, "what opens jobs", opener.close)
        tell("starting the process that opens jobs")
        opening = _in_starting.begin(opener.start)
        try:  # meanwhile, as it waits for a process that loads libraries
            # In a thread, as a large one is checked and copied.
            store = await _in_starting(SqliteStateStore, Path(config.state_dir), held=held)
            _stop_in_thread(started, ending, "the state store", store.close)
            watchdog = Watchdog(config.unwell_after_s)
            started.callback(watchdog.close)
            watchdog.watch("the state store", store.check)
            metrics, endpoint = make_metrics(config, started, ending), None
            metrics.team_weights({name: team.weight for name, team in config.teams.items()})
            metrics.wanted_workers(config.workers)
            if config.metrics_listen is not None:
                endpoint = serve_metrics(metrics.registry, config.metrics_listen)
                _stop_in_thread(started, ending, "the metrics endpoint", endpoint.stop)
            tell("compiling the planner; a first start takes minutes, others seconds")
            await _in_starting(warm_up)
            await _in_starting(load_kernels)
        finally:
            await opening
        # One thread: a team's order waits at most for one pack of another team to be written.
        writers = FairThreads("writing orders", threads=1, teams=lambda: config.teams)
        started.callback(writers.close)
        tls = config.tls.client if config.tls is not None else None
        coordinator = Coordinator(
            store=store,
            pool=pool,
            link=GrpcWorkerLink(secret, tls=tls, threads=writers),
            read_job=opener.read_job,
            open_job=opener.open_job,
            read_sources=opener.read_sources,
            ticket_secret=secret,
            attempt_timeout_s=config.attempt_timeout_s,
            idle_release_s=config.idle_release_s,
            metrics=metrics,
            teams=lambda: config.teams,
            diagnose=diagnose,
            wanted_workers=config.workers,
            planning_threads=config.planning_threads,
            opened_at_once=config.job_opening.at_once,
            troubles=watchdog.troubles,
            descriptors=descriptors,
        )
        started.push_async_callback(
            lambda: ending.within(COORDINATOR_STOP_S, "attempts", coordinator.stop())
        )
        tell("taking up the jobs that are registered")
        await coordinator.start()
        server = await serve_coordinator(coordinator, config.listen, access=access, tls=config.tls)
        started.push_async_callback(server.stop, 0.0)  # for when one of the next lines fails
        on_stopping = _watch_serving(config, watchdog, server, started)
        return Service(
            server=server,
            pool=pool,
            staffing=staffing,
            store=store,
            metrics=endpoint,
            started=started.pop_all(),
            left=ending.left,
            on_stopping=on_stopping,
        )


def _starts_workers(config: ServiceConfig) -> str:
    workers = f"{config.workers} worker{'s' if config.workers > 1 else ''}"
    if config.pool == "local":
        return f"starting {workers}"
    if config.ray_address is None:
        return f"starting Ray and {workers}"
    return f"joining Ray at {config.ray_address}, and taking over or starting {workers}"


def run_service(
    config: ServiceConfig,
    *,
    ready: Callable[[Service], None],
    staffed: Callable[[Service], None] = lambda service: None,
    tell: Callable[[str], None] = log.info,
) -> None:
    """Serve until SIGTERM or SIGINT, or until it is known that the workers cannot start, then stop
    gracefully; in the latter case what `WorkerPool.start` raised is raised. `tell` hears what a
    start does, `ready` is called once the service serves, `staffed` once its workers are there.
    Ends the process with status ABANDONED if something does not stop within `stop_within_s`. Call
    it in the main thread."""
    guard = StopGuard(config.stop_within_s)
    try:
        left = asyncio.run(_serve_until_asked(config, guard, ready, staffed, tell))
    except BaseException:
        guard.ask()  # the failure may have left something that hangs
        raise
    guard.end_unless_clean(left)


async def _serve_until_asked(
    config: ServiceConfig,
    guard: StopGuard,
    ready: Callable[[Service], None],
    staffed: Callable[[Service], None],
    tell: Callable[[str], None],
) -> list[str]:
    """Returns the names of what could not be stopped."""
    asked = asyncio.create_task(guard.asked())
    starting = asyncio.create_task(start_service(config, tell=tell))
    await asyncio.wait({asked, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
    if starting.cancelled():
        return []
    service = starting.result()
    keep_for_next_step()
    beside = [
        asyncio.create_task(give_back_now_and_then()),
        asyncio.create_task(archive_now_and_then(service.store, config.archive_ledger_after_days)),
    ]
    garbage.search_seldom()
    try:
        ready(service)
        await asyncio.wait({asked, service.staffing}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            service.staffing.result()
            staffed(service)
        await asked
        log.info("stopping: open calls have 5 s to end")
    finally:
        for task in beside:
            task.cancel()
        await service.stop()
    return service.left


def _watch_serving(
    config: ServiceConfig,
    watchdog: Watchdog,
    server: ServerHandle,
    started: contextlib.AsyncExitStack,
) -> Callable[[], None]:
    """Start the watchdog over event loop and port, and report its verdict as gRPC health, on
    `health_listen` too if the config has it. Returns a function that stops the watchdog and
    reports the service as not ready."""
    loop = asyncio.get_running_loop()
    port = None

    def tell_own_port(ready: bool, alive: bool) -> None:
        telling = server.tell_health(ready=ready)
        try:
            asyncio.run_coroutine_threadsafe(telling, loop)
        except RuntimeError:  # the loop is closed: the service has stopped
            telling.close()

    if config.health_listen is not None:
        port = HealthPort(config.health_listen)
        started.callback(port.stop)
        watchdog.tell(port.tell)
    watchdog.tell(tell_own_port)
    watchdog.watch_loop(loop)
    request = OwnRequest(server.listens, tls=config.tls, limit_s=config.unwell_after_s)
    watchdog.watch("our own port", request)
    watchdog.start()

    def on_stopping() -> None:
        watchdog.close()
        if port is not None:
            port.tell(False, True)

    return on_stopping


def _stop_in_thread(
    started: contextlib.AsyncExitStack, ending: Ending, what: str, stop: Callable[[], object]
) -> None:
    """Have `stop` called in a thread when the service stops; if it hangs, it is abandoned."""
    started.push_async_callback(
        lambda: ending.within(STOP_CALL_S, what, in_thread(what, stop)),
    )


def shared_secret(config: ServiceConfig) -> bytes:
    """The secret that coordinator and workers share. It is made on first use; only the service's
    own user can read it."""
    path = Path(config.secret_file or Path(config.state_dir) / SECRET)
    try:
        if not path.exists() and config.secret_file is None:
            making = path.with_name(f"{path.name}.part")  # a full disk leaves no short secret
            making.unlink(missing_ok=True)
            making.touch(mode=0o600)
            making.write_bytes(secrets.token_bytes(SECRET_BYTES))
            making.replace(path)
        secret = path.read_bytes()
        if others_may(path):
            raise SpecError(
                f"the secret file {path} may be read or written by whoever is on this machine, "
                "and whoever has it commands the workers. Make another, as this one is known: "
                f"`head -c {SECRET_BYTES} /dev/urandom > FILE; chmod 600 FILE`; in Kubernetes give "
                "its volume defaultMode: 0440."
            )
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
