"""Context plans as they leave: sound in structure, and timed where their groups really are."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.plan import ContextPlan
from dataservice.planning.context.seconds import group_seconds
from dataservice.planning.context.units import Setting
from dataservice.planning.invariants import Groups, check_groups, require
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.padding import padded_length

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
    wrong = _first_mistimed(
        groups,
        joined([wave.padded_tokens for wave in waves], np.int64),
        joined([wave.time_s for wave in waves], np.float64),
        tokens,
        np.ones(tokens.size) if weights is None else weights,
        setting,
    )
    require(wrong < 0, f"group {wrong} has other tokens or seconds than its samples on its ranks")


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


@kernel
def _first_mistimed(
    groups: Groups,
    padded_tokens: NDArray[np.int64],
    time_s: NDArray[np.float64],
    tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
    setting: Setting,
) -> int:
    """The first group whose padded tokens or seconds, crossing counted, are not its own; or −1."""
    samples, sample_offsets, ranks, rank_offsets = groups
    for group in range(time_s.size):
        first = rank_offsets[group]
        degree = rank_offsets[group + 1] - first
        total = 0
        squares = 0.0
        for at in range(sample_offsets[group], sample_offsets[group + 1]):
            sample = samples[at]
            padded = padded_length(tokens[sample], degree)
            total += padded
            squares += weights[sample] * float(padded) * float(padded)
        crosses = False
        node = ranks[first] // setting.ranks_per_node
        for at in range(first, rank_offsets[group + 1]):
            crosses = crosses or ranks[at] // setting.ranks_per_node != node
        seconds = group_seconds(float(total), squares, degree, crosses, setting.coefficients)
        if total != padded_tokens[group]:
            return group
        if not abs(seconds - time_s[group]) <= _ROUNDING * seconds:
            return group
    return -1
