"""Branch and bound for a handful of items: the optimum, or the best found within a node budget."""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.loads.problem import PartitionProblem, max_load

MOST_ITEMS = 14
_NODE_BUDGET = 200_000


@kernel
def _branch_and_bound(
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    ranks: int,
    capacity: float,
    max_count: int,
    full_ranks: int,
    lower_bound: float,
    incumbent: float,
    node_budget: int,
) -> tuple[NDArray[np.int64], bool, bool]:
    """Depth first over falling costs. Of ranks with equal loads, sizes and counts one is tried.

    Returns (assignment, whether it beats the incumbent, whether the search was complete).
    """
    n = costs.size
    best = incumbent
    best_at = np.full(n, -1)
    rank_at = np.full(n, -1)  # int64[n]
    loads = np.zeros(ranks)  # float64[ranks]
    held = np.zeros(ranks)  # float64[ranks]: summed sizes
    count_of = np.zeros(ranks, np.int64)  # int64[ranks]
    full = 0
    improved = False
    place = 0
    nodes = 0
    while place >= 0:
        nodes += 1
        if nodes > node_budget:
            return best_at, improved, False
        if place == n:
            best = loads.max()
            best_at[:] = rank_at
            improved = True
            if best <= lower_bound:
                return best_at, True, True
            place -= 1
            continue
        rank = rank_at[place]
        if rank >= 0:  # coming back: undo, then try the next rank
            loads[rank] -= costs[place]
            held[rank] -= sizes[place]
            full -= 1 if count_of[rank] == max_count else 0
            count_of[rank] -= 1
        rank += 1
        limit = max_count if full < full_ranks else max_count - 1
        while rank < ranks:
            room = count_of[rank] < limit and held[rank] + sizes[place] <= capacity
            if room and loads[rank] + costs[place] < best:
                alike = False
                for other in range(rank):
                    if (
                        loads[other] == loads[rank]
                        and held[other] == held[rank]
                        and count_of[other] == count_of[rank]
                    ):
                        alike = True
                        break
                if not alike:
                    break
            rank += 1
        if rank == ranks:
            rank_at[place] = -1
            place -= 1
            continue
        rank_at[place] = rank
        loads[rank] += costs[place]
        held[rank] += sizes[place]
        count_of[rank] += 1
        full += 1 if count_of[rank] == max_count else 0
        place += 1
    return best_at, improved, True


def exact(
    problem: PartitionProblem, incumbent: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64] | None, bool]:
    """Improve `incumbent` (or find a first answer); also whether optimality was proven.

    Exponential, so for at most MOST_ITEMS items and a fixed number of nodes.
    """
    best = np.inf if incumbent is None else max_load(problem, incumbent)
    rank_at, improved, complete = _branch_and_bound(
        problem.costs,
        problem.sizes,
        problem.ranks,
        problem.capacity,
        problem.max_count,
        problem.full_ranks,
        problem.lower_bound,
        # Beating the incumbent by rounding alone is no improvement.
        best * (1.0 - 1e-12),
        _NODE_BUDGET,
    )
    return (rank_at if improved else incumbent), complete
