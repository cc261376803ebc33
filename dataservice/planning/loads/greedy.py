"""Greedy number partitioning (longest processing time first).

OrchMLLM Alg. 1 and MMScale Alg. 2; the latter sorts ascending, but the 4/3 bound it quotes needs
the falling order used here (Graham 1969: (4 − 1/ranks)/3).
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import heap_sift_down, heap_sift_up, radix_argsort
from dataservice.planning.loads.problem import PartitionProblem

_QUANTA = 2.0**22 - 1.0
# Ranks without room that may be passed over for all items together, before the costs are given up
# and the sizes alone are looked at: seconds of work otherwise, where most ranks are full.
PASSED_OVER = 1 << 23


@kernel
def sort_rising(loads: NDArray[np.float64], ids: NDArray[np.int64]) -> None:
    """Stable, in place. Insertion for a few loads; else by 22 bits of where a load lies between
    the extremes, insertion for what that leaves, and by all bits where an outlier crowds the
    rest together. O(n)."""
    n = loads.size
    low, high = loads.min(), loads.max()
    if n > 24 and high > low:
        scale = _QUANTA / (high - low)
        keys = np.empty(n, np.uint64)
        for i in range(n):
            keys[i] = np.uint64((loads[i] - low) * scale)
        order = radix_argsort(keys)
        alike = 0
        for i in range(1, n):
            alike += keys[order[i]] == keys[order[i - 1]] and loads[order[i]] < loads[order[i - 1]]
        if alike > n // 8:
            order = radix_argsort(loads.view(np.uint64))
        old_loads, old_ids = loads.copy(), ids.copy()
        for i in range(n):
            loads[i] = old_loads[order[i]]
            ids[i] = old_ids[order[i]]
    for i in range(1, n):
        load = loads[i]
        rank = ids[i]
        j = i - 1
        while j >= 0 and loads[j] > load:
            loads[j + 1] = loads[j]
            ids[j + 1] = ids[j]
            j -= 1
        loads[j + 1] = load
        ids[j + 1] = rank


@kernel
def assign_least_loaded(costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Unlimited case, in batches instead of a heap: several times faster with many ranks.

    Ranks lie sorted by load. Walking up, each takes the next item for as long as its load is at
    most the least load after taking: until then it is the least loaded of all, exactly as the
    heap would find. The ranks of the batch are then sorted again and merged with the others.
    """
    return add_least_loaded(costs, np.zeros(ranks), np.arange(ranks))


@kernel
def add_least_loaded(
    costs: NDArray[np.float64], loads: NDArray[np.float64], ids: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The same beside what the ranks have: `loads` float64[ranks], which rise before and after, of
    the ranks `ids` int64[ranks]."""
    n, ranks = costs.size, loads.size
    spare_loads = np.empty(ranks)  # float64[ranks]
    spare_ids = np.empty(ranks, np.int64)  # int64[ranks]
    rank_at = np.empty(n, np.int64)  # int64[n]
    place = 0
    while place < n:
        least_after = np.inf
        batch = 0
        while place < n and batch < ranks and loads[batch] <= least_after:
            rank_at[place] = ids[batch]
            loads[batch] += costs[place]
            least_after = min(least_after, loads[batch])
            batch += 1
            place += 1
        spare_loads[:batch] = loads[:batch]
        spare_ids[:batch] = ids[:batch]
        sort_rising(spare_loads[:batch], spare_ids[:batch])
        taken, untouched, at = 0, batch, 0
        while taken < batch:  # ranks above all of the batch stay where they are
            if untouched < ranks and loads[untouched] < spare_loads[taken]:
                loads[at] = loads[untouched]
                ids[at] = ids[untouched]
                untouched += 1
            else:
                loads[at] = spare_loads[taken]
                ids[at] = spare_ids[taken]
                taken += 1
            at += 1
    return rank_at


@kernel
def _least_loaded_limited(
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    ranks: int,
    capacity: float,
    max_count: int,
    full_ranks: int,
) -> tuple[NDArray[np.int64], bool]:
    """Least-loaded rank that still has room; ranks passed over for this item are put back. False
    too where most ranks are full and too many had to be passed over."""
    n = costs.size
    loads = np.zeros(ranks)  # float64[ranks], a heap
    ids = np.arange(ranks)  # int64[ranks]: rank of each load
    rank_at = np.full(n, -1)  # int64[n]
    size_of = np.zeros(ranks)  # float64[ranks]
    count_of = np.zeros(ranks, np.int64)  # int64[ranks]
    aside_load = np.empty(ranks)
    aside_id = np.empty(ranks, np.int64)
    open_ranks = ranks
    limit = max_count
    full = 0
    left = PASSED_OVER
    for place in range(n):
        aside = 0
        while open_ranks > 0 and rank_at[place] < 0:
            rank = ids[0]
            closed = count_of[rank] >= limit
            if not closed and size_of[rank] + sizes[place] <= capacity:
                rank_at[place] = rank
                loads[0] += costs[place]
                size_of[rank] += sizes[place]
                count_of[rank] += 1
                if count_of[rank] == max_count:
                    full += 1
                    if full == full_ranks:
                        limit = max_count - 1
            else:
                if not closed:
                    aside_load[aside] = loads[0]
                    aside_id[aside] = rank
                    aside += 1
                open_ranks -= 1
                loads[0] = loads[open_ranks]
                ids[0] = ids[open_ranks]
            if open_ranks > 0:
                heap_sift_down(loads, ids, open_ranks, 0)
        left -= aside
        for k in range(aside):
            loads[open_ranks] = aside_load[k]
            ids[open_ranks] = aside_id[k]
            heap_sift_up(loads, ids, open_ranks)
            open_ranks += 1
        if rank_at[place] < 0 or left < 0:
            return rank_at, False
    return rank_at, True


def greedy(problem: PartitionProblem) -> NDArray[np.int64] | None:
    """Rank of each sorted place, or None where some item finds no room. O(n log ranks)."""
    if not problem.equal_count:
        rank_at = assign_least_loaded(problem.costs, problem.ranks)
        held = np.bincount(rank_at, weights=problem.sizes, minlength=problem.ranks)
        if held.max() <= problem.capacity:  # balanced loads seldom come near it
            return rank_at
    rank_at, placed = _least_loaded_limited(
        problem.costs,
        problem.sizes,
        problem.ranks,
        problem.capacity,
        problem.max_count,
        problem.full_ranks,
    )
    return rank_at if placed else None
