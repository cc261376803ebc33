"""Degrees of given groups by DHP's 2D dynamic programming (eq. 11).

DP[i][j] = min over d of max(DP[i−1][j−d], T(G_i, d)): the least makespan of the first i groups on
at most j ranks. Kept as the paper's own method and as the reference of the threshold solver.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.planning.context.degrees_threshold import check_times, checked_degrees
from dataservice.planning.kernels.compile import kernel


def degrees_by_dp(times_s: ArrayLike, *, ranks: int) -> NDArray[np.int64]:
    """Degrees int64[G] that minimise the largest time, from `times_s` [G, N] (column d−1 is degree
    d; infinity forbids a degree), with Σ degree ≤ ranks.

    Raises PlanningError if even the least degrees do not fit. O(G·N²).
    """
    times = check_times(times_s, ranks)
    return checked_degrees(solve_dp(times, ranks), times, ranks)


@kernel
def solve_dp(times: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    groups, width = times.shape
    best = np.full((groups + 1, ranks + 1), np.inf)
    choice = np.zeros((groups + 1, ranks + 1), np.int64)
    best[0, :] = -np.inf
    for i in range(1, groups + 1):
        for j in range(1, ranks + 1):
            for d in range(1, min(width, j) + 1):
                value = max(best[i - 1, j - d], times[i - 1, d - 1])
                if value < best[i, j]:
                    best[i, j] = value
                    choice[i, j] = d
    degree = np.zeros(groups, np.int64)
    left = ranks
    for i in range(groups, 0, -1):
        degree[i - 1] = choice[i, left]
        left -= choice[i, left]
    return degree
