"""Context plans as they leave: sound in structure, and timed where their groups really are."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.plan import ContextPlan
from dataservice.planning.context.seconds import fixed_seconds, group_seconds, work_seconds
from dataservice.planning.context.units import Setting
from dataservice.planning.invariants import Groups, check_groups, require
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.integers import padded_length

# Sums that were kept up while samples moved differ from fresh ones by rounding.
_ROUNDING = 1e-6

Scalar = TypeVar("Scalar", bound=np.generic)


def check_waves(
    waves: Sequence[ContextPlan],
    tokens: NDArray[np.int64],
    weights: NDArray[np.float64] | None,
    setting: Setting,
) -> None:
    """Raises PlanningError unless the waves hold each sample once, within memory, on replicas of
    its own, and every group's tokens and seconds are those of its samples on its ranks.

    `tokens` int64[n]; `weights` float64[n] 1+η, None for 1. O(n + ranks of all groups).
    """
    for wave in waves:
        _check_sizes(wave)
    groups = Groups(
        samples=joined([wave.samples for wave in waves], np.int32),
        sample_offsets=_offsets([wave.sample_offsets for wave in waves]),
        ranks=joined([wave.ranks for wave in waves], np.int32),
        rank_offsets=_offsets([wave.rank_offsets for wave in waves]),
    )
    sizes = [wave.time_s.size for wave in waves]
    check_groups(
        groups,
        np.repeat(np.arange(len(waves), dtype=np.int32), sizes),
        tokens,
        replicas=setting.ranks,
        memory_tokens=setting.memory_tokens,
    )
    padded_tokens, seconds, _ = _times_on_ranks(
        groups, tokens, np.empty(0) if weights is None else weights, setting
    )
    same = padded_tokens == joined([wave.padded_tokens for wave in waves], np.int64)
    time_s = joined([wave.time_s for wave in waves], np.float64)
    same &= np.abs(seconds - time_s) <= _ROUNDING * seconds  # False where one is no number
    require(
        bool(same.all()),
        f"group {int(same.argmin()) if same.size else 0} has other tokens or seconds than its "
        "samples on its ranks",
    )


def _check_sizes(wave: ContextPlan) -> None:
    counts = {len(wave.sample_offsets) - 1, len(wave.rank_offsets) - 1, len(wave.time_s)}
    counts.add(len(wave.padded_tokens))
    require(len(counts) == 1, f"arrays of one wave have {sorted(counts)} groups")
    for offsets, ends in ((wave.sample_offsets, wave.samples), (wave.rank_offsets, wave.ranks)):
        cut = offsets[0] == 0 and offsets[-1] == len(ends)
        require(bool(cut), f"offsets of a wave do not cut its {len(ends)} samples or ranks")


def joined(arrays: list[NDArray[Scalar]], dtype: type[Scalar]) -> NDArray[Scalar]:
    """The waves' arrays end to end; empty of that type where there is no wave."""
    return np.concatenate(arrays) if arrays else np.zeros(0, dtype)


def _offsets(each: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Offsets of all waves end to end."""
    joined = [np.zeros(1, np.int64)]
    end = 0
    for offsets in each:
        joined.append(offsets[1:] + end)
        end += int(offsets[-1])
    return np.concatenate(joined)


def retimed(
    wave: ContextPlan,
    tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
    setting: Setting,
) -> ContextPlan:
    """The wave with the seconds of its groups on their ranks; arguments as in `check_waves`."""
    groups = Groups(wave.samples, wave.sample_offsets, wave.ranks, wave.rank_offsets)
    _, seconds, work_s = _times_on_ranks(groups, tokens, weights, setting)
    fluid_s = fixed_seconds(setting.coefficients) + work_s / setting.ranks
    return replace(wave, time_s=seconds, lower_bound_s=fluid_s)


@kernel
def _times_on_ranks(
    groups: Groups, tokens: NDArray[np.int64], weights: NDArray[np.float64], setting: Setting
) -> tuple[NDArray[np.int64], NDArray[np.float64], float]:
    """Padded tokens int64[groups] and seconds float64[groups], crossing counted, and the work of
    all in replica-seconds, padding left out. Empty `weights` are all 1."""
    samples, sample_offsets, ranks, rank_offsets = groups
    count = sample_offsets.size - 1
    padded_tokens, seconds, work = np.empty(count, np.int64), np.empty(count), 0.0
    for group in range(count):
        first = rank_offsets[group]
        degree = rank_offsets[group + 1] - first
        total = 0
        squares = 0.0
        for at in range(sample_offsets[group], sample_offsets[group + 1]):
            sample = samples[at]
            padded = padded_length(tokens[sample], degree)
            weight = weights[sample] if weights.size else 1.0
            total += padded
            squares += weight * float(padded) * float(padded)
            size = float(tokens[sample])
            work += work_seconds(size, weight * size * size, setting.coefficients)
        crosses = False
        if degree > 1:  # divisions are what this takes, and most groups are of one rank
            node = ranks[first] // setting.ranks_per_node
            for at in range(first + 1, rank_offsets[group + 1]):
                crosses = crosses or ranks[at] // setting.ranks_per_node != node
        padded_tokens[group] = total
        seconds[group] = group_seconds(float(total), squares, degree, crosses, setting.coefficients)
    return padded_tokens, seconds, work
