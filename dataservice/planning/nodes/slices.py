"""Phases with long items that may be cut: sliced wherever a replica is full.

What cannot be cut or is short goes where its text is, costliest first, to the least loaded replica
of its node, or of all. The rest is poured on top like a fluid, up to a cap: replica by replica in
its own node, what finds no room there over the other nodes. An item is so cut only where a replica
is full, and there are at most as many more pieces than items as replicas. The cap rises from just
above the bound until all has room. Where replicas have room for so many bytes alone, one is full
too once these are; a phase is given up where the cap has risen far and some have no room yet.

    cap ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄
        2 3 3 3 │ 4 4 5 5     items 2 to 5, each cut where the cap is reached
        2 2 3 3 │ 4 4 4 4
        ▪ ▪ 2 3 │ ▪ ▪ ▪ ▪     ▪ short ones

Shapes: m items, k pieces, N ranks; `listed` items of one phase.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_falling, group_stable, heap_sift_down
from dataservice.planning.pieces import Cut

_NO_LIMIT = np.int64(1) << 62  # bytes
# Of the first cap over the bound, and of the second over the first. What found no room is added
# too, but not all of it: units are whole, and many ranks take one more of a little more room.
_RISE = 1e-3
_MORE = 1.5  # by which a rise exceeds the one before, so that there are few
_CAREFUL = 2.0
_LOST_UNITS = 0.4  # room that a full rank is left with, of a unit
_SHORT = 0.125  # of a replica's share, up to which an item is not cut
# Where bytes find no room, a phase is given up once the cap would rise by so much in one go.
_MOST_RISE = 0.1
_EXACT = 1e-9


class Slices(NamedTuple):
    """Pieces of items in any order: `cut` [k], the `rank` int32[k] of each, and `slowest_s`
    float64[phases] of the fullest rank in each phase; infinite where bytes found no room, and there
    are no pieces."""

    cut: Cut
    rank: NDArray[np.int32]
    slowest_s: NDArray[np.float64]


def slice_phases(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    unit_costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    home: NDArray[np.int32],
    *,
    bounds: NDArray[np.float64],
    ranks: int,
    ranks_per_node: int,
    unit_bytes: NDArray[np.int64] | None = None,
    rooms: NDArray[np.int64] | None = None,
) -> Slices:
    """The pieces of items [m], each phase balanced on its own and mostly inside nodes. Every piece
    costs what its units do and the same constant: an item of u units `costs` u·unit + constant,
    and one unit alone unit + constant (`unit_costs`). No load is below `bounds` float64[phases].

    With `unit_bytes` [m] and `rooms` [W, N], the phases of a wave, equally many in each, share the
    bytes that it leaves to each rank.

    O(m log m + N log N) and O(m + N) a round, of which there are few.
    """
    if unit_bytes is None or rooms is None:
        unit_bytes, rooms = np.zeros(phase.size, np.int64), np.zeros((0, ranks), np.int64)
    row, first, held, rank, slowest_s = _slice_phases(
        phase, costs, unit_costs, tokens, units, unit_bytes, home, bounds, rooms, ranks_per_node
    )
    return Slices(Cut(row, first, held), rank, slowest_s)


@kernel
def _slice_phases(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    unit_costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    unit_bytes: NDArray[np.int64],
    home: NDArray[np.int32],
    bounds: NDArray[np.float64],
    rooms: NDArray[np.int64],
    ranks_per_node: int,
) -> tuple[
    NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]
]:
    phases, (waves, ranks) = bounds.size, rooms.shape
    rooms = rooms.copy()  # less what the phases so far hold
    listed, begins = group_stable(phase, np.arange(phase.size), phases)
    most = phase.size + np.count_nonzero(np.diff(begins)) * ranks  # pieces
    row, first = np.empty(most, np.int64), np.empty(most, np.int32)
    held, rank = np.empty(most, np.int32), np.empty(most, np.int32)
    fluid = _Fluid(
        np.empty(phase.size, np.int64),
        np.empty(phase.size),
        np.empty(phase.size),
        np.empty(phase.size, np.int32),
        np.empty(phase.size, np.int32),
        np.empty(phase.size, np.int64),
    )
    short, scratch = np.empty(phase.size, np.int64), np.empty((2, phase.size), np.int64)
    slowest_s = np.zeros(phases)
    end = 0
    for p in range(phases):
        items = listed[begins[p] : begins[p + 1]]
        if items.size == 0:
            continue
        total_s = costs[items].sum()
        few, cut_s = _part(items, costs, unit_costs, units, unit_bytes, home, ranks_per_node,
                           total_s / ranks * _SHORT, short, fluid)  # fmt: skip
        many = items.size - few
        few_items = short[:few][argsort_falling(tokens[short[:few]])]
        cap = max(bounds[p], total_s / ranks + (cut_s / many if many else 0.0))
        cap *= 1.0 + _RISE
        room = rooms[p * waves // phases] if waves else np.full(ranks, _NO_LIMIT)
        if waves:
            total_bytes = (unit_bytes[items] * units[items]).sum()
            cap = max(cap, _least_cap(room, total_s, total_bytes))
        most_rise = _MOST_RISE if waves else np.inf
        beside, left = np.zeros(ranks), room.copy()  # what the short ones leave no room for
        rise = _RISE if cap < np.inf else np.inf
        while rise < most_rise and not _place_short(
            few_items, costs, units, unit_bytes, home, cap, ranks_per_node, beside, left, rank[end:]
        ):
            beside[:], left[:] = 0.0, room
            cap *= 1.0 + rise
            rise *= _MORE
        at = end + few
        pieces, left_s = 0, np.inf
        while left_s > 0.0 and rise < most_rise:
            loads, free = beside.copy(), left.copy()
            open_ranks = np.arange(0, ranks, ranks_per_node)
            pieces, left_s = _pour(fluid, many, cap, ranks_per_node, loads, free, open_ranks,
                                   scratch, row[at:], first[at:], held[at:], rank[at:])  # fmt: skip
            cap = cap * (1.0 + rise) + left_s / (_CAREFUL * ranks)
            rise *= _MORE
            if left_s == 0.0:
                slowest_s[p] = loads.max()
                room[:] = free
        if left_s > 0.0:
            slowest_s[p] = np.inf
            continue
        row[end:at] = few_items
        first[end:at] = 0
        held[end:at] = units[few_items]
        end = at + pieces
        row[at:end] = fluid.item[row[at:end]]
    return row[:end], first[:end], held[:end], rank[:end], slowest_s


class _Fluid(NamedTuple):
    """Long items of one phase that may be cut, in the first places of each: `item` int64, seconds
    of a `unit` and of every piece (`fixed`) float64, its `units` and its `node` int32, and the
    bytes of a unit (`size`) int64."""

    item: NDArray[np.int64]
    unit: NDArray[np.float64]
    fixed: NDArray[np.float64]
    units: NDArray[np.int32]
    node: NDArray[np.int32]
    size: NDArray[np.int64]


@leaf
def _least_cap(room: NDArray[np.int64], total_s: float, total_bytes: int) -> float:
    """What ranks are filled to at least, in seconds, by work that could be divided at will, where
    some are full of its bytes before; infinite where it has no room. O(N) a round: the cap rises by
    what is left for each rank that is not full, of which there are fewer in each round."""
    cap, left_s = 0.0, total_s
    while left_s > 0.0:
        open_ranks, left_s = 0, total_s
        for rank in range(room.size):
            full_s = room[rank] * (total_s / total_bytes) if total_bytes else np.inf
            left_s -= min(full_s, cap)
            open_ranks += full_s > cap
        if left_s <= total_s * _EXACT:
            break
        if open_ranks == 0:
            return np.inf
        cap += left_s / open_ranks
    return cap


@leaf
def _part(
    items: NDArray[np.int64],
    costs: NDArray[np.float64],
    unit_costs: NDArray[np.float64],
    units: NDArray[np.int32],
    unit_bytes: NDArray[np.int64],
    home: NDArray[np.int32],
    ranks_per_node: int,
    short_s: float,
    short: NDArray[np.int64],
    fluid: _Fluid,
) -> tuple[int, float]:
    """Write the items that are short, or whole, to `short`, and the others to `fluid`. How many are
    short; and summed over the others what cutting each once takes: nearly every rank holds a part
    of an item that it cuts, pays for it, and is left with room for less than a unit."""
    few, many, cut_s = 0, 0, 0.0
    for k in range(items.size):
        item = items[k]
        # One unit, or units that cost nothing.
        if costs[item] <= unit_costs[item] or costs[item] <= short_s:
            short[few] = item
            few += 1
        else:
            unit = (costs[item] - unit_costs[item]) / (units[item] - 1)
            fixed = unit_costs[item] - unit
            fluid.item[many], fluid.unit[many], fluid.fixed[many] = item, unit, fixed
            fluid.units[many], fluid.node[many] = units[item], home[item] // ranks_per_node
            fluid.size[many] = unit_bytes[item]
            cut_s += fixed + unit * _LOST_UNITS
            many += 1
    return few, cut_s


@kernel
def _place_short(
    items: NDArray[np.int64],
    costs: NDArray[np.float64],
    units: NDArray[np.int32],
    unit_bytes: NDArray[np.int64],
    home: NDArray[np.int32],
    cap: float,
    ranks_per_node: int,
    loads: NDArray[np.float64],
    free: NDArray[np.int64],
    rank: NDArray[np.int32],
) -> bool:
    """Whether all `items`, which fall in cost, have a rank within the cap: written to `rank`, in
    their order, to `loads` float64[N] and to `free` int64[N], the bytes that ranks have left."""
    left = np.empty(items.size, np.int64)  # places of those that their nodes have no room for
    count = 0
    for place in range(items.size):
        item = items[place]
        begin = home[item] // ranks_per_node * ranks_per_node
        least, least_s = begin, loads[begin]
        for other in range(begin + 1, min(begin + ranks_per_node, loads.size)):
            if loads[other] < least_s:
                least, least_s = other, loads[other]
        size = unit_bytes[item] * units[item]
        if least_s + costs[item] <= cap and size <= free[least]:
            loads[least] += costs[item]
            free[least] -= size
            rank[place] = least
        else:
            left[count] = place
            count += 1
    if count == 0:
        return True
    keys, ids = loads.copy(), np.arange(loads.size)  # a heap: least load first
    for start in range(keys.size // 2 - 1, -1, -1):
        heap_sift_down(keys, ids, keys.size, start)
    for place in left[:count]:
        size = unit_bytes[items[place]] * units[items[place]]
        if keys[0] + costs[items[place]] > cap or size > free[ids[0]]:
            return False
        keys[0] += costs[items[place]]
        loads[ids[0]] = keys[0]
        free[ids[0]] -= size
        rank[place] = ids[0]
        heap_sift_down(keys, ids, keys.size, 0)
    return True


@leaf
def _pour(
    fluid: _Fluid,
    items: int,
    cap: float,
    ranks_per_node: int,
    loads: NDArray[np.float64],
    free: NDArray[np.int64],
    open_ranks: NDArray[np.int64],
    scratch: NDArray[np.int64],
    place: NDArray[np.int64],
    first: NDArray[np.int32],
    held: NDArray[np.int32],
    rank: NDArray[np.int32],
) -> tuple[int, float]:
    """Write the pieces of the first `items` onto the room below the cap; how many, and the seconds
    for which there is no room. A rank at which an item is cut is full from then on.

    Written: `loads` float64[N]; `free` int64[N], the bytes that ranks have left; `open_ranks`
    int64[nodes], the first rank of each that is not full; and of the pieces, the item's `place`,
    `first`, `held` and `rank`. `scratch` int64[2, items].
    """
    rest, done_of = scratch  # items that are left over in their nodes, and the units that are not
    nodes = open_ranks.size
    left = items
    count, left_s = 0, 0.0
    for turn in range(2):  # in their nodes, then anywhere
        turns, left = left, 0
        node = 0
        for k in range(turns):
            of, done = (rest[k], done_of[k]) if turn else (k, 0)
            node = node if turn else int(fluid.node[k])
            unit, fixed, units = fluid.unit[of], fluid.fixed[of], int(fluid.units[of])
            while done < units and node < nodes:
                at = open_ranks[node]
                if at == loads.size or at == (node + 1) * ranks_per_node:
                    if turn == 0:
                        break
                    node += 1
                    continue
                room = max(cap - loads[at] - fixed, 0.0)
                taken = int(min(float(units - done), room / unit))
                if taken * fluid.size[of] > free[at]:
                    taken = free[at] // fluid.size[of]
                if taken > 0:
                    free[at] -= taken * fluid.size[of]
                    place[count], first[count], held[count], rank[count] = of, done, taken, at
                    count += 1
                    done += taken
                    loads[at] += fixed + unit * taken
                if done < units:
                    open_ranks[node] += 1
            if done < units:
                rest[left], done_of[left] = of, done
                left += 1
    for k in range(left):
        left_s += fluid.unit[rest[k]] * (fluid.units[rest[k]] - done_of[k])
    return count, left_s
