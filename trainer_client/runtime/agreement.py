"""What all replicas agree on before a step's first exchange: its plan, and its loss tokens.

Both come from one sum over replicas. A plan's digest is hashed to numbers d, and each replica adds
d and d². Replicas that all hold d have Σd = N·d and Σd² = N·d²; any others have not, since the
numbers then vary about their mean. So one all-reduce of a size that does not depend on the number
of replicas compares all digests, and only where they differ does one ask who holds which.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from trainer_client.runtime.faults import PlanMismatchError
from trainer_client.runtime.host_numbers import sum_numbers
from trainer_client.runtime.loss import LossTokens, own_loss_tokens, summed_loss_tokens
from trainer_client.runtime.peers import PeerGroup
from trainer_client.shard import Shard

COMPARING = "comparing plan digests"


def begin_step(shard: Shard, everyone: PeerGroup) -> LossTokens:
    """The step's loss tokens over all replicas, once it is known that all hold the same plan.

    Raises PlanMismatchError, on every replica, and PeerError. Collective over ``everyone``.
    """
    own = own_loss_tokens(shard)
    count, weight = _sum_if_same(shard.plan.digest, everyone, (own.count, own.weight))
    return summed_loss_tokens(shard, count, weight)


def check_same_plan(digest: str, group: PeerGroup) -> None:
    """Compare the plan digest of all replicas, once a step before its first collective.

    ``digest``: a text of one length everywhere, such as hexadecimal SHA-256.

    Raises PlanMismatchError, on every replica, naming the digests and who holds them.
    """
    _sum_if_same(digest, group, ())


def _sum_if_same(digest: str, group: PeerGroup, numbers: Sequence[float]) -> list[float]:
    """The sums of ``numbers`` over the group, whose members all gave the same digest."""
    own = np.frombuffer(hashlib.sha256(digest.encode()).digest(), dtype=np.uint16).astype(float)
    ours = np.concatenate([own, own**2])  # below 2³², so sums of 2²⁰ replicas are exact
    sums = sum_numbers([*ours.tolist(), *numbers], group, action=COMPARING)
    if not np.array_equal(sums[: len(ours)], group.size * ours):
        raise PlanMismatchError(_holders(digest, group))
    return sums[len(ours) :]


def _holders(digest: str, group: PeerGroup) -> dict[str, list[int]]:
    """Digest → the replicas that hold it."""
    own = torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8).to(group.device)
    replicas_of: dict[str, list[int]] = {}
    gathered = torch.stack(group.gather(own, action=COMPARING)).cpu()
    for replica, theirs in zip(group.members, gathered, strict=True):
        replicas_of.setdefault(bytes(theirs.tolist()).decode(), []).append(replica)
    return replicas_of
