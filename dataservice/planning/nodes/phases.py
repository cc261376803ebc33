"""Every phase of a step at once: each wave's items of one encoder, node by node.

There are many phases and, in each of their nodes, few items, so that a call for each node would
cost more than the work itself. Items are sorted once by cost; two counting sorts list them by
phase and node, before and after the excess of full nodes has moved, and each phase is then
levelled, node by node.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import group_stable, radix_argsort
from dataservice.planning.nodes.excess import move_excess
from dataservice.planning.nodes.level import level_phase


def spread_phases(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    home: NDArray[np.int32],
    volume: IntArray,
    *,
    phases: int,
    ranks: int,
    ranks_per_node: int,
    tolerance: float,
) -> NDArray[np.int32]:
    """The rank of each item, int32[m], each phase balanced on its own and mostly inside nodes.

    By item, [m]: `phase` in [0, phases); `costs`; `tokens`, with which the costs rise inside a
    phase; `home`, the rank it is needed on; `volume`, what moving it to another node costs. The
    last node may have fewer ranks. `tolerance`: what a node may hold above the bound before items
    leave it. O(m · ranks of a node²).
    """
    order = radix_argsort((tokens.max() - tokens).astype(np.uint64))
    return _spread(
        phase,
        costs,
        tokens,
        order,
        home,
        volume.astype(np.float64),
        int(phases),
        int(ranks),
        int(ranks_per_node),
        float(tolerance),
    )


@kernel
def _spread(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    order: NDArray[np.int64],
    home: NDArray[np.int32],
    volume: NDArray[np.float64],
    phases: int,
    ranks: int,
    ranks_per_node: int,
    tolerance: float,
) -> NDArray[np.int32]:
    nodes = -(-ranks // ranks_per_node)
    whole = np.ones(costs.size, np.int32)
    bounds = phase_bounds(phase, costs, tokens, whole, costs, phases, ranks)  # float64[phases]
    node_of = np.empty(costs.size, np.int64)  # int64[m]
    segment_of = np.empty(costs.size, np.int64)  # int64[m]: phase · nodes + node
    for item in range(costs.size):
        node_of[item] = home[item] // ranks_per_node
        segment_of[item] = phase[item] * nodes + node_of[item]
    listed, begins = group_stable(segment_of, order, phases * nodes)
    if nodes > 1:
        in_node = np.full(nodes, ranks_per_node)  # int64[nodes]: ranks of each
        in_node[nodes - 1] = ranks - (nodes - 1) * ranks_per_node
        for p in range(phases):
            of_phase = begins[p * nodes : (p + 1) * nodes + 1]
            limits = bounds[p] * (1.0 + tolerance) * in_node
            move_excess(costs, volume, listed, of_phase, limits, node_of)
        for item in range(costs.size):
            segment_of[item] = phase[item] * nodes + node_of[item]
        listed, begins = group_stable(segment_of, order, phases * nodes)
    rank_of = np.empty(costs.size, np.int32)  # int32[m]
    for p in range(phases):
        of_phase = begins[p * nodes : (p + 1) * nodes + 1]
        level_phase(costs, listed, of_phase, bounds[p], ranks, ranks_per_node, rank_of)
    return rank_of


@kernel
def phase_bounds(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    unit_costs: NDArray[np.float64],
    phases: int,
    ranks: int,
) -> NDArray[np.float64]:
    """What the largest load of each phase cannot be below: float64[phases]. O(m).

    An item may be cut into its `units` [m], each of `unit_costs` [m] alone. The largest of the mean
    load, the costliest unit and, since items hold whole units of tokens (tiles, frames) that cannot
    be divided, what the units of the fullest rank take at least: it holds the mean number of them
    or more, rounded up, at no fewer seconds than the cheapest.
    """
    total = np.zeros(phases)
    largest = np.zeros(phases)
    held = np.zeros(phases, np.int64)  # tokens
    unit = np.zeros(phases, np.int64)  # greatest common divisor of the tokens of an item
    cheapest = np.full(phases, np.inf)  # seconds of a token
    for item in range(costs.size):
        p = phase[item]
        total[p] += costs[item]
        largest[p] = max(largest[p], unit_costs[item])
        size = np.int64(tokens[item])
        if size > 0:
            held[p] += size
            cheapest[p] = min(cheapest[p], costs[item] / size)
            size //= units[item]
            while size:
                unit[p], size = size, unit[p] % size
    bounds = np.maximum(total / ranks, largest)
    for p in range(phases):
        if held[p] > 0:
            fullest = -(-held[p] // (unit[p] * ranks)) * unit[p]
            bounds[p] = max(bounds[p], fullest * cheapest[p])
    return bounds


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
