"""One device's choices, exactly: how many layers of each group keep everything, recompute
selectively, or recompute in full, so that what it holds fits and the added time is least.

A multiple-choice knapsack in which equal layers are counts. Branch and bound over groups: options
by rising cost, cut off by the linear relaxation of what is left, which takes the cheapest seconds a
byte first. Limited in nodes; where they run out, the relaxation is the bound.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel

CHOICES = 3
# Options looked at for one device, times the rows that each is held against, and at least.
_WORK = 3_000_000
_LEAST_NODES = 20_000
# Rows whose relaxation is asked: those with the least room.
_RELAXED_ROWS = 4


class LayerGroups(NamedTuple):
    """Layers of one device, equal within a group.

    `layers` int64[group] how many; `used` float64[row, group, choice] bytes of one layer in each
    set of microbatches that the device holds; `working` float64[group, choice] bytes it needs for a
    moment besides; `cost` float64[group, choice] seconds it adds to a mean microbatch.
    """

    layers: NDArray[np.int64]
    used: NDArray[np.float64]
    working: NDArray[np.float64]
    cost: NDArray[np.float64]


class DeviceChoices(NamedTuple):
    """The best choices, best first: `counts` int64[found, group, choice] layers of each choice,
    `cost` float64[found]. No choice that fits costs less than `bound`; `proven`: the first costs no
    more."""

    counts: NDArray[np.int64]
    cost: NDArray[np.float64]
    bound: float
    proven: bool


def peak_bytes(groups: LayerGroups, counts: NDArray[np.int64]) -> float:
    """The most that a device holds under counts int64[group, choice]."""
    working = float((groups.working * (counts > 0)).max(initial=0.0))
    return float(np.einsum("rgk,gk->r", groups.used, counts.astype(np.float64)).max()) + working


def least_counts(groups: LayerGroups) -> NDArray[np.int64]:
    """The choice of each group that holds least, for the best cap on what is needed for a moment;
    int64[group, choice]."""
    total = groups.used.sum(axis=0)
    best = np.zeros(groups.cost.shape, np.int64)
    least = np.inf
    for cap in np.unique(groups.working):
        allowed = groups.working <= cap
        if not allowed.any(axis=1).all():
            continue
        # Of choices that hold as little, the one that adds least.
        ranked = np.lexsort((groups.cost, np.where(allowed, total, np.inf)), axis=1)[:, 0]
        counts = np.zeros(groups.cost.shape, np.int64)
        counts[np.arange(len(ranked)), ranked] = groups.layers
        peak = peak_bytes(groups, counts)
        if peak < least:
            least, best = peak, counts
    return best


def choose_counts(groups: LayerGroups, capacity: float, keep: int) -> DeviceChoices:
    """The `keep` choices of least cost whose peak is at most `capacity`; none if none fits."""
    order = np.argsort(
        -groups.layers * np.ptp(groups.used.sum(axis=0), axis=1), kind="stable"
    )  # what decides most comes first
    sorted_groups = LayerGroups(
        layers=groups.layers[order],
        used=np.ascontiguousarray(groups.used[:, order]),
        working=groups.working[order],
        cost=groups.cost[order],
    )
    options, offsets = _options(sorted_groups)
    of = np.repeat(np.arange(len(order)), np.diff(offsets))
    weights = options.astype(np.float64)
    used = np.ascontiguousarray(np.einsum("rok,ok->or", sorted_groups.used[:, of], weights))
    cost = (sorted_groups.cost[of] * options).sum(axis=1)
    working = (sorted_groups.working[of] * (options > 0)).max(axis=1)
    slack = np.argsort(-sorted_groups.used[:, :, 0] @ sorted_groups.layers, kind="stable")
    relaxed = _relaxation(sorted_groups, slack[:_RELAXED_ROWS])
    usable = sorted_groups._replace(
        cost=np.where(_useful(sorted_groups), sorted_groups.cost, np.inf)
    )
    by_hand = _seed(*usable, int(slack[0]), capacity)
    start = np.array(
        [
            first + int((options[first:end] == counts).all(axis=1).argmax())
            for first, end, counts in zip(offsets, offsets[1:], by_hand, strict=False)
        ],
        np.int64,
    )
    nodes = max(_LEAST_NODES, _WORK // (9 + used.shape[1]))
    chosen, costs, bound, proven = _branch(
        used, cost, working, offsets, capacity, *relaxed, start, keep, nodes
    )
    found = int((costs < np.inf).sum())
    counts = np.zeros((found, len(order), CHOICES), np.int64)
    counts[:, order] = options[chosen[:found]]
    return DeviceChoices(counts, costs[:found], bound, proven)


def _options(groups: LayerGroups) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Every way to count a group's layers over its choices, by rising cost: int64[option, choice],
    and where each group's begin."""
    options, offsets = [], [0]
    for layers, cost, useful in zip(groups.layers, groups.cost, _useful(groups), strict=True):
        selective, full = np.divmod(np.arange((layers + 1) ** 2), layers + 1)
        counts = np.stack([layers - selective - full, selective, full], axis=1)
        counts = counts[(counts >= 0).all(axis=1) & ~(counts[:, ~useful] > 0).any(axis=1)]
        counts = counts[np.argsort((cost * counts).sum(axis=1), kind="stable")]
        options.append(counts)
        offsets.append(offsets[-1] + len(counts))
    return np.concatenate(options), np.array(offsets)


def _useful(groups: LayerGroups) -> NDArray[np.bool_]:
    """bool[group, choice]: choices that no other of the group is as good as in everything."""
    worth = np.concatenate([groups.used, groups.working[None], groups.cost[None]])
    useful = np.ones(groups.cost.shape, np.bool_)
    for k in range(CHOICES):
        for other in range(CHOICES):
            covers = (worth[:, :, other] <= worth[:, :, k]).all(axis=0)
            equal = (worth[:, :, other] == worth[:, :, k]).all(axis=0)
            useful[:, k] &= ~(covers & (~equal | (other < k)))
    return useful


def _relaxation(
    groups: LayerGroups, rows: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """What bytes saved cost at least, in the groups from each on: both float64[relaxed row, group +
    1, segment + 1] rising sums of bytes and seconds, from the choices of least cost on; and the
    rows."""
    count = len(groups.layers)
    segments = (CHOICES - 1) * count
    saved = np.zeros((len(rows), count + 1, segments + 1))
    seconds = np.full(saved.shape, np.inf)
    seconds[:, :, 0] = 0.0
    for at, row in enumerate(rows):
        _fill_relaxation(groups.layers, groups.used[row], groups.cost, saved[at], seconds[at])
    return saved, seconds, rows.astype(np.int64)


@kernel
def _fill_relaxation(
    layers: NDArray[np.int64],
    used: NDArray[np.float64],
    cost: NDArray[np.float64],
    saved: NDArray[np.float64],
    seconds: NDArray[np.float64],
) -> None:
    groups, choices = cost.shape
    bytes_of = np.zeros((choices - 1) * groups)  # [segment] of all layers of its group
    seconds_of = np.full((choices - 1) * groups, np.inf)
    slope = np.full((choices - 1) * groups, np.inf)
    for g in range(groups):
        at = 0
        for k in range(1, choices):
            if cost[g, k] < cost[g, at] or (cost[g, k] == cost[g, at] and used[g, k] < used[g, at]):
                at = k
        for turn in range(choices - 1):  # along the lower hull: the cheapest way down from here
            step, best = -1, np.inf
            for k in range(choices):
                if used[g, k] < used[g, at]:
                    way = (cost[g, k] - cost[g, at]) / (used[g, at] - used[g, k])
                    if way < best or (way == best and used[g, k] < used[g, step]):
                        step, best = k, way
            if step < 0:
                break
            segment = g * (choices - 1) + turn
            bytes_of[segment] = layers[g] * (used[g, at] - used[g, step])
            seconds_of[segment] = layers[g] * (cost[g, step] - cost[g, at])
            slope[segment] = best
            at = step
    order = np.argsort(slope, kind="mergesort")
    for first in range(groups + 1):
        place = 0
        for segment in order:
            if segment // (choices - 1) >= first and slope[segment] < np.inf:
                saved[first, place + 1] = saved[first, place] + bytes_of[segment]
                seconds[first, place + 1] = seconds[first, place] + seconds_of[segment]
                place += 1


@kernel
def _cost_to_save(saved: NDArray[np.float64], seconds: NDArray[np.float64], need: float) -> float:
    """Least seconds that save `need` bytes; infinite if nothing does."""
    if need <= 0:
        return 0.0
    place = 0
    while place + 1 < saved.size and seconds[place + 1] < np.inf:
        if saved[place + 1] >= need:
            share = (need - saved[place]) / (saved[place + 1] - saved[place])
            return float(seconds[place] + share * (seconds[place + 1] - seconds[place]))
        place += 1
    return np.inf


@kernel
def _cost_to_fit(
    saved: NDArray[np.float64],
    seconds: NDArray[np.float64],
    relaxed: NDArray[np.int64],
    group: int,
    need: NDArray[np.float64],
) -> float:
    """Least seconds with which the groups from `group` on may save `need` [row] bytes."""
    least = 0.0
    for k in range(relaxed.size):
        least = max(least, _cost_to_save(saved[k, group], seconds[k, group], need[relaxed[k]]))
    return least


@kernel
def _branch(
    used: NDArray[np.float64],
    cost: NDArray[np.float64],
    working: NDArray[np.float64],
    offsets: NDArray[np.int64],
    capacity: float,
    saved: NDArray[np.float64],
    seconds: NDArray[np.float64],
    relaxed: NDArray[np.int64],
    start: NDArray[np.int64],
    keep: int,
    nodes: int,
) -> tuple[NDArray[np.int64], NDArray[np.float64], float, bool]:
    """The options [keep, group] of least cost, their costs, a bound and whether it is met.

    Options [option] of group g are offsets[g]..offsets[g+1], by rising cost; `used` is [option,
    row]. `start` [group] is a choice that fits, or empty.
    """
    groups, rows = offsets.size - 1, used.shape[1]
    least_used, cheap_used, cheap_cost = _left_from(used, cost, offsets)
    best = np.full(keep, np.inf)
    chosen = np.zeros((keep, groups), np.int64)
    at = np.zeros(groups + 1, np.int64)
    held = np.zeros((groups + 1, rows))
    spent = np.zeros(groups + 1)
    moment = np.zeros(groups + 1)
    bound = cheap_cost[0] + _cost_to_fit(saved, seconds, relaxed, 0, cheap_used[0] - capacity)
    if start.size:
        for g in range(groups):
            spent[g + 1] = spent[g] + cost[start[g]]
        _keep(best, chosen, spent[groups], start)
    g = 0
    at[0] = offsets[0] - 1
    while g >= 0:
        at[g] += 1
        o = at[g]
        if o == offsets[g + 1] or spent[g] + cost[o] + cheap_cost[g + 1] >= best[keep - 1]:
            g -= 1
            continue
        nodes -= 1
        if nodes < 0:
            return chosen, best, bound, False
        spent[g + 1] = spent[g] + cost[o]
        moment[g + 1] = max(moment[g], working[o])
        room = capacity - moment[g + 1]
        fits = True
        for r in range(rows):
            held[g + 1, r] = held[g, r] + used[o, r]
            fits = fits and held[g + 1, r] + least_used[g + 1, r] <= room
        if not fits:
            continue
        if g == groups - 1:
            _keep(best, chosen, spent[groups], at)
            continue
        need = held[g + 1] + cheap_used[g + 1] - room
        left = cheap_cost[g + 1] + _cost_to_fit(saved, seconds, relaxed, g + 1, need)
        if spent[g + 1] + left >= best[keep - 1]:
            continue
        g += 1
        at[g] = offsets[g] - 1
    return chosen, best, best[0], True


@kernel
def _left_from(
    used: NDArray[np.float64], cost: NDArray[np.float64], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Of the groups from each on: the least they hold and what they hold where each adds least,
    float64[group + 1, row], and the least they add, float64[group + 1]."""
    groups, rows = offsets.size - 1, used.shape[1]
    least_used = np.zeros((groups + 1, rows))
    cheap_used = np.zeros((groups + 1, rows))
    cheap_cost = np.zeros(groups + 1)
    for g in range(groups - 1, -1, -1):
        first, end = offsets[g], offsets[g + 1]
        cheap_cost[g] = cheap_cost[g + 1] + cost[first]
        for r in range(rows):
            low = np.inf
            cheap = np.inf
            for o in range(first, end):
                low = min(low, used[o, r])
                if cost[o] == cost[first]:
                    cheap = min(cheap, used[o, r])
            least_used[g, r] = least_used[g + 1, r] + low
            cheap_used[g, r] = cheap_used[g + 1, r] + cheap
    return least_used, cheap_used, cheap_cost


@kernel
def _keep(
    best: NDArray[np.float64], chosen: NDArray[np.int64], cost: float, at: NDArray[np.int64]
) -> None:
    """Put a choice in its place, unless it is there already; the last falls out."""
    for k in range(best.size):
        if best[k] == cost and (chosen[k] == at[: chosen.shape[1]]).all():
            return
    k = best.size - 1
    while k > 0 and best[k - 1] > cost:
        best[k] = best[k - 1]
        chosen[k] = chosen[k - 1]
        k -= 1
    best[k] = cost
    chosen[k] = at[: chosen.shape[1]]


@kernel
def _seed(
    layers: NDArray[np.int64],
    used: NDArray[np.float64],
    working: NDArray[np.float64],
    cost: NDArray[np.float64],
    row: int,
    capacity: float,
) -> NDArray[np.int64]:
    """A good choice to start from, int64[group, choice]: layer by layer the cheapest seconds a byte
    until all fits, then back what was too much; empty where that leads nowhere."""
    groups, choices = cost.shape
    counts = np.zeros((groups, choices), np.int64)
    for g in range(groups):
        counts[g, cost[g].argmin()] = layers[g]
    while _peak(used, working, counts) > capacity:
        step, best = -1, np.inf
        for move in range(groups * choices * choices):
            g, k, to = move // choices**2, move // choices % choices, move % choices
            saves = used[row, g, k] - used[row, g, to]
            if counts[g, k] > 0 and saves > 0:
                way = (cost[g, to] - cost[g, k]) / saves
                if way < best:
                    step, best = move, way
        if step < 0:
            return counts[:0]
        g, k, to = step // choices**2, step // choices % choices, step % choices
        counts[g, k] -= 1
        counts[g, to] += 1
    gained = True
    while gained:
        gained = False
        for move in range(groups * choices * choices):
            g, k, to = move // choices**2, move // choices % choices, move % choices
            while counts[g, k] > 0 and cost[g, to] < cost[g, k]:
                counts[g, k] -= 1
                counts[g, to] += 1
                if _peak(used, working, counts) > capacity:
                    counts[g, k] += 1
                    counts[g, to] -= 1
                    break
                gained = True
    return counts


@kernel
def _peak(
    used: NDArray[np.float64], working: NDArray[np.float64], counts: NDArray[np.int64]
) -> float:
    """As `peak_bytes`."""
    held, moment = 0.0, 0.0
    for r in range(used.shape[0]):
        total = 0.0
        for g in range(counts.shape[0]):
            for k in range(counts.shape[1]):
                total += used[r, g, k] * counts[g, k]
                if counts[g, k] > 0:
                    moment = max(moment, working[g, k])
        held = max(held, total)
    return held + moment
