"""Which ranks of an attempt cannot fetch from which workers, remembered from step to step.

The network may drop what goes between trainers and a worker that the coordinator still reaches.
A rank finds that out by waiting in vain, and without a memory each step would cost it the same wait
again. A path may be mended: it is tried again after a while, and if it is still broken it is left
alone for twice as long. If it holds for as long as it was left alone, it is forgotten.
"""

import asyncio
import heapq
import logging
from collections.abc import Mapping
from typing import NamedTuple

log = logging.getLogger(__name__)

FIRST_S = 30.0
LONGEST_S = 960.0
# Ranks that must fail to reach a worker before all go elsewhere: a single one may be at fault.
SEVERAL = 2


class _Broken(NamedTuple):
    """A path that is left alone until some time, and remembered for `life_s` from then on."""

    worker: str
    rank: int
    until_s: float
    life_s: float


_Paths = dict[str, dict[int, _Broken]]  # by worker, by rank


class Reachability:
    """The paths from ranks to workers that count as broken now. Every rank asks at each step: what
    it is told of a worker costs O(1), however many ranks avoid it."""

    def __init__(self, *, job: str = "", ranks: int = SEVERAL) -> None:
        """`ranks` of an attempt of the job."""
        self._about = {"job": job}
        self._several = min(SEVERAL, ranks)
        self._known: _Paths = {}
        self._broken: _Paths = {}  # those that are broken now; no worker without any
        self._due: list[tuple[float, _Broken]] = []  # a heap: each is mended, then forgotten

    def avoid(self, rank: int, worker: str) -> None:
        """Nothing came to the rank, though the worker had the pack: it avoids the worker for a
        while."""
        if rank in self._broken_now.get(worker, {}):
            return
        known = self._known.get(worker, {}).get(rank)
        life_s = FIRST_S if known is None else min(2 * known.life_s, LONGEST_S)
        shunned = worker in self.shunned
        until_s = asyncio.get_running_loop().time() + life_s
        broken = _Broken(worker, rank, until_s, life_s)
        for paths in (self._known, self._broken):
            paths.setdefault(worker, {})[rank] = broken
        heapq.heappush(self._due, (until_s, broken))
        if worker in self.shunned and not shunned:
            log.warning(
                "ranks cannot fetch from %s: packs are ordered elsewhere for %.0f s. Look at the "
                "network between the trainers and that worker.",
                worker,
                life_s,
                extra=self._about,
            )

    @property
    def intact(self) -> bool:
        """Whether no path is broken, as nearly always."""
        return not self._broken

    def avoided_by(self, rank: int) -> set[str]:
        """The workers that the rank is not to be sent to. O(workers that some rank avoids)."""
        return {worker for worker, ranks in self._broken_now.items() if self._avoids(rank, ranks)}

    def avoids(self, rank: int, worker: str) -> bool:
        """Whether the rank is not to be sent to this worker."""
        return self._avoids(rank, self._broken_now.get(worker, {}))

    @property
    def shunned(self) -> set[str]:
        """The workers that several ranks avoid, so that all do, and packs are better ordered
        elsewhere."""
        broken = self._broken_now.items()
        return {worker for worker, ranks in broken if len(ranks) >= self._several}

    def try_again(self, rank: int) -> None:
        """The rank has no other worker left: it may be sent to any."""
        for worker in [name for name, ranks in self._known.items() if rank in ranks]:
            self._forget(rank, worker)

    def know(self, workers: frozenset[str]) -> None:
        """These are the workers; the others are gone for good, and their names are not used
        again."""
        for paths in (self._known, self._broken):
            for worker in paths.keys() - workers:
                del paths[worker]

    def _avoids(self, rank: int, ranks: Mapping[int, _Broken]) -> bool:
        return rank in ranks or len(ranks) >= self._several

    @property
    def _broken_now(self) -> _Paths:
        """The broken paths, without those whose time is over."""
        now_s = asyncio.get_running_loop().time()
        while self._due and self._due[0][0] <= now_s:
            due_s, path = heapq.heappop(self._due)
            if self._known.get(path.worker, {}).get(path.rank) is not path:
                continue  # tried again meanwhile, or its worker is gone
            if due_s > path.until_s:
                self._forget(path.rank, path.worker)
            else:
                _drop(self._broken, path.rank, path.worker)
                heapq.heappush(self._due, (path.until_s + path.life_s, path))
        return self._broken

    def _forget(self, rank: int, worker: str) -> None:
        _drop(self._known, rank, worker)
        _drop(self._broken, rank, worker)


def _drop(paths: _Paths, rank: int, worker: str) -> None:
    ranks = paths.get(worker, {})
    ranks.pop(rank, None)
    if not ranks:
        paths.pop(worker, None)
