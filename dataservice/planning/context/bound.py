"""Lower bounds of a wave, and of a step's: what no grouping and no degrees can beat."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.seconds import (
    attention_seconds,
    fixed_seconds,
    passing_seconds,
    ring_seconds,
    work_seconds,
)
from dataservice.planning.context.units import (
    Setting,
    Units,
    degree_after,
    fastest_seconds,
    fitting_degrees,
    next_degree,
    padded_sums,
    plain_units,
    unit_seconds,
)
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_descending

_BISECTIONS = 30


def wave_bound(
    units: Units, least: NDArray[np.int64], setting: Setting, rest_work_s: float = 0.0
) -> float:
    """The larger of β₁ + Σwork/N, max_k min_d T_k(d), and the least τ at which the ranks have time
    for the work and for the ring traffic that meeting τ exposes. O(n), and O(n·N) at worst.

    `rest_work_s`: work of short units that are not listed; none is slower alone than the mean or
    longer than all that are.
    """
    return float(_bound(units, least, rest_work_s, setting))


def waves_bound(units: Units, least: NDArray[np.int64], setting: Setting) -> float:
    """The larger of two bounds of the summed makespans: of all units in one wave, and β₁ for each
    more that memory calls for; and of what the unit of most work leaves to the others."""
    waves = -(-int(units.total.sum()) // (setting.ranks * setting.memory_tokens))
    together_s = wave_bound(units, least, setting)
    together_s += (waves - 1) * fixed_seconds(setting.coefficients)
    dense = argsort_descending(units.work / units.total)
    bound_s = max(together_s, float(_beside_heaviest(units, least, dense, setting)))
    if units.tokens.size > units.total.size or (units.weights != 1).any():
        return bound_s
    return max(bound_s, length_bound(np.sort(units.tokens)[::-1].copy(), setting))


def length_bound(sizes: NDArray[np.int64], setting: Setting) -> float:
    """Of samples `sizes` int64[n], which fall, each attending to what came before it: the k slowest
    waves take what the longest sample does, the longest that one wave cannot hold beside all longer
    ones, and so on; the tokens that memory leaves to other waves are at best the lightest, and take
    β₁ a wave and 1/N of their work. The largest sum over all k. O(n + waves·N)."""
    full = setting.ranks * setting.memory_tokens
    held = np.cumsum(sizes)
    left = np.arange(int(held[-1]), -full, -full)  # int64[k + 1], tokens beside the k slowest
    left[-1] = 0
    first = np.searchsorted(held, full * np.arange(left.size - 1), side="right")  # int64[k]
    units = plain_units(sizes[first], setting)
    slowest_s = fastest_each(units, fitting_degrees(units, setting), setting)
    lightest = sizes[::-1].copy()
    work_s = plain_units(lightest, setting).work
    tokens = np.append(0, np.cumsum(lightest))
    left_s = np.interp(left, tokens, np.append(0.0, np.cumsum(work_s))) / setting.ranks
    others_s = -(-left // full) * fixed_seconds(setting.coefficients) + left_s
    return float((np.append(0.0, np.cumsum(slowest_s)) + others_s).max())


@kernel
def fastest_each(units: Units, least: NDArray[np.int64], setting: Setting) -> NDArray[np.float64]:
    """min_d T(d) of each unit alone: float64[u]."""
    seconds = np.empty(least.size, np.float64)
    for unit in range(least.size):
        seconds[unit] = fastest_seconds(units, unit, least[unit], 0.0, setting)
    return seconds


class _Others(NamedTuple):
    """All units but one, those of most work a token first: prefix sums `tokens` int64[u] and
    `work_s` float64[u], and `thin` float64[u−1], work a token with its sign turned, so that it
    rises."""

    tokens: NDArray[np.int64]
    work_s: NDArray[np.float64]
    thin: NDArray[np.float64]


@kernel
def _beside_heaviest(
    units: Units, least: NDArray[np.int64], dense: NDArray[np.int64], setting: Setting
) -> float:
    """Least seconds of all waves, whatever the degree of the heaviest unit; `dense` int64[u] lists
    units by falling work a token. O(u + N·log u)."""
    heaviest = int(np.argmax(units.work))
    others = _Others(np.zeros(dense.size, np.int64), np.zeros(dense.size), np.empty(dense.size - 1))
    count = 0
    for unit in dense:
        if unit != heaviest:
            others.tokens[count + 1] = others.tokens[count] + units.total[unit]
            others.work_s[count + 1] = others.work_s[count] + units.work[unit]
            others.thin[count] = -units.work[unit] / units.total[unit]
            count += 1
    best = np.inf
    degree = least[heaviest]
    while degree <= setting.ranks:
        best = min(best, _beside_one(units, heaviest, degree, others, setting))
        degree = next_degree(degree, setting)
    return best


@kernel
def _beside_one(units: Units, unit: int, degree: int, others: _Others, setting: Setting) -> float:
    """Least seconds of all waves where the unit has `degree` ranks, d.

    The rank time of all waves holds all work and what the unit's ring wastes. And its own wave
    takes T(d), more with each token that joins it; the other N−d ranks hold their memory of the
    densest units at best, and what is left is in other waves, β₁ each and 1/N of its work.
    """
    base, linear = fixed_seconds(setting.coefficients), work_seconds(1.0, 0.0, setting.coefficients)
    crosses = degree > setting.ranks_per_node
    ringed = linear + passing_seconds(degree, crosses, setting.coefficients)
    tokens, squares = padded_sums(units, unit, degree)
    hops_s = degree * ring_seconds(0.0, degree, crosses, setting.coefficients)
    # Rank-seconds without β₁, of which each token that joins adds `linear` and `ringed`.
    attending_s = work_seconds(float(tokens), squares, setting.coefficients)
    passing_s = ringed * tokens + hops_s
    most = float(degree * setting.memory_tokens - tokens)  # tokens that may join
    hiding = min(float(_tokens_above(others, ringed)), most)
    hidden_s = _densest_s(others, hiding) - ringed * hiding
    work_s = units.work[unit] + others.work_s[-1]
    even_s = (work_s + max(0.0, passing_s - units.work[unit] - hidden_s)) / setting.ranks
    full = setting.ranks * setting.memory_tokens
    room = (setting.ranks - degree) * setting.memory_tokens
    left = max(0, others.tokens[-1] - room)
    fewest = -(-(units.total[unit] + others.tokens[-1]) // full)
    share = setting.ranks / degree
    # What takes longer by joining is convex, and so is what is left: the least is where one of its
    # two slopes ends, or where they meet.
    meeting = (attending_s - passing_s) / (ringed - linear) if ringed > linear else most
    slopes_end = (
        float(_tokens_above(others, share * linear) - room),
        float(_tokens_above(others, share * ringed) - room),
    )
    best = np.inf
    for more in range(max(0, -(-left // full) - 1), -(-left // full) + 1):
        must = float(max(0, left - more * full))  # tokens that join, for so few waves
        if must > most:
            continue
        waves_s = max(fewest, more + 1) * base
        for joining in (must, meeting, slopes_end[0], slopes_end[1]):
            joined = min(max(joining, must), most)
            own_s = max(attending_s + linear * joined, passing_s + ringed * joined) / degree
            left_s = others.work_s[-1] - _densest_s(others, room + joined)
            best = min(best, waves_s + max(even_s, own_s + left_s / setting.ranks))
    return best


@kernel
def _densest_s(others: _Others, tokens: float) -> float:
    """Work of so many of the densest tokens, the last unit in part."""
    held = np.searchsorted(others.tokens, tokens, side="right") - 1
    work_s = others.work_s[held]
    if held < others.thin.size:
        work_s -= others.thin[held] * (tokens - others.tokens[held])
    return float(work_s)


@kernel
def _tokens_above(others: _Others, work_s: float) -> int:
    """Tokens of all units with more work than that a token."""
    return int(others.tokens[np.searchsorted(others.thin, -work_s)])


@kernel
def _bound(units: Units, least: NDArray[np.int64], rest_work_s: float, setting: Setting) -> float:
    work_s = units.work.sum() + rest_work_s
    base = fixed_seconds(setting.coefficients)
    low = float(base + work_s / setting.ranks)
    for unit in range(units.total.size):
        if least[unit] > 1 or units.work[unit] + base > low:
            low = max(low, fastest_seconds(units, unit, least[unit], low, setting))
    intensity = _intensity(units, setting)
    if _ranks_suffice(units, least, work_s, intensity, low, setting):
        return low
    high = 2 * low
    while not _ranks_suffice(units, least, work_s, intensity, high, setting):
        low = high
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _ranks_suffice(units, least, work_s, intensity, middle, setting):
            high = middle
        else:
            low = middle
    return low


@kernel
def _intensity(units: Units, setting: Setting) -> float:
    """Most attention seconds a token of any sequence brings to hide the ring behind."""
    most = 0.0
    for i in range(units.tokens.size):
        most = max(most, units.weights[i] * float(units.tokens[i]))
    return attention_seconds(most, setting.coefficients)


@kernel
def _ranks_suffice(
    units: Units,
    least: NDArray[np.int64],
    work_s: float,
    intensity: float,
    tau: float,
    setting: Setting,
) -> bool:
    """Is there rank time for all work at makespan τ?

    A unit too slow for τ alone needs n = min{d : T(d) ≤ τ} ranks at least, and each of its tokens
    then costs its ring q(d) = (d−1)·rate ≥ q(n) rank-seconds, hidden behind attention as far as
    there is any. Where q(n) exceeds the most attention any token has, nothing that shares the
    group can hide the rest, so each such unit exposes q(n)·tokens − attention at least.
    """
    base = fixed_seconds(setting.coefficients)
    have = (tau - base) * setting.ranks
    exposed = 0.0
    for unit in range(units.total.size):
        if least[unit] == 1 and units.work[unit] + base <= tau:
            continue
        degree = max(least[unit], int(units.work[unit] / (tau - base) * (1 - 1e-12)))
        while degree <= setting.ranks and unit_seconds(units, unit, degree, setting) > tau:
            degree = degree_after(units, unit, degree, tau, setting)
        if degree > setting.ranks:
            return False
        crosses = degree > setting.ranks_per_node
        per_token = passing_seconds(degree, crosses, setting.coefficients)
        if per_token > intensity:
            attention = attention_seconds(units.squares[unit], setting.coefficients)
            exposed += per_token * float(units.total[unit]) - attention
    return bool(work_s + exposed <= have * (1 + 1e-9))
