"""Which replica takes which pack of a wave, so that replicas end up with equal sums.

Within a wave all groups of degree 1 may trade places at no cost. Wave by wave, the heaviest
pack goes to the replica that has done least so far (LPT over waves, MMScale Alg. 2 with its
sort mended); with replicas that synchronise only at the end of a step this is what they
wait for, and where they meet in every wave it costs nothing. What replicas do is what decoders take
or, where items stay with their text, all that a pack takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StageReport
from dataservice.core.plan_options import Assign, algorithm_named
from dataservice.planning.context.groups import ContextPlan
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.loads.greedy import sort_rising

# The waves with their ranks assigned, and a report where there was anything to do.
Assigned = tuple[tuple[ContextPlan, ...], StageReport | None]
# Of each wave, what its packs take their replicas, float64[packs]; None where it is `time_s`.
Seconds = Sequence[NDArray[np.float64]] | None


def assign_packs(
    waves: tuple[ContextPlan, ...], *, replicas: int, algorithm: Assign, seconds: Seconds = None
) -> Assigned:
    """The replicas of every pack, by the named algorithm. Raises PlanningError on others."""
    return algorithm_named(ASSIGNMENTS, algorithm, "plan.assign")(waves, replicas, seconds)


def _as_packed(waves: tuple[ContextPlan, ...], replicas: int, seconds: Seconds) -> Assigned:
    return waves, None


def seat_packs(
    waves: tuple[ContextPlan, ...], replicas: int, seconds: Seconds = None
) -> tuple[tuple[ContextPlan, ...], StageReport]:
    """The same waves with their degree-1 groups re-seated, and the largest sum of any replica
    before and after. Wider groups keep their replicas, and so their nodes. O(P log P)."""
    before = np.zeros(replicas)
    after = np.zeros(replicas)
    seated = []
    total = 0.0
    for wave, time_s in zip(waves, seconds or [wave.time_s for wave in waves], strict=True):
        total += _add_times(time_s, wave.ranks, wave.rank_offsets, before)
        ranks = _seat(time_s, wave.ranks, wave.rank_offsets, after)
        _add_times(time_s, ranks, wave.rank_offsets, after)
        seated.append(replace(wave, ranks=ranks))
    report = StageReport(
        stage="assign",
        algorithm="balanced",
        unit="s",
        before=float(before.max(initial=0.0)),
        after=float(after.max(initial=0.0)),
        lower_bound=total / replicas,
    )
    return tuple(seated), report


ASSIGNMENTS: dict[Assign, Callable[[tuple[ContextPlan, ...], int, Seconds], Assigned]] = {
    "balanced": seat_packs,
    "as_packed": _as_packed,
}


@leaf
def _add_times(
    time_s: NDArray[np.float64],
    ranks: NDArray[np.int32],
    offsets: NDArray[np.int64],
    sums: NDArray[np.float64],
) -> float:
    """Add each group's time to the sum of each of its ranks; returns all that was added."""
    added = 0.0
    for group in range(time_s.size):
        for place in range(offsets[group], offsets[group + 1]):
            sums[ranks[place]] += time_s[group]
            added += time_s[group]
    return added


@kernel
def _seat(
    time_s: NDArray[np.float64],
    ranks: NDArray[np.int32],
    offsets: NDArray[np.int64],
    sums: NDArray[np.float64],
) -> NDArray[np.int32]:
    """Ranks of all groups: the slowest group of one rank where the sum is least, and so on."""
    taken = np.zeros(sums.size, np.bool_)  # bool[replicas]
    single = np.empty(time_s.size, np.int64)  # int64[groups]: those of degree 1
    count = 0
    for group in range(time_s.size):
        if offsets[group + 1] - offsets[group] == 1:
            single[count] = group
            count += 1
        else:
            for place in range(offsets[group], offsets[group + 1]):
                taken[ranks[place]] = True
    slowest_first = single[:count].copy()  # int64[those]
    if count > 0:
        sort_rising(time_s.max() - time_s[slowest_first], slowest_first)
    least_first = np.flatnonzero(~taken)  # int64[free replicas]
    if least_first.size > 0:
        sort_rising(sums[least_first], least_first)
    seated = ranks.copy()  # int32[ranks of all groups]
    for k in range(count):
        seated[offsets[slowest_first[k]]] = least_first[k]
    return seated
