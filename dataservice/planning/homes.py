"""Where the text of each encoder item is: its pack, and the replica that holds its first token."""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StepPlan
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.padding import ring_member


def item_packs(plan: StepPlan) -> NDArray[np.int32]:
    """The pack of each item: int32[m]. O(n + m)."""
    return _item_packs(plan.pack_offsets, plan.pack_samples, plan.item_sample)


def item_homes(plan: StepPlan, pack: NDArray[np.int32]) -> NDArray[np.int32]:
    """The replica that holds each item's first token: int32[m]; `pack` int32[m] as above."""
    return _item_homes(
        plan.replica_offsets,
        plan.pack_replicas,
        pack,
        plan.item_sample,
        plan.item_position,
        plan.sample_tokens,
    )


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
def _item_homes(
    replica_offsets: NDArray[np.int64],
    pack_replicas: NDArray[np.int32],
    pack: NDArray[np.int32],
    item_sample: NDArray[np.int32],
    item_position: NDArray[np.int32],
    sample_tokens: NDArray[np.int32],
) -> NDArray[np.int32]:
    home = np.empty(pack.size, np.int32)
    for item in range(pack.size):
        first = replica_offsets[pack[item]]
        degree = replica_offsets[pack[item] + 1] - first
        if degree > 1:
            tokens = int(sample_tokens[item_sample[item]])
            first += ring_member(int(item_position[item]), tokens, int(degree))
        home[item] = pack_replicas[first]
    return home
