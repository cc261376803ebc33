"""Which replica takes which pack of a wave, so that replicas end up with equal sums.

Within a wave all groups of degree 1 may trade places at no cost. Wave by wave, the heaviest
pack goes to the replica that has done least so far (LPT over waves, MMScale Alg. 2 with its
sort mended); with replicas that synchronise only at the end of a step this is what they
wait for, and where they meet in every wave it costs nothing.
"""

from dataclasses import replace

import numpy as np

from dataservice.core.plan import StageReport
from dataservice.planning.context.groups import ContextPlan


def seat_packs(
    waves: tuple[ContextPlan, ...], *, replicas: int
) -> tuple[tuple[ContextPlan, ...], StageReport]:
    """The same waves with their degree-1 groups re-seated, and the largest sum of any replica
    before and after. O(P log P)."""
    before = np.zeros(replicas)
    after = np.zeros(replicas)
    seated = []
    for wave in waves:
        np.add.at(before, wave.ranks, np.repeat(wave.time_s, wave.degrees))
        ranks = wave.ranks.copy()
        single = np.flatnonzero(wave.degrees == 1)
        seats = np.setdiff1d(np.arange(replicas), ranks[np.repeat(wave.degrees > 1, wave.degrees)])
        heaviest_first = single[np.argsort(-wave.time_s[single], kind="stable")]
        least_first = seats[np.argsort(after[seats], kind="stable")]
        ranks[wave.rank_offsets[heaviest_first]] = least_first[: len(single)]
        np.add.at(after, ranks, np.repeat(wave.time_s, wave.degrees))
        seated.append(replace(wave, ranks=ranks))
    total = sum(float((wave.time_s * wave.degrees).sum()) for wave in waves)
    report = StageReport(
        stage="assign",
        algorithm="balanced",
        unit="s",
        before=float(before.max(initial=0.0)),
        after=float(after.max(initial=0.0)),
        lower_bound=total / replicas,
    )
    return tuple(seated), report
