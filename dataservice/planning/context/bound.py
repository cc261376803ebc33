"""Lower bounds of a wave: what no grouping and no degrees can beat."""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.seconds import (
    attention_seconds,
    fixed_seconds,
    passing_seconds,
)
from dataservice.planning.context.units import (
    Setting,
    Units,
    degree_after,
    fastest_seconds,
    unit_seconds,
)
from dataservice.planning.kernels.compile import kernel

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
