"""Static context parallelism: packs in the order they came, every group of one degree."""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import ContextCost
from dataservice.planning.context.groups import ContextPlan
from dataservice.planning.context.seconds import group_seconds
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.padding import padded_length
from dataservice.planning.kernels.sort import group_stable


def static_waves(
    tokens: NDArray[np.int64],
    pack_of: NDArray[np.int32],
    cost_tokens: NDArray[np.int64],
    *,
    replicas: int,
    degree: int,
    cost: ContextCost,
    ranks_per_node: int | None = None,
    full_attention: NDArray[np.float64] | None = None,
) -> tuple[ContextPlan, ...]:
    """Waves of N/degree packs, in pack order; group g of a wave has the ranks from g·degree on.

    `tokens` int64[n] true lengths, `pack_of` int32[n], `cost_tokens` int64[n] the lengths that
    are paid for (padded ones in a padded baseline), `full_attention` float64[n] η. O(n).
    """
    packs = int(pack_of.max(initial=-1)) + 1
    samples, offsets = group_stable(pack_of.astype(np.int64), np.arange(pack_of.size), packs)
    per_wave, node = replicas // degree, ranks_per_node or replicas
    first = np.arange(packs) % per_wave * degree
    crosses = first // node != (first + degree - 1) // node
    weights = np.ones(tokens.size) if full_attention is None else 1.0 + full_attention
    seconds, padded = _pack_sums(
        samples, offsets, tokens, cost_tokens, weights, degree, crosses, cost.coefficients
    )
    waves = []
    for begin in range(0, packs, per_wave):
        end = min(begin + per_wave, packs)
        waves.append(
            ContextPlan(
                samples=samples[offsets[begin] : offsets[end]].astype(np.int32),
                sample_offsets=offsets[begin : end + 1] - offsets[begin],
                ranks=np.arange((end - begin) * degree, dtype=np.int32),
                rank_offsets=np.arange(end - begin + 1) * degree,
                time_s=seconds[begin:end],
                padded_tokens=padded[begin:end],
                lower_bound_s=0.0,
            )
        )
    return tuple(waves)


@kernel
def _pack_sums(
    samples: NDArray[np.int64],
    offsets: NDArray[np.int64],
    tokens: NDArray[np.int64],
    cost_tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
    degree: int,
    crosses: NDArray[np.bool_],
    coefficients: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Seconds and padded tokens of each pack: [packs]."""
    packs = offsets.size - 1
    seconds = np.empty(packs)
    padded = np.zeros(packs, np.int64)
    for pack in range(packs):
        paid, squares = 0, 0.0
        for at in range(offsets[pack], offsets[pack + 1]):
            padded[pack] += padded_length(tokens[samples[at]], degree)
            length = padded_length(cost_tokens[samples[at]], degree)
            paid += length
            squares += weights[samples[at]] * float(length) * float(length)
        seconds[pack] = group_seconds(float(paid), squares, degree, crosses[pack], coefficients)
    return seconds, padded
