"""Groups of a step onto its waves, and waves as plans.

Wide groups go first, a part of each wave kept for groups of one rank as long as other waves have
room, so that every node finds some to fill up with; groups of one rank follow by falling time.

Shapes: n samples, W waves of N ranks, G groups, L of which hold anything.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.many_fill import Groups
from dataservice.planning.context.plan import ContextPlan, place_sorted
from dataservice.planning.context.seconds import fixed_seconds, group_seconds, work_seconds
from dataservice.planning.context.units import Setting
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_falling, radix_argsort

# Of a wave's ranks in wide groups, while other waves have room for them: so that nodes fill up, or
# so that as few waves as can be wait for slow ones.
WIDE_SHARES = (0.6, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """All groups of a step and the wave of each.

    Samples are known by their place when sorted longest first. Group i < `anchors` holds sample i;
    every group i holds members[begins[i]:begins[i+1]] too: `members` int64[n − anchors], `begins`
    int64[G + 1]. `listed` int64[L], the groups that hold anything, widest first, have the waves
    `wave_of` int64[L]; these take `total_s`. Wide groups are in the first `slow_waves`.
    """

    total_s: float
    waves: int
    slow_waves: int
    groups: Groups
    anchors: int
    members: NDArray[np.int64]
    begins: NDArray[np.int64]
    listed: NDArray[np.int64]
    wave_of: NDArray[np.int64]


def list_groups_widest(groups: Groups) -> NDArray[np.int64]:
    """Groups that hold anything, widest first and then slowest first: int64[L]."""
    used = np.flatnonzero(groups.tokens > 0)  # int64[L], rising
    # The bits of positive floats order as the floats do; widths are sorted after, and stably.
    slowest = used[radix_argsort(~groups.time_s[used].view(np.uint64))]  # int64[L]
    width = groups.degree[slowest]  # int64[L]
    if width.max(initial=1) == 1:
        return slowest
    return slowest[argsort_falling(width)]


@kernel
def deal(
    listed: NDArray[np.int64],
    groups: Groups,
    slow_waves: int,
    waves: int,
    wide_share: float,
    setting: Setting,
) -> NDArray[np.int64]:
    """Wave of each of the groups `listed` int64[L], widest first: int64[L]. −1 for the first
    wide one that finds none and all that follow it."""
    wave_of = np.full(listed.size, -1, np.int64)  # int64[L]
    room = np.full(waves, setting.ranks, np.int64)  # int64[W]: ranks left in each wave
    wide = 0  # ranks of all wide groups
    for group in listed:
        wide += groups.degree[group] if groups.degree[group] > 1 else 0
    share = min(1.0, max(wide_share, 1.02 * wide / (slow_waves * setting.ranks)))
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
    # All wide groups have a wave. Those of one rank fill what is left, wave by wave, slowest first.
    wave = 0
    for at in range(listed.size):
        if wave_of[at] < 0:
            while wave < waves and room[wave] == 0:
                wave += 1
            wave_of[at] = wave
            room[wave] -= 1
    return wave_of


@leaf
def _first_with(room: NDArray[np.int64], degree: int, reserved: int) -> int:
    """The first wave with room for the group above what is reserved, and take it; −1 if none.
    `room` int64[W] in ranks."""
    for wave in range(room.size):
        if room[wave] - reserved >= degree:
            room[wave] -= degree
            return wave
    return -1


def plan_waves(
    order: NDArray[np.int64], answer: Answer, setting: Setting
) -> tuple[ContextPlan, ...]:
    """The waves that are not empty; `order` int64[n] is the caller's index of each sample in the
    answer."""
    groups = answer.groups
    # int64[L], int64[W + 1], int32[n], int64[L + 1]: groups now lie wave by wave
    listed, wave_begins, samples, offsets = _emit(
        order,
        answer.listed,
        answer.wave_of,
        answer.waves,
        answer.anchors,
        answer.members,
        answer.begins,
    )
    degrees, tokens = groups.degree[listed], groups.tokens[listed]  # int64[L], int64[L]
    seconds, squares = groups.time_s[listed], groups.squares[listed]  # float64[L], float64[L]
    plans = []
    for wave in range(answer.waves):
        start, stop = wave_begins[wave], wave_begins[wave + 1]
        if start == stop:
            continue
        first, last = offsets[start], offsets[stop]
        degree, time_s = degrees[start:stop], seconds[start:stop]  # of this wave: [groups], views
        # int32[Σ degree], int64[groups + 1], bool[groups]
        ranks, rank_offsets, crosses = place_sorted(
            degree, ranks=setting.ranks, ranks_per_node=setting.ranks_per_node
        )
        work_s = _mend_seconds(  # writes into time_s
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
                lower_bound_s=fixed_seconds(setting.coefficients) + work_s / setting.ranks,
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
    """Groups wave by wave int64[L], where each wave begins int64[W + 1], and their samples end to
    end, by the caller's index int32[n], with offsets int64[L + 1]. Arguments as in `Answer`."""
    wave_begins = np.zeros(waves + 1, np.int64)  # int64[W + 1]: counts, then their prefix sums
    for wave in wave_of:
        wave_begins[wave + 1] += 1
    for wave in range(waves):
        wave_begins[wave + 1] += wave_begins[wave]
    ends = wave_begins[:-1].copy()  # int64[W]: where the next group of each wave is written
    sorted_groups = np.empty_like(listed)  # int64[L]
    # In each wave the groups stay in the order of `listed`, widest first.
    for at in range(listed.size):
        sorted_groups[ends[wave_of[at]]] = listed[at]
        ends[wave_of[at]] += 1
    samples = np.empty(order.size, np.int32)  # int32[n]
    offsets = np.zeros(listed.size + 1, np.int64)  # int64[L + 1]
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


@leaf
def _mend_seconds(
    seconds: NDArray[np.float64],
    degree: NDArray[np.int64],
    tokens: NDArray[np.int64],
    squares: NDArray[np.float64],
    crosses: NDArray[np.bool_],
    setting: Setting,
) -> float:
    """Rings that had to cross nodes take longer: mend `seconds`. Returns the wave's work in
    replica-seconds. All arrays [groups of the wave]: tokens padded, squares Σs² of the padded
    samples."""
    work = 0.0
    for g in range(degree.size):
        work += work_seconds(float(tokens[g]), squares[g], setting.coefficients)
        if crosses[g] and degree[g] <= setting.ranks_per_node:
            seconds[g] = group_seconds(
                float(tokens[g]), squares[g], degree[g], True, setting.coefficients
            )
    return work
