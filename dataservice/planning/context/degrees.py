"""Degrees of given groups, exactly and in microseconds: raise the slowest group.

need_g(τ) = min{d : T_g(d) ≤ τ}; a makespan τ is possible iff Σ need_g(τ) ≤ N. Start every group
at its least degree and move the slowest one to its next degree that is faster than it is now,
until the ranks run out: each group then stands at need_g of the best τ, whatever the shape of T.
The same makespan as DHP's 2D dynamic
programming (eq. 11), which stands beside it as the paper's own method and as a reference:
DP[i][j] = min over d of max(DP[i−1][j−d], T(G_i, d)), the least makespan of the first i groups on
at most j ranks.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.context.units import (
    Setting,
    Units,
    degree_seconds,
    next_degree,
    padded_sums,
)
from dataservice.planning.invariants import require
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import heap_sift_down


def degrees_by_threshold(times_s: ArrayLike, *, ranks: int) -> NDArray[np.int64]:
    """Degrees int64[G] that minimise the largest time, from `times_s` [G, N] (column d−1 is degree
    d; infinity forbids a degree), with Σ degree ≤ ranks. No group is wider than it needs to be.

    Raises PlanningError if even the least degrees do not fit. O(G·N), less when few are raised.
    """
    times = check_times(times_s, ranks)
    return checked_degrees(_raise_from_table(times, ranks), times, ranks)


def checked_degrees(
    degrees: NDArray[np.int64], times: NDArray[np.float64], ranks: int
) -> NDArray[np.int64]:
    """`degrees` int64[G], if they fit the ranks and the table [G, N] allows each."""
    fit = int(degrees.sum()) <= ranks and int(degrees.min(initial=1)) >= 1
    require(fit, f"degrees of {int(degrees.sum())} are not within {ranks} ranks")
    chosen = times[np.arange(degrees.size), degrees - 1]
    require(bool(np.isfinite(chosen).all()), "a group has a degree that its times forbid")
    return degrees


def check_times(times_s: ArrayLike, ranks: int) -> NDArray[np.float64]:
    """The table as float64[G, N], each group with a degree and their least sum within `ranks`."""
    times = np.asarray(times_s, dtype=np.float64)
    if times.ndim != 2 or np.isnan(times).any():
        raise PlanningError(
            f"times_s has shape {times.shape} or holds NaN; give seconds [groups, degrees]"
        )
    times = np.ascontiguousarray(times[:, : max(ranks, 0)])
    finite = np.isfinite(times)
    allowed = finite.any(axis=1)
    least = int((finite.argmax(axis=1) + 1).sum()) if times.size else 0
    if not allowed.all() or least > ranks:
        wanting = np.flatnonzero(~allowed)
        raise PlanningError(
            f"{times.shape[0]} groups need {least} ranks and there are {ranks}; "
            + (f"group {wanting[0]} has no allowed degree; " if wanting.size else "")
            + "form smaller groups or give more ranks"
        )
    return times


@kernel
def _raise_from_table(times: NDArray[np.float64], ranks: int) -> NDArray[np.int64]:
    groups, width = times.shape
    degree = np.empty(groups, np.int64)
    keys = np.empty(groups, np.float64)
    ids = np.arange(groups)
    spare = ranks
    for g in range(groups):
        d = 1
        while np.isinf(times[g, d - 1]):
            d += 1
        degree[g] = d
        keys[g] = -times[g, d - 1]  # a min-heap of negated times gives the slowest
        spare -= d
    for start in range(groups // 2 - 1, -1, -1):
        heap_sift_down(keys, ids, groups, start)
    while groups > 0:
        g = ids[0]
        d = degree[g] + 1
        while d <= width and times[g, d - 1] >= -keys[0]:
            d += 1
        if d > width or d - degree[g] > spare:
            break
        spare -= d - degree[g]
        degree[g] = d
        keys[0] = -times[g, d - 1]
        heap_sift_down(keys, ids, groups, 0)
    return degree


@leaf
def member_sums(
    units: Units, members: NDArray[np.int64], start: int, end: int, degree: int
) -> tuple[int, float]:
    """Padded Σs and Σ(1+η)s² of the group of members[start:end] at a degree."""
    tokens = 0
    squares = 0.0
    for place in range(start, end):
        unit_tokens, unit_squares = padded_sums(units, members[place], degree)
        tokens += unit_tokens
        squares += unit_squares
    return tokens, squares


@kernel
def raise_degrees(
    units: Units, members: NDArray[np.int64], offsets: NDArray[np.int64], setting: Setting
) -> NDArray[np.int64]:
    """`degrees_by_threshold` of groups members[offsets[g]:offsets[g+1]], working out only the times
    it looks at. Least degrees that do not fit the ranks are returned as they are."""
    groups = offsets.size - 1
    degree = np.empty(groups, np.int64)
    keys = np.empty(groups, np.float64)
    ids = np.arange(groups)
    spare = setting.ranks
    for g in range(groups):
        d = 1
        while True:
            tokens, squares = member_sums(units, members, offsets[g], offsets[g + 1], d)
            if tokens <= setting.memory_tokens * d or d > setting.ranks:
                break
            d = next_degree(d, setting)
        degree[g] = d
        keys[g] = -degree_seconds(tokens, squares, d, setting)
        spare -= d
    for start in range(groups // 2 - 1, -1, -1):
        heap_sift_down(keys, ids, groups, start)
    while groups > 0 and spare > 0:
        g = ids[0]
        d = next_degree(degree[g], setting)
        faster = np.inf
        while d - degree[g] <= spare:
            tokens, squares = member_sums(units, members, offsets[g], offsets[g + 1], d)
            faster = degree_seconds(tokens, squares, d, setting)
            if faster < -keys[0] and tokens <= setting.memory_tokens * d:
                break
            d = next_degree(d, setting)
        if d - degree[g] > spare:
            break
        spare -= d - degree[g]
        degree[g] = d
        keys[0] = -faster
        heap_sift_down(keys, ids, groups, 0)
    return degree


@kernel
def time_table(
    units: Units, members: NDArray[np.int64], offsets: NDArray[np.int64], setting: Setting
) -> NDArray[np.float64]:
    """T [G, N] of groups at every degree, infinity where memory or the setting forbids it."""
    groups = offsets.size - 1
    times = np.full((groups, setting.ranks), np.inf)
    for g in range(groups):
        d = 1
        while d <= setting.ranks:
            tokens, squares = member_sums(units, members, offsets[g], offsets[g + 1], d)
            if tokens <= setting.memory_tokens * d:
                times[g, d - 1] = degree_seconds(tokens, squares, d, setting)
            d = next_degree(d, setting)
    return times


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
