"""One node's items over its ranks, so that none goes above a given load if that can be had.

Few and coarse items, such as images of 1, 3 and 5 tiles, need unequal ranks: where 153 tiles go
to 8 ranks, one of them holds 20, and should hold them in few items, since each item costs extra.

    greedily            20 tiles in 10 items, 19 in 10, 19 in 10 …       the first is too heavy
    first rank filled   20 tiles in  4 items, 19 in 11, 19 in 11 …
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.loads.greedy import assign_least_loaded

FEW_RANKS = 32  # up to this many ranks, the least loaded is found by looking at each


@kernel
def fill_node(
    fell: NDArray[np.float64],
    ranks: int,
    cap: float,
    rank_at: NDArray[np.int64],
) -> float:
    """Largest load of the best of several fillings, the first that keeps `cap` if one does.

    `fell` float64[items] costs, falling. Filling j packs the first j ranks up to the cap, costliest
    first, and spreads the rest greedily; the best is written to `rank_at` int64[items].
    O(items·ranks) a filling; at most as many fillings as ranks, and one beyond 32 ranks.
    """
    packed_at = np.full(fell.size, -1)  # int64[items]: ranks already packed to the cap
    tried_at = np.empty(fell.size, np.int64)
    loads = np.empty(ranks)  # float64[ranks]
    least = np.inf
    left = fell.sum()
    for packed in range(ranks if ranks <= FEW_RANKS else 1):
        if packed > 0:
            left -= _pack_rank(fell, packed - 1, cap, packed_at)
            if left > cap * (ranks - packed):
                break
        _spread_rest(fell, ranks, packed, packed_at, tried_at, loads)
        if loads.max() < least:
            least = loads.max()
            rank_at[:] = tried_at
        if least <= cap:
            break
    return least


@leaf
def _pack_rank(
    fell: NDArray[np.float64], rank: int, cap: float, packed_at: NDArray[np.int64]
) -> float:
    """Give a rank whatever still fits, costliest first; the summed cost."""
    load = 0.0
    for place in range(fell.size):
        if packed_at[place] < 0 and load + fell[place] <= cap:
            packed_at[place] = rank
            load += fell[place]
    return load


@kernel
def _spread_rest(
    fell: NDArray[np.float64],
    ranks: int,
    packed: int,
    packed_at: NDArray[np.int64],
    rank_at: NDArray[np.int64],
    loads: NDArray[np.float64],
) -> None:
    """Items of no packed rank, costliest first, to the least loaded of the other ranks."""
    loads[:] = 0.0
    if ranks > FEW_RANKS:
        rank_at[:] = assign_least_loaded(fell, ranks)
        for place in range(fell.size):
            loads[rank_at[place]] += fell[place]
        return
    for place in range(fell.size):
        least = packed_at[place]
        if least < 0:
            least = packed
            for rank in range(packed + 1, ranks):
                if loads[rank] < loads[least]:
                    least = rank
        rank_at[place] = least
        loads[least] += fell[place]
