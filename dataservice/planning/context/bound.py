"""Lower bounds of a wave, and of a step's: what no grouping and no degrees can beat."""

from typing import NamedTuple, TypeVar

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
    longest_within,
    next_degree,
    padded_sums,
    plain_units,
    unit_seconds,
    wider_degree,
)
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_descending, argsort_falling

_BISECTIONS = 30
# Between the times of a wave that are looked at, as a share; more by as often as ranks are so many.
_STEP = 0.002
_MANY_RANKS = 512

Number = TypeVar("Number", np.int64, np.float64)


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
    more that memory calls for; and of what the units of most work leave to the others."""
    waves = -(-int(units.total.sum()) // (setting.ranks * setting.memory_tokens))
    plain = units.tokens.size == units.total.size and bool((units.weights == 1).all())
    if plain and (units.tokens[1:] > units.tokens[:-1]).any():
        falling = argsort_falling(units.tokens)
        units, least = plain_units(units.tokens[falling], setting), least[falling]
    together_s = wave_bound(units, least, setting)
    together_s += (waves - 1) * fixed_seconds(setting.coefficients)
    dense = _densest(units)
    bound_s = max(together_s, float(_beside_heaviest(units, setting, dense, together_s)))
    return max(bound_s, length_bound(units, setting)) if plain else bound_s


def length_bound(units: Units, setting: Setting) -> float:
    """Of units that are one sample each, longest first, attending to what came before it: the k
    slowest waves take what the longest sample does, the longest that one wave cannot hold beside
    all longer ones, and so on; the tokens that memory leaves to other waves are at best the
    lightest, and take β₁ a wave and 1/N of their work. The largest sum over all k. O(n + waves·N).
    """
    full = setting.ranks * setting.memory_tokens
    held = _prefix_sums(units.total)  # int64[n + 1], tokens of the longest
    held_s = _prefix_sums(units.work)  # float64[n + 1], their work
    waves = -(-int(held[-1]) // full)
    slow = np.minimum(full * np.arange(waves + 1), held[-1])  # int64[k + 1], in the k slowest waves
    first = np.searchsorted(held, slow[:-1], side="right") - 1  # int64[k]
    longest = plain_units(units.tokens[first], setting)
    slowest_s = fastest_each(longest, fitting_degrees(longest, setting), setting)
    left_s = (held_s[-1] - np.interp(slow, held, held_s)) / setting.ranks
    others_s = np.arange(waves, -1, -1) * fixed_seconds(setting.coefficients) + left_s
    return float((_prefix_sums(slowest_s) + others_s).max())


@kernel
def fastest_each(units: Units, least: NDArray[np.int64], setting: Setting) -> NDArray[np.float64]:
    """min_d T(d) of each unit alone: float64[u]."""
    seconds = np.empty(least.size, np.float64)
    for unit in range(least.size):
        seconds[unit] = fastest_seconds(units, unit, least[unit], 0.0, setting)
    return seconds


class _Dense(NamedTuple):
    """All units, those of most work a token first: prefix sums `tokens` int64[u + 1] and `work_s`
    float64[u + 1], and `thin` float64[u], work a token with its sign turned, so that it rises."""

    tokens: NDArray[np.int64]
    work_s: NDArray[np.float64]
    thin: NDArray[np.float64]


def _densest(units: Units) -> _Dense:
    total, work = units.total, units.work
    thin = -(work / total)
    if (thin[1:] < thin[:-1]).any():  # samples that fall in length do so in this, too
        falling = argsort_descending(-thin)
        total, work, thin = total[falling], work[falling], thin[falling]
    return _Dense(_prefix_sums(total), _prefix_sums(work), thin)


def _prefix_sums(values: NDArray[Number]) -> NDArray[Number]:
    """Sums of the first 0 … n values: [n + 1]."""
    sums = np.zeros(values.size + 1, values.dtype)
    np.cumsum(values, out=sums[1:])
    return sums


class _Shared(NamedTuple):
    """A group that holds certain units of `own` tokens, by its degree float64[N + 1]: rank-seconds
    without β₁ as long as attention hides the ring (`attending_s`) and where it does not
    (`passing_s`), infinite where it has no room; what a token more adds to the latter (`ringed`),
    and how many more have room."""

    own: float
    attending_s: NDArray[np.float64]
    passing_s: NDArray[np.float64]
    ringed: NDArray[np.float64]
    room: NDArray[np.float64]


@kernel
def _beside_heaviest(units: Units, setting: Setting, dense: _Dense, enough_s: float) -> float:
    """Least seconds of all waves, whatever the wave of the heaviest unit takes: τ, in small steps;
    or a lower bound of no more than `enough_s`, as soon as one is met.

    In τ the unit has a degree with T(d) ≤ τ. Its ring wastes rank time, the more the shorter τ is.
    And its ranks hold no more of other units than τ leaves time for, nor do those of the next
    heaviest: the wave holds the densest units at best, less what is lost there. The rest is in
    other waves, β₁ each and 1/N of its work. O(u + steps·N).
    """
    base, ranks = fixed_seconds(setting.coefficients), setting.ranks
    heaviest = int(np.argmax(units.work))
    alone = _shared(units, np.array([heaviest]), setting)
    following = _next_heaviest(units, heaviest)
    other = _shared(units, following, setting)
    both = _shared(units, np.append(following, heaviest), setting)
    total, work_s = float(dense.tokens[-1]), dense.work_s[-1]
    full = float(ranks * setting.memory_tokens)
    least_left_s = np.ceil(max(0.0, total - full) / full) * base
    least_left_s += (work_s - _densest_s(dense, full)) / ranks
    own_s = base + np.maximum(alone.attending_s[1:], alone.passing_s[1:]) / np.arange(1, ranks + 1)
    best = np.inf
    low = own_s.min()
    while best > enough_s * (1 + 1e-9) and low + least_left_s < best:
        most = low * (1 + _STEP * max(1, ranks // _MANY_RANKS))
        high = low
        for seconds in own_s:  # below T(d), that degree is too slow
            if high < seconds <= most:
                high = seconds
        high = most if high == low else high
        within_s = (high - base) * (1 - 1e-12)
        lost = _lost(alone, within_s, setting)
        if lost < np.inf:
            held_s = _densest_s(dense, full - lost)
            for unit in following:  # in the wave, in a group of its own or not, or in another
                also = min(lost + _lost(other, within_s, setting), _lost(both, within_s, setting))
                without_s = _densest_s(dense, full - lost + other.own) - units.work[unit]
                held_s = max(_densest_s(dense, full - also), without_s)
            more = np.ceil(max(0.0, total - full + lost) / full)
            even_s = (work_s + _wasted(units.work[heaviest], alone, dense, within_s)) / ranks
            left_s = (work_s - held_s) / ranks
            best = min(best, more * base + max(base + even_s, low + left_s))
        low = high
    return best


@kernel
def _next_heaviest(units: Units, heaviest: int) -> NDArray[np.int64]:
    """The unit of most work but one, int64[1]; none of a single unit."""
    second = -1
    for unit in range(units.work.size):
        if unit != heaviest and (second < 0 or units.work[unit] > units.work[second]):
            second = unit
    return np.full(min(1, units.work.size - 1), second)


@kernel
def _shared(units: Units, chosen: NDArray[np.int64], setting: Setting) -> _Shared:
    """A group of the units `chosen`."""
    linear = work_seconds(1.0, 0.0, setting.coefficients)
    shared = _Shared(
        float(units.total[chosen].sum()),
        np.full(setting.ranks + 1, np.inf),
        np.full(setting.ranks + 1, np.inf),
        np.full(setting.ranks + 1, np.inf),
        np.zeros(setting.ranks + 1),
    )
    degree = 1
    while degree <= setting.ranks:
        tokens, squares = 0, 0.0
        for unit in chosen:
            unit_tokens, unit_squares = padded_sums(units, unit, degree)
            tokens += unit_tokens
            squares += unit_squares
        room = degree * setting.memory_tokens - tokens
        if room >= 0:
            crosses = degree > setting.ranks_per_node
            ringed = linear + passing_seconds(degree, crosses, setting.coefficients)
            hops_s = degree * ring_seconds(0.0, degree, crosses, setting.coefficients)
            shared.attending_s[degree] = work_seconds(float(tokens), squares, setting.coefficients)
            shared.passing_s[degree] = ringed * tokens + hops_s
            shared.ringed[degree] = ringed
            shared.room[degree] = room
        degree = next_degree(degree, setting)
    return shared


@leaf
def _lost(shared: _Shared, within_s: float, setting: Setting) -> float:
    """Tokens that the group's ranks have memory and no time for, at the degree that loses least;
    infinite where no degree is fast enough."""
    linear = work_seconds(1.0, 0.0, setting.coefficients)
    least = np.inf
    for degree in range(1, setting.ranks + 1):
        left_s = degree * within_s - shared.attending_s[degree]
        pass_s = degree * within_s - shared.passing_s[degree]
        if left_s < 0 or pass_s < 0:
            continue
        join = shared.room[degree]
        if join * linear > left_s:
            join = left_s / linear
        if join * shared.ringed[degree] > pass_s:
            join = pass_s / shared.ringed[degree]
        least = min(least, degree * setting.memory_tokens - shared.own - join)
    return float(least)


@leaf
def _wasted(work_s: float, alone: _Shared, dense: _Dense, within_s: float) -> float:
    """Rank-seconds that the ring of a unit of `work_s` is not hidden, at the degree that wastes
    least: what joins the group hides a part where it attends for longer than its own ring takes."""
    least = np.inf
    for degree in range(1, alone.room.size):
        if max(alone.attending_s[degree], alone.passing_s[degree]) <= degree * within_s:
            ringed = alone.ringed[degree]
            hiding = min(
                float(dense.tokens[np.searchsorted(dense.thin, -ringed)]), alone.room[degree]
            )
            hidden_s = _densest_s(dense, hiding) - ringed * hiding
            least = min(least, max(0.0, alone.passing_s[degree] - work_s - hidden_s))
    return float(least)


@leaf
def _densest_s(dense: _Dense, tokens: float) -> float:
    """Work of so many of the densest tokens at most, the last unit in part."""
    if tokens <= 0:
        return 0.0
    held = np.searchsorted(dense.tokens, tokens, side="right") - 1
    work_s = dense.work_s[held]
    if held < dense.thin.size:
        work_s -= dense.thin[held] * (tokens - dense.tokens[held])
    return float(work_s)


@kernel
def _bound(units: Units, least: NDArray[np.int64], rest_work_s: float, setting: Setting) -> float:
    work_s = units.work.sum() + rest_work_s
    base = fixed_seconds(setting.coefficients)
    low = float(base + work_s / setting.ranks)
    falling = _fall(units)
    for unit in range(min(units.total.size, 1) if falling else units.total.size):
        if least[unit] > 1 or units.work[unit] + base > low:
            low = max(low, fastest_seconds(units, unit, least[unit], low, setting))
    intensity = _intensity(units, setting)
    slow = np.empty(0, np.int64) if falling else _slow_units(units, least, low, setting)
    if _ranks_suffice(units, least, slow, falling, work_s, intensity, low, setting):
        return low
    high = 2 * low
    while not _ranks_suffice(units, least, slow, falling, work_s, intensity, high, setting):
        low = high
        high *= 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _ranks_suffice(units, least, slow, falling, work_s, intensity, middle, setting):
            high = middle
        else:
            low = middle
    return low


@leaf
def _fall(units: Units) -> bool:
    """Whether each unit is one sample that attends to what came before it, the longest first: then
    what the first takes alone, none after it exceeds, nor its degree."""
    if units.tokens.size > units.total.size:
        return False
    for unit in range(units.tokens.size):
        shorter = unit == 0 or units.tokens[unit] <= units.tokens[unit - 1]
        if not shorter or units.weights[unit] != 1.0:
            return False
    return True


@leaf
def _intensity(units: Units, setting: Setting) -> float:
    """Most attention seconds a token of any sequence brings to hide the ring behind."""
    most = 0.0
    for i in range(units.tokens.size):
        most = max(most, units.weights[i] * float(units.tokens[i]))
    return attention_seconds(most, setting.coefficients)


@kernel
def _slow_units(
    units: Units, least: NDArray[np.int64], tau: float, setting: Setting
) -> NDArray[np.int64]:
    """Units that one rank does not hold, or not within τ: int64[those]."""
    base = fixed_seconds(setting.coefficients)
    slow = np.empty(units.total.size, np.int64)
    count = 0
    for unit in range(units.total.size):
        slow[count] = unit
        count += least[unit] > 1 or units.work[unit] + base > tau
    return slow[:count]


@leaf
def _ranks_suffice(
    units: Units,
    least: NDArray[np.int64],
    slow: NDArray[np.int64],
    falling: bool,
    work_s: float,
    intensity: float,
    tau: float,
    setting: Setting,
) -> bool:
    """Is there rank time for all work at makespan τ, within which all but the `slow` end alone?

    A unit too slow for τ alone needs n = min{d : T(d) ≤ τ} ranks at least, and each of its tokens
    then costs its ring q(d) = (d−1)·rate ≥ q(n) rank-seconds, hidden behind attention as far as
    there is any. Where q(n) exceeds the most attention any token has, nothing that shares the
    group can hide the rest, so each such unit exposes q(n)·tokens − attention at least.
    """
    have = (tau - fixed_seconds(setting.coefficients)) * setting.ranks
    if falling:
        exposed = _exposed_by_length(units, intensity, tau, setting)
    else:
        exposed = _exposed(units, least, slow, intensity, tau, setting)
    return bool(work_s + exposed <= have * (1 + 1e-9))


@leaf
def _exposed(
    units: Units,
    least: NDArray[np.int64],
    slow: NDArray[np.int64],
    intensity: float,
    tau: float,
    setting: Setting,
) -> float:
    """Rank-seconds that the slow units expose at least; infinite where one meets τ at no degree."""
    base = fixed_seconds(setting.coefficients)
    exposed = 0.0
    for place in range(slow.size):
        unit = slow[place]
        if least[unit] == 1 and units.work[unit] + base <= tau:
            continue
        degree = max(least[unit], int(units.work[unit] / (tau - base) * (1 - 1e-12)))
        while degree <= setting.ranks and unit_seconds(units, unit, degree, setting) > tau:
            degree = degree_after(units, unit, degree, tau, setting)
        if degree > setting.ranks:
            return np.inf
        exposed += _exposed_at(units, unit, degree, intensity, setting)
    return exposed


@leaf
def _exposed_by_length(units: Units, intensity: float, tau: float, setting: Setting) -> float:
    """The same of units that fall: those of one degree lie together, so that there is one look at
    each degree, and none at units that one rank ends. O(ranks + slow units)."""
    budget_s = tau - fixed_seconds(setting.coefficients)
    alone, longest = units.total.size, longest_within(1, tau, setting)
    unit = -1  # the last that one rank does not end
    while alone - unit > 1:
        middle = (alone + unit) // 2
        if units.total[middle] > longest:
            unit = middle
        else:
            alone = middle
    exposed, degree = 0.0, 1
    while unit >= 0:
        degree = wider_degree(degree, units, unit, budget_s, setting)
        crosses = degree > setting.ranks_per_node
        ring_s = ring_seconds(float(units.total[unit]), degree, crosses, setting.coefficients)
        if degree > setting.ranks or ring_s > budget_s:  # a ring only slows down as it widens
            return np.inf
        longest = longest_within(degree, tau, setting)
        while unit >= 0 and units.total[unit] <= longest:
            exposed += _exposed_at(units, unit, degree, intensity, setting)
            unit -= 1
    return exposed


@leaf
def _exposed_at(units: Units, unit: int, degree: int, intensity: float, setting: Setting) -> float:
    """Rank-seconds that one unit exposes at least from this degree on."""
    per_token = passing_seconds(degree, degree > setting.ranks_per_node, setting.coefficients)
    if per_token <= intensity:
        return 0.0
    attention = attention_seconds(units.squares[unit], setting.coefficients)
    return per_token * float(units.total[unit]) - attention
