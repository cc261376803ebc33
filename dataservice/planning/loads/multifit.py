"""MultiFit (Coffman, Garey, Johnson 1978): bisect the load bound, packing first-fit decreasing.

The same first-fit kernel, given sizes instead of costs, decides whether a capacity can be met.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.loads.greedy import PASSED_OVER, greedy
from dataservice.planning.loads.problem import ROUNDING, PartitionProblem, max_load

_BISECTIONS = 24


@leaf
def _next_fit_leaf(tree: NDArray[np.float64], leaves: int, start: int, need: float) -> int:
    """First leaf at or after `start` with at least `need` left, or −1. O(log leaves)."""
    if start >= leaves:
        return -1
    node = start + leaves
    while tree[node] < need:
        # Climb until this node is a left child, then try its right neighbour.
        while node & 1:
            node >>= 1
        if node <= 1:
            return -1
        node += 1
    while node < leaves:
        node *= 2
        if tree[node] < need:
            node += 1
    return node - leaves


@kernel
def first_fit_decreasing(
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    ranks: int,
    bound: float,
    capacity: float,
    max_count: int,
    full_ranks: int,
) -> tuple[NDArray[np.int64], bool]:
    """Place each item in the first rank whose load stays within `bound` and size within
    `capacity`. The tree holds the room left per rank, so a search is O(log ranks)."""
    leaves = 1
    while leaves < ranks:
        leaves *= 2
    tree = np.full(2 * leaves, -np.inf)  # float64[2·leaves]: most room below each node
    tree[leaves : leaves + ranks] = bound
    for node in range(leaves - 1, 0, -1):
        tree[node] = max(tree[2 * node], tree[2 * node + 1])
    size_of = np.zeros(ranks)  # float64[ranks]
    count_of = np.zeros(ranks, np.int64)  # int64[ranks]
    rank_at = np.full(costs.size, -1)  # int64[n]
    limit = max_count
    full = 0
    left = PASSED_OVER
    for place in range(costs.size):
        rank = _next_fit_leaf(tree, leaves, 0, costs[place])
        while rank >= 0 and (count_of[rank] >= limit or size_of[rank] + sizes[place] > capacity):
            rank = _next_fit_leaf(tree, leaves, rank + 1, costs[place])
            left -= 1
        if rank < 0 or left < 0:
            return rank_at, False
        rank_at[place] = rank
        size_of[rank] += sizes[place]
        count_of[rank] += 1
        if count_of[rank] == max_count:
            full += 1
            if full == full_ranks:
                limit = max_count - 1
                for other in range(ranks):  # their room is no room any more
                    if count_of[other] >= limit:
                        tree[other + leaves] = -np.inf
                for node in range(leaves - 1, 0, -1):
                    tree[node] = max(tree[2 * node], tree[2 * node + 1])
        node = rank + leaves
        tree[node] -= costs[place]
        if count_of[rank] >= limit:
            tree[node] = -np.inf
        node >>= 1
        while node >= 1:
            tree[node] = max(tree[2 * node], tree[2 * node + 1])
            node >>= 1
    return rank_at, True


def multifit(problem: PartitionProblem) -> NDArray[np.int64] | None:
    """Rank of each sorted place, or None where no bound tried fits.

    Starts between the certificate and the greedy answer, so it is never worse than greedy.
    O(n log ranks) per bisection.
    """
    best = greedy(problem)
    low = problem.lower_bound
    high = float(problem.costs.sum()) if best is None else max_load(problem, best)
    if best is None:
        best = _fit(problem, high)
    for _ in range(_BISECTIONS):
        if high <= low * (1.0 + ROUNDING):
            break
        bound = 0.5 * (low + high)
        found = _fit(problem, bound)
        if found is None:
            low = bound
        else:
            best, high = found, min(bound, max_load(problem, found))
    return best


def _fit(problem: PartitionProblem, bound: float) -> NDArray[np.int64] | None:
    rank_at, placed = first_fit_decreasing(
        problem.costs,
        problem.sizes,
        problem.ranks,
        bound * (1.0 + ROUNDING),
        problem.capacity,
        problem.max_count,
        problem.full_ranks,
    )
    return rank_at if placed else None
