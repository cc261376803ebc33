"""Groups and degrees together, for a target time τ.

A unit slower than τ alone, or too large for one rank, anchors a group of the least degree that
meets τ. The ranks left over are groups of degree 1. All other units fall by work, each into the
group with the least time so far that has the memory, so that short samples level what the long
ones leave:

    τ ┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈┈
      ░░░░░░░░░░░░░░░░░   ░░  ▓▓  ▓▓      ░ short samples   █ anchor over 5 ranks
      █████████████████   ██  ░░  ▓▓
      degree 5            d=1 d=1 d=1

Several τ just above the fluid bound are tried and the best grouping is kept: which units anchor,
and how wide, changes only at a few of them.

Shapes: u units, N ranks, G groups in use. `least` int64[u] is each unit's least degree, `order`
int64[u] lists the units by falling work; tokens are padded, squares are Σ(1+η)s² in tokens².
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.seconds import fixed_seconds
from dataservice.planning.context.units import (
    Setting,
    Units,
    degree_after,
    degree_seconds,
    padded_sums,
)
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import heap_sift_down, heap_sift_up

# Steps above the fluid bound that are tried, as shares of it.
_STEPS = (0.0, 0.002, 0.005, 0.01, 0.02, 0.035, 0.06, 0.1, 0.17, 0.28, 0.45, 0.7, 1.2)
_PLACEMENTS = 1 << 16  # units placed in all builds of a wave; many units need few builds
_BISECTIONS = 24


class Grouping(NamedTuple):
    """Groups under construction: `group_of` int64[u], −1 for a unit without a group; for each group
    [N] its `degree`, padded `tokens` and `squares`, `seconds`, and whether it `crosses` nodes where
    it was placed (False before); `used` int64[1], the number G of groups in use, which are the
    first of each array. Groups that are placed come as arrays of [G]. Kernels write into it."""

    group_of: NDArray[np.int64]
    degree: NDArray[np.int64]
    tokens: NDArray[np.int64]
    squares: NDArray[np.float64]
    seconds: NDArray[np.float64]
    crosses: NDArray[np.bool_]
    used: NDArray[np.int64]


@kernel
def empty_grouping(units: int, ranks: int) -> Grouping:
    # Every group has a rank at least, so there are never more than N.
    return Grouping(
        np.zeros(units, np.int64),  # group_of int64[u]
        np.ones(ranks, np.int64),  # degree int64[N]
        np.zeros(ranks, np.int64),  # tokens int64[N]
        np.zeros(ranks, np.float64),  # squares float64[N]
        np.zeros(ranks, np.float64),  # seconds float64[N]
        np.zeros(ranks, np.bool_),  # crosses bool[N]
        np.zeros(1, np.int64),  # used int64[1]
    )


@kernel
def copy_grouping(source: Grouping, target: Grouping) -> None:
    """Both have the same u and N."""
    target.group_of[:] = source.group_of
    target.degree[:] = source.degree
    target.tokens[:] = source.tokens
    target.squares[:] = source.squares
    target.seconds[:] = source.seconds
    target.crosses[:] = source.crosses
    target.used[:] = source.used


@leaf
def makespan(grouping: Grouping) -> float:
    """Seconds of the slowest of the G groups in use; 0 where there are none."""
    slowest = 0.0
    for g in range(grouping.used[0]):
        slowest = max(slowest, grouping.seconds[g])
    return slowest


@leaf
def degree_within(units: Units, unit: int, least: int, target_s: float, setting: Setting) -> int:
    """Least degree ≥ `least` at which the unit alone meets the target; ranks+1 if none does."""
    budget = target_s - fixed_seconds(setting.coefficients)
    if budget <= 0:
        return setting.ranks + 1
    degree = least
    if not setting.power_of_two:
        # With fewer ranks the unit is too slow even without padding and ring.
        degree = max(least, int(units.work[unit] / budget * (1 - 1e-12)))
    while degree <= setting.ranks:
        if units.work[unit] <= budget * degree * (1 + 1e-12):
            tokens, squares = padded_sums(units, unit, degree)
            if (
                degree_seconds(tokens, squares, degree, setting) <= target_s
                and tokens <= setting.memory_tokens * degree
            ):
                return degree
        if setting.power_of_two:
            degree *= 2
        else:
            degree = degree_after(units, unit, degree, target_s, setting)
    return setting.ranks + 1


@leaf
def _fluid_fits(units: Units, least: NDArray[np.int64], target_s: float, setting: Setting) -> bool:
    """Do the anchors of τ and the rest, taken as a fluid, fit the ranks in time and memory?"""
    base = fixed_seconds(setting.coefficients)
    ranks = 0
    anchored_work = 0.0
    rest_work = 0.0
    for unit in range(units.work.size):
        if least[unit] == 1 and units.work[unit] + base <= target_s:
            rest_work += units.work[unit]
            continue
        ranks += degree_within(units, unit, least[unit], target_s, setting)  # N + 1 if none will do
        anchored_work += units.work[unit]
        if ranks > setting.ranks:
            return False
    return bool(anchored_work + rest_work <= (target_s - base) * setting.ranks * (1 + 1e-12))


@leaf
def fluid_target(units: Units, least: NDArray[np.int64], bound_s: float, setting: Setting) -> float:
    """The least τ ≥ bound (to within its bisection) at which the fluid fits."""
    if _fluid_fits(units, least, bound_s, setting):
        return bound_s
    low = bound_s
    high = 2 * bound_s
    while not _fluid_fits(units, least, high, setting):
        low = high
        high *= 2
        if high > 1e9 * (bound_s + 1):
            return high
    # From here on the fluid fits at `high` and does not at `low`.
    for _ in range(_BISECTIONS):
        if high - low <= 1e-4 * high:
            break
        middle = (low + high) / 2
        if _fluid_fits(units, least, middle, setting):
            high = middle
        else:
            low = middle
    return high


@leaf
def add_unit(units: Units, unit: int, group: int, into: Grouping, setting: Setting) -> None:
    """One more unit in the group, padded for its degree; memory is not looked at."""
    tokens, squares = padded_sums(units, unit, into.degree[group])
    into.group_of[unit] = group
    into.tokens[group] += tokens
    into.squares[group] += squares
    into.seconds[group] = degree_seconds(
        into.tokens[group], into.squares[group], into.degree[group], setting
    )


@kernel
def build_groups(
    units: Units,
    order: NDArray[np.int64],
    least: NDArray[np.int64],
    target_s: float,
    setting: Setting,
    into: Grouping,
) -> float:
    """Fill `into` for the target; the makespan, or infinity when memory or ranks run out, and then
    `into` is half filled."""
    base = fixed_seconds(setting.coefficients)
    into.used[0] = 0
    used = 0
    small = 0
    into.tokens[:] = 0
    into.squares[:] = 0.0
    into.seconds[:] = 0.0
    for unit in order:
        if least[unit] == 1 and units.work[unit] + base <= target_s:
            into.group_of[unit] = -1  # for `_spread_small`
            small += 1
            continue
        degree = degree_within(units, unit, least[unit], target_s, setting)
        used += degree
        if used > setting.ranks:
            return np.inf
        into.degree[into.used[0]] = degree
        add_unit(units, unit, into.used[0], into, setting)
        into.used[0] += 1
    # Groups so far hold one anchor each, on `used` ranks. Empty ones on the ranks left over follow.
    for _ in range(min(setting.ranks - used, small)):
        into.degree[into.used[0]] = 1
        into.used[0] += 1
    if not _spread_small(units, order, setting, into):
        return np.inf
    return makespan(into)


class Heap(NamedTuple):
    """A min-heap of groups: `keys` float64[G], `ids` int64[G], and `size` int64[1], how many of the
    G it holds. The least key is keys[0]; of equal keys the lower id comes first."""

    keys: NDArray[np.float64]
    ids: NDArray[np.int64]
    size: NDArray[np.int64]


@leaf
def _push(heap: Heap, key: float, group: int) -> None:
    place = heap.size[0]
    heap.keys[place] = key
    heap.ids[place] = group
    heap.size[0] = place + 1
    heap_sift_up(heap.keys, heap.ids, place)


@leaf
def _pop(heap: Heap) -> int:
    group = heap.ids[0]
    last = heap.size[0] - 1
    heap.size[0] = last
    heap.keys[0] = heap.keys[last]
    heap.ids[0] = heap.ids[last]
    heap_sift_down(heap.keys, heap.ids, last, 0)
    return int(group)


@kernel
def _spread_small(units: Units, order: NDArray[np.int64], setting: Setting, into: Grouping) -> bool:
    """Each unit without a group into the fastest group with room; False when one finds none.

    A group found without room waits, ordered by room, until a unit comes that could fit it.
    """
    count = into.used[0]
    # Every group is in one of the two, each of [G]: ready by seconds, waiting by −room in tokens.
    ready = Heap(into.seconds[:count].copy(), np.arange(count), np.full(1, count))
    waiting = Heap(np.empty(count), np.empty(count, np.int64), np.zeros(1, np.int64))
    for start in range(count // 2 - 1, -1, -1):
        heap_sift_down(ready.keys, ready.ids, count, start)
    for unit in order:
        if into.group_of[unit] >= 0:
            continue
        # Afterwards no waiting group has room for the unit.
        while waiting.size[0] > 0 and -waiting.keys[0] >= units.total[unit]:
            group = _pop(waiting)
            _push(ready, into.seconds[group], group)
        placed = False
        while ready.size[0] > 0 and not placed:
            group = ready.ids[0]
            tokens, _ = padded_sums(units, unit, into.degree[group])
            room = setting.memory_tokens * into.degree[group] - into.tokens[group]
            if tokens <= room:
                add_unit(units, unit, group, into, setting)
                ready.keys[0] = into.seconds[group]
                heap_sift_down(ready.keys, ready.ids, ready.size[0], 0)
                placed = True
            else:
                if into.degree[group] > 1:  # only whole chunks of padding count
                    room -= room % (2 * into.degree[group])
                _push(waiting, -float(room), _pop(ready))
        if not placed:
            return False
    return True


@kernel
def best_groups(
    units: Units,
    order: NDArray[np.int64],
    least: NDArray[np.int64],
    bound_s: float,
    enough: float,
    setting: Setting,
    best: Grouping,
) -> float:
    """Build at each step above the fluid target; keep the best in `best`, unless what it holds
    already is faster, and stop at `enough` times the bound. Gives the seconds of `best`; infinity
    where it stays empty."""
    trial = empty_grouping(units.work.size, setting.ranks)
    found = makespan(best) if best.used[0] else np.inf
    target = fluid_target(units, least, bound_s, setting)
    place = 0
    left = _PLACEMENTS
    while place < len(_STEPS) and left >= 0:
        left -= units.work.size
        tau = target * (1 + _STEPS[place])
        if found <= tau or found <= bound_s * enough:
            break
        value = build_groups(units, order, least, tau, setting, trial)
        # Out of memory: only clearly more ranks for the short samples will help.
        place += 3 if np.isinf(value) else 1
        if value < found:
            found = value
            copy_grouping(trial, best)
    return found


@kernel
def best_static_groups(
    units: Units, order: NDArray[np.int64], below_s: float, setting: Setting, best: Grouping
) -> float:
    """The best grouping of one degree into `best`, if it is faster than `below_s`; its seconds, or
    else `below_s`."""
    trial = empty_grouping(units.work.size, setting.ranks)
    found = below_s
    left = _PLACEMENTS
    for degree in range(1, setting.ranks + 1):
        if left < 0:
            break
        if setting.ranks % degree or (setting.power_of_two and degree & (degree - 1)):
            continue
        left -= units.work.size
        value = static_groups(units, order, degree, setting, trial)
        if value < found:
            found = value
            copy_grouping(trial, best)
    return found


@kernel
def static_groups(
    units: Units, order: NDArray[np.int64], degree: int, setting: Setting, into: Grouping
) -> float:
    """Units by falling work over N // degree groups of one degree; infinity if they do not fit."""
    into.used[0] = setting.ranks // degree
    into.degree[: into.used[0]] = degree
    into.tokens[:] = 0
    into.squares[:] = 0.0
    into.seconds[:] = 0.0
    into.group_of[:] = -1
    if not _spread_small(units, order, setting, into):
        return np.inf
    return makespan(into)


@kernel
def regroup(
    units: Units,
    group_of: NDArray[np.int64],
    degree: NDArray[np.int64],
    setting: Setting,
    into: Grouping,
) -> None:
    """Fill `into` with given groups, as they are: `group_of` int64[u], `degree` int64[G]."""
    into.used[0] = degree.size
    into.degree[: degree.size] = degree
    into.tokens[:] = 0
    into.squares[:] = 0.0
    into.seconds[:] = 0.0
    for unit in range(group_of.size):
        add_unit(units, unit, group_of[unit], into, setting)
