"""Workers as Ray actors, each a process that serves gRPC. The only file that imports ray.

Ray places the processes, watches them and limits their CPUs; no sample passes through it.
"""

import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from dataservice.core.errors import ServiceError, SpecError, WorkerLostError
from dataservice.core.ports import ServedWorker, ServeWorker
from dataservice.workers.pool import PoolConfig, SupervisedPool

logger = logging.getLogger(__name__)

# Ray puts sockets below its directory, and Linux allows 107 bytes for a socket's path; the
# session's name and the socket's take up to 62 of them.
TEMP_DIR_LIMIT_BYTES = 45
# Ray refuses less than 75 MiB; nothing of ours is ever put there.
SMALLEST_OBJECT_STORE_BYTES = 80 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class RayPoolConfig(PoolConfig):
    """Where Ray runs. Without `address` a Ray of our own starts on this machine."""

    address: str | None = None
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


class _WorkerProcess:
    """Runs as a Ray actor: one served worker on the actor's own event loop."""

    def __init__(self) -> None:
        self._served: ServedWorker | None = None

    async def serve(self, serve: ServeWorker, worker: str) -> tuple[str, str, int]:
        """Start the worker; (address, Ray node, process id)."""
        self._served = await serve(worker)
        return self._served.address, ray.get_runtime_context().get_node_id(), os.getpid()

    async def ping(self) -> None:
        """Returns if the event loop that serves streams still turns."""

    async def stop(self) -> None:
        """Finish open streams and close the port."""
        if self._served is not None:
            await self._served.stop()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Actor:
    """`process` is a descriptor of the actor's process, -1 when it runs on another machine."""

    worker: str
    actor: Any
    process: int = -1


class RayWorkerPool(SupervisedPool[_Actor]):
    """core.ports.WorkerPool over Ray.

    `serve` is pickled to the actors: a function of an importable module, or a partial of one.
    A Ray that this process has already started or joined is used and left running.
    """

    def __init__(self, *, serve: ServeWorker, config: RayPoolConfig) -> None:
        super().__init__(config)
        self._serve = serve
        self._ray_config = config
        self._owns_ray = False

    async def _open(self) -> None:
        if ray.is_initialized():
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # On this thread, though it blocks for seconds: the kernel ends Ray's processes with
        # the thread that started them, and a pool thread may end before the service does.
        with _sigterm_kept():
            _init_ray(self._ray_config)
        self._owns_ray = True

    async def _launch(self, worker: str) -> tuple[str, _Actor]:
        remote = ray.remote(num_cpus=self._ray_config.cpus_per_worker, max_restarts=0)
        actor: Any = remote(_WorkerProcess).options(name=worker).remote()
        try:
            address, node_id, process_id = await actor.serve.remote(self._serve, worker)
        except RayError as error:
            _kill(actor)
            raise _start_failure(worker, error) from error
        except BaseException:
            _kill(actor)
            raise
        local = node_id == ray.get_runtime_context().get_node_id()
        process = _process_descriptor(process_id) if local else -1
        return address, _Actor(worker=worker, actor=actor, process=process)

    async def _alive(self, handle: _Actor) -> bool:
        try:
            await handle.actor.ping.remote()
        except RayError as error:
            logger.info("%s: %s", handle.worker, str(error).splitlines()[0])
            return False
        return True

    async def _end(self, handle: _Actor, *, gracefully: bool) -> None:
        if gracefully:
            with contextlib.suppress(RayError):
                await handle.actor.stop.remote()
        _kill(handle.actor)
        if handle.process >= 0:
            # Ray asks first, and a stopped process does not hear it: its CPUs would stay taken.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle.process, signal.SIGKILL)
            os.close(handle.process)

    async def _close(self) -> None:
        if self._owns_ray:
            self._owns_ray = False
            with _sigterm_kept():
                ray.shutdown()


def node_host() -> str:
    """This machine's address among Ray's nodes: what a `serve` in an actor advertises."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _init_ray(config: RayPoolConfig) -> None:
    options: dict[str, Any] = {"address": config.address}
    if config.address is None:
        options = {
            "address": "local",
            "num_cpus": max(1, math.ceil(config.workers * config.cpus_per_worker)),
            "object_store_memory": config.object_store_bytes,
            "_temp_dir": None if config.temp_dir is None else str(config.temp_dir),
        }
    try:
        ray.init(
            include_dashboard=False,
            log_to_driver=config.log_to_driver,
            logging_level=logging.WARNING,
            **options,
        )
    except (ConnectionError, OSError, RuntimeError, ValueError, RayError) as error:
        where = "on this machine" if config.address is None else f"at {config.address}"
        raise WorkerLostError(
            f"Ray {where} cannot be used: {error}. Check the address, that it runs the same Ray "
            f"({ray.__version__}) and Python, and that its temp_dir is writable."
        ) from error


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Ray takes SIGTERM over for itself; the service's own way of stopping goes before."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # Outside the main thread Ray could not take it, and it cannot be given back.
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL if kept is None else kept)


def _kill(actor: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(actor, no_restart=True)


def _process_descriptor(process_id: int) -> int:
    """Names this very process even after its number is used again; Linux only."""
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
