"""Which worker decodes which pack of a step: one where its samples are kept, or one near the ranks
that get it, within a bound on when the step is decoded.

    sample ──────► the cache where it is kept ──┐ votes, by decode work
    item, text ──► replica ──► node, zone ──────┤
                                                ▼
    packs, heaviest first ──► of the sites where a worker is done within the bound, the one with
                              the most votes; of equals, the one that is done first

A *site* is what workers share: a cache, a node and a zone.

Bound. By load alone, each pack in turn goes to the worker that is done first (list scheduling).
Compared with the last of those, no worker is done later by more than SLACK of the step's own work
on all slots: a step is decoded in at most 1 + SLACK of the time. An answer that is not within this
bound is dropped for that by load alone.

Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads", SODA 2018, §1.1:
whatever prefers a place that is full goes to its next; here the bound is on work and not on counts.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import sample_starts
from dataservice.core.plan import StepPlan
from dataservice.planning.invariants import check_assignment
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_falling, heap_sift_down, heap_sift_up

SLACK = 0.1
ENCODER_TOKEN_WORK = 4
"""Work of decoding what becomes an encoder token, in that of a token of text: pixels and samples of
sound take most of the time."""
# A picture of 1.5 megapixels takes 17 ms to decode, and about a quarter of that to go through gRPC
# instead of memory. Between zones it takes longer, and costs money.
SAME_NODE = 0.25
SAME_ZONE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkerSites:
    """W workers at S sites. `queued` float64[W]: the work before each slot of a worker; `slots`
    int64[W]; `site` int64[W]. `cache`, `node`, `zone` int64[S] are numbers from 0 on, and -1 where
    it is not known, or where nothing is kept."""

    queued: NDArray[np.float64]
    slots: NDArray[np.int64]
    site: NDArray[np.int64]
    cache: NDArray[np.int64]
    node: NDArray[np.int64]
    zone: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pull:
    """What draws the packs of a plan. `cache` int64[n]: the cache where each sample is thought to
    be, `node` and `zone` int64[N]: where each replica is. Numbers are those of WorkerSites."""

    cache: NDArray[np.int64]
    node: NDArray[np.int64]
    zone: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PackPlaces:
    """`worker` int64[k] of each pack. Of their decode `work`, as much is `cached` where it goes to,
    goes to ranks of the `same_node`, and to ranks of the `same_zone`."""

    worker: NDArray[np.int64]
    work: float
    cached: float
    same_node: float
    same_zone: float


def place_packs(
    plan: StepPlan,
    packs: NDArray[np.int64],
    work: NDArray[np.int64],
    workers: WorkerSites,
    pull: Pull,
) -> PackPlaces:
    """A worker for each of these `packs` int64[k] of the plan, whose decode `work` is int64[k].

    There is one pack and one worker at least. O(k · (S + workers of a site) + samples + items).
    """
    places, told = np.empty(len(packs), np.int64), np.zeros(3)
    by_load_done = _by_load(work, workers.queued, workers.slots, places)
    known, sites = _known(plan, pull), _Sites(workers.cache, workers.node, workers.zone)
    if len(workers.cache) > 1:
        drawn, order = np.empty(len(packs), np.int64), argsort_falling(work)
        begins, members = _workers_of_sites(workers)
        bound = by_load_done + SLACK * float(work.sum()) / float(workers.slots.sum())
        queued, slots = workers.queued, workers.slots
        done = _by_pull(
            order, packs, work, bound, queued, slots, begins, members, drawn, told, known, sites
        )
        if done <= bound:
            check_assignment(drawn, len(workers.slots), "worker of a pack")
            return PackPlaces(drawn, float(work.sum()), *told.tolist())
    told[:] = 0.0
    if any((of_sites >= 0).any() for of_sites in sites):
        _tell(packs, workers.site[places], told, known, sites)
    check_assignment(places, len(workers.slots), "worker of a pack")
    return PackPlaces(places, float(work.sum()), *told.tolist())


class _Known(NamedTuple):
    """What votes are counted from: a plan's packs, what is in them, where it is and goes."""

    pack_offsets: NDArray[np.int64]
    pack_samples: NDArray[np.int32]
    sample_tokens: NDArray[np.int32]
    item_begins: NDArray[np.int64]
    item_tokens: NDArray[np.int32]
    item_replica: NDArray[np.int32]
    replica_offsets: NDArray[np.int64]
    pack_replicas: NDArray[np.int32]
    cache_of_sample: NDArray[np.int64]
    node_of_replica: NDArray[np.int64]
    zone_of_replica: NDArray[np.int64]


class _Sites(NamedTuple):
    """Of each site, int64[S]: its cache, its node, its zone, -1 where it has none."""

    cache: NDArray[np.int64]
    node: NDArray[np.int64]
    zone: NDArray[np.int64]


class _Votes(NamedTuple):
    """The votes of a pack, in work, by cache, node and zone; the last of each, at -1, stays 0."""

    cached: NDArray[np.float64]
    near: NDArray[np.float64]
    zoned: NDArray[np.float64]


def _known(plan: StepPlan, pull: Pull) -> _Known:
    items = np.bincount(plan.item_sample, minlength=len(plan.sample_ids))
    return _Known(
        plan.pack_offsets,
        plan.pack_samples,
        plan.sample_tokens,
        sample_starts(items),
        plan.item_encoder_tokens,
        plan.item_replica,
        plan.replica_offsets,
        plan.pack_replicas,
        pull.cache,
        pull.node,
        pull.zone,
    )


def _workers_of_sites(workers: WorkerSites) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each site's workers begin, int64[S + 1], and the workers by site, int64[W]."""
    counts = np.bincount(workers.site, minlength=len(workers.cache))
    return sample_starts(counts), np.argsort(workers.site, kind="stable")


@kernel
def _by_load(
    work: NDArray[np.int64],
    queued: NDArray[np.float64],
    slots: NDArray[np.int64],
    worker_of: NDArray[np.int64],
) -> float:
    """Each pack in turn to the worker that is done first. Returns when the last pack is done, 0.0
    where there is none."""
    done, ids = np.empty(queued.size, np.float64), np.empty(queued.size, np.int64)
    for w in range(queued.size):
        done[w], ids[w] = queued[w], w
        heap_sift_up(done, ids, w)
    last = 0.0
    for k in range(work.size):
        worker_of[k] = ids[0]
        done[0] += work[k] / slots[ids[0]]
        last = max(last, done[0])
        heap_sift_down(done, ids, done.size, 0)
    return last


@leaf
def _vote(pack: int, known: _Known, votes: _Votes) -> None:
    """Add the votes of one pack."""
    text = np.int64(0)
    for k in range(known.pack_offsets[pack], known.pack_offsets[pack + 1]):
        sample = known.pack_samples[k]
        work = np.int64(known.sample_tokens[sample])
        text += work
        for item in range(known.item_begins[sample], known.item_begins[sample + 1]):
            own = ENCODER_TOKEN_WORK * np.int64(known.item_tokens[item])
            work += own
            replica = known.item_replica[item]
            votes.near[known.node_of_replica[replica]] += own
            votes.zoned[known.zone_of_replica[replica]] += own
        votes.cached[known.cache_of_sample[sample]] += work
    first, end = known.replica_offsets[pack], known.replica_offsets[pack + 1]
    for k in range(first, end):
        replica = known.pack_replicas[k]
        votes.near[known.node_of_replica[replica]] += text / (end - first)
        votes.zoned[known.zone_of_replica[replica]] += text / (end - first)
    votes.cached[-1] = 0.0
    votes.near[-1] = 0.0
    votes.zoned[-1] = 0.0


@leaf
def _unvote(pack: int, known: _Known, votes: _Votes) -> None:
    """Set to 0 what a pack has voted for: there may be thousands of places, and a pack has few."""
    for k in range(known.pack_offsets[pack], known.pack_offsets[pack + 1]):
        sample = known.pack_samples[k]
        votes.cached[known.cache_of_sample[sample]] = 0.0
        for item in range(known.item_begins[sample], known.item_begins[sample + 1]):
            replica = known.item_replica[item]
            votes.near[known.node_of_replica[replica]] = 0.0
            votes.zoned[known.zone_of_replica[replica]] = 0.0
    for k in range(known.replica_offsets[pack], known.replica_offsets[pack + 1]):
        replica = known.pack_replicas[k]
        votes.near[known.node_of_replica[replica]] = 0.0
        votes.zoned[known.zone_of_replica[replica]] = 0.0


@leaf
def _tell_of(site: int, sites: _Sites, votes: _Votes, told: NDArray[np.float64]) -> None:
    """Add to `told` float64[3] the work of a pack that is cached at this site, goes to the same
    node, and to the same zone."""
    told[0] += votes.cached[sites.cache[site]]
    told[1] += votes.near[sites.node[site]]
    told[2] += votes.zoned[sites.zone[site]]


@kernel
def _none_yet(known: _Known, sites: _Sites) -> _Votes:
    return _Votes(
        np.zeros(max(sites.cache.max(), known.cache_of_sample.max()) + 2, np.float64),
        np.zeros(max(sites.node.max(), known.node_of_replica.max()) + 2, np.float64),
        np.zeros(max(sites.zone.max(), known.zone_of_replica.max()) + 2, np.float64),
    )


@kernel
def _by_pull(
    order: NDArray[np.int64],
    packs: NDArray[np.int64],
    work: NDArray[np.int64],
    bound: float,
    queued: NDArray[np.float64],
    slots: NDArray[np.int64],
    site_begins: NDArray[np.int64],
    site_workers: NDArray[np.int64],
    worker_of: NDArray[np.int64],
    told: NDArray[np.float64],
    known: _Known,
    sites: _Sites,
) -> float:
    """Packs in this order, each to the site that draws it most and has room. Returns when the last
    is done; `told` float64[3] is added to as by `_tell`."""
    votes, count = _none_yet(known, sites), sites.cache.size
    (cached, near, zoned), (cache, node, zone) = votes, sites
    done = queued.copy()
    # Of each site, [S]: the worker that is done first, when, and its time for a unit.
    first, soon, pace = np.empty(count, np.int64), np.empty(count), np.empty(count)
    for site in range(count):
        _see_first(site, done, slots, site_begins, site_workers, first, soon, pace)
    last = 0.0
    for k in order:
        _vote(packs[k], known, votes)
        best, most, soonest = -1, 0.0, np.inf
        for site in range(count):
            drawn = cached[cache[site]] + SAME_NODE * near[node[site]]
            drawn += SAME_ZONE * zoned[zone[site]]
            if drawn >= most:  # which few are
                ends = soon[site] + work[k] * pace[site]
                if ends <= bound and (drawn > most or ends < soonest):
                    best, most, soonest = site, drawn, ends
        if best < 0:  # there is no room: whoever is done first
            for site in range(count):
                ends = soon[site] + work[k] * pace[site]
                if ends < soonest:
                    best, soonest = site, ends
        _tell_of(best, sites, votes, told)
        _unvote(packs[k], known, votes)
        worker_of[k] = first[best]
        done[first[best]] = soonest
        last = max(last, soonest)
        _see_first(best, done, slots, site_begins, site_workers, first, soon, pace)
    return last


@leaf
def _see_first(
    site: int,
    done: NDArray[np.float64],
    slots: NDArray[np.int64],
    begins: NDArray[np.int64],
    workers: NDArray[np.int64],
    first: NDArray[np.int64],
    soon: NDArray[np.float64],
    pace: NDArray[np.float64],
) -> None:
    """Set which of a site's workers is done first, when, and how much later with a unit more."""
    best = workers[begins[site]]
    for k in range(begins[site] + 1, begins[site + 1]):
        if done[workers[k]] < done[best]:
            best = workers[k]
    first[site], soon[site], pace[site] = best, done[best], 1.0 / slots[best]


@kernel
def _tell(
    packs: NDArray[np.int64],
    site_of: NDArray[np.int64],
    told: NDArray[np.float64],
    known: _Known,
    sites: _Sites,
) -> None:
    """Add to `told` what `_tell_of` says of packs int64[k] at these sites int64[k]."""
    votes = _none_yet(known, sites)
    for k in range(packs.size):
        _vote(packs[k], known, votes)
        _tell_of(site_of[k], sites, votes, told)
        _unvote(packs[k], known, votes)
