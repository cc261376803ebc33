"""What has to leave a node: the excess over its limit, in items that cost most per unit moved.

Which items leave is a knapsack cover: by falling cost per volume those that do not overshoot, each
to the node with the most room, then the one that covers the rest at least volume. Near the least
volume, not proven least.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.heap import heap_sift_down
from dataservice.planning.kernels.sort import argsort_rising


@kernel
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


@kernel
def _lighten(
    node: int,
    items: NDArray[np.int64],
    costs: NDArray[np.float64],
    volume: NDArray[np.float64],
    over: NDArray[np.float64],
    rooms: NDArray[np.float64],
    takers: NDArray[np.int64],
    node_of: NDArray[np.int64],
) -> None:
    # A heap by falling density and, among equals, falling cost: a few of many items leave.
    size = items.size
    keys = np.empty(size)
    ids = np.arange(size)
    for k in range(size):
        free = volume[items[k]] <= 0.0
        keys[k] = -np.inf if free else -costs[items[k]] / volume[items[k]]
    for start in range(size // 2 - 1, -1, -1):
        heap_sift_down(keys, ids, size, start)
    while size > 0 and over[node] > 0.0:
        item = items[ids[0]]
        size -= 1
        keys[0], ids[0] = keys[size], ids[size]
        heap_sift_down(keys, ids, size, 0)
        if 0.0 < costs[item] <= over[node]:
            _give(item, costs[item], node, over, rooms, takers, node_of)
    if over[node] <= 0.0:
        return
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
    """Let every node above its limit give its excess to nodes below theirs, worst node first.

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
    rooms = over[takers]  # float64[takers], a heap
    for start in range(rooms.size // 2 - 1, -1, -1):
        heap_sift_down(rooms, takers, rooms.size, start)
    for node in argsort_rising(-over):
        if over[node] <= 0.0 or rooms.size == 0:
            break
        items = order[begins[node] : begins[node + 1]]
        _lighten(node, items, costs, volume, over, rooms, takers, node_of)
