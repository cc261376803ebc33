"""Every phase of a step at once: each wave's items of one encoder, node by node.

There are many phases and, in each of their nodes, few items, so that a call for each node would
cost more than the work itself. Items are sorted once by cost; two counting sorts list them by
phase and node, before and after the excess of full nodes has moved, and each phase is then
levelled, node by node.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_falling, group_stable, radix_argsort
from dataservice.planning.loads.problem import ROUNDING
from dataservice.planning.nodes.excess import move_excess
from dataservice.planning.nodes.level import level_phase

# Up to so many units a rank in the mean, that they and the items are whole makes a difference.
_MOST_UNITS = 48
_MOST_POINTS = 256  # of the hull, at twice the bound: as many units as a rank could hold
_CAP_STEP = 5e-3
_HALVINGS = 12  # of such a step


def spread_phases(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    home: NDArray[np.int32],
    volume: IntArray,
    *,
    bounds: NDArray[np.float64],
    ranks: int,
    ranks_per_node: int,
    tolerance: float,
) -> NDArray[np.int32]:
    """The rank of each item, int32[m], each phase balanced on its own and mostly inside nodes.

    By item, [m]: `phase` in [0, phases); `costs`; `tokens`, with which the costs rise inside a
    phase; `home`, the rank it is needed on; `volume`, what moving it to another node costs. The
    last node may have fewer ranks. `bounds` float64[phases]: what no rank's load can stay below.
    `tolerance`: what a node may hold above the bound before items leave it. O(m · ranks of a
    node²).
    """
    ranks, ranks_per_node = int(ranks), int(ranks_per_node)
    listed, begins = _by_node(
        phase,
        costs,
        argsort_falling(tokens),
        home,
        volume.astype(np.float64),
        bounds,
        ranks,
        ranks_per_node,
        float(tolerance),
    )
    nodes = -(-ranks // ranks_per_node)
    costs_at = costs[listed]  # float64[m]
    rank_at = np.empty(costs.size, np.int32)  # int32[m]
    for p in range(bounds.size):  # by one kernel for all, numba would count arrays for each item
        of_phase = begins[p * nodes : (p + 1) * nodes + 1]
        level_phase(costs_at, of_phase, bounds[p], ranks, ranks_per_node, rank_at)
    rank_of = np.empty_like(rank_at)
    rank_of[listed] = rank_at
    return rank_of


@kernel
def _by_node(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    order: NDArray[np.int64],
    home: NDArray[np.int32],
    volume: NDArray[np.float64],
    bounds: NDArray[np.float64],
    ranks: int,
    ranks_per_node: int,
    tolerance: float,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items by phase and node, once the excess of full nodes has moved: `listed` int64[m], of which
    segment phase · nodes + node holds begins[segment] : begins[segment + 1], by falling cost."""
    nodes, phases = -(-ranks // ranks_per_node), bounds.size
    node_of = np.empty(costs.size, np.int64)  # int64[m]
    segment_of = np.empty(costs.size, np.int64)  # int64[m]: phase · nodes + node
    node_of_rank = np.arange(ranks) // ranks_per_node  # looked up, as divisions take longer
    for item in range(costs.size):
        node_of[item] = node_of_rank[home[item]]
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
    return listed, begins


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
    be divided, what ranks of so many units and items take at least: the fullest rank holds the mean
    number of units or more, rounded up, at no fewer seconds than the cheapest; and see `_mixed_s`.
    """
    total = np.zeros(phases)
    largest = np.zeros(phases)
    count = np.zeros(phases, np.int64)
    held = np.zeros(phases, np.int64)  # tokens
    unit = np.zeros(phases, np.int64)  # greatest common divisor of the tokens of an item
    cheapest = np.full(phases, np.inf)  # seconds of a token
    least = np.zeros(phases, np.int64)  # tokens of the smallest unit, and the fewest seconds of one
    least_s = np.full(phases, np.inf)
    for item in range(costs.size):
        p = phase[item]
        total[p] += costs[item]
        largest[p] = max(largest[p], unit_costs[item])
        size = np.int64(tokens[item])
        if size > 0:
            count[p] += 1
            held[p] += size
            cheapest[p] = min(cheapest[p], costs[item] / size)
            if units[item] > 1:
                size //= units[item]
            if least[p] == 0 or size < least[p]:
                least[p], least_s[p] = size, unit_costs[item]
            elif size == least[p]:
                least_s[p] = min(least_s[p], unit_costs[item])
            if unit[p] != 1:  # nothing is smaller
                rest = unit[p]
                while rest:
                    size, rest = rest, size % rest
                unit[p] = size
    bounds = np.maximum(total / ranks, largest)
    steepness = _token_seconds(phase, costs, tokens, units, unit_costs, least, least_s)
    for p in range(phases):
        if held[p] > 0:
            mean_units = held[p] / (unit[p] * ranks)
            fullest = -(-held[p] // (unit[p] * ranks)) * unit[p]
            bounds[p] = max(bounds[p], fullest * cheapest[p])
            fixed_s = least_s[p] - steepness[p] * least[p]
            if 0.0 < fixed_s < np.inf:
                bounds[p] = max(bounds[p], -(-count[p] // ranks) * fixed_s)
            if mean_units <= _MOST_UNITS and 0.0 < fixed_s < np.inf:
                unit_s = steepness[p] * unit[p]
                bounds[p] = _mixed_s(bounds[p], mean_units, count[p] / ranks, unit_s, fixed_s)
    return bounds


@kernel
def _token_seconds(
    phase: NDArray[np.int64],
    costs: NDArray[np.float64],
    tokens: NDArray[np.int32],
    units: NDArray[np.int32],
    unit_costs: NDArray[np.float64],
    least: NDArray[np.int64],
    least_s: NDArray[np.float64],
) -> NDArray[np.float64]:
    """What every token more than those of the smallest unit takes at least, float64[phases], in an
    item or a unit; infinite where all are alike."""
    seconds = np.full(least.size, np.inf)
    for item in range(costs.size):
        p, size = phase[item], np.int64(tokens[item])
        if size > least[p]:
            seconds[p] = min(seconds[p], (costs[item] - least_s[p]) / (size - least[p]))
            if units[item] > 1:
                size //= units[item]
            if units[item] > 1 and size > least[p]:
                seconds[p] = min(seconds[p], (unit_costs[item] - least_s[p]) / (size - least[p]))
    return seconds


@leaf
def _mixed_s(
    bound_s: float, mean_units: float, mean_items: float, unit_s: float, fixed_s: float
) -> float:
    """A bound from units and items together, or `bound_s`: what ranks of so many of both in the
    mean take at least, where items take `fixed_s` and `unit_s` for each unit.

    Within `cap` seconds a rank of t units holds at most min(t, (cap − t·unit_s) / fixed_s) items,
    rounded down. Ranks of several t mix, so their means lie in the hull of these points: the cap
    rises until the hull has the mean number of units with that of items.
    """
    if unit_s * _MOST_POINTS < 2.0 * bound_s:  # units weigh next to nothing
        return bound_s
    low, high = bound_s, bound_s
    while _most_items(high, mean_units, unit_s, fixed_s) < mean_items:
        if high > 2.0 * bound_s:
            return bound_s
        low, high = high, high * (1.0 + _CAP_STEP)
    for _ in range(_HALVINGS if high > low else 0):
        middle = 0.5 * (low + high)
        if _most_items(middle, mean_units, unit_s, fixed_s) < mean_items:
            low = middle
        else:
            high = middle
    return low


@leaf
def _most_items(cap: float, mean_units: float, unit_s: float, fixed_s: float) -> float:
    """Of ranks that keep the cap and hold so many units in the mean, the mean number of items; -1
    where they cannot hold so many units."""
    most = -1.0
    fullest = int(cap * (1.0 + ROUNDING) / unit_s)
    for few in range(int(mean_units) + 1):
        low = _items_beside(few, cap, unit_s, fixed_s)
        if few == mean_units:
            most = max(most, low)
        for many in range(int(mean_units) + 1, fullest + 1):
            part = (mean_units - few) / (many - few)
            most = max(most, low + part * (_items_beside(many, cap, unit_s, fixed_s) - low))
    return most + ROUNDING


@leaf
def _items_beside(units: int, cap: float, unit_s: float, fixed_s: float) -> float:
    """Items that a rank of so many units holds at most."""
    room = (cap * (1.0 + ROUNDING) - units * unit_s) / fixed_s
    return float(min(float(units), np.floor(room + ROUNDING)))


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
