"""What has to leave a node: the excess over its limit, as an even mix of its items.

Only items that cost nearly the most per unit moved are asked, and of those every k-th by cost, so
that neither the node nor those it gives to are left with large items alone, which balance badly.
All that leaves is pooled and goes, costliest first, to the node with the most room.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_rising, heap_sift_down

# Items this much less dense than the densest are still asked: it is a mix that balances.
_NEARLY = 1.5
_ALL = 1e9  # where those are too little, the bar falls, in a few strides, until all are asked


@leaf
def _give(
    item: int,
    cost: float,
    node: int,
    over: NDArray[np.float64],
    rooms: NDArray[np.float64],
    takers: NDArray[np.int64],
    node_of: NDArray[np.int64],
) -> None:
    """Move one item to the node with the most room, unless that would leave it the worse one.

    `over` [nodes] is load − limit; `rooms` a heap of `takers`' over, most room first.
    """
    taker = takers[0]
    after = over[taker] + cost
    if after > 0.0 and after >= over[node]:
        return
    node_of[item] = taker
    over[taker] = after
    over[node] -= cost
    rooms[0] = after
    heap_sift_down(rooms, takers, rooms.size, 0)


@leaf
def _choose(
    excess: float,
    items: NDArray[np.int64],
    costs: NDArray[np.float64],
    volume: NDArray[np.float64],
    pool: NDArray[np.int64],
) -> int:
    """Write the items that leave one node to `pool`, all together at most `excess`; how many."""
    densest = 0.0
    for item in items:
        if volume[item] > 0.0:
            densest = max(densest, costs[item] / volume[item])
    asked = 0.0
    nearly = 1.0
    while asked < excess and nearly < _ALL:
        nearly = max(nearly * nearly, _NEARLY)
        asked = 0.0
        for item in items:
            if costs[item] * nearly >= densest * volume[item]:
                asked += costs[item]
    count = 0
    share = min(excess / asked, 1.0) if asked > 0.0 else 0.0
    due = 0.0  # what should have left by now, if items could be divided
    for item in items:
        if costs[item] * nearly < densest * volume[item]:
            continue
        due += share * costs[item]
        if 0.5 * costs[item] <= due and 0.0 < costs[item] <= excess:
            pool[count] = item
            count += 1
            due -= costs[item]
            excess -= costs[item]
    return count


@leaf
def _give_one_more(
    node: int,
    items: NDArray[np.int64],
    costs: NDArray[np.float64],
    volume: NDArray[np.float64],
    over: NDArray[np.float64],
    rooms: NDArray[np.float64],
    takers: NDArray[np.int64],
    node_of: NDArray[np.int64],
) -> None:
    """Of the items that cover what is still too much, the one of least volume."""
    cover = -1
    for item in items:
        enough = node_of[item] == node and costs[item] >= over[node]
        if enough and (cover < 0 or volume[item] < volume[cover]):
            cover = item
    if cover >= 0:
        _give(cover, costs[cover], node, over, rooms, takers, node_of)


@kernel
def move_excess(
    costs: NDArray[np.float64],
    volume: NDArray[np.float64],
    order: NDArray[np.int64],
    begins: NDArray[np.int64],
    limits: NDArray[np.float64],
    node_of: NDArray[np.int64],
) -> None:
    """Let every node above its limit give its excess to nodes below theirs.

    `costs`, `volume` float64[n] and `node_of` int64[n], written to, are by item; node k, whose
    limit is limits[k], holds order[begins[k] : begins[k + 1]], by falling cost. O(n + moved·log n).
    """
    nodes = limits.size
    over = np.empty(nodes)  # float64[nodes]: load − limit
    for node in range(nodes):
        load = 0.0
        for k in range(begins[node], begins[node + 1]):
            load += costs[order[k]]
        over[node] = load - limits[node]
    takers = np.flatnonzero(over <= 0.0)  # int64[nodes with room]
    givers = np.flatnonzero(over > 0.0)  # int64[nodes without]
    if takers.size == 0:
        return
    rooms = over[takers]  # float64[takers], a heap
    for start in range(rooms.size // 2 - 1, -1, -1):
        heap_sift_down(rooms, takers, rooms.size, start)
    pool = np.empty(begins[nodes] - begins[0], np.int64)  # int64[items]: those that leave
    leaving = 0
    for giver in givers:
        items = order[begins[giver] : begins[giver + 1]]
        leaving += _choose(over[giver], items, costs, volume, pool[leaving:])
    for place in argsort_rising(-costs[pool[:leaving]]):
        item = pool[place]
        _give(item, costs[item], node_of[item], over, rooms, takers, node_of)
    for giver in givers:
        if over[giver] > 0.0:
            items = order[begins[giver] : begins[giver + 1]]
            _give_one_more(int(giver), items, costs, volume, over, rooms, takers, node_of)
