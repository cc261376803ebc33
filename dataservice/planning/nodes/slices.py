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

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.heap import heap_sift_down
from dataservice.planning.kernels.sort import group_stable, radix_argsort
from dataservice.planning.nodes.phases import phase_bounds
from dataservice.planning.pieces import Cut

# Of the first cap over the bound, and of each over the one before; and into how many parts what had
# no room is divided, one of which is added: units are whole, and more of them fit all at once.
_RISE = 1e-3
_CAREFUL = 3.0
_SHORT = 0.125  # of a replica's share, up to which an item is not cut


def slice_phases(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    unit_costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    home: NDArray[np.int32],
    long: NDArray[np.bool_],
    rank_of: NDArray[np.int32],
    *,
    ranks: int,
    ranks_per_node: int,
) -> tuple[Cut, NDArray[np.int32]]:
    """The pieces of items [m] and the rank of each, int32[k]: each phase of `long` bool[phases]
    balanced on its own and mostly inside nodes, the items of others as they are, on `rank_of`
    int32[m]. Every piece costs what its units do and the same constant: an item of u units `costs`
    u·unit + constant, and one unit alone unit + constant (`unit_costs`).

    O(m log m + N log N) a round, and a round for each rise of the cap.
    """
    row, first, held, rank = _slice_phases(
        phase, costs, unit_costs, tokens, units, home, long, rank_of, ranks, ranks_per_node
    )
    return Cut(row, first, held), rank


@kernel
def _slice_phases(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    unit_costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    home: NDArray[np.int32],
    long: NDArray[np.bool_],
    rank_of: NDArray[np.int32],
    ranks: int,
    ranks_per_node: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    phases = long.size
    bounds = phase_bounds(phase, costs, tokens, units, unit_costs, phases, ranks)
    listed, begins = group_stable(phase, np.arange(phase.size), phases)
    most = phase.size + np.count_nonzero(long) * ranks  # pieces
    row = np.empty(most, np.int64)
    first = np.empty(most, np.int32)
    held = np.empty(most, np.int32)
    rank = np.empty(most, np.int32)
    end = 0
    for p in range(phases):
        items = listed[begins[p] : begins[p + 1]]
        if not long[p]:
            row[end : end + items.size] = items
            first[end : end + items.size] = 0
            held[end : end + items.size] = units[items]
            rank[end : end + items.size] = rank_of[items]
            end += items.size
            continue
        mean = costs[items].sum() / ranks
        alone = costs[items] <= unit_costs[items]  # one unit, or units that cost nothing
        solid = alone | (costs[items] <= mean * _SHORT)
        short, fluid = items[solid], items[~solid]
        most_tokens = tokens[items].max()
        short = short[radix_argsort((most_tokens - tokens[short]).astype(np.uint64))]
        cap = bounds[p] * (1.0 + _RISE)
        beside = np.zeros(ranks)  # what the short ones leave no room for
        while not _place_short(short, costs, home, cap, ranks_per_node, beside, rank[end:]):
            beside[:] = 0.0
            cap *= 1.0 + _RISE
        at = end + short.size
        pieces, left_s = 0, np.inf
        while left_s > 0.0:
            pieces, left_s = _pour(
                fluid, costs, unit_costs, units, home, cap, ranks_per_node, beside.copy(),
                row[at:], first[at:], held[at:], rank[at:],
            )  # fmt: skip
            cap = cap * (1.0 + _RISE) + left_s / (_CAREFUL * ranks)
        row[end : end + short.size] = short
        first[end : end + short.size] = 0
        held[end : end + short.size] = units[short]
        end += short.size + pieces
    return _in_order(row[:end], first[:end], held[:end], rank[:end], phase.size)


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
    items: NDArray[np.int64],
    costs: NDArray[np.float64],
    unit_costs: NDArray[np.float64],
    units: NDArray[np.int32],
    home: NDArray[np.int32],
    cap: float,
    ranks_per_node: int,
    loads: NDArray[np.float64],
    row: NDArray[np.int64],
    first: NDArray[np.int32],
    held: NDArray[np.int32],
    rank: NDArray[np.int32],
) -> tuple[int, float]:
    """Write the pieces of `items` onto the room below the cap; how many, and the seconds for which
    there is no room. A rank at which an item is cut is full from then on. Written: `loads`
    float64[N], and `row`, `first`, `held` and `rank` of the pieces."""
    nodes = -(-loads.size // ranks_per_node)
    least = np.arange(nodes) * ranks_per_node  # the first rank of each node that is not full
    rest_item = np.empty(items.size, np.int64)  # those that are left over in their nodes
    rest_first = np.empty(items.size, np.int64)
    rest = 0
    count, left_s = 0, 0.0
    for turn in range(2):  # in their nodes, then anywhere
        anywhere = 0  # the first node that is not full
        for k in range(items.size if turn == 0 else rest):
            item = items[k] if turn == 0 else rest_item[k]
            done = 0 if turn == 0 else rest_first[k]
            unit = (costs[item] - unit_costs[item]) / (units[item] - 1)
            fixed = unit_costs[item] - unit
            node = home[item] // ranks_per_node if turn == 0 else anywhere
            while done < units[item] and node < nodes:
                at = least[node]
                if at == min((node + 1) * ranks_per_node, loads.size):
                    if turn == 0:
                        break
                    node += 1
                    continue
                room = cap - loads[at] - fixed
                taken = int(min(float(units[item] - done), max(room, 0.0) / unit))
                if taken > 0:
                    row[count], first[count], held[count], rank[count] = item, done, taken, at
                    count += 1
                    done += taken
                    loads[at] += fixed + unit * taken
                if done < units[item]:
                    least[node] += 1
            if turn == 0 and done < units[item]:
                rest_item[rest], rest_first[rest] = item, done
                rest += 1
            else:
                anywhere = node
                left_s += unit * (units[item] - done)
    return count, left_s


@kernel
def _in_order(
    row: NDArray[np.int64],
    first: NDArray[np.int32],
    held: NDArray[np.int32],
    rank: NDArray[np.int32],
    items: int,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """The pieces by item, and then as they follow one another in it, as they were written."""
    order, _ = group_stable(row, np.arange(row.size), items)
    return row[order], first[order], held[order], rank[order]
