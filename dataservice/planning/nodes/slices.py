"""Phases with long items that may be cut: sliced wherever a replica is full.

What cannot be cut or is short goes where its text is, costliest first, to the least loaded replica
of its node, or of all. The rest is poured on top like a fluid, up to a cap: replica by replica in
its own node, what finds no room there over the other nodes. An item is so cut only where a replica
is full, and there are at most as many more pieces than items as replicas. The cap rises from just
above the bound until all has room.

    cap ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄
        2 3 3 3 │ 4 4 5 5     items 2 to 5, each cut where the cap is reached
        2 2 3 3 │ 4 4 4 4
        ▪ ▪ 2 3 │ ▪ ▪ ▪ ▪     ▪ short ones

Shapes: m items, k pieces, N ranks; `listed` items of one phase.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.heap import heap_sift_down
from dataservice.planning.kernels.sort import group_stable, radix_argsort
from dataservice.planning.nodes.phases import phase_bounds
from dataservice.planning.pieces import Cut

# Of the first cap over the bound, and of the second over the first. What found no room is added
# too, but not all of it: units are whole, and many ranks take one more of a little more room.
_RISE = 1e-3
_MORE = 1.5  # by which a rise exceeds the one before, so that there are few
_CAREFUL = 2.0
_LOST_UNITS = 0.4  # room that a full rank is left with, of a unit
_SHORT = 0.125  # of a replica's share, up to which an item is not cut


class Slices(NamedTuple):
    """Pieces of items in any order: `cut` [k], the `rank` int32[k] of each, and `slowest_s`
    float64[phases] of the fullest rank in each phase."""

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
    phases: int,
    ranks: int,
    ranks_per_node: int,
) -> Slices:
    """The pieces of items [m], each phase balanced on its own and mostly inside nodes. Every piece
    costs what its units do and the same constant: an item of u units `costs` u·unit + constant,
    and one unit alone unit + constant (`unit_costs`).

    O(m log m + N log N) and O(m + N) a round, of which there are few.
    """
    row, first, held, rank, slowest_s = _slice_phases(
        phase, costs, unit_costs, tokens, units, home, phases, ranks, ranks_per_node
    )
    return Slices(Cut(row, first, held), rank, slowest_s)


@kernel
def _slice_phases(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    unit_costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    home: NDArray[np.int32],
    phases: int,
    ranks: int,
    ranks_per_node: int,
) -> tuple[
    NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.float64]
]:
    bounds = phase_bounds(phase, costs, tokens, units, unit_costs, phases, ranks)
    listed, begins = group_stable(phase, np.arange(phase.size), phases)
    most = phase.size + np.count_nonzero(np.diff(begins)) * ranks  # pieces
    row = np.empty(most, np.int64)
    first = np.empty(most, np.int32)
    held = np.empty(most, np.int32)
    rank = np.empty(most, np.int32)
    slowest_s = np.zeros(phases)
    end = 0
    for p in range(phases):
        items = listed[begins[p] : begins[p + 1]]
        if items.size == 0:
            continue
        total_s = costs[items].sum()
        alone = costs[items] <= unit_costs[items]  # one unit, or units that cost nothing
        solid = alone | (costs[items] <= total_s / ranks * _SHORT)
        short, fluid = items[solid], items[~solid]
        most_tokens = tokens[items].max()
        short = short[radix_argsort((most_tokens - tokens[short]).astype(np.uint64))]
        unit = (costs[fluid] - unit_costs[fluid]) / (units[fluid] - 1)
        fixed = unit_costs[fluid] - unit
        # Nearly every rank holds a part of an item that it cuts, pays for it, and is left with
        # room for less than a unit.
        cut = (fixed + unit * _LOST_UNITS).mean() if fluid.size else 0.0
        cap = max(bounds[p], total_s / ranks + cut)
        cap *= 1.0 + _RISE
        beside = np.zeros(ranks)  # what the short ones leave no room for
        rise = _RISE
        while not _place_short(short, costs, home, cap, ranks_per_node, beside, rank[end:]):
            beside[:] = 0.0
            cap *= 1.0 + rise
            rise *= _MORE
        at = end + short.size
        pieces, left_s = 0, np.inf
        node = home[fluid] // ranks_per_node
        while left_s > 0.0:
            loads = beside.copy()
            pieces, left_s = _pour(
                unit, fixed, units[fluid], node, cap, ranks_per_node, loads,
                row[at:], first[at:], held[at:], rank[at:],
            )  # fmt: skip
            cap = cap * (1.0 + rise) + left_s / (_CAREFUL * ranks)
            rise *= _MORE
            slowest_s[p] = loads.max()
        row[end:at] = short
        first[end:at] = 0
        held[end:at] = units[short]
        end = at + pieces
        row[at:end] = fluid[row[at:end]]
    return row[:end], first[:end], held[:end], rank[:end], slowest_s


@kernel
def _place_short(
    items: NDArray[np.int64],
    costs: NDArray[np.float64],
    home: NDArray[np.int32],
    cap: float,
    ranks_per_node: int,
    loads: NDArray[np.float64],
    rank: NDArray[np.int32],
) -> bool:
    """Whether all `items`, which fall in cost, have a rank within the cap: written to `rank`, in
    their order, and to `loads` float64[N]."""
    left = np.empty(items.size, np.int64)  # places of those that their nodes have no room for
    count = 0
    for place in range(items.size):
        item = items[place]
        begin = home[item] // ranks_per_node * ranks_per_node
        least = begin
        for other in range(begin + 1, min(begin + ranks_per_node, loads.size)):
            if loads[other] < loads[least]:
                least = other
        if loads[least] + costs[item] <= cap:
            loads[least] += costs[item]
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
        if keys[0] + costs[items[place]] > cap:
            return False
        keys[0] += costs[items[place]]
        loads[ids[0]] = keys[0]
        rank[place] = ids[0]
        heap_sift_down(keys, ids, keys.size, 0)
    return True


@kernel
def _pour(
    unit: NDArray[np.float64],
    fixed: NDArray[np.float64],
    units: NDArray[np.int32],
    home: NDArray[np.int32],
    cap: float,
    ranks_per_node: int,
    loads: NDArray[np.float64],
    item: NDArray[np.int64],
    first: NDArray[np.int32],
    held: NDArray[np.int32],
    rank: NDArray[np.int32],
) -> tuple[int, float]:
    """Write the pieces of items onto the room below the cap; how many, and the seconds for which
    there is no room. A rank at which an item is cut is full from then on.

    Of each item [f], seconds of a `unit` and of every piece (`fixed`), its `units` and its `home`
    node. Written: `loads` float64[N], and `item`, `first`, `held` and `rank` of the pieces.
    """
    nodes = -(-loads.size // ranks_per_node)
    least = np.arange(nodes) * ranks_per_node  # the first rank of each node that is not full
    rest = np.empty(units.size, np.int64)  # items that are left over in their nodes,
    done_of = np.zeros(units.size, np.int64)  # and the units of each that are not
    left = units.size
    count, left_s = 0, 0.0
    for turn in range(2):  # in their nodes, then anywhere
        turns, left = left, 0
        node = 0
        for k in range(turns):
            of = rest[k] if turn else k
            node = node if turn else home[k]
            done = done_of[of]
            while done < units[of] and node < nodes:
                at = least[node]
                if at == min((node + 1) * ranks_per_node, loads.size):
                    if turn == 0:
                        break
                    node += 1
                    continue
                room = cap - loads[at] - fixed[of]
                taken = int(min(float(units[of] - done), max(room, 0.0) / unit[of]))
                if taken > 0:
                    item[count], first[count], held[count], rank[count] = of, done, taken, at
                    count += 1
                    done += taken
                    loads[at] += fixed[of] + unit[of] * taken
                if done < units[of]:
                    least[node] += 1
            if done < units[of]:
                rest[left] = of
                done_of[of] = done
                left += 1
    for k in range(left):
        left_s += unit[rest[k]] * (units[rest[k]] - done_of[rest[k]])
    return count, left_s
