"""Workers as Ray actors, each a process that serves gRPC. The only file that imports ray.

Ray places the processes, watches them and limits their CPUs; no sample passes through it.

In a Ray cluster that existed before, workers may outlive the pool: they are detached actors in the
service's own namespace, and the next pool keeps those that answer and were started with the same
settings. A worker that no pool has pinged for `orphan_after_s` ends itself.
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError
from ray.runtime_env import RuntimeEnv

from dataservice.core import garbage
from dataservice.core.descriptor_limit import descriptor_limit
from dataservice.core.errors import ServiceError, SpecError, WorkerLostError
from dataservice.core.ports import ServedWorker, ServeWorker
from dataservice.core.threads import CallThreads
from dataservice.core.whereabouts import Whereabouts
from dataservice.workers.nursery import ends_within
from dataservice.workers.pool import PoolConfig, Running, SupervisedPool
from dataservice.workers.ray_head import RayHead

log = logging.getLogger(__name__)

# Ray puts sockets below its directory, and Linux allows 107 bytes for a socket's path; the names of
# the session and the socket take up to 62 of them.
TEMP_DIR_LIMIT_BYTES = 45
INNER_DIR = "ray"  # Ray gives its folder mode 0777, so it lies inside a private one
# Ray refuses less than 75 MiB; we never put anything there.
SMALLEST_OBJECT_STORE_BYTES = 80 * 2**20
# Seconds that a leftover worker has to introduce itself.
INTRODUCTION_S = 5.0
SLOW_S = 10.0  # that Ray may take to answer before it is told
END_S = 2.0  # for a worker to exit after it has finished its streams
REMOVALS = 50
REMOVAL_PAUSE_S = 0.1

_OUR_TOKEN = "that its token is ours (RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"

Started = TypeVar("Started")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPoolConfig(PoolConfig):
    """Where Ray runs. Without `address`, the pool starts a Ray of its own on this machine. Workers
    run in Ray's `runtime_env`; local folders in it are read once, when the pool opens.

    With a `namespace`, which only this service uses, workers of a former pool with the same
    `settings` are taken over. With `outlive`, workers keep running when this pool stops, and end
    themselves when no pool has pinged them for `orphan_after_s`.
    """

    address: str | None = None
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    namespace: str | None = None
    settings: str = ""
    outlive: bool = False
    orphan_after_s: float = 900.0
    cpus_per_worker: float = 1.0
    temp_dir: Path | None = None
    object_store_bytes: int = SMALLEST_OBJECT_STORE_BYTES
    log_to_driver: bool = True

    def __post_init__(self) -> None:
        # Zero-argument super() names the class that dataclass(slots=True) replaced.
        PoolConfig.__post_init__(self)
        if self.cpus_per_worker < 0:
            raise SpecError(f"cpus_per_worker is {self.cpus_per_worker}; it must be at least 0.")
        length_bytes = len(os.fsencode(self.temp_dir or ""))
        if length_bytes > TEMP_DIR_LIMIT_BYTES:
            raise SpecError(
                f"Ray's temp_dir {str(self.temp_dir)!r} is {length_bytes} bytes long; Ray's "
                f"sockets need it to be at most {TEMP_DIR_LIMIT_BYTES}. Choose a shorter path."
            )
        if self.outlive and self.namespace is None:
            raise SpecError("workers that outlive their pool need a namespace to be found in.")
        _read_runtime_env(self.runtime_env)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Introduction:
    """A worker's description of itself: where it serves, on which Ray node, the settings it was
    started with, how many files and sockets it may have open, and where it is."""

    address: str
    node_id: str
    process_id: int
    settings: str
    descriptors: int
    where: Whereabouts


class _WorkerProcess:
    """Runs as a Ray actor: one served worker on the actor's own event loop."""

    def __init__(self, settings: str, orphan_after_s: float) -> None:
        self._settings = settings
        self._orphan_after_s = orphan_after_s
        self._served: ServedWorker | None = None
        self._heard_s = time.monotonic()
        self._watch: asyncio.Task[None] | None = None

    async def serve(self, serve: ServeWorker, worker: str) -> _Introduction:
        """Start the worker."""
        self._served = await serve(worker)
        garbage.search_seldom()
        self._watch = asyncio.create_task(self._end_when_orphaned())
        return self._introduction(self._served)

    async def introduce(self) -> _Introduction | None:
        """This worker's description; None while it does not serve."""
        self._heard_s = time.monotonic()
        return None if self._served is None else self._introduction(self._served)

    async def ping(self) -> None:
        """Returns if the event loop that serves streams still runs."""
        self._heard_s = time.monotonic()

    async def stop(self) -> None:
        """Finish open streams and close the port."""
        if self._served is not None:
            await self._served.stop()

    def _introduction(self, served: ServedWorker) -> _Introduction:
        return _Introduction(
            address=served.address,
            node_id=ray.get_runtime_context().get_node_id(),
            process_id=os.getpid(),
            settings=self._settings,
            descriptors=descriptor_limit(),
            where=served.where,
        )

    async def _end_when_orphaned(self) -> None:
        left_s = self._orphan_after_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = self._heard_s + self._orphan_after_s - time.monotonic()
        log.warning("no coordinator has asked for %g s: this worker ends", self._orphan_after_s)
        await self.stop()
        _kill(ray.get_runtime_context().current_actor)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Actor:
    """A Ray actor. `process` is a descriptor of its process, -1 when it runs on another machine."""

    worker: str
    actor: Any
    process: int = -1


class RayWorkerPool(SupervisedPool[_Actor]):
    """core.ports.WorkerPool over Ray.

    `serve` is pickled and sent to the actors: it is a function of an importable module, or a
    partial of one. A Ray that this process has already started or joined is used and left running.
    """

    def __init__(self, *, serve: ServeWorker, config: RayPoolConfig) -> None:
        super().__init__(config)
        self._serve = serve
        self._ray_config = config
        self._owns_ray = False
        self._asked_s: float | None = None  # since when Ray is waited for
        self._head = RayHead(address=config.address)
        self._watch: asyncio.Task[None] | None = None  # over its head
        self._private_dir: Path | None = None
        self._settings = config.settings
        # One thread, and not the event loop's: Ray takes seconds to come up. The kernel ends its
        # processes together with the thread that started them, so that must live on; and what is
        # asked there takes turns, so Ray is shut down once it has come up.
        self._calls = CallThreads("Ray", 1)

    async def _open(self) -> None:
        config = self._ray_config
        if ray.is_initialized():
            if config.runtime_env:
                raise SpecError(
                    "Ray runs in this process already, and takes no other runtime_env. Leave it "
                    "out here, or give it to ray.init."
                )
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray forks its processes, which run other programs at once. gRPC would tell of each fork
        # while we serve, and prepare for calls that no child makes.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        if config.address is None and config.temp_dir is None:
            self._private_dir = _private_temp_dir()
        self._owns_ray = True  # whoever cancels us has it shut down, once it has come up
        self._asked_s = time.monotonic()
        try:
            with _sigterm_kept():
                async with asyncio.timeout(config.start_timeout_s), self._told_when_slow():
                    await self._head.until_it_listens()
                    await self._calls(_init_ray, config, self._private_dir)
        except TimeoutError as error:
            raise WorkerLostError(
                f"Ray {self._head.where} has not answered for {config.start_timeout_s:g} s"
                f"{self._head.silence}. Check the address, that its head runs, and {_OUR_TOKEN}, "
                "or raise worker_start_timeout_s."
            ) from error
        finally:
            self._asked_s = None
        self._watch = asyncio.create_task(
            self._head.watch(
                config.health_interval_s, lambda: log.error("%s", self._without_a_head())
            )
        )
        if config.runtime_env:
            # By now it names packages by their content: workers that were kept with modules that
            # have changed since are not taken over.
            told = ray.get_runtime_context().get_runtime_env_string()  # type: ignore[no-untyped-call]
            self._settings += f" in {told}"

    @contextlib.asynccontextmanager
    async def _told_when_slow(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        telling = loop.call_later(SLOW_S, lambda: log.warning("%s", self.shortfall()))
        try:
            yield
        finally:
            telling.cancel()

    def shortfall(self) -> str:
        """As that of every pool; while Ray itself does not answer, that."""
        if self._asked_s is not None:
            waited_s = time.monotonic() - self._asked_s
            return (
                f"{self._config.workers} of {self._config.workers} workers wait for Ray "
                f"{self._head.where}, which has not answered for {waited_s:.0f} s"
                f"{self._head.silence}"
            )
        return "; ".join(filter(None, (super().shortfall(), self._without_a_head())))

    def _without_a_head(self) -> str:
        if not self._head.silence:
            return ""
        return (
            f"the head of Ray {self._head.where} does not answer any more{self._head.silence}. "
            "Workers go on; but Ray ends this process when the head has been away for "
            "RAY_gcs_rpc_server_reconnect_timeout_s, by default 60 s"
        )

    @property
    def _outlived(self) -> bool:
        return self._ray_config.outlive

    async def _found(self) -> list[Running[_Actor]]:
        namespace = self._ray_config.namespace
        if namespace is None:
            return []
        # Ray gives no types for this: names and namespaces, both text.
        listing = partial(ray.util.list_named_actors, all_namespaces=True)
        named: list[dict[str, str]] = await self._calls(listing)
        workers = [each["name"] for each in named if each["namespace"] == namespace]
        met = await asyncio.gather(*(self._meet(worker, namespace) for worker in workers))
        return [running for running in met if running is not None]

    async def _meet(self, worker: str, namespace: str) -> Running[_Actor] | None:
        """A leftover worker, if it is like ours; otherwise it is ended."""
        self._used(worker)
        try:
            actor: Any = ray.get_actor(worker, namespace=namespace)
        except ValueError:
            return None  # it has just ended
        said: _Introduction | None = None
        # AttributeError: the worker is of an older release, without `introduce`.
        with contextlib.suppress(TimeoutError, RayError, AttributeError):
            async with asyncio.timeout(INTRODUCTION_S):
                said = await actor.introduce.remote()
        if said is not None and said.settings == self._settings:
            return _running(worker, actor, said)
        why = "does not answer" if said is None else "was started with other settings"
        log.warning("%s of a former coordinator %s: it is replaced", worker, why)
        await self._end(_Actor(worker=worker, actor=actor), gracefully=False)
        return None

    async def _launch(self, worker: str) -> Running[_Actor]:
        config = self._ray_config
        remote = ray.remote(num_cpus=config.cpus_per_worker, max_restarts=0)
        actor: Any = (
            remote(_WorkerProcess)
            .options(
                name=worker,
                namespace=config.namespace,
                lifetime="detached" if config.outlive else None,
            )
            .remote(self._settings, config.orphan_after_s)
        )
        try:
            said: _Introduction = await actor.serve.remote(self._serve, worker)
        except RayError as error:
            _kill(actor)
            raise _start_failure(worker, error) from error
        except BaseException:
            _kill(actor)
            raise
        return _running(worker, actor, said)

    async def _resources_left(self) -> str:
        """The CPUs that a worker takes, and the cluster's CPUs, in words."""
        wanted = self._ray_config.cpus_per_worker
        try:
            async with asyncio.timeout(END_S):
                there, free = await asyncio.to_thread(_cpus)
        except (TimeoutError, RayError):
            return ""
        return f": it takes {wanted:g} CPUs, and of {there:g} in the cluster {free:g} are free"

    async def _alive(self, handle: _Actor) -> bool:
        try:
            await handle.actor.ping.remote()
        except RayError as error:
            log.info("%s: %s", handle.worker, str(error).splitlines()[0])
            return False
        return True

    async def _end(self, handle: _Actor, *, gracefully: bool) -> None:
        if gracefully:
            with contextlib.suppress(RayError):
                await handle.actor.stop.remote()
        _kill(handle.actor)
        if handle.process >= 0:
            # Ray asks the process to exit, and counts any other end as a crash. A process that is
            # stopped (SIGSTOP) does not hear it, and would keep its CPUs for seconds.
            if gracefully:
                await asyncio.to_thread(ends_within, handle.process, END_S)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle.process, signal.SIGKILL)
            os.close(handle.process)

    async def _close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._owns_ray:
            self._owns_ray = False
            try:
                async with asyncio.timeout(self._config.stop_timeout_s):
                    await self._calls(ray.shutdown)
            except TimeoutError:
                log.warning("Ray does not answer: it is left, and its processes end with this one")
        if self._private_dir is not None:
            await asyncio.to_thread(remove_folder, self._private_dir)
            self._private_dir = None


def node_host() -> str:
    """This machine's address among Ray's nodes, which a `serve` in an actor advertises."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _private_temp_dir() -> Path | None:
    """A folder that only this user may enter, around Ray's own, which Ray opens to everyone. None
    when its path would be too long for Ray's sockets: Ray then chooses the place."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        made = Path(tempfile.mkdtemp(prefix="dataservice-", dir=parent))  # 0700
        if len(os.fsencode(made / INNER_DIR)) <= TEMP_DIR_LIMIT_BYTES:
            log.info("Ray keeps its sockets and logs in %s", made)
            return made
        made.rmdir()
    log.warning(
        "Ray's sockets and logs lie where others on this machine may see them: %s is too long a "
        "path for a folder of our own. Set TMPDIR to a shorter one.",
        tempfile.gettempdir(),
    )
    return None


def remove_folder(folder: Path) -> None:
    """Remove a folder whose files nobody needs. Ray's processes may still write a last line there
    meanwhile: it is then removed again."""
    for _ in range(REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(REMOVAL_PAUSE_S)
    log.warning("what Ray left in %s could not be removed", folder)


def _init_ray(config: RayPoolConfig, private_dir: Path | None) -> None:
    options: dict[str, Any] = {"address": config.address}
    temp_dir = config.temp_dir
    if private_dir is not None:
        temp_dir = private_dir / INNER_DIR
    # Ray would tell of each start that it has not replaced our handler of SIGTERM.
    logging.getLogger("ray._private.worker").addFilter(_tells_no_handler)
    if config.address is None:
        _ask_for_a_token()
        options = {
            "address": "local",
            "num_cpus": max(1, math.ceil(config.workers * config.cpus_per_worker)),
            "object_store_memory": config.object_store_bytes,
            "_temp_dir": None if temp_dir is None else str(temp_dir),
        }
    init = partial(
        ray.init,
        include_dashboard=False,
        log_to_driver=config.log_to_driver,
        logging_level=logging.WARNING,
        runtime_env=_read_runtime_env(config.runtime_env),
        **options,
    )
    try:
        if config.address is None:
            start_ray(init)
        else:
            init()
    except Exception as error:  # Ray's own, bare ones too
        where = RayHead(address=config.address).where
        raise WorkerLostError(
            f"Ray {where} cannot be used: {str(error).rstrip('.')}. Check the address, "
            f"that it runs the same Ray ({ray.__version__}) and Python, that its temp_dir is "
            f"writable, and {_OUR_TOKEN}."
        ) from error


def start_ray(start: Callable[[], Started]) -> Started:
    """Start Ray's processes here by `start`, and once more where they do not come up: a raylet that
    dies as it starts, of a port that another took first, is waited for in vain, and Ray then
    raises a bare Exception. Whatever else is raised is no accident, and goes on to the caller."""
    try:
        return start()
    except Exception as error:
        if type(error) is not Exception:
            raise
        log.warning("Ray is started once more: %s", error)
        return start()


def _tells_no_handler(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("SIGTERM handler is not set")


def _read_runtime_env(plain: Mapping[str, Any]) -> RuntimeEnv | None:
    """Ray's own reading of a runtime_env. Raises SpecError where it is none."""
    if not plain:
        return None
    known = sorted(key for key in RuntimeEnv.known_fields if not key.startswith("_"))
    try:
        unknown = sorted(plain.keys() - set(known))
        if unknown:  # which Ray would only warn of
            raise ValueError(f"it has {unknown}, and Ray {ray.__version__} has {known}")
        return RuntimeEnv(**plain)
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"this is no runtime_env of Ray: {str(error).rstrip('.')}. Correct ray_runtime_env."
        ) from error


def _ask_for_a_token() -> None:
    """Have Ray require a token: it listens on every address of the machine and runs the code it is
    sent. By default Ray keeps the token in a file; only the processes of our own Ray know ours."""
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # Which by default it warns of, and says how to turn it off.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        log.warning(
            "RAY_AUTH_MODE is %r: whoever reaches Ray's ports on this machine can run code here. "
            "Unset it, or set it to token.",
            os.environ["RAY_AUTH_MODE"],
        )


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Restores the service's SIGTERM handler, which Ray's core replaces with its own."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Outside the main thread none can be set.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL if kept is None else kept)


def _cpus() -> tuple[float, float]:
    """(CPUs in the cluster, free ones of them). Ray leaves out resources of which there are 0."""
    there: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return there.get("CPU", 0.0), free.get("CPU", 0.0)


def _running(worker: str, actor: Any, said: _Introduction) -> Running[_Actor]:
    local = said.node_id == ray.get_runtime_context().get_node_id()
    process = _process_descriptor(said.process_id) if local else -1
    return Running(
        worker=worker,
        address=said.address,
        handle=_Actor(worker=worker, actor=actor, process=process),
        descriptors=said.descriptors,
        where=said.where,
    )


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(actor, no_restart=True)


def _process_descriptor(process_id: int) -> int:
    """A descriptor of this very process, even after its number is reused; Linux only."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return os.pidfd_open(process_id)
    return -1


def _start_failure(worker: str, error: RayError) -> ServiceError:
    cause = getattr(error, "cause", None)
    if isinstance(cause, ServiceError):
        return type(cause)(f"{worker} did not start: {cause}")
    return WorkerLostError(
        f"{worker} did not start: {str(error).splitlines()[-1]}. Look at the workers' logs in "
        "Ray's session directory."
    )
