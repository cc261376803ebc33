"""How long the waves of a step take when short samples are a fluid, and how wide long ones are.

With many samples the short ones fill whatever the long ones leave. The first k waves last τ₀, the
other W − k last τ₁ ≤ τ₀; samples slower than τ₀ alone are widened to meet it, and all of these are
in the first k waves:

    Σ need(τ₀) ≤ k·N     and     Σ work + exposed ring ≤ N·(k·(τ₀ − β₁) + (W − k)·(τ₁ − β₁))

One level for all waves (k = W) is the simplest. Two serve where a ring makes samples slow however
wide they are, and where a replica of short samples runs out of memory before it has worked for τ₀.

Shapes: W waves of N ranks; u units are `long`, by falling work; `least` int64[u] are their least
degrees. `work_s` is that of all samples, short ones too, in replica-seconds at degree 1.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.seconds import fixed_seconds, group_rates
from dataservice.planning.context.units import Setting, Units, next_degree
from dataservice.planning.kernels.compile import kernel, leaf

_BISECTIONS = 24
_CLOSE = 2e-4
# Shares of the even level that are tried for the first waves.
_LEVELS = (1.0, 1.01, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.45, 1.65, 1.9, 2.3, 3.0, 4.0)


class Target(NamedTuple):
    """The first `slow_waves` last `slow_s`, the others `fast_s`; `degree` int64[u] of each long
    unit; whether it all `fits` the ranks."""

    slow_s: float
    fast_s: float
    slow_waves: int
    degree: NDArray[np.int64]
    fits: bool


def total_seconds(target: Target, waves: int) -> float:
    """What all waves are meant to take."""
    return target.slow_waves * target.slow_s + (waves - target.slow_waves) * target.fast_s


@kernel
def one_level(
    long: Units, least: NDArray[np.int64], work_s: float, waves: int, setting: Setting
) -> Target:
    """The least τ, to within its bisection, at which `waves` equal waves hold `work_s` of work.

    `long` holds at least every unit that is slower than β₁ + work_s/(waves·N) or needs more than
    one rank, longest first; `least` int64[u] their least degrees. O(u · bisections).
    """
    low = fixed_seconds(setting.coefficients) + work_s / (waves * setting.ranks)
    target = _level(long, least, work_s, waves, low, setting)
    high = low
    if least.sum() - np.count_nonzero(least == 1) > waves * setting.ranks:
        return target  # memory allows no level
    while not target.fits and high < 1e9 * (low + 1):
        low = high
        high *= 1.25
        target = _level(long, least, work_s, waves, high, setting)
    # From here on `target` is that of `high`; `low` does not fit, unless the two are the same.
    for _ in range(_BISECTIONS):
        if high - low <= _CLOSE * high:
            break
        middle = (low + high) / 2
        trial = _level(long, least, work_s, waves, middle, setting)
        if trial.fits:
            high = middle
            target = trial
        else:
            low = middle
    return target


@kernel
def two_levels(
    long: Units,
    least: NDArray[np.int64],
    work_s: float,
    waves: int,
    most_fast_s: float,
    setting: Setting,
) -> Target:
    """The two levels of the least sum whose lower one is at most `most_fast_s`; of sums as good,
    those of the lower upper level."""
    base = fixed_seconds(setting.coefficients)
    even_s = base + work_s / (waves * setting.ranks)
    # Nothing found yet: infinite levels, and a degree int64[u] that nothing reads.
    best = Target(np.inf, np.inf, waves, np.ones(least.size, np.int64), False)
    best_s = np.inf
    for share in _LEVELS:
        slow_s = share * even_s
        degree, slots, exposed_s = widths(long, least, slow_s, setting)
        all_s = (work_s + exposed_s) / setting.ranks  # of each rank over all waves, without β₁
        alone = 0  # units of one rank that the fast waves have no time for
        for slow_waves in range(max(1, -(-slots // setting.ranks)), waves):
            fast_s = base + (all_s - slow_waves * (slow_s - base)) / (waves - slow_waves)
            if fast_s > min(most_fast_s, slow_s):
                continue
            # What is slower than the other waves needs a rank of the first ones.
            for unit in range(least.size):
                alone += degree[unit] == 1 and long.work[unit] + base > fast_s
            total_s = slow_waves * slow_s + (waves - slow_waves) * fast_s
            enough = slots + alone <= slow_waves * setting.ranks and fast_s > base
            if enough and total_s < best_s * (1 - 1e-3):
                best = Target(slow_s, fast_s, slow_waves, degree, True)
                best_s = total_s
            break  # only the fewest slow waves whose lower level is low enough are tried
    return best


@kernel
def _level(
    long: Units,
    least: NDArray[np.int64],
    work_s: float,
    waves: int,
    level_s: float,
    setting: Setting,
) -> Target:
    """All waves at `level_s`, and whether ranks and time are enough."""
    degree, slots, exposed_s = widths(long, least, level_s, setting)
    room_s = waves * (level_s - fixed_seconds(setting.coefficients)) * setting.ranks
    fits = slots <= waves * setting.ranks and work_s + exposed_s <= room_s * (1 + 1e-12)
    return Target(level_s, level_s, waves, degree, fits)


@kernel
def widths(
    long: Units, least: NDArray[np.int64], level_s: float, setting: Setting
) -> tuple[NDArray[np.int64], int, float]:
    """Least degree of each long unit that meets the level int64[u], their sum over those that do
    not meet it alone, and the rank-seconds that their rings expose. The sum is 2⁴⁰,
    more than any number of ranks, where no degree meets the level. O(u)."""
    degree = np.ones(least.size, np.int64)  # int64[u]
    slots = 0
    exposed_s = 0.0
    unit = least.size - 1
    longest = longest_within(1, level_s, setting)
    while unit >= 0 and long.total[unit] <= longest:
        unit -= 1  # on one rank
    budget_s = level_s - fixed_seconds(setting.coefficients)
    wide = 1
    while unit >= 0:
        wide = next_degree(wide, setting)
        if not setting.power_of_two:  # with fewer ranks there is no memory, or no time
            wide = max(wide, long.total[unit] // setting.memory_tokens)
            wide = max(wide, int(min(long.work[unit] / budget_s * (1 - 1e-12), 1e9)))
        rates = group_rates(wide, wide > setting.ranks_per_node, setting.coefficients)
        # A ring only slows down as it widens.
        ring_s = rates.ring * float(long.total[unit]) + rates.hops
        if wide > setting.ranks or ring_s > budget_s:
            return degree, 1 << 40, exposed_s
        longest = longest_within(wide, level_s, setting)
        while unit >= 0 and long.total[unit] <= longest:
            tokens, squares = float(long.total[unit]), long.squares[unit]
            ring_s = rates.ring * tokens + rates.hops
            exposed_s += max(0.0, ring_s - rates.attention * squares) * wide
            degree[unit] = wide
            slots += wide
            unit -= 1
    return degree, slots, exposed_s


@leaf
def longest_within(degree: int, level_s: float, setting: Setting) -> int:
    """Tokens of the longest sample that so many ranks hold and compute within the level, alone and
    without full attention; 0 where none is short enough."""
    rates = group_rates(degree, degree > setting.ranks_per_node, setting.coefficients)
    budget_s = level_s - rates.fixed
    if budget_s <= 0:
        return 0
    longest = float(setting.memory_tokens * degree)
    slowest_s = rates.linear * longest + max(
        rates.attention * longest * longest, rates.ring * longest + rates.hops
    )
    if slowest_s > budget_s:
        # linear·s + ring·s + hops and linear·s + attention·s² are within the budget.
        if (rates.linear + rates.ring) * longest + rates.hops > budget_s:
            longest = (budget_s - rates.hops) / (rates.linear + rates.ring)
        if (rates.linear + rates.attention * longest) * longest > budget_s:
            root = math.sqrt(rates.linear * rates.linear + 4 * rates.attention * budget_s)
            longest = 2 * budget_s / (rates.linear + root)
    chunk = 2 * degree if degree > 1 else 1
    return max(0, int(longest * (1 + 1e-12))) // chunk * chunk
