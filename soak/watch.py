"""The soak's leak checks: the resources a service holds while it runs, and those it leaves
behind."""

import contextlib
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from soak import processes
from soak.service import ServiceProcess

INTERVAL_S = 1.0
# Growth from the first to the last quarter that does not count as a leak, since caches fill up.
RSS_RATIO, RSS_MARGIN_BYTES = 1.10, 16 * 2**20
COUNT_MARGIN = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The resources of the coordinator and of all the service's processes at one moment."""

    coordinator: int
    rss_bytes: int
    files: int
    threads: int
    sockets: int
    family: int
    family_rss_bytes: int


@dataclass
class Watch:
    """Samples a service every second from `start` to `stop`."""

    service: ServiceProcess
    samples: list[Sample] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample, in a separate thread."""
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it was started."""
        return self._thread is not None

    def stop(self) -> None:
        """Stop sampling."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL_S):
            with contextlib.suppress(psutil.Error):
                self.samples.append(self._sample())

    def _sample(self) -> Sample:
        coordinator = psutil.Process(self.service.pid)
        family = processes.family(self.service.home)
        with coordinator.oneshot():
            return Sample(
                coordinator=coordinator.pid,
                rss_bytes=coordinator.memory_info().rss,
                files=coordinator.num_fds(),
                threads=coordinator.num_threads(),
                sockets=len(coordinator.net_connections(kind="inet")),
                family=len(family),
                family_rss_bytes=sum(map(_rss_bytes, family)),
            )


def growth(samples: Sequence[Sample]) -> dict[str, tuple[float, float]]:
    """Median of the first and of the last quarter, by name. Needs one coordinator throughout."""
    quarter = max(1, len(samples) // 4)
    names = ("rss_bytes", "files", "threads", "sockets", "family", "family_rss_bytes")
    return {
        name: (
            statistics.median(getattr(sample, name) for sample in samples[:quarter]),
            statistics.median(getattr(sample, name) for sample in samples[-quarter:]),
        )
        for name in names
    }


def grown(samples: Sequence[Sample]) -> list[str]:
    """The figures that have grown beyond their tolerance."""
    if len({sample.coordinator for sample in samples}) > 1:
        return ["the coordinator was replaced while it was to be watched"]
    found = []
    for name, (first, last) in growth(samples).items():
        limit = limit_of(name, first)
        if last > limit:
            found.append(f"{name} grew from {first:,.0f} to {last:,.0f} (limit {limit:,.0f})")
    return found


def limit_of(name: str, first: float) -> float:
    """The largest value that is no growth from `first`, in bytes where the name says so."""
    return first * RSS_RATIO + RSS_MARGIN_BYTES if name.endswith("bytes") else first + COUNT_MARGIN


def left_behind(service: ServiceProcess, wait_s: float = 15.0) -> list[str]:
    """The leftovers of a stopped service; all of it gets a moment to end."""
    deadline_s = time.monotonic() + wait_s
    while (found := _left(service)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return found


def _left(service: ServiceProcess) -> list[str]:
    alive = processes.family(service.home)
    found = [f"process {p.pid} still lives: {processes.title(p)[:80]}" for p in alive]
    port = int(service.address.rpartition(":")[2])
    listening = [
        connection
        for connection in psutil.net_connections(kind="inet")
        if connection.laddr and connection.laddr.port == port and connection.status != "TIME_WAIT"
    ]
    return found + [f"sockets are left at port {port}: {listening}"] * bool(listening)


def _rss_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(psutil.Error):
        return int(process.memory_info().rss)
    return 0
