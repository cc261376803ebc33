"""Two groups at a time: whose unit should move to the other, or be swapped for one of it.

Shapes: u units and N groups at most, as in `build.Grouping`; m units of one group. Tokens are
padded for the degree at hand, squares are Σ(1+η)s² in tokens².
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.build import Grouping
from dataservice.planning.context.seconds import Rates, group_rates, group_seconds, seconds_at
from dataservice.planning.context.units import Setting, Units, padded_sums
from dataservice.planning.kernels.compile import kernel, leaf

NONE, MOVE, SWAP, RANK, MERGE = range(5)


class Members(NamedTuple):
    """Units of each group as doubly linked lists: `first` int64[N], the first unit of a group;
    `after` and `before` int64[u], a unit's neighbours in its group. −1 where there is none."""

    first: NDArray[np.int64]
    after: NDArray[np.int64]
    before: NDArray[np.int64]


class Change(NamedTuple):
    """A change of group g with `partner`: `value`, the seconds of the slower of the two after it,
    its kind, and the units that move: `unit_g` is read for MOVE and SWAP, `unit_h` for SWAP."""

    value: float
    kind: int
    partner: int
    unit_g: int
    unit_h: int


class Scratch(NamedTuple):
    """The m units of the partner h at the front of five arrays: `unit` int64, and the tokens int64
    and squares float64 of each, padded for the degree of g and for that of h. `budget` int64[1],
    the swaps that may still be looked at."""

    unit: NDArray[np.int64]
    tokens_g: NDArray[np.int64]
    tokens_h: NDArray[np.int64]
    squares_g: NDArray[np.float64]
    squares_h: NDArray[np.float64]
    budget: NDArray[np.int64]


@leaf
def link(members: Members, unit: int, group: int) -> None:
    """Make a unit that is in no list the first of the group."""
    old = members.first[group]
    members.after[unit] = old
    members.before[unit] = -1
    if old >= 0:
        members.before[old] = unit
    members.first[group] = unit


@leaf
def unlink(members: Members, unit: int, group: int) -> None:
    """Take a unit out of its group's list. Its own `after` and `before` stay as they were."""
    after = members.after[unit]
    before = members.before[unit]
    if before >= 0:
        members.after[before] = after
    else:
        members.first[group] = after
    if after >= 0:
        members.before[after] = before


@kernel
def list_members(grouping: Grouping) -> Members:
    """Every unit must have a group. The units of each group come out rising."""
    units = grouping.group_of.size
    members = Members(
        np.full(grouping.degree.size, -1, np.int64),  # first int64[N]
        np.empty(units, np.int64),  # after int64[u]
        np.empty(units, np.int64),  # before int64[u]
    )
    for unit in range(units - 1, -1, -1):
        link(members, unit, grouping.group_of[unit])
    return members


@leaf
def sums_at(units: Units, members: Members, group: int, degree: int) -> tuple[int, float]:
    """Tokens and squares of the group's units, were they padded for `degree`. O(m)."""
    tokens = 0
    squares = 0.0
    unit = members.first[group]
    while unit >= 0:
        unit_tokens, unit_squares = padded_sums(units, unit, degree)
        tokens += unit_tokens
        squares += unit_squares
        unit = members.after[unit]
    return tokens, squares


@leaf
def time_of(tokens: int, squares: float, degree: int, crosses: bool, setting: Setting) -> float:
    """Time of a group, infinity when its ranks cannot hold it."""
    if tokens > setting.memory_tokens * degree:
        return np.inf
    crosses = crosses or degree > setting.ranks_per_node
    return group_seconds(float(tokens), squares, degree, crosses, setting.coefficients)


@leaf
def _rates(degree: int, crosses: bool, setting: Setting) -> Rates:
    return group_rates(degree, crosses or degree > setting.ranks_per_node, setting.coefficients)


@leaf
def _timed(rates: Rates, room: int, tokens: int, squares: float) -> float:
    """Time of a group, infinity when its ranks have room for fewer tokens."""
    return np.inf if tokens > room else seconds_at(rates, float(tokens), squares)


@leaf
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


@leaf
def try_moves(
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
    kind = NONE
    unit_g = g
    unit_h = h
    dg = grouping.degree[g]
    dh = grouping.degree[h]
    rates_g = _rates(dg, grouping.crosses[g], setting)
    rates_h = _rates(dh, grouping.crosses[h], setting)
    room_g = setting.memory_tokens * dg
    room_h = setting.memory_tokens * dh
    others = 0
    if swaps:
        others = _read_group(units, members, h, dg, dh, scratch)
    # The first `others` places of the scratch hold h's units; none where only moves are tried.
    i = members.first[g]
    while i >= 0 and best > enough_s:
        tokens, squares = padded_sums(units, i, dg)
        tokens_g = grouping.tokens[g] - tokens
        squares_g = grouping.squares[g] - squares
        tokens, squares = padded_sums(units, i, dh)
        tokens_h = grouping.tokens[h] + tokens
        squares_h = grouping.squares[h] + squares
        # Unit i has left g, padded for dg, and has come to h, padded for dh.
        value = max(
            _timed(rates_g, room_g, tokens_g, squares_g),
            _timed(rates_h, room_h, tokens_h, squares_h),
        )
        if value < best:
            best, kind, unit_g = value, MOVE, i
        for k in range(others):
            tokens = tokens_g + scratch.tokens_g[k]
            value = _timed(rates_g, room_g, tokens, squares_g + scratch.squares_g[k])
            if value >= best:
                continue  # g alone is too slow already
            tokens = tokens_h - scratch.tokens_h[k]
            value = max(value, _timed(rates_h, room_h, tokens, squares_h - scratch.squares_h[k]))
            if value < best:
                best, kind, unit_g, unit_h = value, SWAP, i, scratch.unit[k]
        i = members.after[i]
    return Change(best, kind, h, unit_g, unit_h)
