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

CHOSEN, _PACKED, _TRIED = 0, 1, 2  # rank of each item: in the best filling, if packed, in this one
FEW_RANKS = 32  # up to this many ranks, the least loaded is found by looking at each


@kernel
def fill_node(
    fell: NDArray[np.float64],
    ranks: int,
    cap: float,
    rank_at: NDArray[np.int64],
) -> float:
    """Largest load of the best of several fillings, the first that keeps `cap` if one does.

    `fell` float64[items] costs, falling; the best is written to `rank_at` int64[items]. Beyond 32
    ranks there is one filling, the greedy one.
    """
    if ranks <= FEW_RANKS:
        room = np.empty((3, fell.size), np.int64)
        largest = fill_few(fell, fell.size, ranks, cap, room, np.empty(ranks))
        rank_at[:] = room[CHOSEN]
        return largest
    rank_at[:] = assign_least_loaded(fell, ranks)
    loads = np.zeros(ranks)
    for place in range(fell.size):
        loads[rank_at[place]] += fell[place]
    return float(loads.max())


@leaf
def fill_few(
    fell: NDArray[np.float64],
    count: int,
    ranks: int,
    cap: float,
    room: NDArray[np.int64],
    loads: NDArray[np.float64],
) -> float:
    """`fill_node` of the first `count` items on at most 32 ranks, in space that is given: `room`
    int64[3, ≥ count], whose row CHOSEN is the answer, and `loads` float64[≥ ranks].

    Filling j packs the first j ranks up to the cap, costliest first, and spreads the rest greedily.
    O(items·ranks) a filling, and at most as many fillings as ranks.
    """
    least = np.inf
    left = 0.0
    for place in range(count):
        left += fell[place]
        room[_PACKED, place] = -1
    for packed in range(ranks):
        if packed > 0:
            left -= _pack_rank(fell, count, packed - 1, cap, room)
            if left > cap * (ranks - packed):
                break
        largest = _spread_rest(fell, count, ranks, packed, room, loads)
        if largest < least:
            least = largest
            for place in range(count):
                room[CHOSEN, place] = room[_TRIED, place]
        if least <= cap:
            break
    return least


@leaf
def _pack_rank(
    fell: NDArray[np.float64], count: int, rank: int, cap: float, room: NDArray[np.int64]
) -> float:
    """Give a rank whatever still fits, costliest first; the summed cost."""
    load = 0.0
    for place in range(count):
        if room[_PACKED, place] < 0 and load + fell[place] <= cap:
            room[_PACKED, place] = rank
            load += fell[place]
    return load


@leaf
def _spread_rest(
    fell: NDArray[np.float64],
    count: int,
    ranks: int,
    packed: int,
    room: NDArray[np.int64],
    loads: NDArray[np.float64],
) -> float:
    """Items of no packed rank, costliest first, to the least loaded of the other ranks; the largest
    load. Written: the rank of each, room[_TRIED]."""
    for rank in range(ranks):
        loads[rank] = 0.0
    for place in range(count):
        least = room[_PACKED, place]
        if least < 0:
            least = packed
            for rank in range(packed + 1, ranks):
                if loads[rank] < loads[least]:
                    least = rank
        room[_TRIED, place] = least
        loads[least] += fell[place]
    largest = 0.0
    for rank in range(ranks):
        largest = max(largest, loads[rank])
    return largest
