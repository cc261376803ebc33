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

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_rising
from dataservice.planning.loads.problem import ROUNDING
from dataservice.planning.nodes.fill import CHOSEN, FEW_RANKS, fill_few, fill_node

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
    if begins[nodes] == begins[0]:
        return
    largest_home = 0
    for node in range(nodes):
        largest_home = max(largest_home, begins[node + 1] - begins[node])
        for place in range(begins[node], begins[node + 1]):
            rank_of[listed[place]] = node * ranks_per_node
    most = np.full(nodes, np.inf)  # float64[nodes]: largest load
    came = np.empty((2, _MOVED_PER_NODE * nodes), np.int64)  # int64[item and next guest, moved]
    guests = np.full((2, nodes), -1)  # int64[first and last, nodes]: places in `came`
    moved = 0
    slack, missed, lower_caps = _FIRST_SLACK, 0.0, 0
    few = max(nodes // _FEW_NODES, 1)
    stuck = np.empty(nodes, np.int64)  # int64[nodes that miss the cap]
    space = largest_home + came.shape[1] + 1
    held = np.empty(space, np.int64)  # int64[items of a node]
    fell = np.empty(space)  # float64[items of a node]
    room = np.empty((3, space), np.int64)
    loads = np.empty(ranks_per_node)
    while True:
        cap = bound * (1.0 + slack) * (1.0 + ROUNDING)
        missing = 0
        for node in range(nodes):
            if most[node] <= cap:
                continue
            inside = min(ranks_per_node, ranks - node * ranks_per_node)
            count = _hold(
                node, listed, begins, came, guests, -1, costs, ranks_per_node, rank_of, held, fell
            )
            most[node] = _fill(
                node * ranks_per_node, inside, count, cap, most[node], held, fell, room, loads,
                rank_of,
            )  # fmt: skip
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
                guests, moved, held, fell, room, loads, rank_of,
            )  # fmt: skip
        slack *= _WIDER


@kernel
def _fill(
    first: int,
    ranks: int,
    count: int,
    cap: float,
    most: float,
    held: NDArray[np.int64],
    fell: NDArray[np.float64],
    room: NDArray[np.int64],
    loads: NDArray[np.float64],
    rank_of: NDArray[np.int32],
) -> float:
    """Fill the node that begins at rank `first` anew, with the first `count` items of `held`, if
    that lowers its largest load, `most`; what is then the largest."""
    if ranks <= FEW_RANKS:
        largest = fill_few(fell, count, ranks, cap, room, loads)
    else:
        largest = fill_node(fell[:count], ranks, cap, room[CHOSEN, :count])
    if largest >= most:
        return most
    for place in range(count):
        rank_of[held[place]] = first + room[CHOSEN, place]
    return largest


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
    guests: NDArray[np.int64],
    moved: int,
    held: NDArray[np.int64],
    fell: NDArray[np.float64],
    room: NDArray[np.int64],
    loads: NDArray[np.float64],
    rank_of: NDArray[np.int32],
) -> int:
    """Items that rise above the cap in their node, cheapest first, to nodes that keep it with them.

    Nodes are asked in turn, and once one refuses, it is not asked again: at most one filling a node
    and one an item moved. Written: `most` float64[nodes], `came` int64[item and next guest, moved],
    `guests` int64[first and last, nodes] and `rank_of`. Returns how many items have moved in all.
    """
    hosts = _by_room(stuck, costs, listed, begins, cap, ranks, ranks_per_node, rank_of)
    asked, left = 0, hosts.size
    above = np.empty(ranks_per_node)  # float64[ranks of the node]: load, until it keeps the cap
    for node in stuck:
        first = node * ranks_per_node
        count = _hold(
            node, listed, begins, came, guests, -1, costs, ranks_per_node, rank_of, held, fell
        )
        above[:] = 0.0
        for place in range(count):
            above[rank_of[held[place]] - first] += fell[place]
        for place in range(begins[node + 1] - 1, begins[node] - 1, -1):  # guests stay: moved once
            item = listed[place]
            rank = rank_of[item] - first
            at_home = 0 <= rank < ranks_per_node
            while at_home and above[rank] > cap and left > 0 and moved < came.shape[1]:
                asked %= left
                host = hosts[asked]
                seats = min(ranks_per_node, ranks - host * ranks_per_node)
                count = _hold(
                    host, listed, begins, came, guests, item, costs, ranks_per_node, rank_of, held,
                    fell,
                )  # fmt: skip
                limit = cap * (1.0 + ROUNDING)
                largest = _fill(
                    host * ranks_per_node,
                    seats,
                    count,
                    cap,
                    limit,
                    held,
                    fell,
                    room,
                    loads,
                    rank_of,
                )
                if largest >= limit:
                    left -= 1
                    hosts[asked] = hosts[left]
                    continue
                most[host] = largest
                came[0, moved], came[1, moved] = item, -1
                if guests[0, host] < 0:
                    guests[0, host] = moved
                else:
                    came[1, guests[1, host]] = moved
                guests[1, host] = moved
                moved += 1
                asked += 1
                above[rank] -= costs[item]
                break
        most[node] = above.max()
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


@leaf
def _hold(
    node: int,
    listed: NDArray[np.int64],
    begins: NDArray[np.int64],
    came: NDArray[np.int64],
    guests: NDArray[np.int64],
    newcomer: int,
    costs: NDArray[np.float64],
    ranks_per_node: int,
    rank_of: NDArray[np.int32],
    held: NDArray[np.int64],
    fell: NDArray[np.float64],
) -> int:
    """Write the items of a node, costliest first, to `held`, and their costs to `fell`: those at
    home there, those that came, and one more. How many they are."""
    count = 0
    for place in range(begins[node], begins[node + 1]):
        item = listed[place]
        if rank_of[item] // ranks_per_node == node:
            held[count] = item
            fell[count] = costs[item]
            count += 1
    guest = guests[0, node]
    while guest >= 0 or newcomer >= 0:
        if guest >= 0:
            item, guest = came[0, guest], came[1, guest]
        else:
            item, newcomer = newcomer, -1
        cost = costs[item]
        place = count
        while place > 0 and fell[place - 1] < cost:
            held[place], fell[place] = held[place - 1], fell[place - 1]
            place -= 1
        held[place], fell[place] = item, cost
        count += 1
    return count
