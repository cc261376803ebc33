"""The coordinator under load, in a process of its own: as `serve` runs it, workers elsewhere."""

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.scale.made_job import JOB, made_setup
from dataservice.core import garbage
from dataservice.core.ports import WorkerInfo
from dataservice.engine.coordinator import Coordinator
from dataservice.engine.fair_threads import FairThreads
from dataservice.observability.metrics import PrometheusMetrics
from dataservice.operate.freed_memory import give_back_now_and_then, keep_for_next_step
from dataservice.planning.warm import warm_up
from dataservice.serving.server import serve_coordinator
from dataservice.serving.worker_link import GrpcWorkerLink
from dataservice.state.sqlite import SqliteStateStore

SECRET = b"a secret of 32 bytes for scaling"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What is played: `ranks` with `samples_a_rank` each, drawn from an index of `indexed`. Of a
    `watched` one each turn of the event loop is timed, which takes time itself."""

    ranks: int
    samples_a_rank: int
    indexed: int = 400_000
    memory_tokens: int = 8192
    text: bool = False
    watched: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """Processor seconds of the coordinator's process so far, its resident memory now, and whether
    the steps that it may plan ahead are all planned and decoded. Where it is watched, the most
    processor seconds that a callback has kept the event loop since this was asked before, and its
    name."""

    cpu_s: float
    rss_bytes: int
    ahead: bool
    longest: tuple[float, str] = (0.0, "")


class FixedPool:
    """core.ports.WorkerPool over workers that somebody else runs."""

    def __init__(self, addresses: list[str], slots: int) -> None:
        self._workers = tuple(
            WorkerInfo(worker=f"worker-{k}", address=address, slots=slots)
            for k, address in enumerate(addresses)
        )

    async def start(self) -> None:
        """They run already."""

    async def stop(self) -> None:
        """They are not ours."""

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All of them."""
        return self._workers

    def shortfall(self) -> str:
        """None is missing."""
        return ""

    async def replace(self, worker: str) -> None:
        """They do not fail here."""
        raise AssertionError(f"{worker} was lost")

    async def renew(
        self, workers: Collection[str], drained: Callable[[str], Awaitable[None]]
    ) -> None:
        """Nobody asks for it."""


def serve(size: Size, workers: list[str], home: str, line: Connection) -> None:
    """Serve until the line says None; every other word is answered with what was used."""
    asyncio.run(_serve(size, workers, Path(home), line))


async def _serve(size: Size, workers: list[str], home: Path, line: Connection) -> None:
    warm_up()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    setup = made_setup(
        max(size.indexed, size.ranks * size.samples_a_rank),
        size.ranks * size.samples_a_rank,
        memory_tokens=size.memory_tokens,
        text=size.text,
    )
    writers = FairThreads("writing orders", threads=1)
    store = SqliteStateStore(home)
    coordinator = Coordinator(
        store=store,
        pool=FixedPool(workers, slots=32),
        link=GrpcWorkerLink(SECRET, threads=writers),
        read_job=lambda _text, _base, _team: [setup.record],
        open_job=lambda _record: setup,
        ticket_secret=SECRET,
        metrics=PrometheusMetrics(),
    )
    await coordinator.start()
    await coordinator.submit(JOB, "")
    server = await serve_coordinator(coordinator, "127.0.0.1:0")
    keep_for_next_step()  # as app.py does, and what follows
    garbage.search_seldom()
    giving = asyncio.create_task(give_back_now_and_then())
    line.send(server.address)
    process, loop = psutil.Process(), asyncio.get_running_loop()
    turns = Turns() if size.watched else None
    while await loop.run_in_executor(None, line.recv) is not None:
        used = Used(
            cpu_s=time.process_time(),
            rss_bytes=process.memory_info().rss,
            ahead=await _is_ahead(coordinator),
            longest=(0.0, "") if turns is None else turns.longest(),
        )
        line.send(used)
    giving.cancel()
    await server.stop(0.0)
    with contextlib.suppress(Exception):
        await coordinator.stop()
    writers.close()
    store.close()


class Turns:
    """Times every callback of this thread's event loop by the thread's own processor seconds, which
    other work on the machine does not lengthen."""

    def __init__(self) -> None:
        self._longest = (0.0, "")
        ours, run = threading.get_ident(), asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            if threading.get_ident() != ours:
                run(handle)
                return
            began_s = time.thread_time()
            run(handle)
            took_s = time.thread_time() - began_s
            if took_s > self._longest[0]:
                self._longest = took_s, _name(handle)

        asyncio.Handle._run = timed  # type: ignore[assignment, method-assign]

    def longest(self) -> tuple[float, str]:
        """The longest since the last call."""
        found, self._longest = self._longest, (0.0, "")
        return found


def _name(handle: Any) -> str:
    """Of a task its coroutine, of another callback itself."""
    task = getattr(handle._callback, "__self__", None)
    called = task.get_coro() if isinstance(task, asyncio.Task) else handle._callback
    return str(getattr(called, "__qualname__", called))


async def _is_ahead(coordinator: Coordinator) -> bool:
    (job,) = (await coordinator.health([JOB], team=None)).jobs
    health = job.health
    return health.ready_steps == health.decoded_steps == health.window_steps
