"""Every phase of a step at once: each wave's items of one encoder, node by node.

There are many phases and, in each of their nodes, few items, so that a call for each node would
cost more than the work itself. Items are sorted once by cost; two counting sorts list them by
phase and node, before and after the excess of full nodes has moved, and each node is then filled
rank by rank, costliest item first.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import group_stable, radix_argsort
from dataservice.planning.loads.greedy import assign_least_loaded
from dataservice.planning.loads.refine import refine_in_place
from dataservice.planning.nodes.excess import move_excess

# Part of the tolerance kept for the imbalance that remains inside a node.
_INSIDE_SHARE = 0.05
_FEW_RANKS = 32  # up to this many ranks, the least loaded is found by looking at each
_WORK_PER_ITEM = 60


def spread_phases(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    rank: IntArray,
    home: NDArray[np.int32],
    volume: IntArray,
    *,
    phases: int,
    ranks: int,
    ranks_per_node: int,
    tolerance: float,
    refined: bool,
) -> NDArray[np.int32]:
    """The rank of each item, int32[m], each phase balanced on its own and mostly inside nodes.

    By item, [m]: `phase` in [0, phases); `costs`; `rank`, non-negative integers that rise with the
    costs inside a phase; `home`, the rank it is needed on; `volume`, what moving it to another node
    costs. The last node may have fewer ranks. `refined` lowers the largest load of a node further
    by local search. O(m log ranks).
    """
    order = radix_argsort((rank.max() - rank).astype(np.uint64))
    return _spread(
        phase,
        costs,
        order,
        home,
        volume.astype(np.float64),
        int(phases),
        int(ranks),
        int(ranks_per_node),
        float(tolerance),
        refined,
    )


@kernel
def _spread(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    order: NDArray[np.int64],
    home: NDArray[np.int32],
    volume: NDArray[np.float64],
    phases: int,
    ranks: int,
    ranks_per_node: int,
    tolerance: float,
    refined: bool,
) -> NDArray[np.int32]:
    nodes = -(-ranks // ranks_per_node)
    bounds = _bounds(phase, costs, phases, ranks)  # float64[phases]
    node_of = np.empty(costs.size, np.int64)  # int64[m]
    segment_of = np.empty(costs.size, np.int64)  # int64[m]: phase · nodes + node
    for item in range(costs.size):
        node_of[item] = home[item] // ranks_per_node
        segment_of[item] = phase[item] * nodes + node_of[item]
    listed, begins = group_stable(segment_of, order, phases * nodes)
    if nodes > 1:
        in_node = np.full(nodes, ranks_per_node)  # int64[nodes]: ranks of each
        in_node[nodes - 1] = ranks - (nodes - 1) * ranks_per_node
        over_mean = 1.0 + tolerance * (1.0 - _INSIDE_SHARE)
        for p in range(phases):
            of_phase = begins[p * nodes : (p + 1) * nodes + 1]
            move_excess(costs, volume, listed, of_phase, bounds[p] * over_mean * in_node, node_of)
        for item in range(costs.size):
            segment_of[item] = phase[item] * nodes + node_of[item]
        listed, begins = group_stable(segment_of, order, phases * nodes)
    rank_of = np.empty(costs.size, np.int32)  # int32[m]
    for segment in range(phases * nodes):
        items = listed[begins[segment] : begins[segment + 1]]
        first = segment % nodes * ranks_per_node
        inside = min(ranks_per_node, ranks - first)
        rank_at = _fill_node(costs, items, inside, 0.5 * _INSIDE_SHARE * tolerance, refined)
        for place in range(items.size):
            rank_of[items[place]] = first + rank_at[place]
    return rank_of


@kernel
def _bounds(
    phase: NDArray[np.int64], costs: NDArray[np.float64], phases: int, ranks: int
) -> NDArray[np.float64]:
    """Per phase the larger of the mean load and the largest item: float64[phases]."""
    total = np.zeros(phases)
    largest = np.zeros(phases)
    for item in range(costs.size):
        total[phase[item]] += costs[item]
        largest[phase[item]] = max(largest[phase[item]], costs[item])
    return np.maximum(total / ranks, largest)


@kernel
def _fill_node(
    costs: NDArray[np.float64],
    items: NDArray[np.int64],
    ranks: int,
    tolerance: float,
    refined: bool,
) -> NDArray[np.int64]:
    """Each item, costliest first, to the least loaded rank: int64[items]."""
    if ranks > _FEW_RANKS or refined:
        fell = costs[items]
    loads = np.zeros(ranks)
    if ranks > _FEW_RANKS:
        rank_at = assign_least_loaded(fell, ranks)
        for place in range(items.size):
            loads[rank_at[place]] += fell[place]
    else:
        rank_at = np.empty(items.size, np.int64)
        for place in range(items.size):
            least = 0
            for rank in range(1, ranks):
                if loads[rank] < loads[least]:
                    least = rank
            rank_at[place] = least
            loads[least] += costs[items[place]]
    if refined and items.size > ranks > 1:
        target = (1.0 + tolerance) * max(loads.sum() / ranks, fell[0])
        if loads.max() > target:
            work = _WORK_PER_ITEM * items.size + 2000
            refine_in_place(rank_at, fell, fell, ranks, np.inf, False, target, work)
    return rank_at


@kernel
def phase_loads(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    rank_of: NDArray[np.int32],
    phases: int,
    ranks: int,
) -> NDArray[np.float64]:
    """Summed costs [phases, ranks] of each rank's items in each phase. O(m + phases·ranks)."""
    loads = np.zeros((phases, ranks))
    for item in range(costs.size):
        loads[phase[item], rank_of[item]] += costs[item]
    return loads


@kernel
def name_parts(
    part_of: NDArray[np.int32],
    home: NDArray[np.int32],
    phase: NDArray[np.int64],
    phases: int,
    ranks: int,
) -> NDArray[np.int32]:
    """Name the parts of each phase after the ranks that already hold most of their text: int32[m].

    Loads stay as they are; fewer features travel. Greedy over (items in common), O(m).
    """
    keys = np.empty(part_of.size, np.uint64)  # uint64[m]: phase, part and home of each item
    for item in range(part_of.size):
        keys[item] = np.uint64((phase[item] * ranks + part_of[item]) * ranks + home[item])
    order = radix_argsort(keys)
    pairs = np.empty(part_of.size, np.uint64)  # uint64[m]: the distinct keys
    count = np.zeros(part_of.size, np.uint64)  # uint64[m]: items of each
    distinct = 0
    for item in order:
        if distinct == 0 or pairs[distinct - 1] != keys[item]:
            pairs[distinct] = keys[item]
            distinct += 1
        count[distinct - 1] += np.uint64(1)
    name = np.full((phases, ranks), -1, np.int32)  # int32[phases, parts]
    taken = np.zeros((phases, ranks), np.bool_)  # bool[phases, ranks]
    for pair in radix_argsort(~count[:distinct]):
        row = np.int64(pairs[pair]) // ranks
        of_phase, part, rank = row // ranks, row % ranks, np.int64(pairs[pair]) % ranks
        if name[of_phase, part] < 0 and not taken[of_phase, rank]:
            name[of_phase, part] = rank
            taken[of_phase, rank] = True
    for p in range(phases):
        free = 0
        for left in range(ranks):
            if name[p, left] < 0:
                while taken[p, free]:
                    free += 1
                name[p, left] = free
                free += 1
    named = np.empty_like(part_of)
    for item in range(part_of.size):
        named[item] = name[phase[item], part_of[item]]
    return named
