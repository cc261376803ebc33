"""Few units on few ranks: the best of all waves, groups, degrees and places on nodes.

A state is how many ranks are free on each node; a move gives some of them to a group, which
crosses nodes if they lie on two. The first unit of a set is in some group; what that leaves of the
units, on what its move leaves of the ranks, is a smaller case:

    wave(units, free) = min over groups ∋ first unit, moves:  max(T(group), wave(rest, free after))
    step(units)       = min over waves ∋ first unit:          wave(it, all free) + step(rest)

Shapes: u units, whose sets are the bits of a mask; S states, the first of which is all free; M
moves. About 3ᵘ/2 · M looks.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import sample_starts
from dataservice.planning.context.plan import ContextPlan, plan_of_groups
from dataservice.planning.context.seconds import group_seconds
from dataservice.planning.context.units import Setting, Units, padded_sums, select_units
from dataservice.planning.kernels.compile import kernel

# Bounds on 3ᵘ·M: of a step (8 units on 4 ranks of 2 nodes, 6 on 64 of one), and of one wave.
STEP_LOOKS = 1 << 21
WAVE_LOOKS = 1 << 17
_MOST_STATES = 1 << 10


class Moves(NamedTuple):
    """From the state `before` to `after`, both int64[M], a group takes `degree` int64[M] ranks and
    `crosses` nodes or not, int64[M]: 1 or 0. `free` int64[S, nodes] are the states."""

    before: NDArray[np.int64]
    after: NDArray[np.int64]
    degree: NDArray[np.int64]
    crosses: NDArray[np.int64]
    free: NDArray[np.int64]


class Table(NamedTuple):
    """For each set of units and state the least `seconds` float64[2ᵘ, S] of one wave, and the
    `group` and the `move` that it begins with, int64[2ᵘ, S]."""

    seconds: NDArray[np.float64]
    group: NDArray[np.int64]
    move: NDArray[np.int64]


def best_wave(units: Units, setting: Setting, whole: bool) -> ContextPlan | None:
    """The best plan of all units in one wave; None where they do not fit or are too many to try."""
    moves = _moves_within(WAVE_LOOKS, units, setting)
    if moves is None or units.total.size == 0:
        return None
    table = _try_all(units, moves, setting, whole)
    every = (1 << units.total.size) - 1
    return _plan(units, table, moves, every, setting) if table.seconds[every, 0] < np.inf else None


def best_waves(units: Units, setting: Setting, whole: bool) -> tuple[ContextPlan, ...] | None:
    """The best plan of all units in any number of waves, the slowest first; None where they are
    too many to try. Each unit must fit the ranks."""
    moves = _moves_within(STEP_LOOKS, units, setting)
    if moves is None:
        return None
    table = _try_all(units, moves, setting, whole)
    waves = [
        _plan(units, table, moves, int(wave), setting) for wave in _cut(table.seconds[:, 0].copy())
    ]
    return tuple(sorted(waves, key=lambda wave: -wave.makespan_s))


def _moves_within(most_looks: int, units: Units, setting: Setting) -> Moves | None:
    """All moves, if to try them with every set of units takes few enough looks."""
    sets = 3 ** min(units.total.size, most_looks.bit_length())
    rooms = []
    states = ways = 1
    for first in range(0, setting.ranks, setting.ranks_per_node):
        room = min(setting.ranks_per_node, setting.ranks - first)
        rooms.append(room)
        states *= room + 1
        ways *= (room + 1) * (room + 2) // 2
        if ways * sets > most_looks or states > _MOST_STATES:
            return None
    return _all_moves(np.array(rooms, np.int64), setting.power_of_two)


@kernel
def _all_moves(rooms: NDArray[np.int64], power_of_two: bool) -> Moves:
    """`rooms` int64[nodes], ranks of each node."""
    states = 1
    ways = 1  # from any state to one with no more ranks free on any node
    for room in rooms:
        states *= room + 1
        ways *= (room + 1) * (room + 2) // 2
    free = np.empty((states, rooms.size), np.int64)
    for state in range(states):
        left = state
        for node in range(rooms.size):  # state 0 has all ranks free
            free[state, node] = rooms[node] - left % (rooms[node] + 1)
            left //= rooms[node] + 1
    moves = Moves(
        np.empty(ways, np.int64),
        np.empty(ways, np.int64),
        np.empty(ways, np.int64),
        np.empty(ways, np.int64),
        free,
    )
    count = 0
    for before in range(states):
        for after in range(states):
            degree = 0
            nodes = 0
            for node in range(rooms.size):
                taken = free[before, node] - free[after, node]
                if taken < 0:
                    degree = -rooms.sum()
                degree += taken
                nodes += taken > 0
            if degree > 0 and not (power_of_two and degree & (degree - 1)):
                moves.before[count] = before
                moves.after[count] = after
                moves.degree[count] = degree
                moves.crosses[count] = nodes > 1
                count += 1
    return Moves(
        moves.before[:count], moves.after[:count], moves.degree[:count], moves.crosses[:count], free
    )


@kernel
def _set_times(units: Units, setting: Setting) -> NDArray[np.float64]:
    """Seconds [set, crosses, degree] of each set of units as one group; infinity without room."""
    count = units.total.size
    times = np.full((1 << count, 2, setting.ranks + 1), np.inf)
    tokens = np.zeros(1 << count, np.int64)
    squares = np.zeros(1 << count, np.float64)
    for degree in range(1, setting.ranks + 1):
        for unit in range(count):
            own_tokens, own_squares = padded_sums(units, unit, degree)
            for before in range(1 << unit):
                mask = before | 1 << unit
                tokens[mask] = tokens[before] + own_tokens
                squares[mask] = squares[before] + own_squares
        for mask in range(1, 1 << count):
            if tokens[mask] <= setting.memory_tokens * degree:
                for crosses in range(2):
                    times[mask, crosses, degree] = group_seconds(
                        float(tokens[mask]),
                        squares[mask],
                        degree,
                        crosses == 1,
                        setting.coefficients,
                    )
    return times


@kernel
def _try_all(units: Units, moves: Moves, setting: Setting, whole: bool) -> Table:
    """The table of all sets; `whole` units are never put together."""
    times = _set_times(units, setting)
    shape = (1 << units.total.size, moves.free.shape[0])
    table = Table(np.full(shape, np.inf), np.zeros(shape, np.int64), np.zeros(shape, np.int64))
    table.seconds[0] = 0.0
    for mask in range(1, shape[0]):
        first = mask & -mask
        others = 0 if whole else mask ^ first  # that may join the first unit's group
        joining = others
        while True:
            group = first | joining
            for move in range(moves.degree.size):
                value = max(
                    times[group, moves.crosses[move], moves.degree[move]],
                    table.seconds[mask ^ group, moves.after[move]],
                )
                if value < table.seconds[mask, moves.before[move]]:
                    table.seconds[mask, moves.before[move]] = value
                    table.group[mask, moves.before[move]] = group
                    table.move[mask, moves.before[move]] = move
            if joining == 0:
                break
            joining = (joining - 1) & others
    return table


@kernel
def _cut(wave_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Sets int64[waves] that hold every unit once, of the least summed seconds [2ᵘ] of a wave."""
    step_s = np.full(wave_s.size, np.inf)
    step_s[0] = 0.0
    last = np.zeros(wave_s.size, np.int64)  # the wave of the first unit of each set
    for mask in range(1, wave_s.size):
        first = mask & -mask
        others = mask ^ first
        joining = others
        while True:
            wave = first | joining
            if wave_s[wave] + step_s[mask ^ wave] < step_s[mask]:
                step_s[mask] = wave_s[wave] + step_s[mask ^ wave]
                last[mask] = wave
            if joining == 0:
                break
            joining = (joining - 1) & others
    waves = np.empty(wave_s.size, np.int64)
    count = 0
    mask = wave_s.size - 1
    while mask > 0:
        waves[count] = last[mask]
        mask ^= last[mask]
        count += 1
    return waves[:count].copy()


def _plan(units: Units, table: Table, moves: Moves, wave: int, setting: Setting) -> ContextPlan:
    """The groups of the wave on their ranks, widest first."""
    node_starts = np.arange(moves.free.shape[1]) * setting.ranks_per_node
    groups = []
    mask, state = wave, 0
    while mask:
        move = int(table.move[mask, state])
        after = int(moves.after[move])
        free, left = moves.free[state], moves.free[after]
        # A node's ranks are given away from its last one on.
        ranks = np.concatenate(
            [start + np.arange(a, b) for start, a, b in zip(node_starts, left, free, strict=True)]
        )
        held = int(table.group[mask, state])
        groups.append((held, ranks, bool(moves.crosses[move])))
        mask, state = mask ^ held, after
    groups.sort(key=lambda group: -group[1].size)
    bits = np.arange(units.total.size)
    members = [bits[held >> bits & 1 > 0] for held, _, _ in groups]
    chosen = np.concatenate(members)
    return plan_of_groups(
        select_units(units, chosen),
        np.arange(chosen.size),
        sample_starts(np.array([len(each) for each in members])),
        np.concatenate([ranks for _, ranks, _ in groups]).astype(np.int32),
        sample_starts(np.array([ranks.size for _, ranks, _ in groups])),
        np.array([crosses for _, _, crosses in groups]),
        float(table.seconds[wave, 0]),
        setting,
    )
