"""Improve a grouping against max(β₁ + Σwork/N, max_k min_d T_k(d)), DHP's weak point.

Always the slowest group g is relieved, by whichever change leaves the smaller maximum of the two
groups it touches:

    move    a unit of g to h                 rank    h (or nobody) gives g a rank
    swap    a unit of g for one of h         merge   g and h become one group on both their ranks

Every accepted change leaves both groups faster than g was, so the makespan never grows.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context_build import Grouping
from dataservice.planning.context_kernels import inner, kernel
from dataservice.planning.context_units import (
    Setting,
    Units,
    next_degree,
    padded_sums,
)
from dataservice.planning.cost import (
    ATTENTION,
    GROUP,
    LINEAR,
    RING_HOP,
    RING_INTER,
    RING_INTRA,
    group_seconds,
)

_PARTNERS = 24  # fast groups looked at as partners of the slowest
_SWAP_PAIRS = 1024  # larger products of members are moved or merged, not swapped
_PAIR_BUDGET = 1 << 18  # swaps looked at in one improvement; sets its time, not its clock
_LEAST_GAIN = 1e-9
_NONE, _MOVE, _SWAP, _RANK, _MERGE = range(5)


class Members(NamedTuple):
    """Units of each group as doubly linked lists: `first` int64[N], `after`, `before` int64[u]."""

    first: NDArray[np.int64]
    after: NDArray[np.int64]
    before: NDArray[np.int64]


class Change(NamedTuple):
    """A change of group g with `partner`: the maximum of the two after it, its kind, and the units
    that move."""

    value: float
    kind: int
    partner: int
    unit_g: int
    unit_h: int


class Rates(NamedTuple):
    """A group's time, linear in its sums: seconds a token, a token², a token on the ring, and
    fixed; `room` is what its ranks hold."""

    linear: float
    attention: float
    ring: float
    hops: float
    fixed: float
    room: int


class Scratch(NamedTuple):
    """Units of the partner and their sums at both degrees, [members] each; `budget` int64[1], the
    swaps that may still be looked at."""

    unit: NDArray[np.int64]
    tokens_g: NDArray[np.int64]
    tokens_h: NDArray[np.int64]
    squares_g: NDArray[np.float64]
    squares_h: NDArray[np.float64]
    budget: NDArray[np.int64]


@inner
def _link(members: Members, unit: int, group: int) -> None:
    old = members.first[group]
    members.after[unit] = old
    members.before[unit] = -1
    if old >= 0:
        members.before[old] = unit
    members.first[group] = unit


@inner
def _unlink(members: Members, unit: int, group: int) -> None:
    after = members.after[unit]
    before = members.before[unit]
    if before >= 0:
        members.after[before] = after
    else:
        members.first[group] = after
    if after >= 0:
        members.before[after] = before


@inner
def _list_members(grouping: Grouping) -> Members:
    units = grouping.group_of.size
    members = Members(
        np.full(grouping.degree.size, -1, np.int64),
        np.empty(units, np.int64),
        np.empty(units, np.int64),
    )
    for unit in range(units - 1, -1, -1):
        _link(members, unit, grouping.group_of[unit])
    return members


@inner
def _sums_at(units: Units, members: Members, group: int, degree: int) -> tuple[int, float]:
    tokens = 0
    squares = 0.0
    unit = members.first[group]
    while unit >= 0:
        unit_tokens, unit_squares = padded_sums(units, unit, degree)
        tokens += unit_tokens
        squares += unit_squares
        unit = members.after[unit]
    return tokens, squares


@inner
def _time_of(tokens: int, squares: float, degree: int, crosses: bool, setting: Setting) -> float:
    """Time of a group, infinity when its ranks cannot hold it."""
    if tokens > setting.memory_tokens * degree:
        return np.inf
    crosses = crosses or degree > setting.ranks_per_node
    return group_seconds(float(tokens), squares, degree, crosses, setting.coefficients)


@inner
def _partners(grouping: Grouping, slowest: int) -> NDArray[np.int64]:
    """The fastest groups but the slowest, fastest first: an insertion into a short list."""
    chosen = np.empty(_PARTNERS, np.int64)
    held = 0
    for group in range(grouping.used[0]):
        seconds = grouping.seconds[group]
        full = held == _PARTNERS
        if group == slowest or (full and seconds >= grouping.seconds[chosen[held - 1]]):
            continue
        place = held - 1 if full else held
        while place > 0 and grouping.seconds[chosen[place - 1]] > seconds:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = group
        held = held if full else held + 1
    return chosen[:held]


@inner
def _rates(degree: int, crosses: bool, setting: Setting) -> Rates:
    cost = setting.coefficients
    if degree == 1:
        ring = 0.0
    elif crosses or degree > setting.ranks_per_node:
        ring = cost[RING_INTER] * (degree - 1) / degree
    else:
        ring = cost[RING_INTRA] * (degree - 1) / degree
    return Rates(
        cost[LINEAR] / degree,
        cost[ATTENTION] / degree,
        ring,
        cost[RING_HOP] * (degree - 1),
        cost[GROUP],
        setting.memory_tokens * degree,
    )


@inner
def _timed(rates: Rates, tokens: int, squares: float) -> float:
    """`group_seconds` with its divisions done; infinity when the ranks cannot hold the tokens."""
    if tokens > rates.room:
        return np.inf
    covered = max(rates.attention * squares, rates.ring * tokens + rates.hops)
    return float(rates.linear * tokens + rates.fixed + covered)


@inner
def _read_group(units: Units, members: Members, h: int, dg: int, dh: int, scratch: Scratch) -> int:
    """Write the sums of h's units at both degrees to the scratch; how many there are."""
    count = 0
    unit = members.first[h]
    while unit >= 0:
        scratch.unit[count] = unit
        scratch.tokens_g[count], scratch.squares_g[count] = padded_sums(units, unit, dg)
        scratch.tokens_h[count], scratch.squares_h[count] = padded_sums(units, unit, dh)
        count += 1
        unit = members.after[unit]
    return count


@inner
def _try_moves(
    units: Units,
    grouping: Grouping,
    members: Members,
    g: int,
    h: int,
    swaps: bool,
    enough_s: float,
    setting: Setting,
    scratch: Scratch,
) -> Change:
    """Best move, or swap, between g and h, or the first that leaves both within `enough_s`."""
    best = np.inf
    kind = _NONE
    unit_g = g
    unit_h = h
    dg = grouping.degree[g]
    dh = grouping.degree[h]
    rates_g = _rates(dg, grouping.crosses[g], setting)
    rates_h = _rates(dh, grouping.crosses[h], setting)
    others = 0
    if swaps:
        others = _read_group(units, members, h, dg, dh, scratch)
    i = members.first[g]
    while i >= 0 and best > enough_s:
        tokens, squares = padded_sums(units, i, dg)
        tokens_g = grouping.tokens[g] - tokens
        squares_g = grouping.squares[g] - squares
        tokens, squares = padded_sums(units, i, dh)
        tokens_h = grouping.tokens[h] + tokens
        squares_h = grouping.squares[h] + squares
        value = max(_timed(rates_g, tokens_g, squares_g), _timed(rates_h, tokens_h, squares_h))
        if value < best:
            best, kind, unit_g = value, _MOVE, i
        for k in range(others):
            value = _timed(
                rates_g, tokens_g + scratch.tokens_g[k], squares_g + scratch.squares_g[k]
            )
            if value >= best:
                continue
            tokens = tokens_h - scratch.tokens_h[k]
            value = max(value, _timed(rates_h, tokens, squares_h - scratch.squares_h[k]))
            if value < best:
                best, kind, unit_g, unit_h = value, _SWAP, i, scratch.unit[k]
        i = members.after[i]
    return Change(best, kind, h, unit_g, unit_h)


@inner
def _seconds_at(
    units: Units, grouping: Grouping, members: Members, group: int, degree: int, setting: Setting
) -> float:
    tokens, squares = _sums_at(units, members, group, degree)
    return _time_of(tokens, squares, degree, False, setting)


@inner
def _merged_seconds(
    units: Units, grouping: Grouping, members: Members, g: int, h: int, setting: Setting
) -> float:
    """Time of one group of g and h on both their ranks."""
    degree = grouping.degree[g] + grouping.degree[h]
    if setting.power_of_two and degree & (degree - 1):
        return np.inf
    if grouping.tokens[g] + grouping.tokens[h] > (setting.memory_tokens + 2) * degree:
        return np.inf
    tokens_g, squares_g = _sums_at(units, members, g, degree)
    tokens_h, squares_h = _sums_at(units, members, h, degree)
    return _time_of(tokens_g + tokens_h, squares_g + squares_h, degree, False, setting)


@inner
def _resize(
    units: Units,
    grouping: Grouping,
    members: Members,
    group: int,
    degree: int,
    setting: Setting,
) -> None:
    grouping.degree[group] = degree
    tokens, squares = _sums_at(units, members, group, degree)
    grouping.tokens[group] = tokens
    grouping.squares[group] = squares
    grouping.seconds[group] = _time_of(tokens, squares, degree, grouping.crosses[group], setting)


@inner
def _absorb(
    units: Units, grouping: Grouping, members: Members, g: int, h: int, setting: Setting
) -> None:
    """Merge h into g; the last group takes h's place."""
    degree = grouping.degree[g] + grouping.degree[h]
    while members.first[h] >= 0:
        unit = members.first[h]
        _unlink(members, unit, h)
        _link(members, unit, g)
        grouping.group_of[unit] = g
    _resize(units, grouping, members, g, degree, setting)
    last = grouping.used[0] - 1
    grouping.used[0] = last
    if h == last:
        return
    while members.first[last] >= 0:
        unit = members.first[last]
        _unlink(members, unit, last)
        _link(members, unit, h)
        grouping.group_of[unit] = h
    _resize(units, grouping, members, h, grouping.degree[last], setting)


@inner
def _shift(
    units: Units,
    grouping: Grouping,
    members: Members,
    unit: int,
    target: int,
    setting: Setting,
) -> None:
    source = grouping.group_of[unit]
    _unlink(members, unit, source)
    _link(members, unit, target)
    grouping.group_of[unit] = target
    _resize(units, grouping, members, source, grouping.degree[source], setting)
    _resize(units, grouping, members, target, grouping.degree[target], setting)


@inner
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
    kind 0 when none helps."""
    best = grouping.seconds[g] * (1 - _LEAST_GAIN)
    kind = _NONE
    partner = g
    unit_g = g
    unit_h = g
    for h in _partners(grouping, g):
        if sizes[g] + sizes[h] > 1:
            pairs = sizes[g] * sizes[h]
            swaps = pairs <= min(_SWAP_PAIRS, scratch.budget[0])
            if swaps:
                scratch.budget[0] -= pairs
            change = _try_moves(units, grouping, members, g, h, swaps, enough_s, setting, scratch)
            if change.value < best:
                best, kind, partner = change.value, change.kind, h
                unit_g, unit_h = change.unit_g, change.unit_h
        if best > enough_s and not setting.placed:
            value = _merged_seconds(units, grouping, members, g, h, setting)
            if value < best:
                best, kind, partner = value, _MERGE, h
        if best <= enough_s:
            return Change(best, kind, partner, unit_g, unit_h)
    if setting.placed:
        return Change(best, kind, partner, unit_g, unit_h)
    spare = setting.ranks
    for h in range(grouping.used[0]):
        spare -= grouping.degree[h]
    wider = next_degree(grouping.degree[g], setting)
    missing = wider - grouping.degree[g] - spare
    if missing > 0:
        wide_s = np.inf  # known once a group is found that can give
    else:
        wide_s = _seconds_at(units, grouping, members, g, wider, setting)
        if wide_s < best:
            best, kind, partner = wide_s, _RANK, g
    for h in range(grouping.used[0]):
        narrower = _narrower(grouping.degree[h], setting)
        if h == g or narrower < 1 or missing <= 0 or grouping.degree[h] - narrower < missing:
            continue
        value = _seconds_at(units, grouping, members, h, narrower, setting)
        if value < best:
            if wide_s == np.inf:
                wide_s = _seconds_at(units, grouping, members, g, wider, setting)
            value = max(value, wide_s)
            if value < best:
                best, kind, partner = value, _RANK, h
    return Change(best, kind, partner, unit_g, unit_h)


@inner
def _narrower(degree: int, setting: Setting) -> int:
    return degree // 2 if setting.power_of_two else degree - 1


@inner
def _apply_change(
    units: Units,
    grouping: Grouping,
    members: Members,
    sizes: NDArray[np.int64],
    g: int,
    change: Change,
    setting: Setting,
) -> None:
    h = change.partner
    if change.kind == _MERGE:
        sizes[g] += sizes[h]
        sizes[h] = sizes[grouping.used[0] - 1]
        _absorb(units, grouping, members, g, h, setting)
    elif change.kind == _RANK:
        if h != g:
            narrower = _narrower(grouping.degree[h], setting)
            _resize(units, grouping, members, h, narrower, setting)
        wider = next_degree(grouping.degree[g], setting)
        _resize(units, grouping, members, g, wider, setting)
    else:
        _shift(units, grouping, members, change.unit_g, h, setting)
        if change.kind == _SWAP:
            _shift(units, grouping, members, change.unit_h, g, setting)
        else:
            sizes[g] -= 1
            sizes[h] += 1


@inner
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
    members = _list_members(grouping)
    sizes = np.zeros(grouping.degree.size, np.int64)
    for unit in range(grouping.group_of.size):
        sizes[grouping.group_of[unit]] += 1
    width = min(grouping.group_of.size, _SWAP_PAIRS)
    scratch = Scratch(
        np.empty(width, np.int64),
        np.empty(width, np.int64),
        np.empty(width, np.int64),
        np.empty(width, np.float64),
        np.empty(width, np.float64),
        np.full(1, _PAIR_BUDGET),
    )
    for done in range(rounds):
        g = _slowest(grouping)
        if grouping.seconds[g] <= enough_s or sizes[g] == 0:
            return done
        change = _find_change(units, grouping, members, sizes, g, enough_s, setting, scratch)
        if change.kind == _NONE:
            return done
        _apply_change(units, grouping, members, sizes, g, change, setting)
    return rounds
