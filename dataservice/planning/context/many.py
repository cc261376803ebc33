"""Waves of a step with many samples: packs, groups, degrees and waves in one go.

Where samples are many, trying several groupings of each wave costs much and gains little. Instead
one target time holds for all waves (`many_target`), samples slower than it open groups of the
degree that meets it, the others level all groups of the step (`many_fill`), and at last groups are
dealt to waves: wide ones over all of them, so that every node finds narrow ones to fill up with,
and groups of one rank by falling time, so that slow ones wait for one another.

    wave 0 │ 5 5 5 3 2 … 1 1 1 1 1   slowest        wave 1 │ 5 5 4 3 2 … 1 1 1 1 1   next
"""

from collections.abc import Iterator

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
from dataservice.planning.context.many_waves import (
    Answer,
    deal,
    list_groups_widest,
    plan_waves,
)
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
    sequences,
)
from dataservice.planning.kernels.sort import radix_argsort
from dataservice.planning.loads.multifit import first_fit_decreasing

_NEAR = 1.02  # of the bound, where no other levels are tried
_FAIR = 1.03  # nor one wave more
_ATTEMPTS = 3  # at one level or two
_CAPPED = 0.25  # quantile of the narrow groups' times that tells how much memory allows
_SHORT = 0.125  # of a rank's memory, up to which a sample counts as short
_ENOUGH = 1.003  # slowest to mean group of one rank at which trading ends
_ROUNDS = 3


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
    return ContextWaves(waves=plan_waves(order, best, setting), lower_bound_s=bound_s)


def _answers(
    sizes: NDArray[np.int64],
    long: Units,
    least: NDArray[np.int64],
    work_s: float,
    waves: int,
    bound_s: float,
    setting: Setting,
) -> Iterator[Answer]:
    """That many waves at one level, or at two where memory ends before that level or where one
    level ends far from the bound; none where memory or ranks do not allow it."""
    target = one_level(long, least, work_s, waves, setting)
    most_fast_s = _short_seconds(sizes, setting)
    if target.slow_s > most_fast_s:
        lower = two_levels(long, least, work_s, waves, most_fast_s, setting)
        target = lower if lower.fits else target
    for attempt in range(_ATTEMPTS):
        answer = _answer(sizes, target, waves, setting) if target.fits else None
        if answer is not None:
            yield answer
            if answer.total_s <= bound_s * _NEAR:
                return
            # What a rank reaches before its memory is full: the lower level, at most.
            narrow = answer.groups.degree == 1
            if narrow.any():
                reached_s = float(np.quantile(answer.groups.time_s[narrow], _CAPPED))
                most_fast_s = min(most_fast_s, reached_s) if attempt else reached_s
        target = two_levels(long, least, work_s, waves, most_fast_s, setting)


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
    listed = list_groups_widest(groups)
    wave_of = deal(listed, groups, target, waves, setting)
    if wave_of.size and wave_of.min() < 0:
        return None
    return Answer(
        total_s=float(_total_seconds(listed, wave_of, waves, groups)),
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
def _total_seconds(
    listed: NDArray[np.int64], wave_of: NDArray[np.int64], waves: int, groups: Groups
) -> float:
    """Sum over waves of their slowest groups."""
    slowest = np.zeros(waves)
    for at in range(listed.size):
        slowest[wave_of[at]] = max(slowest[wave_of[at]], groups.time_s[listed[at]])
    return float(slowest.sum())


@kernel
def _short_seconds(sizes: NDArray[np.int64], setting: Setting) -> float:
    """What a rank full of short samples takes; infinity where there are none."""
    squares = 0.0
    total = 0
    at = sizes.size - 1
    while at >= 0 and sizes[at] <= _SHORT * setting.memory_tokens:
        squares += float(sizes[at]) * float(sizes[at])
        total += sizes[at]
        at -= 1
    if total == 0:
        return np.inf
    share = setting.memory_tokens / total
    work_s = setting.coefficients[ATTENTION] * squares + setting.coefficients[LINEAR] * total
    return float(setting.coefficients[GROUP] + work_s * share)


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
