"""Many small partitions in one call: items of each segment over ranks of its own.

Inside nodes, waves or modalities the problems are small and many, and a call for each would cost
more than the work. The algorithm is that of `partition`'s `auto`: greedy, then refinement.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_descending, group_stable
from dataservice.planning.loads.greedy import assign_least_loaded
from dataservice.planning.loads.refine import refine_in_place

_WORK_PER_ITEM = 60


@kernel
def _solve_segments(
    costs: NDArray[np.float64],
    order: NDArray[np.int64],
    begins: NDArray[np.int64],
    ranks: int,
    tolerance: float,
    rank_of: NDArray[np.int32],
) -> None:
    for segment in range(begins.size - 1):
        items = order[begins[segment] : begins[segment + 1]]
        if items.size == 0:
            continue
        fell = costs[items]
        rank_at = assign_least_loaded(fell, ranks)
        loads = np.zeros(ranks)
        for place in range(items.size):
            loads[rank_at[place]] += fell[place]
        target = (1.0 + tolerance) * max(loads.sum() / ranks, fell[0])
        if loads.max() > target and ranks > 1:
            work = _WORK_PER_ITEM * items.size + 2000
            refine_in_place(rank_at, fell, fell, ranks, np.inf, False, target, work)
        for place in range(items.size):
            rank_of[items[place]] = rank_at[place]


def partition_segments(
    costs: NDArray[np.float64],
    segment_of: NDArray[np.int64],
    *,
    segments: int,
    ranks: int,
    tolerance: float,
) -> NDArray[np.int32]:
    """Rank within its segment of each item, int32[n].

    `costs` float64[n] checked already, `segment_of` int64[n] in [0, segments). Each segment's
    largest load aims at (1 + tolerance) times its own bound. O(n log ranks).
    """
    order, begins = group_stable(segment_of, argsort_descending(costs), segments)
    rank_of = np.empty(costs.size, np.int32)
    _solve_segments(costs, order, begins, int(ranks), float(tolerance), rank_of)
    return rank_of
