"""What draws packs to workers: where their samples were decoded last, and where their ranks are.

A sample goes by a key, which is the same for every job that names the same row of the same file.
The cache of the worker that a sample was ordered from last is remembered, for LAST_KEPT keys; other
samples have a home by rendezvous hashing, which a restart does not forget. Both are guesses that
cost time alone where they are wrong.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.order_columns import PackOrders
from dataservice.core.plan import StepPlan
from dataservice.core.ports import WorkerInfo
from dataservice.core.whereabouts import ANYWHERE, Whereabouts
from dataservice.engine.cache_homes import BUCKETS, cache_homes
from dataservice.planning.place_packs import PackPlaces, Pull, WorkerSites, place_packs

LAST_KEPT = 2**22  # in 8 MiB
NAMES_KEPT = 4096  # of caches, also of those that have gone, and may come back


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackWishes:
    """By what the packs of a plan are placed: `keys` uint32[n] of its samples, and where each
    replica is, [N]. Either is empty where nothing is known."""

    keys: NDArray[np.uint32]
    replicas: Sequence[Whereabouts]


NO_WISHES = PackWishes(keys=np.zeros(0, np.uint32), replicas=())


class Affinity:
    """Where samples are kept, as far as the coordinator has seen."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {}  # of each cache that was ever seen, in their order
        self._here: dict[str, int] = {}  # those that are there, and how many workers share each
        self._homes = cache_homes({})  # int16[BUCKETS], as numbers
        self._gone = np.zeros(1, bool)  # by number, and True for -1
        self._last = np.full(LAST_KEPT, -1, np.int16)

    def place(
        self,
        plan: StepPlan,
        orders: PackOrders,
        work: NDArray[np.int64],
        wishes: PackWishes,
        workers: Sequence[WorkerInfo],
        queued: Sequence[float],
    ) -> PackPlaces:
        """Which of these workers each of these packs of a plan goes to: its decode `work` is
        int64[k], and `queued` is what the slots of each worker have before them."""
        self._know(workers)
        nodes, zones = _Names(), _Names()
        sites = list(dict.fromkeys(worker.where for worker in workers))
        site_of = {site: k for k, site in enumerate(sites)}
        of_replicas = wishes.replicas or (ANYWHERE,) * plan.replicas
        found = WorkerSites(
            queued=np.array(queued, np.float64),
            slots=np.array([worker.slots for worker in workers], np.int64),
            site=np.array([site_of[worker.where] for worker in workers], np.int64),
            cache=np.array([self._number.get(site.cache, -1) for site in sites], np.int64),
            node=nodes.numbers(site.node for site in sites),
            zone=zones.numbers(site.zone for site in sites),
        )
        pull = Pull(
            cache=self._kept_at(wishes.keys, len(plan.sample_ids)),
            node=nodes.numbers(each.node for each in of_replicas),
            zone=zones.numbers(each.zone for each in of_replicas),
        )
        places = place_packs(plan, orders.pack, work, found, pull)
        if len(wishes.keys) and self._here:
            self._note(plan, orders, wishes.keys, found.cache[found.site[places.worker]])
        return places

    def _know(self, workers: Sequence[WorkerInfo]) -> None:
        here = dict(sorted(Counter(w.where.cache for w in workers if w.where.cache).items()))
        if here == self._here:
            return
        if len(self._number) + len(here) > NAMES_KEPT:
            number = {cache: k for k, cache in enumerate(here)}
            moved = [number.get(cache, -1) for cache in self._number]
            self._last = np.array([*moved, -1], np.int16)[self._last]
            self._number = number
        for cache in here:
            self._number.setdefault(cache, len(self._number))
        numbers = np.array([*(self._number[cache] for cache in here), -1], np.int16)
        self._here, self._homes = here, numbers[cache_homes(here)]
        self._gone = np.ones(len(self._number) + 1, bool)
        self._gone[numbers[:-1]] = False

    def _kept_at(self, keys: NDArray[np.uint32], samples: int) -> NDArray[np.int64]:
        """The number of the cache of each sample, int64[n]."""
        if not len(keys) or not self._here:
            return np.full(samples, -1, np.int64)
        last = self._last[keys % LAST_KEPT]
        return np.where(self._gone[last], self._homes[keys % BUCKETS], last).astype(np.int64)

    def _note(
        self,
        plan: StepPlan,
        orders: PackOrders,
        keys: NDArray[np.uint32],
        caches: NDArray[np.int64],
    ) -> None:
        """The packs are ordered where these caches are, int64[k]; -1 for none."""
        of_pack = np.full(plan.packs, -1, np.int64)
        of_pack[orders.pack] = caches
        at = np.repeat(of_pack, np.diff(plan.pack_offsets))
        kept = at >= 0
        self._last[keys[plan.pack_samples[kept]] % LAST_KEPT] = at[kept]


class _Names:
    """Numbers names as they come; an empty one is -1."""

    def __init__(self) -> None:
        self._number: dict[str, int] = {"": -1}

    def numbers(self, names: Iterable[str]) -> NDArray[np.int64]:
        """The number of each name, int64."""
        known = self._number
        return np.array([known.setdefault(name, len(known) - 1) for name in names], np.int64)
