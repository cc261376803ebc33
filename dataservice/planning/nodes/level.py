"""One phase levelled: every node filled under one cap, as low a cap as the slowest node allows.

A phase takes as long as its slowest rank anywhere, so no node need be better than the worst one.
The cap rises in rounds from just above the bound. Where few nodes miss it, they hand on a few of
their cheapest items to nodes that still keep it; where many do, the next round follows. Once all
keep a cap far above the bound, a few lower ones are tried: items that were handed on meanwhile may
let nodes keep what they missed before.

    cap ┄┄┄┄┄┄┄┄┄┄┄┄┄┄▪┄┄┄┄┄┄┄┄┄┄┄┄
        █ █ █ █ │ █ █ █ █ │ █ █ █ ▃     ▪ has no room in its node, and goes to the last

Inside a node, few and coarse items, such as images of 1, 3 and 5 tiles, need unequal ranks: where
153 tiles go to 8 ranks, one of them holds 20, and should hold them in few items, since each item
costs extra.

    greedily            20 tiles in 10 items, 19 in 10, 19 in 10 …       the first is too heavy
    first rank filled   20 tiles in  4 items, 19 in 11, 19 in 11 …
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_rising
from dataservice.planning.loads.greedy import assign_least_loaded
from dataservice.planning.loads.problem import ROUNDING

CHOSEN, _PACKED, _TRIED = 0, 1, 2  # rank of each item: in the best filling, if packed, in this one
FEW_RANKS = 32  # up to this many ranks, the least loaded is found by looking at each
_FIRST_SLACK = 5e-3  # of the first cap over the bound; each round has more
# A phase that ends further above the bound tries caps between the last that it missed and its end.
_NEAR = 8e-3
LOWER_CAPS = 3
_WIDER = 1.5
_FEW_NODES = 4  # one node in so many may miss the cap and be helped by the others
_MOVED_PER_NODE = 2  # items handed on in all, at most


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


class _Guests(NamedTuple):
    """Items that came to other nodes, in the order in which they moved: each `item` int64[moved]
    and the next of the same node, `after`; of each node the `first` and the `last`, int64[nodes].
    −1 where there is none."""

    item: NDArray[np.int64]
    after: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]


class _NodeItems(NamedTuple):
    """The items of the node at hand, in the first places: `item` int64 and `cost` float64, which
    falls; and what filling it needs, `room` int64[3, places] and `loads` float64[ranks], see
    `fill_few`."""

    item: NDArray[np.int64]
    cost: NDArray[np.float64]
    room: NDArray[np.int64]
    loads: NDArray[np.float64]


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
    most_moved = _MOVED_PER_NODE * nodes
    guests = _Guests(
        np.empty(most_moved, np.int64),
        np.empty(most_moved, np.int64),
        np.full(nodes, -1),
        np.full(nodes, -1),
    )
    moved = 0
    slack, missed, lower_caps = _FIRST_SLACK, 0.0, 0
    few = max(nodes // _FEW_NODES, 1)
    stuck = np.empty(nodes, np.int64)  # int64[nodes that miss the cap]
    most_items = largest_home + most_moved + 1
    items = _NodeItems(
        np.empty(most_items, np.int64),
        np.empty(most_items),
        np.empty((3, most_items), np.int64),
        np.empty(ranks_per_node),
    )
    while True:
        cap = bound * (1.0 + slack) * (1.0 + ROUNDING)
        missing = 0
        for node in range(nodes):
            if most[node] <= cap:
                continue
            inside = min(ranks_per_node, ranks - node * ranks_per_node)
            count = _hold(node, listed, begins, guests, -1, costs, ranks_per_node, rank_of, items)
            most[node] = _fill(
                node * ranks_per_node, inside, count, cap, most[node], items, rank_of
            )
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
                stuck[:missing], costs, listed, begins, cap, ranks, ranks_per_node, most, guests,
                moved, items, rank_of,
            )  # fmt: skip
        slack *= _WIDER


@kernel
def _fill(
    first: int,
    ranks: int,
    count: int,
    cap: float,
    most: float,
    items: _NodeItems,
    rank_of: NDArray[np.int32],
) -> float:
    """Fill the node that begins at rank `first` anew, with its `count` items, if that lowers its
    largest load, `most`; what is then the largest."""
    if ranks <= FEW_RANKS:
        largest = fill_few(items.cost, count, ranks, cap, items.room, items.loads)
    else:
        largest = fill_node(items.cost[:count], ranks, cap, items.room[CHOSEN, :count])
    if largest >= most:
        return most
    for place in range(count):
        rank_of[items.item[place]] = first + items.room[CHOSEN, place]
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
    guests: _Guests,
    moved: int,
    items: _NodeItems,
    rank_of: NDArray[np.int32],
) -> int:
    """Items that rise above the cap in their node, cheapest first, to nodes that keep it with them.

    Nodes are asked in turn, and once one refuses, it is not asked again: at most one filling a node
    and one an item moved. Written: `most` float64[nodes], `guests` and `rank_of`. Returns how many
    items have moved in all.
    """
    hosts = _by_room(stuck, costs, listed, begins, cap, ranks, ranks_per_node, rank_of)
    asked, left = 0, hosts.size
    above = np.empty(ranks_per_node)  # float64[ranks of the node]: load, until it keeps the cap
    for node in stuck:
        first = node * ranks_per_node
        count = _hold(node, listed, begins, guests, -1, costs, ranks_per_node, rank_of, items)
        above[:] = 0.0
        for place in range(count):
            above[rank_of[items.item[place]] - first] += items.cost[place]
        for place in range(begins[node + 1] - 1, begins[node] - 1, -1):  # guests stay: moved once
            item = listed[place]
            rank = rank_of[item] - first
            at_home = 0 <= rank < ranks_per_node
            while at_home and above[rank] > cap and left > 0 and moved < guests.item.size:
                asked %= left
                host = hosts[asked]
                seats = min(ranks_per_node, ranks - host * ranks_per_node)
                count = _hold(
                    host, listed, begins, guests, item, costs, ranks_per_node, rank_of, items
                )
                limit = cap * (1.0 + ROUNDING)
                largest = _fill(host * ranks_per_node, seats, count, cap, limit, items, rank_of)
                if largest >= limit:
                    left -= 1
                    hosts[asked] = hosts[left]
                    continue
                most[host] = largest
                _receive(guests, moved, item, host)
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
def _receive(guests: _Guests, moved: int, item: int, host: int) -> None:
    """Add an item, the next after `moved` others, to those that came to a node."""
    guests.item[moved], guests.after[moved] = item, -1
    if guests.first[host] < 0:
        guests.first[host] = moved
    else:
        guests.after[guests.last[host]] = moved
    guests.last[host] = moved


@leaf
def _hold(
    node: int,
    listed: NDArray[np.int64],
    begins: NDArray[np.int64],
    guests: _Guests,
    newcomer: int,
    costs: NDArray[np.float64],
    ranks_per_node: int,
    rank_of: NDArray[np.int32],
    items: _NodeItems,
) -> int:
    """Write the items of a node to `items`: those at home there, those that came, and `newcomer`,
    unless it is −1. How many they are."""
    count = 0
    for place in range(begins[node], begins[node + 1]):
        item = listed[place]
        if rank_of[item] // ranks_per_node == node:
            items.item[count] = item
            items.cost[count] = costs[item]
            count += 1
    guest = guests.first[node]
    while guest >= 0 or newcomer >= 0:
        if guest >= 0:
            item, guest = guests.item[guest], guests.after[guest]
        else:
            item, newcomer = newcomer, -1
        cost = costs[item]
        place = count
        while place > 0 and items.cost[place - 1] < cost:
            items.item[place], items.cost[place] = items.item[place - 1], items.cost[place - 1]
            place -= 1
        items.item[place], items.cost[place] = item, cost
        count += 1
    return count
