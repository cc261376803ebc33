"""Waves of many samples that differ too much for one level: cut as few are, each wave levelled.

Where rings or memory keep long samples from a level that short ones can fill up to, waves of about
equal samples take less in sum. So samples are packed by memory, the packs sorted by their natural
time and cut into waves (`cut`), and the samples of each wave are grouped at the one level that its
ranks allow, as in `many`; on whole nodes, where rings then cross nodes; or as packed.

    natural time ↓   |████|███|███|▓▓▓|▓▓|░░░|░░|      wave 0: 10 s │ wave 1: 4 s │ … │ 2 s

Shapes: n samples, longest first; P packs; W waves of N ranks; u samples of one wave.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.degrees import raise_degrees
from dataservice.planning.context.many_groups import (
    count_long,
    level_groups,
    node_groups,
    one_level,
)
from dataservice.planning.context.many_waves import plan_waves
from dataservice.planning.context.memory_fit import group_by_memory
from dataservice.planning.context.plan import ContextPlan, place_plan
from dataservice.planning.context.seconds import fixed_seconds
from dataservice.planning.context.step_waves import LOST_ROOM, Cut, Packing, cut_packs
from dataservice.planning.context.units import (
    Setting,
    Units,
    list_groups,
    long_units_s,
    plain_units,
    select_units,
)
from dataservice.planning.kernels.sort import group_stable

_FAIR = 1.01  # of its level, within which a wave is not grouped otherwise
# Of more samples, packs of one rank each that are as fair stay as they are.
_MANY = 8192
_LOOKS = 1024  # samples whose own times are looked up


def cut_many_waves(
    units: Units,
    least: NDArray[np.int64],
    order: NDArray[np.int64],
    setting: Setting,
    enough_s: float,
) -> tuple[ContextPlan, ...]:
    """Waves of n samples, one a unit, longest first, those of the longest samples first; `order`
    int64[n] is the caller's index of each, `least` int64[n] their least degrees. The best of
    three cuts, each only where those before take more than `enough_s`. O(n log n)."""
    best: tuple[ContextPlan, ...] = ()
    best_s = np.inf
    for packing, cut in _candidates(units, least, setting):
        waves = _plans(units, least, order, packing, cut, setting)
        total_s = sum(wave.makespan_s for wave in waves)
        if total_s < best_s:
            best, best_s = waves, total_s
        if best_s <= enough_s:
            break
    return best


def _candidates(
    units: Units, least: NDArray[np.int64], setting: Setting
) -> Iterator[tuple[Packing, Cut]]:
    """Packs on as few ranks as hold them, and on a whole node where they need more ranks than one
    and no more than a node has: then no ring crosses nodes that does not have to."""
    node = setting.ranks_per_node
    seconds = _about_seconds(units, least, setting)
    by_node = np.where(least == 1, 1, np.maximum(least, node))
    node_allowed = node < setting.ranks and not (setting.power_of_two and node & (node - 1))
    for degree, lost_room in ((least, LOST_ROOM[::-1]), (by_node, LOST_ROOM[1:])):
        packing = group_by_memory(units, degree, setting)
        for cut in cut_packs(units, seconds, packing, setting, lost_room, rings_count=True):
            yield packing, cut
        if least.max() == 1 or not node_allowed:
            return


def _about_seconds(units: Units, least: NDArray[np.int64], setting: Setting) -> NDArray[np.float64]:
    """About what each sample takes alone float64[n]; 0 for those that a rank holds. The longest of
    some neighbours stands for all."""
    wide = int(np.count_nonzero(least > 1))
    each = 1 + wide // _LOOKS
    some = np.arange(0, wide, each)
    seconds = long_units_s(select_units(units, some), least[some], np.inf, setting)
    return np.append(np.repeat(seconds, each)[:wide], np.zeros(least.size - wide))


def _plans(
    units: Units,
    least: NDArray[np.int64],
    order: NDArray[np.int64],
    packing: Packing,
    cut: Cut,
    setting: Setting,
) -> tuple[ContextPlan, ...]:
    """The waves of a cut; `least` and `order` int64[n]."""
    pack_of, degree = packing
    listed = np.concatenate(cut)  # int64[P]: packs wave by wave
    place = np.empty(degree.size, np.int64)  # int64[P]: of each pack among those
    place[listed] = np.arange(listed.size)
    # Samples by pack, in that order: int64[n], int64[P + 1]
    members, begins = group_stable(place[pack_of], np.arange(pack_of.size), listed.size)
    # And wave by wave, longest first: they are as many.
    wave_of = np.repeat(np.arange(len(cut)), [packs.size for packs in cut])  # int64[P]
    falling, _ = group_stable(wave_of[place[pack_of]], np.arange(pack_of.size), len(cut))
    plans = []
    first = 0
    for packs in cut:
        offsets = begins[first : first + packs.size + 1]
        held = slice(offsets[0], offsets[-1])
        plan = None
        if units.total.size > _MANY and (degree[packs] == 1).all():
            plan = _of_one_rank(units, order, members[held], offsets - offsets[0], setting)
        if plan is None or plan.makespan_s > plan.lower_bound_s * _FAIR:
            chosen = falling[held]
            inside = select_units(units, chosen)._replace(samples=order[chosen])
            packed = place[pack_of[chosen]] - first, degree[packs]
            plan = _wave(inside, least[chosen], packed, setting)
        plans.append(plan)
        first += packs.size
    return tuple(plans)


def _of_one_rank(
    units: Units,
    order: NDArray[np.int64],
    members: NDArray[np.int64],
    offsets: NDArray[np.int64],
    setting: Setting,
) -> ContextPlan:
    """A wave of packs members[offsets[g]:offsets[g+1]] as they are, by falling work, on one rank
    each."""
    fixed_s = fixed_seconds(setting.coefficients)
    work_s = np.add.reduceat(units.work[members], offsets[:-1])
    return ContextPlan(
        samples=order[members].astype(np.int32),
        sample_offsets=offsets,
        ranks=np.arange(work_s.size, dtype=np.int32),
        rank_offsets=np.arange(work_s.size + 1),
        time_s=fixed_s + work_s,
        padded_tokens=np.add.reduceat(units.total[members], offsets[:-1]),
        lower_bound_s=fixed_s + float(work_s.sum()) / setting.ranks,
    )


def _wave(units: Units, least: NDArray[np.int64], packed: Packing, setting: Setting) -> ContextPlan:
    """One wave of `units`, longest first, at its level, by node, or as packed: the first that ends
    near the level, or the fastest. `least` int64[u]."""
    work_s = float(units.work.sum())
    count = count_long(units.tokens, work_s, 1, setting)
    long = plain_units(units.tokens[:count], setting)
    target = one_level(long, least[:count], work_s, 1, setting)
    plans: list[ContextPlan] = []
    for by_node in (False, True):
        if by_node:
            answer = node_groups(units.tokens, least, setting)
        else:
            answer = level_groups(units.tokens, target, 1, setting) if target.fits else None
        plans += () if answer is None else plan_waves(units.samples, answer, setting)
        if plans and plans[-1].makespan_s <= target.slow_s * _FAIR:
            return plans[-1]
    members, offsets = list_groups(packed[0], packed[1].size)
    degrees = raise_degrees(units, members, offsets, setting)
    fluid_s = fixed_seconds(setting.coefficients) + work_s / setting.ranks
    plans.append(place_plan(units, members, offsets, degrees, fluid_s, setting, movable=True))
    return min(plans, key=lambda plan: plan.makespan_s)
