"""The coordinator under load, in a process of its own: as `serve` runs it, workers elsewhere."""

import asyncio
import contextlib
import resource
import selectors
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

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
    """What is played: `ranks` with `samples_a_rank` each, drawn from an index of `indexed`."""

    ranks: int
    samples_a_rank: int
    indexed: int = 400_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """Processor seconds of the coordinator's process so far, its resident memory now, and whether
    the steps that it may plan ahead are all planned and decoded; of the event loop's turns
    since this was asked before, the processor seconds of the longest."""

    cpu_s: float
    rss_bytes: int
    ahead: bool
    longest_turn_s: float = 0.0


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


class Turns(selectors.DefaultSelector):
    """The selector of an event loop, which times the loop's turns: what it does between two looks
    at its sockets, by the thread's own processor seconds, which other work on the machine does not
    lengthen."""

    def __init__(self) -> None:
        super().__init__()
        self._began_s: float | None = None
        self._longest_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Look, and end one turn and begin the next."""
        if self._began_s is not None:
            self._longest_s = max(self._longest_s, time.thread_time() - self._began_s)
        found = super().select(timeout)
        self._began_s = time.thread_time()
        return found

    def longest_s(self) -> float:
        """Of the turns since this was asked before."""
        found_s, self._longest_s = self._longest_s, 0.0
        return found_s


def serve(size: Size, workers: list[str], home: str, line: Connection) -> None:
    """Serve until the line says None; every other word is answered with what was used."""
    turns = Turns()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        runner.run(_serve(size, workers, Path(home), line, turns))


async def _serve(
    size: Size, workers: list[str], home: Path, line: Connection, turns: Turns
) -> None:
    warm_up()
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    setup = made_setup(
        max(size.indexed, size.ranks * size.samples_a_rank),
        size.ranks * size.samples_a_rank,
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
    while await loop.run_in_executor(None, line.recv) is not None:
        used = Used(
            cpu_s=time.process_time(),
            rss_bytes=process.memory_info().rss,
            ahead=await _is_ahead(coordinator),
            longest_turn_s=turns.longest_s(),
        )
        line.send(used)
    giving.cancel()
    await server.stop(0.0)
    with contextlib.suppress(Exception):
        await coordinator.stop()
    writers.close()
    store.close()


async def _is_ahead(coordinator: Coordinator) -> bool:
    (job,) = (await coordinator.health([JOB], team=None)).jobs
    health = job.health
    return health.ready_steps == health.decoded_steps == health.window_steps
