"""A coordinator, its stand-in workers and its ranks, each in processes of their own, and what a
step costs there."""

import contextlib
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks.scale import ranks, service, stand_ins
from benchmarks.scale.ranks import Seen
from benchmarks.scale.service import Size, Used

WORKERS = 40
PLAYERS = 2
BEGINS_IN_S = 0.3
SETTLE_S = 1.0
QUIET_S = 1.0
IDLE_SHARE = 0.05  # of a processor, below which the coordinator counts as at rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What steps took: processor seconds of the coordinator a step, the median and 99th percentile
    of the seconds of a call for a shard, bytes of an answer, and its packs and items."""

    cpu_s: float
    p50_s: float
    p99_s: float
    size_bytes: float = 0.0
    packs: float = 0.0
    items: float = 0.0


class Stage:
    """All processes of one size."""

    def __init__(self, size: Size, coordinator: Connection, players: list[Connection]) -> None:
        self.size = size
        self._coordinator = coordinator
        self._players = players
        self.longest_turn_s = 0.0  # that was heard of: see Used

    def used(self) -> Used:
        """What the coordinator has used by now."""
        self._coordinator.send("used")
        used: Used = self._coordinator.recv()
        self.longest_turn_s = max(self.longest_turn_s, used.longest_turn_s)
        return used

    def settle(self) -> None:
        """Wait until the coordinator has nothing left to do. One that is quiet may be waiting for
        its workers, and what it does for the next steps would then be counted as of empty calls."""
        busy_s = self.used().cpu_s
        while True:
            time.sleep(QUIET_S)
            now = self.used()
            if now.ahead and now.cpu_s - busy_s < IDLE_SHARE * QUIET_S:
                return
            busy_s = now.cpu_s

    def steps(self, count: int, *, settle_s: float = SETTLE_S) -> Cost:
        """The cost of so many steps, with what was planned and ordered meanwhile."""
        return self._cost("step", count, settle_s)

    def empty(self, count: int) -> Cost:
        """The cost of as many empty calls."""
        return self._cost("empty", count, 0.1)

    def _cost(self, word: str, count: int, settle_s: float) -> Cost:
        self.settle()
        before, seen = self.used(), []
        for _ in range(count):
            for player in self._players:
                player.send((word, time.time() + (BEGINS_IN_S if settle_s else 0.0)))
            seen += [_received(player) for player in self._players]
            time.sleep(settle_s)  # the next step is planned and decoded meanwhile
        self.settle()
        after = self.used()
        asked_s = np.concatenate([each.asked_s for each in seen])
        answers = len(asked_s)
        return Cost(
            cpu_s=(after.cpu_s - before.cpu_s) / count,
            p50_s=float(np.percentile(asked_s, 50)),
            p99_s=float(np.percentile(asked_s, 99)),
            size_bytes=sum(each.size_bytes for each in seen) / answers,
            packs=sum(each.packs for each in seen) / answers,
            items=sum(each.items for each in seen) / answers,
        )


def _received(line: Connection) -> Seen:
    seen: Seen = line.recv()
    return seen


@contextlib.contextmanager
def staged(size: Size, *, workers: int = WORKERS, players: int = PLAYERS) -> Iterator[Stage]:
    """The processes, every rank with its session open."""
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = stack.enter_context(_process(stand_ins.serve, workers))
        addresses = hosts.recv()
        coordinator = stack.enter_context(_process(service.serve, size, addresses, home))
        address = coordinator.recv()
        bounds = np.linspace(0, size.ranks, players + 1).astype(int).tolist()
        lines = [
            stack.enter_context(_process(ranks.play, address, size.ranks, first, stop))
            for first, stop in pairwise(bounds)
        ]
        for line in lines:
            assert line.recv() == "open"
        yield Stage(size, coordinator, lines)


@contextlib.contextmanager
def _process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        with contextlib.suppress(OSError):
            ours.send(None)
        process.join(20)
        if process.is_alive():
            process.terminate()
            process.join()
