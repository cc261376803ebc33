"""Waves of a step with many samples: packs, groups, degrees and waves in one go.

Where samples are many, trying several groupings of each wave costs much and gains little. Instead
one target time holds for all waves (`many_target`), samples slower than it open groups of the
degree that meets it, the others level all groups of the step (`many_fill`), and at last groups are
dealt to waves: wide ones over all of them, so that every node finds narrow ones to fill up with,
and groups of one rank by falling time, so that slow ones wait for one another.

    wave 0 │ 5 5 5 3 2 … 1 1 1 1 1   slowest        wave 1 │ 5 5 4 3 2 … 1 1 1 1 1   next
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.planning.context.bound import wave_bound
from dataservice.planning.context.groups import ContextWaves
from dataservice.planning.context.kernels import kernel
from dataservice.planning.context.many_fill import (
    Groups,
    fill,
    list_members,
    put,
    put_all,
    trade,
)
from dataservice.planning.context.many_target import Target, one_level, two_levels
from dataservice.planning.context.place import place_sorted
from dataservice.planning.context.plan import ContextPlan
from dataservice.planning.context.units import (
    Degrees,
    Setting,
    Units,
    fitting_degrees,
    make_setting,
    make_units,
)
from dataservice.planning.cost import (
    ATTENTION,
    GROUP,
    LINEAR,
    ContextCost,
    group_seconds,
    sequences,
)
from dataservice.planning.kernels.sort import radix_argsort
from dataservice.planning.loads.multifit import first_fit_decreasing

_NEAR = 1.01  # of the bound, where two levels are not tried
_FAIR = 1.03  # nor one wave more
_ATTEMPTS = 2  # at two levels
_CAPPED = 0.25  # quantile of the narrow groups' times that tells how much memory allows
_ENOUGH = 1.001  # slowest to mean group of one rank at which trading ends
_ROUNDS = 4
_WIDE_SHARE = 0.6  # of a wave's ranks in wide groups, while other waves have room for them


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """All groups of a step and the wave of each.

    Samples are known by their place when sorted longest first. Group g < `anchors` holds sample g;
    every group g holds members[begins[g]:begins[g+1]] too. `listed` int64[G], widest first, have
    the waves `wave_of` int64[G]; these take `total_s`.
    """

    total_s: float
    waves: int
    groups: Groups
    anchors: int
    members: NDArray[np.int64]
    begins: NDArray[np.int64]
    listed: NDArray[np.int64]
    wave_of: NDArray[np.int64]


def plan_many_waves(
    tokens: ArrayLike,
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    ranks_per_node: int | None = None,
    degrees: Degrees = "any",
) -> ContextWaves:
    """As `plan_context_waves` without given packs, for many samples int[n]. About O(n log N)."""
    setting = make_setting(
        ranks=ranks,
        memory_tokens=memory_tokens,
        cost=cost,
        ranks_per_node=ranks_per_node,
        degrees=degrees,
    )
    lengths, _ = sequences(tokens, None)
    if lengths.size == 0:
        return ContextWaves(waves=(), lower_bound_s=0.0)
    order = radix_argsort((lengths.max() - lengths).astype(np.uint64))
    sizes = lengths[order]
    work_s = _total_work(sizes, setting)
    total = int(sizes.sum())
    at_least = -(-total // (setting.ranks * setting.memory_tokens))
    waves = at_least
    base_s = float(setting.coefficients[GROUP])
    best: Answer | None = None
    bound_s = np.inf
    while best is None or best.waves == waves - 1:
        long = make_units(sizes[: _long(sizes, work_s, waves, setting)], None, cost)
        least = fitting_degrees(long, setting)
        if bound_s == np.inf:
            bound_s = wave_bound(long, least, setting, work_s - float(long.work.sum()))
            bound_s += (at_least - 1) * base_s
        for answer in _answers(sizes, long, least, work_s, waves, bound_s, setting):
            if best is None or answer.total_s < best.total_s:
                best = answer
        # One wave more costs β₁ again: worth a try only where it can leave less than it costs.
        if best is not None and best.total_s <= bound_s * _FAIR:
            break
        waves += 1 if best is not None else max(1, waves // 128)
    return ContextWaves(waves=_plans(order, best, setting), lower_bound_s=bound_s)


def _answers(
    sizes: NDArray[np.int64],
    long: Units,
    least: NDArray[np.int64],
    work_s: float,
    waves: int,
    bound_s: float,
    setting: Setting,
) -> Iterator[Answer]:
    """That many waves at one level and, unless this is near the bound, at two; none where memory
    or ranks do not allow it."""
    target = one_level(long, least, work_s, waves, setting)
    answer = _answer(sizes, target, waves, setting) if target.fits else None
    most_fast_s = np.inf
    for _ in range(_ATTEMPTS):
        if answer is not None:
            yield answer
            if answer.total_s <= bound_s * _NEAR:
                return
            # What a rank reaches before its memory is full: the lower level, at most.
            narrow = answer.groups.degree == 1
            if narrow.any():
                reached_s = float(np.quantile(answer.groups.time_s[narrow], _CAPPED))
                most_fast_s = min(most_fast_s, reached_s)
        target = two_levels(long, least, work_s, waves, most_fast_s, setting)
        if not target.fits:
            return
        answer = _answer(sizes, target, waves, setting)
    if answer is not None:
        yield answer


def _answer(
    sizes: NDArray[np.int64], target: Target, waves: int, setting: Setting
) -> Answer | None:
    """The groups of a target and their waves, or None where memory or ranks do not allow it."""
    groups, anchors = _open_groups(sizes, target, waves, setting)
    group_of = fill(sizes, anchors, groups, setting)
    if group_of.size and group_of[-1] < 0:
        groups, anchors = _open_groups(sizes, target, waves, setting)
        if not _fill_by_size(sizes, group_of, anchors, groups, setting):
            return None
    members, begins = list_members(group_of, groups.degree.size)
    members += anchors
    single = np.arange(anchors, groups.degree.size)
    trade(sizes, members, begins, single, _ROUNDS, _ENOUGH, groups, setting)
    listed = _list_groups(groups)
    wave_of = _deal(listed, groups, target, waves, setting)
    if wave_of.size and wave_of.min() < 0:
        return None
    slowest = np.zeros(waves)
    np.maximum.at(slowest, wave_of, groups.time_s[listed])
    return Answer(
        total_s=float(slowest.sum()),
        waves=waves,
        groups=groups,
        anchors=anchors,
        members=members,
        begins=begins,
        listed=listed,
        wave_of=wave_of,
    )


def _fill_by_size(
    sizes: NDArray[np.int64],
    group_of: NDArray[np.int32],
    anchors: int,
    groups: Groups,
    setting: Setting,
) -> bool:
    """Look only at the memory of the groups of one rank: first fit, whatever their times become."""
    rest = sizes[anchors:].astype(np.float64)
    seats = groups.degree.size - anchors
    if seats == 0:
        return False
    memory = float(setting.memory_tokens)
    place, placed = first_fit_decreasing(rest, rest, seats, memory, memory, rest.size + 1, seats)
    if placed:
        group_of[:] = place + anchors
        put_all(sizes[anchors:], group_of, groups, setting)
    return placed


@kernel
def _total_work(sizes: NDArray[np.int64], setting: Setting) -> float:
    """Replica-seconds of all samples at degree 1."""
    squares = 0.0
    total = 0
    for size in sizes:
        squares += float(size) * float(size)
        total += size
    return float(setting.coefficients[ATTENTION] * squares + setting.coefficients[LINEAR] * total)


@kernel
def _long(sizes: NDArray[np.int64], work_s: float, waves: int, setting: Setting) -> int:
    """How many of the samples, which fall, are beyond a rank's memory or its share of a wave."""
    share_s = work_s / (waves * setting.ranks)
    count = 0
    while count < sizes.size:
        size = float(sizes[count])
        alone_s = (setting.coefficients[ATTENTION] * size + setting.coefficients[LINEAR]) * size
        if sizes[count] <= setting.memory_tokens and alone_s <= share_s:
            break
        count += 1
    return count


@kernel
def _open_groups(
    sizes: NDArray[np.int64], target: Target, waves: int, setting: Setting
) -> tuple[Groups, int]:
    """A group for each sample that must be widened or is slow, the first `anchors` of all, and
    groups of one rank for the others in the ranks that are left."""
    anchors = 0
    slots = waves * setting.ranks
    slow_slots = target.slow_waves * setting.ranks
    while anchors < target.degree.size and target.degree[anchors] > 1:
        slots -= target.degree[anchors]
        slow_slots -= target.degree[anchors]
        anchors += 1
    count = anchors + min(slots, sizes.size - anchors)
    groups = Groups(
        np.ones(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros(count, np.float64),
        np.full(count, setting.coefficients[GROUP]),
        np.zeros(count, np.float64),
    )
    for group in range(count):
        if group < anchors:
            groups.degree[group] = target.degree[group]
            put(sizes[group], group, groups, setting)
        if group < anchors + slow_slots:
            groups.spare_s[group] = target.slow_s - target.fast_s
    return groups, anchors


def _list_groups(groups: Groups) -> NDArray[np.int64]:
    """Groups that hold anything, widest first and then slowest first: int64[G]."""
    used = np.flatnonzero(groups.tokens > 0)
    # The bits of positive floats order as the floats do; widths are sorted after, and stably.
    slowest = used[radix_argsort(~groups.time_s[used].view(np.uint64))]
    width = groups.degree[slowest]
    if width.max(initial=1) == 1:
        return slowest
    return slowest[radix_argsort((width.max() - width).astype(np.uint64))]


@kernel
def _deal(
    listed: NDArray[np.int64], groups: Groups, target: Target, waves: int, setting: Setting
) -> NDArray[np.int64]:
    """Wave of each listed group int64[G]; −1 where a wide one finds none."""
    wave_of = np.full(listed.size, -1, np.int64)
    room = np.full(waves, setting.ranks, np.int64)
    wide = 0
    for group in listed:
        wide += groups.degree[group] if groups.degree[group] > 1 else 0
    share = min(1.0, max(_WIDE_SHARE, 1.02 * wide / (target.slow_waves * setting.ranks)))
    reserved = setting.ranks - int(share * setting.ranks)
    for at in range(listed.size):
        degree = groups.degree[listed[at]]
        if degree == 1:
            break
        wave_of[at] = _first_with(room, degree, reserved)
        if wave_of[at] < 0:
            wave_of[at] = _first_with(room, degree, 0)
        if wave_of[at] < 0:
            return wave_of
    wave = 0
    for at in range(listed.size):
        if wave_of[at] < 0:
            while wave < waves and room[wave] == 0:
                wave += 1
            wave_of[at] = wave
            room[wave] -= 1
    return wave_of


@kernel
def _first_with(room: NDArray[np.int64], degree: int, reserved: int) -> int:
    """The first wave with room for the group above what is reserved, and take it; −1 if none."""
    for wave in range(room.size):
        if room[wave] - reserved >= degree:
            room[wave] -= degree
            return wave
    return -1


def _plans(order: NDArray[np.int64], answer: Answer, setting: Setting) -> tuple[ContextPlan, ...]:
    groups = answer.groups
    listed, wave_begins, samples, offsets = _emit(
        order,
        answer.listed,
        answer.wave_of,
        answer.waves,
        answer.anchors,
        answer.members,
        answer.begins,
    )
    degrees, tokens = groups.degree[listed], groups.tokens[listed]
    seconds, squares = groups.time_s[listed], groups.squares[listed]
    plans = []
    for wave in range(answer.waves):
        start, stop = wave_begins[wave], wave_begins[wave + 1]
        if start == stop:
            continue
        first, last = offsets[start], offsets[stop]
        degree, time_s = degrees[start:stop], seconds[start:stop]
        ranks, rank_offsets, crosses = place_sorted(
            degree, ranks=setting.ranks, ranks_per_node=setting.ranks_per_node
        )
        work_s = _mend_seconds(
            time_s, degree, tokens[start:stop], squares[start:stop], crosses, setting
        )
        plans.append(
            ContextPlan(
                samples=samples[first:last],
                sample_offsets=offsets[start : stop + 1] - first,
                ranks=ranks,
                rank_offsets=rank_offsets,
                time_s=time_s,
                padded_tokens=tokens[start:stop],
                lower_bound_s=float(setting.coefficients[GROUP]) + work_s / setting.ranks,
            )
        )
    return tuple(plans)


@kernel
def _emit(
    order: NDArray[np.int64],
    listed: NDArray[np.int64],
    wave_of: NDArray[np.int64],
    waves: int,
    anchors: int,
    members: NDArray[np.int64],
    begins: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Groups wave by wave, where each wave begins, and their samples end to end with offsets."""
    wave_begins = np.zeros(waves + 1, np.int64)
    for wave in wave_of:
        wave_begins[wave + 1] += 1
    for wave in range(waves):
        wave_begins[wave + 1] += wave_begins[wave]
    ends = wave_begins[:-1].copy()
    sorted_groups = np.empty_like(listed)
    for at in range(listed.size):
        sorted_groups[ends[wave_of[at]]] = listed[at]
        ends[wave_of[at]] += 1
    samples = np.empty(order.size, np.int32)
    offsets = np.zeros(listed.size + 1, np.int64)
    end = 0
    for at in range(sorted_groups.size):
        group = sorted_groups[at]
        if group < anchors:
            samples[end] = order[group]
            end += 1
        for k in range(begins[group], begins[group + 1]):
            samples[end] = order[members[k]]
            end += 1
        offsets[at + 1] = end
    return sorted_groups, wave_begins, samples, offsets


@kernel
def _mend_seconds(
    seconds: NDArray[np.float64],
    degree: NDArray[np.int64],
    tokens: NDArray[np.int64],
    squares: NDArray[np.float64],
    crosses: NDArray[np.bool_],
    setting: Setting,
) -> float:
    """Rings that had to cross nodes take longer: mend `seconds`. Returns the wave's work."""
    work = 0.0
    for g in range(degree.size):
        work += setting.coefficients[ATTENTION] * squares[g]
        work += setting.coefficients[LINEAR] * tokens[g]
        if crosses[g] and degree[g] <= setting.ranks_per_node:
            seconds[g] = group_seconds(
                float(tokens[g]), squares[g], degree[g], True, setting.coefficients
            )
    return work
