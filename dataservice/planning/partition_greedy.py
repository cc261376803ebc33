"""Greedy number partitioning (longest processing time first).

OrchMLLM Alg. 1 and MMScale Alg. 2; the latter sorts ascending, but the 4/3 bound it quotes needs
the falling order used here (Graham 1969: (4 − 1/ranks)/3).
"""

import numba
import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernel_heap import heap_sift_down, heap_sift_up
from dataservice.planning.partition_problem import PartitionProblem


@numba.njit(cache=True, nogil=True)
def _least_loaded(costs: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    """Unlimited case: replace the top of the heap, item by item."""
    n = costs.size
    loads = np.zeros(ranks)
    ids = np.arange(ranks)
    rank_at = np.empty(n, np.int64)
    for place in range(n):
        rank_at[place] = ids[0]
        loads[0] += costs[place]
        heap_sift_down(loads, ids, ranks, 0)
    return rank_at


@numba.njit(cache=True, nogil=True)
def _least_loaded_limited(
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    ranks: int,
    capacity: float,
    max_count: int,
    full_ranks: int,
) -> tuple[NDArray[np.int64], bool]:
    """Least-loaded rank that still has room; ranks passed over for this item are put back."""
    n = costs.size
    loads = np.zeros(ranks)
    ids = np.arange(ranks)
    rank_at = np.full(n, -1)
    size_of = np.zeros(ranks)
    count_of = np.zeros(ranks, np.int64)
    aside_load = np.empty(ranks)
    aside_id = np.empty(ranks, np.int64)
    open_ranks = ranks
    limit = max_count
    full = 0
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
        for k in range(aside):
            loads[open_ranks] = aside_load[k]
            ids[open_ranks] = aside_id[k]
            heap_sift_up(loads, ids, open_ranks)
            open_ranks += 1
        if rank_at[place] < 0:
            return rank_at, False
    return rank_at, True


def greedy(problem: PartitionProblem) -> NDArray[np.int64] | None:
    """Rank of each sorted place, or None where some item finds no room. O(n log ranks)."""
    if not problem.equal_count and np.isinf(problem.capacity):
        return _least_loaded(problem.costs, problem.ranks)
    rank_at, placed = _least_loaded_limited(
        problem.costs,
        problem.sizes,
        problem.ranks,
        problem.capacity,
        problem.max_count,
        problem.full_ranks,
    )
    return rank_at if placed else None
