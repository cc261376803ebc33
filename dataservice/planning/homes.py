"""Where the text of each encoder item is: its pack, and the replica that holds its first token."""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import locate, padded_tokens
from dataservice.core.plan import StepPlan
from dataservice.planning.kernels.compile import kernel


def item_packs(plan: StepPlan) -> NDArray[np.int32]:
    """The pack of each item: int32[m]. O(n + m)."""
    return _item_packs(plan.pack_offsets, plan.pack_samples, plan.item_sample)


def item_homes(plan: StepPlan, pack: NDArray[np.int32]) -> NDArray[np.int32]:
    """The replica that holds each item's first token: int32[m]; `pack` int32[m] as above."""
    home, in_ring = _first_members(plan.replica_offsets, plan.pack_replicas, pack)
    sample = plan.item_sample[in_ring]
    degree = plan.pack_degree[pack[in_ring]]
    padded = padded_tokens(plan.sample_tokens[sample], degree)
    cp_rank, _ = locate(plan.item_position[in_ring], padded, degree, np.zeros_like(degree))
    home[in_ring] = plan.pack_replicas[plan.replica_offsets[pack[in_ring]] + cp_rank]
    return home


@kernel
def _item_packs(
    offsets: NDArray[np.int64], samples: NDArray[np.int32], item_sample: NDArray[np.int32]
) -> NDArray[np.int32]:
    pack_of = np.empty(samples.size, np.int32)
    for pack in range(offsets.size - 1):
        for place in range(offsets[pack], offsets[pack + 1]):
            pack_of[samples[place]] = pack
    packs = np.empty(item_sample.size, np.int32)
    for item in range(item_sample.size):
        packs[item] = pack_of[item_sample[item]]
    return packs


@kernel
def _first_members(
    replica_offsets: NDArray[np.int64], pack_replicas: NDArray[np.int32], pack: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Ring member 0 of each item's group, and the items of groups that have other members."""
    home = np.empty(pack.size, np.int32)
    in_ring = np.empty(pack.size, np.int64)
    count = 0
    for item in range(pack.size):
        first = replica_offsets[pack[item]]
        home[item] = pack_replicas[first]
        if replica_offsets[pack[item] + 1] - first > 1:
            in_ring[count] = item
            count += 1
    return home, in_ring[:count].copy()
