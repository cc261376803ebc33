"""One phase levelled: every node filled under one cap, as low a cap as the slowest node allows.

A phase takes as long as its slowest rank anywhere, so no node need be better than the worst one.
The cap rises in rounds from just above the bound. Where few nodes miss it, they hand on a few of
their cheapest items to nodes that still keep it; where many do, the next round follows. Once all
keep a cap far above the bound, a few lower ones are tried: items that were handed on meanwhile may
let nodes keep what they missed before.

    cap ┄┄┄┄┄┄┄┄┄┄┄┄┄┄▪┄┄┄┄┄┄┄┄┄┄┄┄
        █ █ █ █ │ █ █ █ █ │ █ █ █ ▃     ▪ has no room in its node, and goes to the last
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_rising
from dataservice.planning.loads.problem import ROUNDING
from dataservice.planning.nodes.fill import FEW_RANKS, fill_node

_FIRST_SLACK = 5e-3  # of the first cap over the bound; each round has more
# A phase that ends further above the bound tries caps between the last that it missed and its end.
_NEAR = 8e-3
LOWER_CAPS = 3
_WIDER = 1.5
_FEW_NODES = 4  # one node in so many may miss the cap and be helped by the others
_MOVED_PER_NODE = 2  # items handed on in all, at most


@kernel
def level_phase(
    costs: NDArray[np.float64],
    listed: NDArray[np.int64],
    begins: NDArray[np.int64],
    bound: float,
    ranks: int,
    ranks_per_node: int,
    rank_of: NDArray[np.int32],
) -> None:
    """Write the rank of each item of a phase to `rank_of` int32[m].

    Node k holds listed[begins[k] : begins[k + 1]], by falling cost; `bound` is what the largest
    load cannot be below. O(items · ranks of a node²) a round, and few rounds, as the slack grows by
    half in each.
    """
    nodes = begins.size - 1
    for node in range(nodes):
        rank_of[listed[begins[node] : begins[node + 1]]] = node * ranks_per_node
    most = np.full(nodes, np.inf)  # float64[nodes]: largest load
    came = np.empty((2, _MOVED_PER_NODE * nodes), np.int64)  # int64[item and node, moved]
    moved = 0
    slack, missed, lower_caps = _FIRST_SLACK, 0.0, 0
    few = max(nodes // _FEW_NODES, 1)
    stuck = np.empty(nodes, np.int64)  # int64[nodes that miss the cap]
    while True:
        cap = bound * (1.0 + slack) * (1.0 + ROUNDING)
        missing = 0
        for node in range(nodes):
            if most[node] <= cap:
                continue
            inside = min(ranks_per_node, ranks - node * ranks_per_node)
            home = listed[begins[node] : begins[node + 1]]
            items = _held(node, home, came[:, :moved], -1, costs, ranks_per_node, rank_of)
            _fill(node * ranks_per_node, inside, items, costs, cap, most[node : node + 1], rank_of)
            if most[node] > cap and inside <= FEW_RANKS:
                stuck[missing] = node
                missing += 1
                if missing > few:
                    break
        if missing == 0:
            reached = most.max() / bound - 1.0
            if reached <= _NEAR or lower_caps == LOWER_CAPS:
                return
            lower_caps += 1
            slack = 0.5 * (missed + reached)
            continue
        missed = max(missed, slack)
        if missing <= few:
            moved = _hand_on(
                stuck[:missing], costs, listed, begins, cap, ranks, ranks_per_node, most, came,
                moved, rank_of,
            )  # fmt: skip
        slack *= _WIDER


@kernel
def _fill(
    first: int,
    ranks: int,
    items: NDArray[np.int64],
    costs: NDArray[np.float64],
    cap: float,
    most: NDArray[np.float64],
    rank_of: NDArray[np.int32],
) -> None:
    """Fill the node that begins at rank `first` anew, if that lowers its largest load, most[0]."""
    rank_at = np.empty(items.size, np.int64)
    largest = fill_node(costs[items], ranks, cap, rank_at)
    if largest < most[0]:
        most[0] = largest
        for place in range(items.size):
            rank_of[items[place]] = first + rank_at[place]


@kernel
def _hand_on(
    stuck: NDArray[np.int64],
    costs: NDArray[np.float64],
    listed: NDArray[np.int64],
    begins: NDArray[np.int64],
    cap: float,
    ranks: int,
    ranks_per_node: int,
    most: NDArray[np.float64],
    came: NDArray[np.int64],
    moved: int,
    rank_of: NDArray[np.int32],
) -> int:
    """Items that rise above the cap in their node, cheapest first, to nodes that keep it with them.

    Nodes are asked in turn, and once one refuses, it is not asked again: at most one filling a node
    and one an item moved. Written: `most` float64[nodes], `came` int64[item and node, moved] and
    `rank_of`. Returns how many items have moved in all.
    """
    hosts = _by_room(stuck, costs, listed, begins, cap, ranks, ranks_per_node, rank_of)
    asked, left = 0, hosts.size
    loads = np.empty(ranks_per_node)
    for node in stuck:
        first = node * ranks_per_node
        home = listed[begins[node] : begins[node + 1]]
        items = _held(node, home, came[:, :moved], -1, costs, ranks_per_node, rank_of)
        loads[:] = 0.0
        for item in items:
            loads[rank_of[item] - first] += costs[item]
        for item in home[::-1]:  # guests stay: an item moves once
            rank = rank_of[item] - first
            at_home = 0 <= rank < ranks_per_node
            while at_home and loads[rank] > cap and left > 0 and moved < came.shape[1]:
                asked %= left
                host = hosts[asked]
                seats = min(ranks_per_node, ranks - host * ranks_per_node)
                theirs = listed[begins[host] : begins[host + 1]]
                held = _held(host, theirs, came[:, :moved], item, costs, ranks_per_node, rank_of)
                largest = np.full(1, cap * (1.0 + ROUNDING))
                _fill(host * ranks_per_node, seats, held, costs, cap, largest, rank_of)
                if rank_of[item] // ranks_per_node == node:
                    left -= 1
                    hosts[asked] = hosts[left]
                    continue
                most[host] = largest[0]
                came[0, moved], came[1, moved] = item, host
                moved += 1
                asked += 1
                loads[rank] -= costs[item]
                break
        most[node] = loads.max()
    return moved


@kernel
def _by_room(
    stuck: NDArray[np.int64],
    costs: NDArray[np.float64],
    listed: NDArray[np.int64],
    begins: NDArray[np.int64],
    cap: float,
    ranks: int,
    ranks_per_node: int,
    rank_of: NDArray[np.int32],
) -> NDArray[np.int64]:
    """The nodes that keep the cap, most room first."""
    nodes = begins.size - 1
    load = np.zeros(nodes)
    for item in listed[begins[0] : begins[nodes]]:
        load[rank_of[item] // ranks_per_node] += costs[item]
    room = np.empty(nodes)
    for node in range(nodes):
        room[node] = cap * min(ranks_per_node, ranks - node * ranks_per_node) - load[node]
    room[stuck] = -np.inf
    return argsort_rising(-room)[: nodes - stuck.size]


@kernel
def _held(
    node: int,
    home: NDArray[np.int64],
    came: NDArray[np.int64],
    newcomer: int,
    costs: NDArray[np.float64],
    ranks_per_node: int,
    rank_of: NDArray[np.int32],
) -> NDArray[np.int64]:
    """The items of a node, costliest first: those at home there, those that came, and one more."""
    items = np.empty(home.size + came.shape[1] + 1, np.int64)
    count = 0
    for item in home:
        if rank_of[item] // ranks_per_node == node:
            items[count] = item
            count += 1
    for k in range(came.shape[1] + 1):
        item = newcomer
        if k < came.shape[1]:
            item = came[0, k] if came[1, k] == node else -1
        if item < 0:
            continue
        place = count
        while place > 0 and costs[items[place - 1]] < costs[item]:
            items[place] = items[place - 1]
            place -= 1
        items[place] = item
        count += 1
    return items[:count]
