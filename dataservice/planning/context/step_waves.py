"""Waves of a step: candidate cuts, each solved wave by wave, the best kept.

A cut needs an estimate of what a wave will take, and no estimate is right everywhere: whether the
room that a widened long sample leaves can be used by short ones depends on rings and nodes. So two
cuts are made, one that counts that room as lost and one that hardly does. Where both end far from
the bound, fewer and fuller waves are tried, and the cuts of fixed degrees. None is solved once the
bound is near, or to its end once it is known to take longer.
"""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import padded_tokens
from dataservice.core.plan_options import Solver
from dataservice.planning.context.cut import cut_waves
from dataservice.planning.context.exact import best_wave
from dataservice.planning.context.memory_fit import group_by_memory
from dataservice.planning.context.plan import ContextPlan, group_times
from dataservice.planning.context.seconds import fixed_seconds
from dataservice.planning.context.units import (
    Setting,
    Units,
    list_groups,
    long_units_s,
    select_units,
    unit_sums,
)
from dataservice.planning.context.wave import FEW_UNITS, NEAR, Wave, mend_waves, solve_wave
from dataservice.planning.kernels.sort import argsort_descending
from dataservice.planning.loads.partition import partition

# Packed groups: group of each unit int64[u], degree of each group int64[G].
Packing = tuple[NDArray[np.int64], NDArray[np.int64]]
# Packed groups of each wave.
Cut = list[NDArray[np.int64]]
# A cut of packed groups, and the seconds that it is known to take about; 0 where it is not.
Candidate = tuple[float, Packing, Cut]

# Share of a widened unit's spare room that a cut counts as lost.
LOST_ROOM = (1.0, 0.15)
_NEAR = 1.01  # no further cut once this close to the bound
_FAR = 1.02  # fuller waves and fixed degrees are tried beyond this,
_MANY = 20_000  # unless there are more units than this: then short ones fill every gap
_MOST_WAVES = 2048  # solved in all candidates together; the first is solved however many it has
# Of the memory of a wave: what the first of fuller waves holds at least, and how much of it in its
# shortest units; and what the others can be filled up to.
_FIRST, _SHORT, _FULLEST = 0.84, 0.09, 0.985
_WIDE = 8  # ranks of an evenly filled group, at most


def solve_waves(
    units: Units,
    least: NDArray[np.int64],
    bound_s: float,
    setting: Setting,
    solver: Solver,
    whole: bool,
) -> tuple[ContextPlan, ...]:
    """The candidate cut whose solved waves have the least summed makespan."""
    best: tuple[ContextPlan, ...] = ()
    best_cut: tuple[Packing, Cut] | None = None
    best_s = np.inf
    left = _MOST_WAVES
    for near, candidates in ((_NEAR, _cuts), (_FAR, _others)):
        if best_s <= bound_s * near:
            break
        for estimate_s, packing, cut in candidates(units, least, setting, whole):
            if estimate_s >= best_s or (best and len(cut) > left):
                continue
            left -= len(cut)
            waves = _solve(units, least, packing, cut, setting, solver, whole, best_s)
            if waves:
                best, best_cut = waves, (packing, cut)
                best_s = sum(wave.makespan_s for wave in waves)
            if best_s <= bound_s * near:
                break
    if best_cut is None or units.total.size > FEW_UNITS or best_s <= bound_s * NEAR:
        return best
    packing, cut = best_cut
    held = [tuple(wave_units(packing, groups)[0].tolist()) for groups in cut]

    def solve(wave: Wave) -> ContextPlan | None:
        chosen = np.array(wave, np.int64)
        inside = select_units(units, chosen)
        return solve_one_wave(inside, least[chosen], setting, solver, whole)

    mended = mend_waves(units, least, dict(zip(held, best, strict=True)), solve, setting)
    return tuple(mended.values())


def solve_one_wave(
    units: Units, least: NDArray[np.int64], setting: Setting, solver: Solver, whole: bool
) -> ContextPlan | None:
    """All units in one wave; None where their groups by memory do not fit the ranks and none others
    are known to."""
    packed = _alone(least) if whole else pack_one_wave(units, least, setting)
    if packed[1].sum() > setting.ranks:
        return best_wave(units, setting, whole)
    return solve_wave(units, least, packed, setting, solver, whole)


def _solve(
    units: Units,
    least: NDArray[np.int64],
    packing: Packing,
    cut: Cut,
    setting: Setting,
    solver: Solver,
    whole: bool,
    below_s: float,
) -> tuple[ContextPlan, ...]:
    """The waves of a cut; none once they are known to take `below_s` or more."""
    base_s = fixed_seconds(setting.coefficients)
    total_s = len(cut) * base_s + float(units.work.sum()) / setting.ranks  # at least
    waves = []
    for groups in cut:
        chosen, packed = wave_units(packing, groups)
        wave = select_units(units, chosen)
        waves.append(solve_wave(wave, least[chosen], packed, setting, solver, whole))
        total_s += waves[-1].makespan_s - base_s - float(wave.work.sum()) / setting.ranks
        if total_s >= below_s:
            return ()
    return tuple(waves)


def _cuts(
    units: Units, least: NDArray[np.int64], setting: Setting, whole: bool
) -> Iterator[Candidate]:
    """Units packed by memory, and the packs cut by natural time."""
    packing = _alone(least) if whole else group_by_memory(units, least, setting)
    # Only a unit of at least a rank's share of the step can be what a wave waits for.
    share_s = float(units.work.sum()) / setting.ranks
    seconds = long_units_s(units, least, share_s, setting)
    lost_room = LOST_ROOM[: 1 if whole else 2]
    for cut in cut_packs(units, seconds, packing, setting, lost_room, whole=whole):
        yield 0.0, packing, cut


def _others(
    units: Units, least: NDArray[np.int64], setting: Setting, whole: bool
) -> Iterator[Candidate]:
    """Fuller waves, and the best fixed degree."""
    if whole or units.total.size > _MANY:
        return
    yield from ((0.0, *fuller) for fuller in _fuller(units, least, setting))
    fixed = [
        (_static_seconds(units, packing, cut, setting), packing, cut)
        for packing in _static_packings(units, least, setting)
        for cut in [cut_static(units, packing, setting)]
    ]
    if fixed:
        yield min(fixed, key=lambda candidate: candidate[0])


def _fuller(
    units: Units, least: NDArray[np.int64], setting: Setting
) -> Iterator[tuple[Packing, Cut]]:
    """As few waves as memory allows, filled evenly: all of them, or those after a first one of the
    longest units and, for the gaps, the shortest."""
    full = setting.ranks * setting.memory_tokens
    order = argsort_descending(units.work)
    held = np.cumsum(units.total[order])  # int64[u]
    waves = -(-int(held[-1]) // full)
    if waves == 1:
        return
    first = max(_FIRST * full, int(held[-1]) - (waves - 1) * _FULLEST * full)
    ahead, after = np.searchsorted(held, [first - _SHORT * full, held[-1] - _SHORT * full])
    rest = order[ahead:after]
    even = _even_packing(select_units(units, rest), least[rest], waves - 1, setting)
    slow = np.concatenate([order[:ahead], order[after:]])
    packed_of, degree = group_by_memory(select_units(units, slow), least[slow], setting)
    if even is not None and degree.sum() <= setting.ranks:
        group_of = np.empty_like(order)
        group_of[slow], group_of[rest] = packed_of, even[0] + degree.size
        cut = [bins + degree.size for bins in cut_static(select_units(units, rest), even, setting)]
        yield (group_of, np.append(degree, even[1])), [np.arange(degree.size), *cut]
    even = _even_packing(units, least, waves, setting)
    if even is not None:
        yield even, cut_static(units, even, setting)


def _even_packing(
    units: Units, least: NDArray[np.int64], waves: int, setting: Setting
) -> Packing | None:
    """Groups of one degree, as many as so many waves have room for, with tokens as even as can be:
    wide enough to hold many units each. None where one does not fit."""
    node = min(setting.ranks_per_node, _WIDE)
    allowed = (d for d in range(1, node + 1) if not (setting.power_of_two and d & (d - 1)))
    degree = max(d for d in allowed if setting.ranks % d == 0)
    tokens, _ = unit_sums(padded_tokens(units.tokens, degree), units.weights, units.offsets)
    if tokens.size == 0 or least.max() > degree:
        return None
    even = partition(tokens, waves * setting.ranks // degree)
    if even.loads.max() > setting.memory_tokens * degree:
        return None
    return even.rank_of.astype(np.int64), np.full(even.loads.size, degree)


def _alone(least: NDArray[np.int64]) -> Packing:
    """Every unit a group of its own."""
    return np.arange(least.size), least


def pack_one_wave(units: Units, least: NDArray[np.int64], setting: Setting) -> Packing:
    """Groups by memory whose least degrees fit the ranks, if best fit or any one degree finds them;
    else best fit's."""
    packing = group_by_memory(units, least, setting)
    if packing[1].sum() <= setting.ranks:
        return packing
    for fixed in _static_packings(units, least, setting):
        if fixed[1].sum() <= setting.ranks:
            return fixed
    return packing


def _static_packings(units: Units, least: NDArray[np.int64], setting: Setting) -> Iterator[Packing]:
    for degree in range(int(least.max(initial=1)), setting.ranks + 1):
        if setting.ranks % degree or (setting.power_of_two and degree & (degree - 1)):
            continue
        yield pack_static(units, degree, setting)


def cut_packs(
    units: Units,
    seconds: NDArray[np.float64],
    packing: Packing,
    setting: Setting,
    lost_room: Iterable[float],
    *,
    whole: bool = False,
    rings_count: bool = False,
) -> Iterator[Cut]:
    """Packed groups by falling natural time in waves: a cut for each of `lost_room`, but none
    twice. `seconds` float64[u]: about what each long unit takes alone, 0 for the others. Where
    `rings_count`, a group's natural time is no less than that."""
    packed_of, packed_degree = packing
    base_s = fixed_seconds(setting.coefficients)
    work = _sums(packed_of, units.work, packed_degree.size)
    fastest = np.zeros(packed_degree.size)
    long = np.flatnonzero(seconds)
    np.maximum.at(fastest, packed_of[long], seconds[long] - base_s)
    natural = work / packed_degree
    if rings_count:
        natural = np.maximum(natural, fastest)
    order = argsort_descending(natural)
    sorted_by_time = natural[order], packed_degree[order], work[order], fastest[order]
    seen: list[list[int]] = []
    for lost in lost_room:
        ends = cut_waves(*sorted_by_time, setting.ranks, base_s, whole, lost)
        if ends.tolist() not in seen:
            seen.append(ends.tolist())
            yield np.split(order, ends[:-1])


def pack_static(units: Units, degree: int, setting: Setting) -> Packing:
    """Best-fit groups of one degree, padding counted."""
    # A group is one rank of `degree` times the memory once every sequence is padded.
    tokens = padded_tokens(units.tokens, degree)
    total, squares = unit_sums(tokens, units.weights, units.offsets)
    padded = units._replace(tokens=tokens, total=total, squares=squares)
    room = setting._replace(memory_tokens=setting.memory_tokens * degree)
    group_of, alone = group_by_memory(padded, np.ones_like(total), room)
    return group_of, alone * degree


def cut_static(units: Units, packing: Packing, setting: Setting) -> Cut:
    """Groups of one degree by falling work, as many to a wave as fit."""
    work = _sums(packing[0], units.work, packing[1].size)
    order = argsort_descending(work)
    a_wave = setting.ranks // int(packing[1][0])
    return [order[start : start + a_wave] for start in range(0, order.size, a_wave)]


def _static_seconds(units: Units, packing: Packing, cut: Cut, setting: Setting) -> float:
    """Sum over waves of the slowest packed group."""
    group_of, degrees = packing
    members, offsets = list_groups(group_of, degrees.size)
    _, _, seconds, _ = group_times(units, members, offsets, degrees, setting)
    return sum(float(seconds[wave].max()) for wave in cut)


def wave_units(packing: Packing, groups: NDArray[np.int64]) -> tuple[NDArray[np.int64], Packing]:
    """Units of the chosen groups, by index, and their packing renumbered."""
    packed_of, packed_degree = packing
    place = np.full(packed_degree.size, -1, np.int64)
    place[groups] = np.arange(groups.size)
    chosen = np.flatnonzero(place[packed_of] >= 0)
    return chosen, (place[packed_of[chosen]], packed_degree[groups])


def _sums(
    group_of: NDArray[np.int64], values: NDArray[np.float64], groups: int
) -> NDArray[np.float64]:
    return np.bincount(group_of, weights=values, minlength=groups).astype(np.float64)
