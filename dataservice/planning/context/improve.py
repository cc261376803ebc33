"""Improve a grouping against max(β₁ + Σwork/N, max_k min_d T_k(d)), DHP's weak point.

Always the slowest group g is relieved, by whichever change leaves the smaller maximum of the two
groups it touches:

    move    a unit of g to h                 rank    h (or nobody) gives g a rank
    swap    a unit of g for one of h         merge   g and h become one group on both their ranks

Every accepted change leaves both groups faster than g was, so the makespan never grows.

Shapes: u units and N groups at most, of which the first G are in use, as in `build.Grouping`;
`sizes` int64[N] is the number of units in each group.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.build import Grouping
from dataservice.planning.context.moves import (
    MERGE,
    NONE,
    RANK,
    SWAP,
    Change,
    Members,
    Scratch,
    link,
    list_members,
    sums_at,
    time_of,
    try_moves,
    unlink,
)
from dataservice.planning.context.units import Setting, Units, next_degree
from dataservice.planning.kernels.compile import kernel, leaf

_PARTNERS = 16  # fast groups looked at as partners of the slowest
_SWAP_PAIRS = 1024  # larger products of members are moved or merged, not swapped
_PAIR_BUDGET = 1 << 16  # swaps looked at in one improvement; sets its time, not its clock
_LEAST_GAIN = 1e-9
_MERGES = 6  # fastest partners that are tried for a merge
ROUNDS = 192  # changes made in one improvement


@kernel
def _partners(grouping: Grouping, slowest: int) -> NDArray[np.int64]:
    """The fastest groups but the slowest, fastest first, int64[partners], at most `_PARTNERS`: an
    insertion into a short list. O(G · partners)."""
    chosen = np.empty(_PARTNERS, np.int64)  # int64[_PARTNERS]: chosen[:held] rise by seconds
    held = 0
    for group in range(grouping.used[0]):
        seconds = grouping.seconds[group]
        full = held == _PARTNERS
        if group == slowest or (full and seconds >= grouping.seconds[chosen[held - 1]]):
            continue
        place = held - 1 if full else held  # a full list loses its last
        while place > 0 and grouping.seconds[chosen[place - 1]] > seconds:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = group
        held = held if full else held + 1
    return chosen[:held]


@leaf
def _seconds_at(
    units: Units, grouping: Grouping, members: Members, group: int, degree: int, setting: Setting
) -> float:
    """Time of the group on `degree` ranks inside a node if they fit one; infinity without room."""
    tokens, squares = sums_at(units, members, group, degree)
    return time_of(tokens, squares, degree, False, setting)


@leaf
def _merged_seconds(
    units: Units, grouping: Grouping, members: Members, g: int, h: int, setting: Setting
) -> float:
    """Time of one group of g and h on both their ranks; infinity where it has no room or its degree
    is not allowed."""
    degree = grouping.degree[g] + grouping.degree[h]
    if setting.power_of_two and degree & (degree - 1):
        return np.inf
    # A first look spares the sums. These tokens are padded for the degrees that the two have now,
    # which may be more than at `degree`: 2 tokens a rank beyond memory are let pass here.
    if grouping.tokens[g] + grouping.tokens[h] > (setting.memory_tokens + 2) * degree:
        return np.inf
    tokens_g, squares_g = sums_at(units, members, g, degree)
    tokens_h, squares_h = sums_at(units, members, h, degree)
    return time_of(tokens_g + tokens_h, squares_g + squares_h, degree, False, setting)


@leaf
def _resize(
    units: Units,
    grouping: Grouping,
    members: Members,
    group: int,
    degree: int,
    setting: Setting,
) -> None:
    """Give the group `degree` ranks, and the sums and seconds of the units that it has now."""
    grouping.degree[group] = degree
    tokens, squares = sums_at(units, members, group, degree)
    grouping.tokens[group] = tokens
    grouping.squares[group] = squares
    grouping.seconds[group] = time_of(tokens, squares, degree, grouping.crosses[group], setting)


@leaf
def _absorb(
    units: Units, grouping: Grouping, members: Members, g: int, h: int, setting: Setting
) -> None:
    """Merge h into g; the last group takes h's place."""
    degree = grouping.degree[g] + grouping.degree[h]
    while members.first[h] >= 0:
        unit = members.first[h]
        unlink(members, unit, h)
        link(members, unit, g)
        grouping.group_of[unit] = g
    _resize(units, grouping, members, g, degree, setting)
    # Group h is empty. Groups in use must stay the first ones.
    last = grouping.used[0] - 1
    grouping.used[0] = last
    if h == last:
        return
    while members.first[last] >= 0:
        unit = members.first[last]
        unlink(members, unit, last)
        link(members, unit, h)
        grouping.group_of[unit] = h
    _resize(units, grouping, members, h, grouping.degree[last], setting)


@leaf
def _shift(
    units: Units,
    grouping: Grouping,
    members: Members,
    unit: int,
    target: int,
    setting: Setting,
) -> None:
    """Move the unit to the group `target`; both groups get their new sums and seconds."""
    source = grouping.group_of[unit]
    unlink(members, unit, source)
    link(members, unit, target)
    grouping.group_of[unit] = target
    _resize(units, grouping, members, source, grouping.degree[source], setting)
    _resize(units, grouping, members, target, grouping.degree[target], setting)


@kernel
def _find_change(
    units: Units,
    grouping: Grouping,
    members: Members,
    sizes: NDArray[np.int64],
    g: int,
    enough_s: float,
    setting: Setting,
    scratch: Scratch,
) -> Change:
    """The change of the slowest group g that leaves the least maximum, or the first that is enough;
    kind NONE when none helps."""
    best = grouping.seconds[g] * (1 - _LEAST_GAIN)
    kind = NONE
    partner = g
    unit_g = g
    unit_h = g
    for place, h in enumerate(_partners(grouping, g)):
        if sizes[g] + sizes[h] > 1:
            pairs = sizes[g] * sizes[h]
            swaps = pairs <= min(_SWAP_PAIRS, scratch.budget[0])
            if swaps:
                scratch.budget[0] -= pairs
            change = try_moves(units, grouping, members, g, h, swaps, enough_s, setting, scratch)
            if change.value < best:
                best, kind, partner = change.value, change.kind, h
                unit_g, unit_h = change.unit_g, change.unit_h
        if place < _MERGES and best > enough_s and not setting.placed:
            value = _merged_seconds(units, grouping, members, g, h, setting)
            if value < best:
                best, kind, partner = value, MERGE, h
        if best <= enough_s:
            return Change(best, kind, partner, unit_g, unit_h)
    change = Change(best, kind, partner, unit_g, unit_h)
    return change if setting.placed else _try_ranks(units, grouping, members, g, change, setting)


@leaf
def _try_ranks(
    units: Units,
    grouping: Grouping,
    members: Members,
    g: int,
    found: Change,
    setting: Setting,
) -> Change:
    """`found`, or a wider g where that is better: on spare ranks, or on some that h can give."""
    spare = setting.ranks  # ranks of no group, once those of all groups are taken off
    for h in range(grouping.used[0]):
        spare -= grouping.degree[h]
    wider = next_degree(grouping.degree[g], setting)
    missing = wider - grouping.degree[g] - spare  # ranks that another group would have to give
    if missing <= 0:
        value = _seconds_at(units, grouping, members, g, wider, setting)
        return Change(value, RANK, g, g, g) if value < found.value else found
    best = found.value
    partner = g
    wide_s = np.inf  # known once some group can give
    for h in range(grouping.used[0]):
        narrower = _narrower(grouping.degree[h], setting)
        if h == g or narrower < 1 or grouping.degree[h] - narrower < missing:
            continue
        value = _seconds_at(units, grouping, members, h, narrower, setting)
        if value >= best:
            continue
        if wide_s == np.inf:
            wide_s = _seconds_at(units, grouping, members, g, wider, setting)
        if max(value, wide_s) < best:
            best, partner = max(value, wide_s), h
    return found if partner == g else Change(best, RANK, partner, g, g)


@leaf
def _narrower(degree: int, setting: Setting) -> int:
    """The next lower degree that is allowed; 0 where there is none."""
    return degree // 2 if setting.power_of_two else degree - 1


@leaf
def _apply_change(
    units: Units,
    grouping: Grouping,
    members: Members,
    sizes: NDArray[np.int64],
    g: int,
    change: Change,
    setting: Setting,
) -> None:
    """Carry out the change of g. Afterwards the grouping, `members` and `sizes` agree again."""
    h = change.partner
    if change.kind == MERGE:
        sizes[g] += sizes[h]
        sizes[h] = sizes[grouping.used[0] - 1]  # the last group will take h's place
        _absorb(units, grouping, members, g, h, setting)
    elif change.kind == RANK:
        if h != g:
            narrower = _narrower(grouping.degree[h], setting)
            _resize(units, grouping, members, h, narrower, setting)
        wider = next_degree(grouping.degree[g], setting)
        _resize(units, grouping, members, g, wider, setting)
    else:
        _shift(units, grouping, members, change.unit_g, h, setting)
        if change.kind == SWAP:
            _shift(units, grouping, members, change.unit_h, g, setting)
        else:
            sizes[g] -= 1
            sizes[h] += 1


@kernel
def _slowest(grouping: Grouping) -> int:
    return int(np.argmax(grouping.seconds[: grouping.used[0]]))


@kernel
def improve_groups(
    units: Units, grouping: Grouping, enough_s: float, rounds: int, setting: Setting
) -> int:
    """Relieve the slowest group until it is within `enough_s`, none helps, or `rounds` are done;
    gives the rounds used. In a `placed` setting ranks stay where they are and only units move.

    O(rounds · (G + partners · members²)).
    """
    if grouping.used[0] == 0:
        return 0
    members = list_members(grouping)
    sizes = np.zeros(grouping.degree.size, np.int64)  # int64[N]
    for unit in range(grouping.group_of.size):
        sizes[grouping.group_of[unit]] += 1
    # Groups swap only where the product of their sizes is at most _SWAP_PAIRS, so width suffices.
    width = min(grouping.group_of.size, _SWAP_PAIRS)
    scratch = Scratch(
        np.empty(width, np.int64),  # unit int64[width]
        np.empty(width, np.int64),  # tokens_g int64[width]
        np.empty(width, np.int64),  # tokens_h int64[width]
        np.empty(width, np.float64),  # squares_g float64[width]
        np.empty(width, np.float64),  # squares_h float64[width]
        np.full(1, _PAIR_BUDGET),  # budget int64[1]
    )
    for done in range(rounds):
        g = _slowest(grouping)
        if grouping.seconds[g] <= enough_s or sizes[g] == 0:
            return done
        change = _find_change(units, grouping, members, sizes, g, enough_s, setting, scratch)
        if change.kind == NONE:
            return done
        _apply_change(units, grouping, members, sizes, g, change, setting)
    return rounds
