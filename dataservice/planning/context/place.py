"""Context groups onto replicas: inside one node wherever they fit.

Groups wider than a node take whole free nodes first. What is left of them and the narrower ones
go, widest first, to the node with the least room that is enough; a group that no node can hold
waits until the others are placed and then takes what is left, crossing nodes.

    node 0 [5 5 5 5 5 2 2 .]   node 1 [4 4 4 4 3 3 3 .]   waits: one more of 2 → the two dots
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import group_stable


def place_groups(
    degrees: NDArray[np.int64],
    priority: NDArray[np.float64],
    *,
    ranks: int,
    ranks_per_node: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """Ranks int32[Σd] of all groups end to end, their offsets int64[G+1], and whether each group
    crosses a node bool[G]. Σ degrees must be within `ranks`; node k holds the ranks from
    k·ranks_per_node on. Of equally wide groups the one of higher `priority` [G] is placed first.

    O(G · (log G + nodes)).
    """
    order = np.lexsort((np.arange(degrees.size), -priority, -degrees))
    return _place_in(order, degrees, ranks, ranks_per_node)


def place_sorted(
    degrees: NDArray[np.int64], *, ranks: int, ranks_per_node: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """As `place_groups`, of groups that come in the order in which they are to be placed."""
    return _place_in(np.arange(degrees.size), degrees, ranks, ranks_per_node)


def _place_in(
    order: NDArray[np.int64], degrees: NDArray[np.int64], ranks: int, ranks_per_node: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    offsets = np.zeros(degrees.size + 1, np.int64)
    np.cumsum(degrees, out=offsets[1:])
    assert offsets[-1] <= ranks
    placed, crosses = _place(degrees, order, offsets, ranks, ranks_per_node)
    return placed, offsets, crosses


@kernel
def _place(
    degrees: NDArray[np.int64],
    order: NDArray[np.int64],
    offsets: NDArray[np.int64],
    ranks: int,
    ranks_per_node: int,
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    nodes = -(-ranks // ranks_per_node)
    free = np.full(nodes, ranks_per_node, np.int64)
    free[nodes - 1] = ranks - (nodes - 1) * ranks_per_node
    start = np.arange(nodes) * ranks_per_node
    placed = np.empty(offsets[-1], np.int32)
    crosses = degrees > ranks_per_node
    ends = offsets[:-1].copy()  # where each group's next rank is written
    left = degrees.copy()
    whole = 0
    for group in order:
        while left[group] >= ranks_per_node and whole < nodes and free[whole] == ranks_per_node:
            ends[group] = _fill(placed, ends[group], start, free, whole, ranks_per_node)
            left[group] -= ranks_per_node
            whole += 1
    # What is left of wide groups takes its turn among the narrow ones, widest first.
    turns, _ = group_stable(np.maximum(ranks_per_node - left, 0), order, ranks_per_node + 1)
    hints = np.zeros(ranks_per_node + 1, np.int64)
    first_free = 0
    for group in turns:
        node = -1
        if left[group] == 1:  # the many groups of one rank, placed last, fill the nodes in turn
            while first_free < nodes and free[first_free] == 0:
                first_free += 1
            node = first_free if first_free < nodes else -1
        elif 0 < left[group] < ranks_per_node:
            node = _tightest(free, hints, left[group])
        if node >= 0:
            ends[group] = _fill(placed, ends[group], start, free, node, left[group])
            hints[free[node]] = min(hints[free[node]], node)
    for group in order:
        while ends[group] < offsets[group + 1]:
            crosses[group] = True
            node = int(np.argmax(free))
            taken = min(offsets[group + 1] - ends[group], free[node])
            ends[group] = _fill(placed, ends[group], start, free, node, taken)
    return placed, crosses


@leaf
def _tightest(free: NDArray[np.int64], hints: NDArray[np.int64], least: int) -> int:
    """The node with the least room that is at least `least`, the first of such; −1 if none. No node
    before hints[r] has room for exactly r."""
    best = -1
    if free.size <= hints.size:  # few large nodes
        for node in range(free.size):
            if free[node] >= least and (best < 0 or free[node] < free[best]):
                best = node
        return best
    for room in range(least, hints.size):
        node = hints[room]
        while node < free.size and free[node] != room:
            node += 1
        hints[room] = node
        if node < free.size:
            return int(node)
    return best


@leaf
def _fill(
    placed: NDArray[np.int32],
    end: int,
    start: NDArray[np.int64],
    free: NDArray[np.int64],
    node: int,
    count: int,
) -> int:
    """Give `count` ranks of a node to the group being written at `end`."""
    for _ in range(count):
        placed[end] = start[node]
        start[node] += 1
        end += 1
    free[node] -= count
    return end
