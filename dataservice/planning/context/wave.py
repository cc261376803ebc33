"""One wave solved: group, improve, set degrees, place."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan_options import Solver
from dataservice.planning.context.bound import wave_bound
from dataservice.planning.context.build import (
    best_groups,
    best_static_groups,
    empty_grouping,
    makespan,
    regroup,
    static_groups,
)
from dataservice.planning.context.degrees_dp import solve_dp
from dataservice.planning.context.degrees_threshold import raise_degrees, time_table
from dataservice.planning.context.exact import best_wave
from dataservice.planning.context.improve import ROUNDS, improve_groups
from dataservice.planning.context.plan import ContextPlan, place_plan
from dataservice.planning.context.units import Setting, Units, list_groups
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_descending
from dataservice.planning.registry import algorithm_named

# Groupings this close to the bound are not improved further.
ENOUGH = 1.001
NEAR = 1.002  # and beyond this, fixed degrees are tried as another start
# Choices that the dynamic programme may look at; beyond, the threshold solver finds its makespan.
_DP_CELLS = 1 << 27


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
