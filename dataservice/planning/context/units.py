"""Units: what context planning moves around. A unit is one sample, or one pack kept whole.

The kernels of this family share two named tuples: `Units`, the work, and `Setting`, the machine.
"""

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.cost import ContextCost, sequences
from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import algorithm_named
from dataservice.planning.context.seconds import (
    fixed_seconds,
    group_rates,
    group_seconds,
    ring_seconds,
    work_seconds,
)
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.integers import padded_length

Degrees = Literal["any", "power_of_two"]
POWER_OF_TWO: dict[Degrees, bool] = {"any": False, "power_of_two": True}


class Units(NamedTuple):
    """u units of n sequences. Unit i holds sequences offsets[i]:offsets[i+1].

    `samples` int64[n] the caller's index of each sequence; `tokens` int64[n]; `weights`
    float64[n], 1+η; `offsets` int64[u+1]; sums over a unit without padding: `total` int64[u],
    `squares` float64[u] Σ(1+η)s², and `work` float64[u], its replica-seconds at degree 1.
    """

    samples: NDArray[np.int64]
    tokens: NDArray[np.int64]
    weights: NDArray[np.float64]
    offsets: NDArray[np.int64]
    total: NDArray[np.int64]
    squares: NDArray[np.float64]
    work: NDArray[np.float64]


class Setting(NamedTuple):
    """N ranks (replicas), the tokens one of them holds, ranks a node, and the cost model. Once
    groups are `placed`, their ranks no longer change."""

    ranks: int
    memory_tokens: int
    ranks_per_node: int
    power_of_two: bool
    coefficients: NDArray[np.float64]
    placed: bool = False


@leaf
def padded_sums(units: Units, unit: int, degree: int) -> tuple[int, float]:
    """Σs and Σ(1+η)s² of a unit once each sequence is padded to a multiple of 2d."""
    if degree == 1:
        return units.total[unit], units.squares[unit]
    tokens = 0
    squares = 0.0
    for i in range(units.offsets[unit], units.offsets[unit + 1]):
        padded = padded_length(units.tokens[i], degree)
        tokens += padded
        squares += units.weights[i] * float(padded) * float(padded)
    return tokens, squares


@leaf
def degree_seconds(tokens: int, squares: float, degree: int, setting: Setting) -> float:
    """Time of a group; it crosses nodes when it cannot do otherwise."""
    crosses = degree > setting.ranks_per_node
    return group_seconds(float(tokens), squares, degree, crosses, setting.coefficients)


@leaf
def unit_seconds(units: Units, unit: int, degree: int, setting: Setting) -> float:
    """Time of a group that holds this unit alone."""
    tokens, squares = padded_sums(units, unit, degree)
    return degree_seconds(tokens, squares, degree, setting)


@leaf
def next_degree(degree: int, setting: Setting) -> int:
    return 2 * degree if setting.power_of_two else degree + 1


@leaf
def least_degree(units: Units, unit: int, setting: Setting) -> int:
    """The smallest degree whose ranks hold the unit, padding counted; ranks+1 if none does."""
    if units.total[unit] <= setting.memory_tokens:
        return 1  # as most do, told without a division
    degree = 1
    if not setting.power_of_two:
        degree = max(1, -(-units.total[unit] // setting.memory_tokens))
    while degree <= setting.ranks:
        tokens, _ = padded_sums(units, unit, degree)
        if tokens <= setting.memory_tokens * degree:
            return degree
        degree = next_degree(degree, setting)
    return setting.ranks + 1


@kernel
def least_degrees(units: Units, setting: Setting) -> NDArray[np.int64]:
    """`least_degree` of every unit: int64[u]."""
    least = np.empty(units.total.size, np.int64)
    for unit in range(units.total.size):
        least[unit] = least_degree(units, unit, setting)
    return least


@leaf
def ring_floor(units: Units, unit: int, degree: int, setting: Setting) -> float:
    """A time that no degree from `degree` on beats: a ring only slows down as it widens."""
    crosses = degree > setting.ranks_per_node
    ring = ring_seconds(float(units.total[unit]), degree, crosses, setting.coefficients)
    return fixed_seconds(setting.coefficients) + ring


@leaf
def degree_after(units: Units, unit: int, degree: int, target_s: float, setting: Setting) -> int:
    """The next degree after `degree` at which the unit alone may meet the target; ranks+1 if none.

    From there on the ring takes at least what it takes at the next one, so what is left of the
    target must hold the linear work: degrees between have no time for it.
    """
    wider = degree + 1
    left_s = target_s - ring_floor(units, unit, wider, setting)
    if left_s <= 0:
        return setting.ranks + 1
    linear_s = work_seconds(float(units.total[unit]), 0.0, setting.coefficients)
    return max(wider, int(min(linear_s / left_s * (1 - 1e-9), setting.ranks + 1.0)))


@leaf
def wider_degree(degree: int, units: Units, unit: int, budget_s: float, setting: Setting) -> int:
    """The next degree after `degree` at which the unit may fit and end within β₁ + `budget_s`: with
    fewer ranks there is no memory, or no time."""
    wider = next_degree(degree, setting)
    if not setting.power_of_two:
        wider = max(wider, units.total[unit] // setting.memory_tokens)
        wider = max(wider, int(min(units.work[unit] / budget_s * (1 - 1e-12), 1e9)))
    return wider


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


@leaf
def fastest_seconds(
    units: Units, unit: int, least: int, enough_s: float, setting: Setting
) -> float:
    """min_d T(d) of one unit, or any T(d) ≤ `enough_s` as soon as one is met."""
    # The degree that would just be enough without ring and padding is the likeliest to be it.
    budget = enough_s - fixed_seconds(setting.coefficients)
    if budget > 0 and not setting.power_of_two:
        likely = max(least, int(units.work[unit] / budget) + 1)
        if likely <= setting.ranks:
            seconds = unit_seconds(units, unit, likely, setting)
            if seconds <= enough_s:
                return seconds
    best = np.inf
    degree = least
    while degree <= setting.ranks and best > enough_s:
        best = min(best, unit_seconds(units, unit, degree, setting))
        if ring_floor(units, unit, degree, setting) >= best:
            break
        degree = next_degree(degree, setting)
    return best


@kernel
def long_units_s(
    units: Units, least: NDArray[np.int64], short_work_s: float, setting: Setting
) -> NDArray[np.float64]:
    """About min_d T(d) of each unit float64[u], from degrees a sixth apart; 0 for units of one rank
    whose work is short."""
    seconds = np.zeros(units.total.size, np.float64)
    for unit in range(units.total.size):
        if least[unit] == 1 and units.work[unit] <= short_work_s:
            continue
        seconds[unit] = unit_seconds(units, unit, least[unit], setting)
        degree = least[unit]
        while degree < setting.ranks:
            wider = next_degree(degree, setting)
            if not setting.power_of_two:
                wider = min(setting.ranks, max(wider, degree + degree // 6))
            if degree < setting.ranks_per_node:
                wider = min(wider, setting.ranks_per_node)
            degree = wider
            if degree > setting.ranks or ring_floor(units, unit, degree, setting) >= seconds[unit]:
                break
            seconds[unit] = min(seconds[unit], unit_seconds(units, unit, degree, setting))
    return seconds


@kernel
def list_groups(
    group_of: NDArray[np.int64], groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Members int64[u] of every non-empty group end to end, by index, and offsets int64[G+1]."""
    sizes = np.zeros(groups, np.int64)  # int64[groups]
    for group in group_of:
        sizes[group] += 1
    start = np.zeros(groups, np.int64)  # int64[groups]
    offsets = np.zeros(groups + 1, np.int64)  # int64[groups + 1]
    kept = 0
    for group in range(groups):
        if sizes[group] > 0:
            start[group] = offsets[kept]
            offsets[kept + 1] = offsets[kept] + sizes[group]
            kept += 1
    members = np.empty(group_of.size, np.int64)  # int64[u]
    for unit in range(group_of.size):
        members[start[group_of[unit]]] = unit
        start[group_of[unit]] += 1
    return members, offsets[: kept + 1].copy()


@kernel
def unit_sums(
    tokens: NDArray[np.int64], weights: NDArray[np.float64], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Σs int64[u] and Σ(1+η)s² float64[u] of each unit, without padding."""
    total = np.empty(offsets.size - 1, np.int64)
    squares = np.empty(offsets.size - 1, np.float64)
    for unit in range(total.size):
        size = 0
        square = 0.0
        for i in range(offsets[unit], offsets[unit + 1]):
            size += tokens[i]
            square += weights[i] * float(tokens[i]) * float(tokens[i])
        total[unit] = size
        squares[unit] = square
    return total, squares


def make_units(
    tokens: ArrayLike,
    full_attention: ArrayLike | None,
    cost: ContextCost,
    packs: ArrayLike | None = None,
) -> Units:
    """One unit a sample, or one a pack of `packs` int[n] (pack of each sample)."""
    lengths, weights = sequences(tokens, full_attention)
    count = lengths.size
    if packs is None:
        return _assemble(
            np.arange(count), lengths, weights, np.arange(count + 1), cost.coefficients
        )
    pack_of = np.asarray(packs)
    if pack_of.shape != (count,) or (count and pack_of.dtype.kind not in "iu"):
        raise PlanningError(
            f"packs has shape {pack_of.shape} and type {pack_of.dtype} for {count} samples; "
            "give the pack of each sample as an integer"
        )
    if count and pack_of.min() < 0:
        raise PlanningError(f"packs has {pack_of.min()}; every sample needs a pack, 0 or above")
    if count and pack_of.max() > 16 * count + 1024:
        pack_of = np.unique(pack_of, return_inverse=True)[1]  # few packs with large names
    samples, offsets = list_groups(pack_of.astype(np.int64), int(pack_of.max(initial=-1)) + 1)
    return _assemble(samples, lengths[samples], weights[samples], offsets, cost.coefficients)


def plain_units(sizes: NDArray[np.int64], setting: Setting) -> Units:
    """One unit a sample, each attending to what came before it; `sizes` int64[n] in tokens."""
    places = np.arange(sizes.size + 1)
    squares, work = _plain_sums(sizes, setting.coefficients)
    return Units(places[:-1], sizes, np.ones(sizes.size), places, sizes, squares, work)


def weighted_units(
    sizes: NDArray[np.int64], weights: NDArray[np.float64], setting: Setting
) -> Units:
    """One unit a sample of `sizes` int64[n] tokens, and `weights` float64[n] 1+η."""
    places = np.arange(sizes.size + 1)
    return _assemble(places[:-1], sizes, weights, places, setting.coefficients)


@kernel
def _plain_sums(
    sizes: NDArray[np.int64], coefficients: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """s² of each sample, and its replica-seconds: float64[n] each."""
    squares = np.empty(sizes.size, np.float64)
    work = np.empty(sizes.size, np.float64)
    for i in range(sizes.size):
        squares[i] = float(sizes[i]) * float(sizes[i])
        work[i] = work_seconds(float(sizes[i]), squares[i], coefficients)
    return squares, work


def _assemble(
    samples: NDArray[np.int64],
    tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
    offsets: NDArray[np.int64],
    coefficients: NDArray[np.float64],
) -> Units:
    total, squares = unit_sums(tokens, weights, offsets)
    work = _unit_work(total, squares, coefficients)
    return Units(samples, tokens, weights, offsets, total, squares, work)


@kernel
def _unit_work(
    total: NDArray[np.int64], squares: NDArray[np.float64], coefficients: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Replica-seconds float64[u] of each unit from its sums [u]."""
    work = np.empty(total.size, np.float64)
    for unit in range(total.size):
        work[unit] = work_seconds(float(total[unit]), squares[unit], coefficients)
    return work


@kernel
def _gather(units: Units, chosen: NDArray[np.int64]) -> Units:
    count = 0
    for unit in chosen:
        count += units.offsets[unit + 1] - units.offsets[unit]
    samples = np.empty(count, np.int64)
    tokens = np.empty(count, np.int64)
    weights = np.empty(count, np.float64)
    offsets = np.zeros(chosen.size + 1, np.int64)
    end = 0
    for place in range(chosen.size):
        for i in range(units.offsets[chosen[place]], units.offsets[chosen[place] + 1]):
            samples[end] = units.samples[i]
            tokens[end] = units.tokens[i]
            weights[end] = units.weights[i]
            end += 1
        offsets[place + 1] = end
    return Units(
        samples,
        tokens,
        weights,
        offsets,
        units.total[chosen],
        units.squares[chosen],
        units.work[chosen],
    )


def select_units(units: Units, chosen: NDArray[np.int64]) -> Units:
    """The units `chosen` int64[k], in that order."""
    return Units(*_gather(units, chosen))


def make_setting(
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    ranks_per_node: int | None,
    degrees: Degrees,
) -> Setting:
    """Validated machine. Without `ranks_per_node` no group crosses a node."""
    if ranks < 1:
        raise PlanningError(f"ranks is {ranks}; give at least 1 model replica")
    if memory_tokens < 1:
        raise PlanningError(
            f"memory_tokens is {memory_tokens}; a replica must hold at least 1 token: raise it"
        )
    if ranks_per_node is not None and ranks_per_node < 1:
        raise PlanningError(f"ranks_per_node is {ranks_per_node}; give at least 1, or None")
    power_of_two = algorithm_named(POWER_OF_TWO, degrees, "degrees")
    node = int(ranks) if ranks_per_node is None else int(ranks_per_node)
    return Setting(int(ranks), int(memory_tokens), node, power_of_two, cost.coefficients)


def fitting_degrees(units: Units, setting: Setting) -> NDArray[np.int64]:
    """Least degree of each unit int64[u]. Raises PlanningError if one fits no number of ranks."""
    least = least_degrees(units, setting)
    if least.size and least.max() > setting.ranks:
        unit = int(np.argmax(least > setting.ranks))
        raise PlanningError(_too_long(units, unit, setting))
    return least


def _too_long(units: Units, unit: int, setting: Setting) -> str:
    memory = setting.memory_tokens
    # The widest group that there may be.
    ranks = 1 << (setting.ranks.bit_length() - 1) if setting.power_of_two else setting.ranks
    first, last = units.offsets[unit], units.offsets[unit + 1]
    total = int(units.total[unit])
    what = (
        f"sample {units.samples[first]} has {total} tokens"
        if last - first == 1
        else f"the pack of sample {units.samples[first]} has {total} tokens"
    )
    wanted = setting._replace(ranks=1 << 40, ranks_per_node=1 << 40)
    needed = int(least_degree(units, unit, wanted))
    return (
        f"{what}; {ranks} replicas of {memory} tokens hold {ranks * memory} (padding to twice the "
        f"degree included): give {needed} replicas, raise memory_tokens to about "
        f"{-(-total // ranks) + 2 * (last - first)}, or shorten it"
    )
