"""Waves of a step with many samples: packs, groups, degrees and waves in one go.

Where samples are many, trying several groupings of each wave costs much and gains little. Instead
one target time holds for all waves (`many_groups`), samples slower than it open groups of the
degree that meets it, the others level all groups of the step (`many_fill`), and at last groups are
dealt to waves: wide ones over all of them, so that every node finds narrow ones to fill up with,
and groups of one rank by falling time, so that slow ones wait for one another.

    wave 0 │ 5 5 5 3 2 … 1 1 1 1 1   slowest        wave 1 │ 5 5 4 3 2 … 1 1 1 1 1   next

Shapes: n samples, known by their place when sorted longest first; the first u of them are long;
N ranks; G groups, of which the first `anchors` were opened by the samples of the same places; L
groups that hold anything. `sizes` int64[n] are tokens, falling; squares are in tokens².
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.cost import ContextCost, sequences
from dataservice.planning.context.bound import wave_bound, waves_bound
from dataservice.planning.context.check import check_waves, retimed
from dataservice.planning.context.groups import ContextWaves
from dataservice.planning.context.many_cut import cut_many_waves
from dataservice.planning.context.many_groups import (
    count_long,
    level_groups,
    one_level,
    total_seconds,
    two_levels,
)
from dataservice.planning.context.many_waves import WIDE_SHARES, Answer, deal, plan_waves
from dataservice.planning.context.plan import ContextPlan
from dataservice.planning.context.seconds import fixed_seconds, with_attention, work_seconds
from dataservice.planning.context.units import (
    Degrees,
    Setting,
    Units,
    fitting_degrees,
    make_setting,
    plain_units,
    weighted_units,
)
from dataservice.planning.kernels.compile import leaf
from dataservice.planning.kernels.sort import argsort_falling

_NEAR = 1.02  # of the bound, where no other levels are tried
_FAIR = 1.03  # nor one wave more
_ATTEMPTS = 2  # at one level or two
_CAPPED = 0.25  # quantile of the narrow groups' times that tells how much memory allows
_SHORT = 0.125  # of a rank's memory, up to which a sample counts as short
# Levels that exceed the bound by so much are not filled, where samples are as many as this.
_FAR = 1.2
_MANY = 8192
# Numbers of waves that are tried, and in vain: bounds on operations, not on time.
_TRIES = 8
_VAIN = 2


def find_many_waves(
    tokens: ArrayLike,
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    full_attention: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    degrees: Degrees = "any",
) -> ContextWaves:
    """As `plan_context_waves` without given packs, for many samples int[n], in about O(n log n)."""
    setting = make_setting(
        ranks=ranks,
        memory_tokens=memory_tokens,
        cost=cost,
        ranks_per_node=ranks_per_node,
        degrees=degrees,
    )
    lengths, weights = sequences(tokens, full_attention)
    if lengths.size == 0:
        return ContextWaves(waves=(), lower_bound_s=0.0)
    if full_attention is None:
        waves, bound_s = _found(lengths, setting)
    else:
        waves, bound_s = _found_as_causal(lengths, weights, setting)
    check_waves(waves, lengths, weights, setting)
    return ContextWaves(waves=waves, lower_bound_s=bound_s)


def _found(lengths: NDArray[np.int64], setting: Setting) -> tuple[tuple[ContextPlan, ...], float]:
    """The best waves of samples [n], each attending to what came before it, and a lower bound."""
    # int64[n]: the caller's index of each sorted sample
    order = argsort_falling(lengths)
    sizes = lengths[order]
    # n units: unit i is sample i. Least degrees int64[n]
    units = plain_units(sizes, setting)
    least = np.ones(sizes.size, np.int64)
    wide = int(np.count_nonzero(sizes > setting.memory_tokens))
    least[:wide] = fitting_degrees(plain_units(sizes[:wide], setting), setting)
    best, bound_s = _search(sizes, units, least, setting)
    found = [] if best is None else [plan_waves(order, best, setting)]
    if best is None or _sum_s(found[0]) > bound_s * _NEAR:
        bound_s = max(bound_s, waves_bound(units, least, setting))
    if best is not None and _sum_s(found[0]) > bound_s * _NEAR:
        again = _dealt_again(best, setting)
        found += [] if again is None else [plan_waves(order, again, setting)]
    if best is None or min(map(_sum_s, found)) > bound_s * _FAIR:
        found.append(cut_many_waves(units, least, order, setting, bound_s * _FAIR))
    return min(found, key=_sum_s), bound_s


def _found_as_causal(
    lengths: NDArray[np.int64], weights: NDArray[np.float64], setting: Setting
) -> tuple[tuple[ContextPlan, ...], float]:
    """Waves of samples that attend both ways, too, `weights` float64[n] 1+η: found as if each did
    by the same share, and timed as they are."""
    squares = lengths.astype(np.float64) ** 2
    share = float((weights * squares).sum() / squares.sum())
    alike = setting._replace(coefficients=with_attention(share, setting.coefficients))
    waves, _ = _found(lengths, alike)
    units = weighted_units(lengths, weights, setting)
    bound_s = waves_bound(units, fitting_degrees(units, setting), setting)
    return tuple(retimed(wave, lengths, weights, setting) for wave in waves), bound_s


def _sum_s(waves: tuple[ContextPlan, ...]) -> float:
    """Seconds of all waves, their groups on their nodes."""
    return sum(wave.makespan_s for wave in waves)


def _dealt_again(answer: Answer, setting: Setting) -> Answer | None:
    """The same groups with wide ones in as few waves as hold them; None where they do not fit."""
    listed, groups = answer.listed, answer.groups
    share = WIDE_SHARES[1]
    wave_of = deal(listed, groups, answer.slow_waves, answer.waves, share, setting)
    return None if wave_of.min(initial=0) < 0 else replace(answer, wave_of=wave_of)


def _search(
    sizes: NDArray[np.int64], units: Units, least: NDArray[np.int64], setting: Setting
) -> tuple[Answer | None, float]:
    """The best answer over some numbers of waves, from the fewest possible on, and a lower bound;
    None where memory or ranks allow none of those tried. `sizes` and `least` int64[n].

    At most `_TRIES` numbers, and no more than two that hold nothing. O(n log n) each.
    """
    at_least = -(-int(sizes.sum()) // (setting.ranks * setting.memory_tokens))  # by memory alone
    # Each sample that one rank cannot hold has a group of its own here, with room for one of over
    # half the memory at most; no two of those share a rank.
    wide = int(np.count_nonzero(least > 1))
    half = int(np.count_nonzero(2 * sizes > setting.memory_tokens)) - wide
    slots = int(least[:wide].sum()) + max(0, half - wide)
    waves = max(at_least, -(-slots // setting.ranks))
    work_s = float(units.work.sum())
    best: Answer | None = None
    bound_s = 0.0
    for tried in range(_TRIES):
        if best.waves < waves - 1 if best is not None else tried >= _VAIN:
            break
        count = count_long(sizes, work_s, waves, setting)  # u
        long = plain_units(sizes[:count], setting)
        if tried == 0:
            bound_s = wave_bound(long, least[:count], setting, work_s - float(long.work.sum()))
            bound_s += (at_least - 1) * fixed_seconds(setting.coefficients)
        for answer in _answers(sizes, long, least[:count], work_s, waves, bound_s, setting):
            if best is None or answer.total_s < best.total_s:
                best = answer
        # One wave more costs β₁ again: worth a try only where it can leave less than it costs.
        if best is not None and best.total_s <= bound_s * _FAIR:
            break
        waves += 1
    return best, bound_s


def _answers(
    sizes: NDArray[np.int64],
    long: Units,
    least: NDArray[np.int64],
    work_s: float,
    waves: int,
    bound_s: float,
    setting: Setting,
) -> Iterator[Answer]:
    """That many waves at one level, or at two where memory ends before that level or where one
    level ends far from the bound; none where memory or ranks do not allow it. `least` int64[u]."""
    target = one_level(long, least, work_s, waves, setting)
    most_fast_s = _short_seconds(sizes, setting)
    lowered = False
    if target.slow_s > most_fast_s:
        lower = two_levels(long, least, work_s, waves, most_fast_s, setting)
        lowered = lower.fits
        target = lower if lowered else target
    for attempt in range(_ATTEMPTS):
        far = sizes.size > _MANY and total_seconds(target, waves) > bound_s * _FAR
        likely = target.fits and not far
        answer = level_groups(sizes, target, waves, setting) if likely else None
        if answer is None and (attempt or lowered):
            return  # else the same levels once more
        if answer is not None:
            yield answer
            if answer.total_s <= bound_s * _NEAR:
                return
            # What a rank reaches before its memory is full: the lower level, at most.
            narrow = answer.groups.degree == 1  # bool[G]
            if narrow.any():
                reached_s = float(np.quantile(answer.groups.time_s[narrow], _CAPPED))
                most_fast_s = min(most_fast_s, reached_s) if attempt else reached_s
        target = two_levels(long, least, work_s, waves, most_fast_s, setting)


@leaf
def _short_seconds(sizes: NDArray[np.int64], setting: Setting) -> float:
    """What a rank full of short samples takes; infinity where there are none."""
    squares = 0.0
    total = 0
    at = sizes.size - 1
    while at >= 0 and sizes[at] <= _SHORT * setting.memory_tokens:
        squares += float(sizes[at]) * float(sizes[at])
        total += sizes[at]
        at -= 1
    if total == 0:
        return np.inf
    share = setting.memory_tokens / total  # of all short samples, what one rank holds
    work_s = work_seconds(float(total), squares, setting.coefficients)
    return fixed_seconds(setting.coefficients) + work_s * share
