"""Which ranks of an attempt cannot fetch from which workers, remembered from step to step.

The network may drop what goes between trainers and a worker that the coordinator still reaches.
A rank finds that out by waiting in vain, and without a memory each step would cost it the same wait
again. A path may be mended: it is tried again after a while, and if it is still broken it is left
alone for twice as long.
"""

import asyncio
import logging
from dataclasses import dataclass

log = logging.getLogger(__name__)

FIRST_S = 30.0
LONGEST_S = 960.0
# Ranks that must fail to reach a worker before all go elsewhere: a single one may be at fault.
SEVERAL = 2


@dataclass(frozen=True, slots=True)
class _Broken:
    until_s: float
    life_s: float


class Reachability:
    """The paths from ranks to workers that count as broken now."""

    def __init__(self, *, job: str = "", ranks: int = SEVERAL) -> None:
        """`ranks` of an attempt of the job."""
        self._about = {"job": job}
        self._several = min(SEVERAL, ranks)
        self._broken: dict[str, dict[int, _Broken]] = {}  # by worker, by rank

    def avoid(self, rank: int, worker: str) -> None:
        """Nothing came to the rank, though the worker had the pack: it avoids the worker for a
        while."""
        now_s = asyncio.get_running_loop().time()
        known = self._broken.setdefault(worker, {}).get(rank)
        if known is None or now_s > known.until_s + known.life_s:
            life_s = FIRST_S
        elif now_s < known.until_s:
            return
        else:
            life_s = min(2 * known.life_s, LONGEST_S)
        shunned = self.is_shunned(worker)
        self._broken[worker][rank] = _Broken(now_s + life_s, life_s)
        if self.is_shunned(worker) and not shunned:
            log.warning(
                "ranks cannot fetch from %s: packs are ordered elsewhere for %.0f s. Look at the "
                "network between the trainers and that worker.",
                worker,
                life_s,
                extra=self._about,
            )

    @property
    def whole(self) -> bool:
        """No path is, or was lately, broken."""
        return not self._broken

    def avoids(self, rank: int, worker: str) -> bool:
        """Whether the rank is not to be sent to this worker."""
        known = self._broken.get(worker)
        return known is not None and (_is_now(known.get(rank)) or self.is_shunned(worker))

    def is_shunned(self, worker: str) -> bool:
        """Whether several ranks avoid it, so that all do, and packs are better ordered
        elsewhere."""
        known = self._broken.get(worker)
        return known is not None and sum(map(_is_now, known.values())) >= self._several

    def try_again(self, rank: int) -> None:
        """The rank has no other worker left: it may be sent to any."""
        for known in self._broken.values():
            known.pop(rank, None)

    def know(self, workers: frozenset[str]) -> None:
        """These are the workers; the others are gone for good, and their names are not used
        again."""
        self._broken = {name: known for name, known in self._broken.items() if name in workers}


def _is_now(broken: _Broken | None) -> bool:
    return broken is not None and asyncio.get_running_loop().time() < broken.until_s
