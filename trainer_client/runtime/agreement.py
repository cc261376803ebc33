"""What all replicas agree on before a step's first exchange: its plan, its loss tokens, and whether
features go a wave ahead.

All come from one sum over replicas. A plan's digest is hashed to numbers d, and each replica adds
d and d². Replicas that all hold d have Σd = N·d and Σd² = N·d²; any others have not, since the
numbers then vary about their mean. So one all-reduce of a size that does not depend on the number
of replicas compares all digests, and only where they differ does one ask who holds which.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from trainer_client.runtime.faults import LayoutError, PlanMismatchError
from trainer_client.runtime.host_numbers import sum_numbers
from trainer_client.runtime.loss import LossTokens, own_loss_tokens, summed_loss_tokens
from trainer_client.runtime.peers import PeerGroup
from trainer_client.shard import Shard

COMPARING = "comparing plan digests"


class StepAgreement(NamedTuple):
    """``room``: whether all replicas have room for a wave of features ahead."""

    loss_tokens: LossTokens
    room: bool


def begin_step(
    shard: Shard,
    everyone: PeerGroup,
    *,
    features_ahead: bool | None = None,
    has_room: bool = False,
) -> StepAgreement:
    """The step's loss tokens over all replicas, and whether all have room (``has_room``), once it
    is known that all hold the same plan and exchange features in the same order.

    Raises PlanMismatchError and LayoutError, on every replica, and PeerError. Collective over
    ``everyone``.
    """
    ahead = 0.0 if features_ahead is None else 1.0 + features_ahead
    own = [*own_numbers(shard), ahead, ahead**2, float(has_room)]
    *sums, of_all, squares, with_room = sum_numbers(own, everyone, action=COMPARING)
    if (of_all, squares) != (everyone.size * ahead, everyone.size * ahead**2):
        raise LayoutError(
            f"replica {everyone.replica} calls run_step with features_ahead={features_ahead}, and "
            "others with another value; they would exchange features in different orders, so give "
            "the same on all replicas"
        )
    agreed = agreed_tokens(shard, sums, ranks=everyone.size)
    if agreed is None:
        raise PlanMismatchError(_holders(shard.plan.digest, everyone))
    return StepAgreement(agreed, with_room == everyone.size)


def check_same_plan(digest: str, group: PeerGroup) -> None:
    """Compare the plan digest of all replicas, once a step before its first collective.

    ``digest``: a text of one length everywhere, such as hexadecimal SHA-256.

    Raises PlanMismatchError, on every replica, naming the digests and who holds them.
    """
    own = _fingerprint(digest)
    if sum_numbers(own, group, action=COMPARING) != [group.size * number for number in own]:
        raise PlanMismatchError(_holders(digest, group))


def own_numbers(shard: Shard, *, labelled: bool = True) -> list[float]:
    """What this rank adds to the sum; loss tokens only where it has labels (``labelled``)."""
    own = own_loss_tokens(shard, labelled=labelled)
    return [own.count, own.weight, *_fingerprint(shard.plan.digest)]


def agreed_tokens(shard: Shard, sums: Sequence[float], *, ranks: int) -> LossTokens | None:
    """The step's loss tokens from the sums over so many ranks; None where plans differ."""
    count, weight, *fingerprints = sums
    if fingerprints != [ranks * number for number in _fingerprint(shard.plan.digest)]:
        return None
    return summed_loss_tokens(shard, count, weight)


def holders(texts: Iterable[tuple[int, torch.Tensor]], length: int) -> dict[str, list[int]]:
    """Digest → the replicas that hold it, from each replica's digests (uint8, end to end)."""
    replicas_of: dict[str, list[int]] = {}
    for replica, gathered in texts:
        held = bytes(gathered.tolist()).decode()
        for each in sorted({held[i : i + length] for i in range(0, len(held), length)}):
            replicas_of.setdefault(each, []).append(replica)
    return replicas_of


def digest_bytes(digest: str, device: torch.device) -> torch.Tensor:
    """The digest as uint8."""
    return torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8).to(device)


def _holders(digest: str, group: PeerGroup) -> dict[str, list[int]]:
    gathered = group.gather(digest_bytes(digest, group.device), action=COMPARING)
    return holders(zip(group.members, gathered, strict=True), len(digest))


def _fingerprint(digest: str) -> list[float]:
    """16 numbers below 2¹⁶ and their squares: sums over 2²⁰ ranks are exact in float64."""
    own = np.frombuffer(hashlib.sha256(digest.encode()).digest(), dtype=np.uint16).astype(float)
    fingerprint: list[float] = np.concatenate([own, own**2]).tolist()
    return fingerprint
