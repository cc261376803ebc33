"""Waves of a step with many samples: packs, groups, degrees and waves in one go.

Where samples are many, trying several groupings of each wave costs much and gains little. Instead
one target time holds for all waves (`many_target`), samples slower than it open groups of the
degree that meets it, the others level all groups of the step (`many_fill`), and at last groups are
dealt to waves: wide ones over all of them, so that every node finds narrow ones to fill up with,
and groups of one rank by falling time, so that slow ones wait for one another.

    wave 0 │ 5 5 5 3 2 … 1 1 1 1 1   slowest        wave 1 │ 5 5 4 3 2 … 1 1 1 1 1   next

Shapes: n samples, known by their place when sorted longest first; the first u of them are long;
N ranks; G groups, of which the first `anchors` were opened by the samples of the same places; L
groups that hold anything. `sizes` int64[n] are tokens, falling; squares are in tokens².
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.cost import ContextCost, sequences
from dataservice.planning.context.bound import wave_bound
from dataservice.planning.context.check import check_waves
from dataservice.planning.context.groups import ContextWaves
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
from dataservice.planning.context.seconds import fixed_seconds, work_seconds
from dataservice.planning.context.units import (
    Degrees,
    Setting,
    Units,
    fitting_degrees,
    make_setting,
    make_units,
)
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import radix_argsort
from dataservice.planning.loads.multifit import first_fit_decreasing

_NEAR = 1.02  # of the bound, where no other levels are tried
_FAIR = 1.03  # nor one wave more
_ATTEMPTS = 2  # at one level or two
_CAPPED = 0.25  # quantile of the narrow groups' times that tells how much memory allows
_SHORT = 0.125  # of a rank's memory, up to which a sample counts as short
_ENOUGH = 1.003  # slowest to mean group of one rank at which trading ends
_ROUNDS = 3
# Numbers of waves that are tried, and long samples looked at in all tries, at least and as a share
# of the samples: bounds on operations, not on time, that no usual step comes near.
_TRIES = 8
_LONG_LOOKS = 8192
_LONG_SHARE = 0.25
_STEP = 8  # of the waves that were too few, the part added in the later tries


def find_many_waves(
    tokens: ArrayLike,
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    ranks_per_node: int | None = None,
    degrees: Degrees = "any",
) -> ContextWaves | None:
    """As `plan_context_waves` without given packs, for many samples int[n], in about O(n log N).

    None where the search, limited in operations, finds no waves: where too many samples are long.
    """
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
    # int64[n]: the caller's index of each sorted sample
    order = radix_argsort((lengths.max() - lengths).astype(np.uint64))
    best, bound_s = _search(lengths[order], cost, setting)
    if best is None:
        return None
    waves = plan_waves(order, best, setting)
    check_waves(waves, lengths, None, setting)
    return ContextWaves(waves=waves, lower_bound_s=bound_s)


def _search(
    sizes: NDArray[np.int64], cost: ContextCost, setting: Setting
) -> tuple[Answer | None, float]:
    """The best answer over some numbers of waves, from the fewest possible on, and the lower bound;
    None where memory or ranks allow none of those tried. `sizes` int64[n] fall.

    At most `_TRIES` numbers, fewer where many samples are long: the least, one more, then what
    first fit by memory takes, and at last ever larger ones. O(n + long · log) each.
    """
    looks = max(_LONG_LOOKS, int(_LONG_SHARE * sizes.size))
    wide = int(np.count_nonzero(sizes > setting.memory_tokens))
    if wide > looks:
        return None, np.inf
    # Each sample that one rank cannot hold has a group of its own here.
    wide_ranks = int(fitting_degrees(make_units(sizes[:wide], None, cost), setting).sum())
    at_least = -(-int(sizes.sum()) // (setting.ranks * setting.memory_tokens))  # by memory alone
    waves = max(at_least, -(-wide_ranks // setting.ranks))
    work_s = _total_work(sizes, setting)
    best: Answer | None = None
    bound_s = np.inf
    for tried in range(1, _TRIES + 1):
        if best is not None and best.waves < waves - 1:
            break
        count = _long(sizes, work_s, waves, setting)
        looks -= count
        if looks < 0:
            break
        long = make_units(sizes[:count], None, cost)  # u units: unit i is sample i
        least = fitting_degrees(long, setting)  # int64[u]
        if bound_s == np.inf:
            bound_s = wave_bound(long, least, setting, work_s - float(long.work.sum()))
            bound_s += (at_least - 1) * fixed_seconds(setting.coefficients)
        for answer in _answers(sizes, long, least, work_s, waves, bound_s, setting):
            if best is None or answer.total_s < best.total_s:
                best = answer
        # One wave more costs β₁ again: worth a try only where it can leave less than it costs.
        if best is not None and best.total_s <= bound_s * _FAIR:
            break
        waves += 1
        if best is None and tried == _TRIES // 4:
            enough = wide_ranks + _ranks_by_memory(sizes, setting)
            waves = max(waves, -(-enough // setting.ranks))
        elif best is None and tried >= _TRIES // 2:
            waves += waves // _STEP
    return best, bound_s


def _ranks_by_memory(sizes: NDArray[np.int64], setting: Setting) -> int:
    """Ranks that hold all samples one rank can hold, first fit, with nothing else beside them."""
    narrow = sizes[sizes <= setting.memory_tokens].astype(np.float64)  # float64[count], tokens
    if narrow.size == 0:
        return 0
    count, memory = narrow.size, float(setting.memory_tokens)
    # int64[count]: the rank of each. There is a rank for every sample, so all are placed.
    place, _ = first_fit_decreasing(narrow, narrow, count, memory, memory, count + 1, count)
    return int(place.max()) + 1


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
    level ends far from the bound; none where memory or ranks do not allow it. `least` int64[u]."""
    target = one_level(long, least, work_s, waves, setting)
    most_fast_s = _short_seconds(sizes, setting)
    if target.slow_s > most_fast_s:
        lower = two_levels(long, least, work_s, waves, most_fast_s, setting)
        target = lower if lower.fits else target
    for attempt in range(_ATTEMPTS):
        answer = _answer(sizes, target, waves, setting) if target.fits else None
        if answer is None and attempt:
            return  # the same levels once more
        if answer is not None:
            yield answer
            if answer.total_s <= bound_s * _NEAR:
                return
            # What a rank reaches before its memory is full: the lower level, at most.
            narrow = answer.groups.degree == 1  # bool[G]
            if narrow.any():
                reached_s = float(np.quantile(answer.groups.time_s[narrow], _CAPPED))
                most_fast_s = min(most_fast_s, reached_s) if attempt else reached_s
        target = two_levels(long, least, work_s, waves, most_fast_s, setting)


def _answer(
    sizes: NDArray[np.int64], target: Target, waves: int, setting: Setting
) -> Answer | None:
    """The groups of a target and their waves, or None where memory or ranks do not allow it."""
    groups, anchors = _open_groups(sizes, target, waves, setting)
    group_of = fill(sizes, anchors, groups, setting)  # int32[n − anchors]
    if group_of.size and group_of[-1] < 0:
        # Memory ended first. Begin again with new groups, as these are partly filled.
        groups, anchors = _open_groups(sizes, target, waves, setting)
        if not _fill_by_size(sizes, group_of, anchors, groups, setting):
            return None
    # int64[n − anchors], int64[G + 1]; an anchor's own sample is not among its members
    members, begins = list_members(group_of, groups.degree.size)
    members += anchors  # places among all n samples from here on
    single = np.arange(anchors, groups.degree.size)  # int64[G − anchors]
    trade(sizes, members, begins, single, _ROUNDS, _ENOUGH, groups, setting)
    listed = list_groups_widest(groups)  # int64[L]
    wave_of = deal(listed, groups, target, waves, setting)  # int64[L]
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
    """Look only at the memory of the groups of one rank: first fit, whatever their times become.

    Writes `group_of` int32[n − anchors] and `groups`, which must be as opened; False, with neither
    changed, where first fit finds no room.
    """
    rest = sizes[anchors:].astype(np.float64)  # float64[n − anchors], tokens
    seats = groups.degree.size - anchors
    if seats == 0:
        return False
    memory = float(setting.memory_tokens)
    # int64[n − anchors]: which group of one rank each goes to, counted from the first of them
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
    return work_seconds(float(total), squares, setting.coefficients)


@kernel
def _total_seconds(
    listed: NDArray[np.int64], wave_of: NDArray[np.int64], waves: int, groups: Groups
) -> float:
    """Sum over waves of their slowest groups; `listed` int64[L], and the wave of each int64[L]."""
    slowest = np.zeros(waves)  # float64[waves], seconds
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
    share = setting.memory_tokens / total  # of all short samples, what one rank holds
    work_s = work_seconds(float(total), squares, setting.coefficients)
    return fixed_seconds(setting.coefficients) + work_s * share


@kernel
def _long(sizes: NDArray[np.int64], work_s: float, waves: int, setting: Setting) -> int:
    """How many of the samples, which fall, are beyond a rank's memory or its share of a wave."""
    share_s = work_s / (waves * setting.ranks)
    count = 0
    while count < sizes.size:
        size = float(sizes[count])
        alone_s = work_seconds(size, size * size, setting.coefficients)
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
    slots = waves * setting.ranks  # ranks left, over all waves
    slow_slots = target.slow_waves * setting.ranks  # the same, of the first waves
    while anchors < target.degree.size and target.degree[anchors] > 1:
        slots -= target.degree[anchors]
        slow_slots -= target.degree[anchors]
        anchors += 1
    count = anchors + min(slots, sizes.size - anchors)  # G
    groups = Groups(
        np.ones(count, np.int64),  # degree int64[G]
        np.zeros(count, np.int64),  # tokens int64[G]
        np.zeros(count, np.float64),  # squares float64[G]
        np.full(count, fixed_seconds(setting.coefficients)),  # time_s float64[G]
        np.zeros(count, np.float64),  # spare_s float64[G]
    )
    for group in range(count):
        if group < anchors:
            groups.degree[group] = target.degree[group]
            put(sizes[group], group, groups, setting)
        # The target has all anchors in the first waves, and groups of one rank on the ranks left.
        if group < anchors + slow_slots:
            groups.spare_s[group] = target.slow_s - target.fast_s
    return groups, anchors
