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

FEW_RANKS = 32  # up to this many ranks, the least loaded is found by looking at each
_LISTED_RANKS = 8  # and up to this many, their loads are kept in order, in registers
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
        return fill_few(fell, ranks, cap, np.inf, rank_at, np.empty(ranks))
    rank_at[:] = assign_least_loaded(fell, ranks)
    loads = np.zeros(ranks)
    for place in range(fell.size):
        loads[rank_at[place]] += fell[place]
    return float(loads.max())


@leaf
def fill_few(
    fell: NDArray[np.float64],
    ranks: int,
    cap: float,
    most: float,
    rank_at: NDArray[np.int64],
    loads: NDArray[np.float64],
) -> float:
    """`fill_node` on at most 32 ranks; `rank_at` is only right where the largest load is below
    `most`. `loads` float64[≥ ranks] is space to work in.

    Filling j packs the first j ranks up to the cap, costliest first, and spreads the rest greedily.
    O(items·ranks) a filling, and at most as many fillings as ranks. Which rank an item goes to is
    only looked up in the best: the loads, in order, are the same without.
    """
    least, chosen = np.inf, 0
    left, fullest = 0.0, 0.0  # of what is not packed, the sum; of ranks that are, the largest load
    for place in range(fell.size):
        left += fell[place]
        rank_at[place] = -1
    for packed in range(ranks):
        if packed > 0:
            load = _pack_rank(fell, packed - 1, cap, rank_at)
            left -= load
            fullest = max(fullest, load)
            if left > cap * (ranks - packed):
                break
        if ranks - packed <= _LISTED_RANKS:
            largest = _largest_spread(fell, ranks - packed, rank_at, fullest, least)
        else:
            largest = max(fullest, _spread_rest(fell, ranks, packed, rank_at, loads, False))
        if largest < least:
            least, chosen = largest, packed
        if least <= cap:
            break
    if least < most:
        _spread_rest(fell, ranks, chosen, rank_at, loads, True)
    return least


@leaf
def _pack_rank(
    fell: NDArray[np.float64], rank: int, cap: float, rank_at: NDArray[np.int64]
) -> float:
    """Give a rank whatever still fits, costliest first; the summed cost."""
    load = 0.0
    for place in range(fell.size):
        if rank_at[place] < 0 and load + fell[place] <= cap:
            rank_at[place] = rank
            load += fell[place]
    return load


@leaf
def _largest_spread(
    fell: NDArray[np.float64],
    ranks: int,
    rank_at: NDArray[np.int64],
    fullest: float,
    enough: float,
) -> float:
    """The largest load where items of no rank, costliest first, go to the least loaded of at most
    eight ranks; at least `fullest`, and no further than `enough`.

    The loads rise from a to h. One that an item has raised is taken out and put where it belongs:
    each of the others stays, or moves down by one.
    """
    a = 0.0
    b = 0.0 if ranks > 1 else np.inf
    c = 0.0 if ranks > 2 else np.inf
    d = 0.0 if ranks > 3 else np.inf
    e = 0.0 if ranks > 4 else np.inf
    f = 0.0 if ranks > 5 else np.inf
    g = 0.0 if ranks > 6 else np.inf
    h = 0.0 if ranks > 7 else np.inf
    for place in range(fell.size):
        if rank_at[place] >= 0:
            continue
        raised = a + fell[place]
        if raised > fullest:
            fullest = raised
            if fullest >= enough:
                break
        a = min(b, raised)
        b = min(c, max(b, raised))
        c = min(d, max(c, raised))
        d = min(e, max(d, raised))
        e = min(f, max(e, raised))
        f = min(g, max(f, raised))
        g = min(h, max(g, raised))
        h = max(h, raised)
    return fullest


@leaf
def _spread_rest(
    fell: NDArray[np.float64],
    ranks: int,
    packed: int,
    rank_at: NDArray[np.int64],
    loads: NDArray[np.float64],
    named: bool,
) -> float:
    """Items of none of the `packed` first ranks, costliest first, to the least loaded of the rest,
    written to `rank_at` if they are to be `named`; the largest load among those."""
    for rank in range(packed, ranks):
        loads[rank] = 0.0
    for place in range(fell.size):
        if 0 <= rank_at[place] < packed:
            continue
        least = packed
        for rank in range(packed + 1, ranks):
            if loads[rank] < loads[least]:
                least = rank
        loads[least] += fell[place]
        if named:
            rank_at[place] = least
    largest = 0.0
    for rank in range(packed, ranks):
        largest = max(largest, loads[rank])
    return largest


class _Guests(NamedTuple):
    """Items that came to other nodes, in the order in which they moved: the `place` of each
    int64[moved] and the next of the same node, `after`; of each node the `first` and the `last`,
    int64[nodes], −1 where there is none. `left` bool[nodes]: it has handed on some of its own."""

    place: NDArray[np.int64]
    after: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    left: NDArray[np.bool_]


class _NodeItems(NamedTuple):
    """The items of the node at hand, in the first rows: `place` int64 and `cost` float64, which
    falls; and what filling it needs, `rank` int64[rows] and `loads` float64[ranks], see
    `fill_few`."""

    place: NDArray[np.int64]
    cost: NDArray[np.float64]
    rank: NDArray[np.int64]
    loads: NDArray[np.float64]


@kernel
def level_phase(
    costs: NDArray[np.float64],
    begins: NDArray[np.int64],
    bound: float,
    ranks: int,
    ranks_per_node: int,
    rank_at: NDArray[np.int32],
) -> None:
    """Write the ranks of a phase's items to `rank_at` int32, a place each as in `costs` float64.

    Node k holds places begins[k] : begins[k + 1], by falling cost; `bound` is what the largest
    load cannot be below. O(items · ranks of a node²) a round, and few rounds, as the slack grows by
    half in each.
    """
    nodes = begins.size - 1
    if begins[nodes] == begins[0]:
        return
    most = np.full(nodes, np.inf)  # float64[nodes]: largest load
    most_moved = _MOVED_PER_NODE * nodes
    guests = _Guests(
        np.empty(most_moved, np.int64),
        np.empty(most_moved, np.int64),
        np.full(nodes, -1),
        np.full(nodes, -1),
        np.zeros(nodes, np.bool_),
    )
    moved = 0
    slack, missed, lower_caps = _FIRST_SLACK, 0.0, 0
    few = max(nodes // _FEW_NODES, 1)
    stuck = np.empty(nodes, np.int64)  # int64[nodes that miss the cap]
    most_items = np.diff(begins).max() + most_moved + 1
    items = _NodeItems(
        np.empty(most_items, np.int64),
        np.empty(most_items),
        np.empty(most_items, np.int64),
        np.empty(ranks_per_node),
    )
    while True:
        cap = bound * (1.0 + slack) * (1.0 + ROUNDING)
        missing = 0
        for node in range(nodes):
            if most[node] <= cap:
                continue
            inside = min(ranks_per_node, ranks - node * ranks_per_node)
            count = _hold(node, begins, guests, -1, costs, ranks_per_node, rank_at, items)
            most[node] = _fill(
                node * ranks_per_node, inside, count, cap, most[node], items, rank_at
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
                stuck[:missing], costs, begins, cap, ranks, ranks_per_node, most, guests, moved,
                items, rank_at,
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
    rank_at: NDArray[np.int32],
) -> float:
    """Fill the node that begins at rank `first` anew, with its `count` items, if that lowers its
    largest load, `most`; what is then the largest."""
    if ranks <= FEW_RANKS:
        largest = fill_few(items.cost[:count], ranks, cap, most, items.rank[:count], items.loads)
    else:
        largest = fill_node(items.cost[:count], ranks, cap, items.rank[:count])
    if largest >= most:
        return most
    for row in range(count):
        rank_at[items.place[row]] = first + items.rank[row]
    return largest


@kernel
def _hand_on(
    stuck: NDArray[np.int64],
    costs: NDArray[np.float64],
    begins: NDArray[np.int64],
    cap: float,
    ranks: int,
    ranks_per_node: int,
    most: NDArray[np.float64],
    guests: _Guests,
    moved: int,
    items: _NodeItems,
    rank_at: NDArray[np.int32],
) -> int:
    """Items that rise above the cap in their node, cheapest first, to nodes that keep it with them.

    Nodes are asked in turn, and once one refuses, it is not asked again: at most one filling a node
    and one an item moved. Written: `most` float64[nodes], `guests` and `rank_at`. Returns how many
    items have moved in all.
    """
    hosts = _by_room(stuck, costs, begins, cap, ranks, ranks_per_node, rank_at)
    asked, left = 0, hosts.size
    above = np.empty(ranks_per_node)  # float64[ranks of the node]: load, until it keeps the cap
    for node in stuck:
        first = node * ranks_per_node
        count = _hold(node, begins, guests, -1, costs, ranks_per_node, rank_at, items)
        above[:] = 0.0
        for row in range(count):
            above[rank_at[items.place[row]] - first] += items.cost[row]
        for place in range(begins[node + 1] - 1, begins[node] - 1, -1):  # guests stay: moved once
            rank = rank_at[place] - first
            at_home = 0 <= rank < ranks_per_node
            while at_home and above[rank] > cap and left > 0 and moved < guests.place.size:
                asked %= left
                host = hosts[asked]
                seats = min(ranks_per_node, ranks - host * ranks_per_node)
                count = _hold(host, begins, guests, place, costs, ranks_per_node, rank_at, items)
                limit = cap * (1.0 + ROUNDING)
                largest = _fill(host * ranks_per_node, seats, count, cap, limit, items, rank_at)
                if largest >= limit:
                    left -= 1
                    hosts[asked] = hosts[left]
                    continue
                most[host] = largest
                _receive(guests, moved, place, host)
                guests.left[node] = True
                moved += 1
                asked += 1
                above[rank] -= costs[place]
                break
        most[node] = above.max()
    return moved


@kernel
def _by_room(
    stuck: NDArray[np.int64],
    costs: NDArray[np.float64],
    begins: NDArray[np.int64],
    cap: float,
    ranks: int,
    ranks_per_node: int,
    rank_at: NDArray[np.int32],
) -> NDArray[np.int64]:
    """The nodes that keep the cap, most room first."""
    nodes = begins.size - 1
    load = np.zeros(nodes)
    for place in range(begins[0], begins[nodes]):
        load[rank_at[place] // ranks_per_node] += costs[place]
    room = np.empty(nodes)
    for node in range(nodes):
        room[node] = cap * min(ranks_per_node, ranks - node * ranks_per_node) - load[node]
    room[stuck] = -np.inf
    return argsort_rising(-room)[: nodes - stuck.size]


@leaf
def _receive(guests: _Guests, moved: int, place: int, host: int) -> None:
    """Add an item, the next after `moved` others, to those that came to a node."""
    guests.place[moved], guests.after[moved] = place, -1
    if guests.first[host] < 0:
        guests.first[host] = moved
    else:
        guests.after[guests.last[host]] = moved
    guests.last[host] = moved


@leaf
def _hold(
    node: int,
    begins: NDArray[np.int64],
    guests: _Guests,
    newcomer: int,
    costs: NDArray[np.float64],
    ranks_per_node: int,
    rank_at: NDArray[np.int32],
    items: _NodeItems,
) -> int:
    """Write the items of a node to `items`: those at home there, those that came, and the one at
    place `newcomer`, unless it is −1. How many they are."""
    count = 0
    for place in range(begins[node], begins[node + 1]):
        if not guests.left[node] or rank_at[place] // ranks_per_node == node:
            items.place[count] = place
            items.cost[count] = costs[place]
            count += 1
    guest = guests.first[node]
    while guest >= 0 or newcomer >= 0:
        if guest >= 0:
            place, guest = guests.place[guest], guests.after[guest]
        else:
            place, newcomer = newcomer, -1
        cost = costs[place]
        row = count
        while row > 0 and items.cost[row - 1] < cost:
            items.place[row], items.cost[row] = items.place[row - 1], items.cost[row - 1]
            row -= 1
        items.place[row], items.cost[row] = place, cost
        count += 1
    return count
