"""One optimizer step of one replica, as its rank shard says.

For every microbatch, in the plan's order: encode the items this replica was given, exchange
the features, run the decoder with the pack's attention, take the loss, go backward. Then sum
the gradients over replicas. All replicas go through the same waves, so every collective meets
its partners.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Module

from trainer_client.runtime.errors import LayoutError, PlanMismatchError
from trainer_client.runtime.exchange import exchange_features
from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.loss import (
    count_loss_tokens,
    global_loss_tokens,
    sum_gradients,
    token_weighted_loss,
)
from trainer_client.runtime.peers import PeerGroup
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.shard import Microbatch, ModalityBatch, Shard

MODALITIES = ("vision", "audio")  # in the order of their exchanges, on every replica


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Feature rows that arrived for a microbatch, [R, width], and their local tokens [R].

    Put them in with ``scatter_rows(embeddings, features.rows, features.positions)``, also when
    there are none.
    """

    rows: Tensor
    positions: Tensor


class MultimodalModel(Protocol):
    """What ``run_step`` asks of a model."""

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        """Feature rows [rows, width] of ``batch.items`` joined end to end; [0, width] if none.

        Sharded encoders (FSDP) must run their layers even then, on a dummy item: their own
        collectives need every replica.
        """
        ...

    def encoder_trains(self, modality: str) -> bool:
        """Whether gradients flow into this encoder; the same answer on all replicas."""
        ...

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor:
        """Logits [local rows, vocabulary]."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """``loss``: mean over the global batch's loss tokens. Seconds are this replica's own."""

    loss: float
    loss_tokens: int
    seconds: float
    microbatch_seconds: tuple[float, ...]
    gradient_sum_seconds: float


def run_step(
    model: MultimodalModel,
    shard: Shard,
    groups: GroupPool,
    *,
    sum_into: Module | None,
    gradient_scale: float = 1.0,
    upcoming: Shard | None = None,
) -> StepResult:
    """Forward and backward of a whole step; gradients are left in ``.grad``.

    Parameters
    ----------
    sum_into: the module whose gradients are summed over replicas afterwards; None where DDP or
        FSDP reduces them, with ``gradient_scale`` the number of replicas it averages over.
    upcoming: the next step's shard, given on every replica or on none: its groups are
        connected in the background while this step computes.

    Raises PlanMismatchError, PeerError, LayoutError. Collective over all replicas.
    """
    started = time.perf_counter()
    everyone = groups.everyone
    check_same_plan(shard.plan.digest, everyone)
    for step in (shard, upcoming):
        if step is not None:
            groups.prewarm(group.replicas for group in step.plan.groups)
    own_tokens = count_loss_tokens(microbatch.labels for microbatch in shard.microbatches)
    loss_tokens = global_loss_tokens(own_tokens, everyone)
    loss_sum = torch.zeros(1, dtype=torch.float64, device=everyone.device)
    microbatch_seconds = []
    for microbatch in shard.microbatches:
        microbatch_started = time.perf_counter()
        logits = forward_microbatch(model, microbatch, groups)
        loss = token_weighted_loss(logits, microbatch.labels.to(logits.device), loss_tokens)
        (loss * gradient_scale).backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.detach().to(loss_sum.device)
        microbatch_seconds.append(time.perf_counter() - microbatch_started)
    sum_started = time.perf_counter()
    if sum_into is not None:
        sum_gradients(sum_into, everyone)
    everyone.post_sum(loss_sum, action="summing the loss").wait()
    ended = time.perf_counter()
    return StepResult(
        loss=float(loss_sum),
        loss_tokens=loss_tokens,
        seconds=ended - started,
        microbatch_seconds=tuple(microbatch_seconds),
        gradient_sum_seconds=ended - sum_started,
    )


def forward_microbatch(model: MultimodalModel, microbatch: Microbatch, groups: GroupPool) -> Tensor:
    """Encode, exchange, decode; logits [local rows, vocabulary]. Collective over all replicas."""
    features: dict[str, Features] = {}
    previous: Tensor | None = None
    for modality in MODALITIES:
        batch: ModalityBatch | None = getattr(microbatch, modality)
        if batch is None:  # then it is None on every replica
            continue
        trains = model.encoder_trains(modality)
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            encoded = model.encode(modality, batch)
        plan = batch.exchange
        _check_rows(modality, batch, encoded)
        rows = exchange_features(
            encoded.index_select(0, plan.send_rows.to(encoded.device)),
            plan.send_splits,
            plan.recv_splits,
            groups.everyone,
            after=previous,
            differentiable=trains,
        )
        previous = rows if trains else previous
        features[modality] = Features(rows=rows, positions=plan.recv_positions)
    attention = PackedAttention(
        microbatch.cu_seqlens,
        group=None if microbatch.idle else groups.get(microbatch.cp_group),
        lengths=microbatch.lengths,
    )
    return model.decode(microbatch, features, attention)


def _check_rows(modality: str, batch: ModalityBatch, encoded: Tensor) -> None:
    planned = len(batch.exchange.send_rows)
    if encoded.shape[0] != planned:
        raise LayoutError(
            f"the {modality} encoder gave {encoded.shape[0]} rows for {len(batch.items)} items "
            f"whose tokens the plan counts as {planned}; check that the model's patch and merge "
            "sizes are those of the job's processor"
        )


def check_same_plan(digest: str, group: PeerGroup) -> None:
    """Compare the plan digest of all replicas, once a step before its first collective.

    ``digest``: a text of one length everywhere, such as hexadecimal SHA-256.

    Raises PlanMismatchError, on every replica, naming the digests and who holds them.
    """
    own = torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8).to(group.device)
    gathered = group.gather(own, action="comparing plan digests")
    replicas_of: dict[str, list[int]] = {}
    for replica, theirs in zip(group.members, gathered, strict=True):
        replicas_of.setdefault(bytes(theirs.tolist()).decode(), []).append(replica)
    if len(replicas_of) > 1:
        raise PlanMismatchError(replicas_of)
