"""All groups of so many waves at the levels that they can reach: opened, filled, traded between.

With many samples the short ones are a fluid that fills whatever the long ones leave. The first k
waves last τ₀, the other W − k last τ₁ ≤ τ₀; samples slower than τ₀ alone are widened to meet it,
and all of these are in the first k waves:

    Σ need(τ₀) ≤ k·N     and     Σ work + exposed ring ≤ N·(k·(τ₀ − β₁) + (W − k)·(τ₁ − β₁))

One level for all waves (k = W) is the simplest. Two serve where a ring makes samples slow however
wide they are, and where a replica of short samples runs out of memory before it has worked for τ₀.

Shapes as in `many`: n samples, known by their place when sorted longest first; u of them are
`long`, by falling work, and `least` int64[u] are their least degrees; G groups, of which the first
`anchors` were opened by the samples of the same places; L groups that hold anything. `work_s` is
that of all samples, short ones too, in replica-seconds at degree 1.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.many_fill import (
    Groups,
    fill,
    list_members,
    put,
    put_all,
    trade,
)
from dataservice.planning.context.many_waves import (
    WIDE_SHARES,
    Answer,
    deal,
    list_groups_widest,
)
from dataservice.planning.context.seconds import fixed_seconds, group_rates, work_seconds
from dataservice.planning.context.units import Setting, Units, longest_within, wider_degree
from dataservice.planning.kernels.compile import kernel, leaf

_BISECTIONS = 24
_CLOSE = 2e-4
# Shares of the even level that are tried for the first waves.
_LEVELS = (1.0, 1.01, 1.02, 1.03, 1.05, 1.07, 1.1, 1.15, 1.2, 1.3, 1.45, 1.65, 1.9, 2.3, 3.0, 4.0)
_TRADED_ENOUGH = 1.003  # slowest to mean group of one rank at which trading ends
_TRADE_ROUNDS = 3


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
        wide = wider_degree(wide, long, unit, budget_s, setting)
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


def level_groups(
    sizes: NDArray[np.int64], target: Target, waves: int, setting: Setting
) -> Answer | None:
    """The groups of a target and their waves, or None where memory or ranks do not allow it."""
    groups, anchors = _open_groups(sizes, target, waves, setting)
    group_of = fill(sizes, anchors, groups, setting)  # int32[n − anchors]
    if group_of.size and group_of[-1] < 0:
        return None
    # int64[n − anchors], int64[G + 1]; an anchor's own sample is not among its members
    members, begins = list_members(group_of, groups.degree.size)
    members += anchors  # places among all n samples from here on
    single = np.arange(anchors, groups.degree.size)  # int64[G − anchors]
    trade(sizes, members, begins, single, _TRADE_ROUNDS, _TRADED_ENOUGH, groups, setting)
    listed = list_groups_widest(groups)  # int64[L]
    wave_of = deal(listed, groups, target.slow_waves, waves, WIDE_SHARES[0], setting)  # int64[L]
    if wave_of.size and wave_of.min() < 0:
        return None
    return Answer(
        total_s=float(_total_seconds(listed, wave_of, waves, groups)),
        waves=waves,
        slow_waves=target.slow_waves,
        groups=groups,
        anchors=anchors,
        members=members,
        begins=begins,
        listed=listed,
        wave_of=wave_of,
    )


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


@kernel
def _total_seconds(
    listed: NDArray[np.int64], wave_of: NDArray[np.int64], waves: int, groups: Groups
) -> float:
    """Sum over waves of their slowest groups; `listed` int64[L], and the wave of each int64[L]."""
    slowest = np.zeros(waves)  # float64[waves], seconds
    for at in range(listed.size):
        slowest[wave_of[at]] = max(slowest[wave_of[at]], groups.time_s[listed[at]])
    return float(slowest.sum())


@leaf
def count_long(sizes: NDArray[np.int64], work_s: float, waves: int, setting: Setting) -> int:
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


def node_groups(
    sizes: NDArray[np.int64], least: NDArray[np.int64], setting: Setting
) -> Answer | None:
    """One wave of groups of whole nodes, so that no ring crosses nodes that does not have to; None
    where they do not hold the samples. `least` int64[n] are their least degrees."""
    node = setting.ranks_per_node
    if setting.power_of_two and node & (node - 1):
        return None
    anchors = int(np.count_nonzero(least > node))
    wide = -(-least[:anchors] // node) * node
    nodes, left = divmod(setting.ranks - int(wide.sum()), node)
    if nodes < 0 or (setting.power_of_two and (wide & (wide - 1)).any()):
        return None
    degree = np.concatenate([wide, np.full(nodes, node), np.ones(left, np.int64)])  # int64[G]
    nothing = np.zeros(degree.size, np.int64)
    fixed_s = np.full(degree.size, fixed_seconds(setting.coefficients))
    groups = Groups(degree, nothing, nothing.astype(np.float64), fixed_s, np.zeros(degree.size))
    put_all(sizes[:anchors], np.arange(anchors, dtype=np.int32), groups, setting)
    group_of = fill(sizes, anchors, groups, setting)
    if group_of.size and group_of[-1] < 0:
        return None
    members, begins = list_members(group_of, degree.size)
    listed = list_groups_widest(groups)
    return Answer(
        total_s=float(groups.time_s[listed].max()),
        waves=1,
        slow_waves=1,
        groups=groups,
        anchors=anchors,
        members=members + anchors,
        begins=begins,
        listed=listed,
        wave_of=np.zeros(listed.size, np.int64),
    )
