"""Waves solved one by one: grouped, improved, given degrees, placed; and a cut into waves mended.

A cut goes by estimates, and where units are few no short ones fill what an estimate leaves: a ring
that has to cross nodes, a rank that waits. So two waves are joined, a unit goes to another wave or
to one of its own, or two units change places, as long as the summed makespans fall:

    wave 0 [▓▓▓▓ ▒▒ ░]      wave 1 [▓▓ ▒▒]        before  t₀ + t₁
    wave 0 [▓▓▓▓ ▒▒]  ─░─►  wave 1 [▓▓ ▒▒ ░]      after   at least β₁ + Σwork/N, and at least what
                                                          the slowest unit takes alone, of each

So the most that a change can gain is known before anything is solved. The most promising are
solved first, and those that promise nothing never are.

Shapes: u units, k waves. The waves of a step are a dict from their units, rising, to their plans.
"""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan_options import Solver, algorithm_named
from dataservice.planning.context.bound import fastest_each, wave_bound
from dataservice.planning.context.build import (
    best_groups,
    best_static_groups,
    empty_grouping,
    makespan,
    regroup,
    static_groups,
)
from dataservice.planning.context.degrees import raise_degrees, solve_dp, time_table
from dataservice.planning.context.exact import best_wave
from dataservice.planning.context.improve import ROUNDS, improve_groups
from dataservice.planning.context.plan import ContextPlan, place_plan
from dataservice.planning.context.seconds import fixed_seconds
from dataservice.planning.context.units import Setting, Units, list_groups
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_descending

# Groupings this close to the bound are not improved further.
ENOUGH = 1.001
NEAR = 1.002  # and beyond this, fixed degrees are tried as another start
# Choices that the dynamic programme may look at; beyond, the threshold solver finds its makespan.
_DP_CELLS = 1 << 27

FEW_UNITS = 64  # beyond, short units fill the gaps, and changes are too many to rate
_MOST_SOLVED = 32  # waves, in one step
_MOST_TAKEN = 1 - 1e-9  # of what it was before, that a change may take

Wave = tuple[int, ...]
# Waves that a change takes away, and those that it makes of their units.
Change = tuple[list[Wave], list[Wave]]
# The plan of the units of one wave; None where no grouping of them that fits is found.
SolveWave = Callable[[Wave], ContextPlan | None]


def solve_wave(
    units: Units,
    least: NDArray[np.int64],
    packed: tuple[NDArray[np.int64], NDArray[np.int64]],
    setting: Setting,
    solver: Solver,
    whole: bool,
) -> ContextPlan:
    """Plan units whose `packed` groups (group_of, least degree) fit the ranks; `whole` units are
    never put together. O(u·log N) for each of about a dozen builds, plus the improvement; the best
    of all where units and ranks are few enough to try."""
    if (best := best_wave(units, setting, whole)) is not None:
        return best
    bound_s = wave_bound(units, least, setting)
    if whole:
        alone = np.arange(units.total.size)
        return _finish(units, alone, alone.size, bound_s, setting, solver, False)
    order = argsort_descending(units.work)
    group_of, groups, found_s = _search(units, order, least, packed[0], packed[1], bound_s, setting)
    plans = [_finish(units, group_of, groups, bound_s, setting, solver, True)]
    if plans[0].makespan_s > found_s * (1 + 1e-9):
        # Placement forced a ring over nodes that the search thought inside one. A search for which
        # every ring crosses expects no better, and a fixed degree that divides the nodes never
        # suffers it, so that bounds the damage.
        slow = setting._replace(ranks_per_node=1)
        group_of, groups, _ = _search(units, order, least, packed[0], packed[1], bound_s, slow)
        plans.append(_finish(units, group_of, groups, bound_s, setting, solver, True))
        static = _best_static(units, order, bound_s, setting)
        plans += [] if static is None else [static]
    return min(plans, key=lambda plan: plan.makespan_s)


def _finish(
    units: Units,
    group_of: NDArray[np.int64],
    groups: int,
    bound_s: float,
    setting: Setting,
    solver: Solver,
    movable: bool,
) -> ContextPlan:
    """Degrees by the chosen solver, then placement."""
    members, offsets = list_groups(group_of, groups)
    set_degrees = algorithm_named(SOLVERS, solver, "solver")
    degrees = set_degrees(units, members, offsets, setting)
    return place_plan(units, members, offsets, degrees, bound_s, setting, movable=movable)


def _dp_degrees(
    units: Units, members: NDArray[np.int64], offsets: NDArray[np.int64], setting: Setting
) -> NDArray[np.int64]:
    if (offsets.size - 1) * setting.ranks**2 > _DP_CELLS:
        return raise_degrees(units, members, offsets, setting)
    return solve_dp(time_table(units, members, offsets, setting), setting.ranks)


SOLVERS: dict[
    Solver, Callable[[Units, NDArray[np.int64], NDArray[np.int64], Setting], NDArray[np.int64]]
] = {"threshold": raise_degrees, "dp": _dp_degrees}


def static_wave(
    units: Units,
    packed: tuple[NDArray[np.int64], NDArray[np.int64]],
    degree: int,
    bound_s: float,
    setting: Setting,
) -> ContextPlan:
    """Every group at one degree: units spread by falling work where memory allows it, else as
    `packed`."""
    spread = _static(units, argsort_descending(units.work), degree, bound_s, setting)
    members, offsets = list_groups(packed[0], packed[1].size)
    as_packed = place_plan(units, members, offsets, packed[1], bound_s, setting, movable=False)
    return spread if spread and spread.makespan_s < as_packed.makespan_s else as_packed


def _static(
    units: Units, order: NDArray[np.int64], degree: int, bound_s: float, setting: Setting
) -> ContextPlan | None:
    grouping = empty_grouping(units.total.size, setting.ranks)
    if not np.isfinite(static_groups(units, order, degree, setting, grouping)):
        return None
    members, offsets = list_groups(grouping.group_of, int(grouping.used[0]))
    degrees = np.full(offsets.size - 1, degree, np.int64)
    return place_plan(units, members, offsets, degrees, bound_s, setting, movable=False)


def _best_static(
    units: Units, order: NDArray[np.int64], bound_s: float, setting: Setting
) -> ContextPlan | None:
    best: ContextPlan | None = None
    for degree in range(1, setting.ranks + 1):
        if setting.ranks % degree or (setting.power_of_two and degree & (degree - 1)):
            continue
        plan = _static(units, order, degree, bound_s, setting)
        if plan is not None and (best is None or plan.makespan_s < best.makespan_s):
            best = plan
    return best


@kernel
def _search(
    units: Units,
    order: NDArray[np.int64],
    least: NDArray[np.int64],
    packed_of: NDArray[np.int64],
    packed_degree: NDArray[np.int64],
    bound_s: float,
    setting: Setting,
) -> tuple[NDArray[np.int64], int, float]:
    """Best grouping found: group of each unit, number of groups, makespan."""
    best = empty_grouping(units.total.size, setting.ranks)
    regroup(units, packed_of, packed_degree, setting, best)
    best_groups(units, order, least, bound_s, ENOUGH, setting, best)
    improve_groups(units, best, bound_s * ENOUGH, ROUNDS, setting)
    found = makespan(best)
    if found > bound_s * NEAR:
        # One degree for all is a better start where rings are cheap and samples few.
        static = empty_grouping(units.total.size, setting.ranks)
        if best_static_groups(units, order, found, setting, static) < found:
            improve_groups(units, static, bound_s * ENOUGH, ROUNDS, setting)
            best = static
    return best.group_of, best.used[0], makespan(best)


def mend_waves(
    units: Units,
    least: NDArray[np.int64],
    waves: dict[Wave, ContextPlan],
    solve: SolveWave,
    setting: Setting,
) -> dict[Wave, ContextPlan]:
    """Waves of the same units whose makespans sum up to no more, the longest unit's first.

    About `_MOST_SOLVED` waves are solved on the way at most; O(u²) for each change that is made.
    """
    alone_s = fastest_each(units, least, setting)
    known: dict[Wave, ContextPlan | None] = {**waves}
    most = len(known) + _MOST_SOLVED
    while len(known) < most:
        for old, new in _changes(units, alone_s, waves, setting):
            known |= {wave: solve(wave) for wave in new if wave not in known}
            plans = {wave: plan for wave in new if (plan := known[wave]) is not None}
            if len(plans) == len(new) and _sum_s(plans, new) < _sum_s(waves, old) * _MOST_TAKEN:
                waves = {wave: plan for wave, plan in waves.items() if wave not in old} | plans
                break
            if len(known) >= most:
                break
        else:
            break  # nothing that may gain does
    longest = {wave: int(units.total[list(wave)].max()) for wave in waves}
    return {wave: waves[wave] for wave in sorted(waves, key=lambda wave: (-longest[wave], wave))}


def _sum_s(plans: dict[Wave, ContextPlan], waves: list[Wave]) -> float:
    return sum(plans[wave].makespan_s for wave in waves)


def _changes(
    units: Units, alone_s: NDArray[np.float64], waves: dict[Wave, ContextPlan], setting: Setting
) -> Iterator[Change]:
    """Changes that may gain something, those that may gain most first."""
    held = list(waves)
    moved, swapped, joined = _most_gains(units, alone_s, waves, setting)
    gains = np.concatenate([moved.ravel(), swapped.ravel(), joined.ravel()])
    enough_s = (1 - _MOST_TAKEN) * _sum_s(waves, held)
    wave_of = {unit: wave for wave in held for unit in wave}
    for place in argsort_descending(np.maximum(gains, 0.0)).tolist():
        if gains[place] <= enough_s:
            return
        if place < moved.size:
            unit, to = divmod(place, moved.shape[1])
            old = [wave_of[unit], *held[to : to + 1]]  # none is at the last place: a new wave
            yield _exchanged(old, [unit], [])
        elif place < moved.size + swapped.size:
            unit, other = divmod(place - moved.size, swapped.shape[1])
            yield _exchanged([wave_of[unit], wave_of[other]], [unit], [other])
        else:
            one, two = divmod(place - moved.size - swapped.size, joined.shape[1])
            yield [held[one], held[two]], [tuple(sorted(held[one] + held[two]))]


def _exchanged(old: list[Wave], out: list[int], back: list[int]) -> Change:
    """The first of the old waves gives the units `out` to the second, or to a new one, for
    `back`."""
    first, second = set(old[0]), set(old[1] if len(old) > 1 else ())
    new = (first - set(out)) | set(back), (second - set(back)) | set(out)
    return old, [tuple(sorted(wave)) for wave in new if wave]


def _most_gains(
    units: Units, alone_s: NDArray[np.float64], waves: dict[Wave, ContextPlan], setting: Setting
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The most seconds that changes can gain: a unit to another wave or a new one [u, k + 1], two
    units of different waves swapped [u, u], and two waves joined [k, k]; −inf for what is none."""
    count, empty = len(alone_s), len(waves)
    sizes = units.total.astype(np.float64)  # float64[u], tokens
    of = np.empty(count, np.int64)  # int64[u], wave of each unit
    for number, wave in enumerate(waves):
        of[list(wave)] = number
    time_s = np.array([*[plan.makespan_s for plan in waves.values()], 0.0])  # float64[k + 1]
    tokens = np.bincount(of, sizes, empty + 1)  # float64[k + 1], as the next two
    work_s = np.bincount(of, units.work, empty + 1)
    slowest_s = np.zeros(empty + 1)
    np.maximum.at(slowest_s, of, alone_s)
    together = of[:, None] == of
    beside = together & ~np.eye(count, dtype=np.bool_)
    rest_s = np.where(beside, alone_s, 0.0).max(axis=1)  # float64[u]: without the unit itself

    def least_s(
        tokens: NDArray[np.float64], work_s: NDArray[np.float64], slowest_s: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        fluid_s = fixed_seconds(setting.coefficients) + work_s / setting.ranks
        fits = tokens <= setting.ranks * setting.memory_tokens
        return np.where(fits, np.maximum(fluid_s, slowest_s), np.inf)

    own = tokens[of] - sizes, work_s[of] - units.work, rest_s  # of its wave without the unit
    left_s = np.where(beside.any(axis=1), least_s(*own), 0.0)
    each = sizes[:, None], units.work[:, None], alone_s[:, None]
    with_it_s = least_s(tokens + each[0], work_s + each[1], np.maximum(slowest_s, each[2]))
    moved = (time_s[of] - left_s)[:, None] + time_s - with_it_s
    moved[np.arange(count), of] = -np.inf
    moved[~beside.any(axis=1), empty] = -np.inf
    for_it_s = least_s(
        own[0][:, None] + sizes, own[1][:, None] + units.work,
        np.maximum(own[2][:, None], alone_s),
    )  # fmt: skip
    swapped = time_s[of][:, None] + time_s[of] - for_it_s - for_it_s.T
    swapped[together | np.tri(count, dtype=np.bool_)] = -np.inf
    joint_s = least_s(
        np.add.outer(tokens, tokens),
        np.add.outer(work_s, work_s),
        np.maximum.outer(slowest_s, slowest_s),
    )
    joined = (np.add.outer(time_s, time_s) - joint_s)[:empty, :empty]
    joined[np.tri(empty, dtype=np.bool_)] = -np.inf
    return moved, swapped, joined
