"""Static context parallelism: packs in the order they came, every group of one degree."""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import ContextCost
from dataservice.core.layout import padded_tokens
from dataservice.planning.context.groups import ContextPlan


def static_waves(
    tokens: NDArray[np.int64],
    pack_of: NDArray[np.int32],
    cost_tokens: NDArray[np.int64],
    *,
    replicas: int,
    degree: int,
    cost: ContextCost,
    ranks_per_node: int | None = None,
) -> tuple[ContextPlan, ...]:
    """Waves of N/degree packs, in pack order; group g of a wave has the ranks from g·degree on.

    `tokens` int64[n] true lengths, `pack_of` int32[n], `cost_tokens` int64[n] the lengths that
    are paid for (padded ones in a padded baseline). O(n log n).
    """
    per_wave = replicas // degree
    packs = int(pack_of.max(initial=-1)) + 1
    members = np.split(np.argsort(pack_of, kind="stable"), _ends(pack_of, packs))
    return tuple(
        _wave(
            members[first : first + per_wave],
            tokens,
            cost_tokens,
            degree,
            cost,
            ranks_per_node or replicas,
        )
        for first in range(0, packs, per_wave)
    )


def _ends(pack_of: NDArray[np.int32], packs: int) -> NDArray[np.int64]:
    return np.cumsum(np.bincount(pack_of, minlength=packs))[:-1]


def _wave(
    packs: list[NDArray[np.int64]],
    tokens: NDArray[np.int64],
    cost_tokens: NDArray[np.int64],
    degree: int,
    cost: ContextCost,
    node: int,
) -> ContextPlan:
    sizes = [len(pack) for pack in packs]
    first = np.arange(len(packs)) * degree
    crosses = first // node != (first + degree - 1) // node
    return ContextPlan(
        samples=np.concatenate(packs).astype(np.int32),
        sample_offsets=np.cumsum([0, *sizes]),
        ranks=np.arange(len(packs) * degree, dtype=np.int32),
        rank_offsets=np.arange(len(packs) + 1) * degree,
        time_s=np.array(
            [
                cost.time_s(cost_tokens[pack], degree, crosses_node=bool(crosses[g]))
                for g, pack in enumerate(packs)
            ]
        ),
        padded_tokens=np.array(
            [padded_tokens(tokens[pack], degree).sum() for pack in packs], dtype=np.int64
        ),
        lower_bound_s=0.0,
    )
