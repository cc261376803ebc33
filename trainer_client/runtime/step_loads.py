"""The loads that measure.py runs of what a step has beside its encoders and its decoder.

Steps of one wave by the runtime that trains, of which the phase that it reports is taken. Every
replica decodes some text, so that exchanges and sums find caches as they do in training.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module

from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.linear_loss import settled
from trainer_client.runtime.loads import Groups, Load, device_of, feature_row, make_microbatch
from trainer_client.runtime.phases import EXCHANGE, GRADIENTS
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.runtime.step import MultimodalModel, run_step
from trainer_client.runtime.wave_features import Features
from trainer_client.shard import (
    FeatureExchange,
    Group,
    Microbatch,
    ModalityBatch,
    PlanSummary,
    Shard,
    Wave,
)


class GivenRows(Module):
    """A model whose encoder has its feature rows already. Its decoder takes their gradients."""

    def __init__(self, model: MultimodalModel) -> None:
        super().__init__()
        self.model = cast(Module, model)
        self.row = torch.nn.Parameter(feature_row(model))

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        """The row as many times as the item is long: [rows, width]."""
        return self.row.expand(len(batch.items[0]), -1).contiguous()

    def dummy_item(self, modality: str) -> Tensor:
        """An item of one row."""
        return torch.zeros(1)

    def encoder_trains(self, modality: str) -> bool:
        """Gradients are sent back."""
        return True

    def decode(
        self, microbatch: Microbatch, features: Mapping[str, Features], attention: PackedAttention
    ) -> Tensor:
        """What the model makes of the text alone."""
        given = cast(MultimodalModel, self.model).decode(microbatch, {}, attention)
        nothing = sum(0 * arrived.rows.sum() for arrived in features.values())
        return settled(given, microbatch) + nothing


def exchange_loads(
    model: MultimodalModel,
    pool: GroupPool,
    groups: Groups,
    counts: Sequence[int],
    *,
    text_tokens: int,
) -> Iterator[Load]:
    """Feature rows from the first member of every group to the next, and their gradients back."""
    members = groups.of(pool.replica)
    target, sends = members[1 % len(members)], pool.replica == members[0]
    given = GivenRows(model)
    for count in counts:
        sent, received = [0] * pool.replicas, [0] * pool.replicas
        if len(members) == groups.degree and pool.replica in members[:2]:
            sent[target] = count if sends else 0
            received[members[0]] = 0 if sends else count
        batches = {"vision": _batch(sent, received, device_of(model))}
        shard = _shard(pool, batches, text_tokens, device_of(model))

        def run(shard: Shard = shard) -> float:
            return run_step(given, shard, pool).phase_s[EXCHANGE]

        yield Load(phase=EXCHANGE, tokens=(count,), groups=groups, run=run)


def gradients_load(
    model: MultimodalModel,
    pool: GroupPool,
    groups: Groups,
    modalities: Sequence[str],
    *,
    text_tokens: int,
) -> Load:
    """What a step takes once, whatever it holds. Dummy items give every encoder its gradients."""
    none, device = [0] * pool.replicas, device_of(model)
    shard = _shard(
        pool, {name: _batch(none, none, device) for name in modalities}, text_tokens, device
    )

    def run() -> float:
        return run_step(cast(Module, model), shard, pool).phase_s[GRADIENTS]

    return Load(phase=GRADIENTS, tokens=(1,), groups=groups, run=run)


def _batch(sent: list[int], received: list[int], device: torch.device) -> ModalityBatch:
    exchange = FeatureExchange(
        send_rows=torch.arange(sum(sent), device=device),
        send_splits=sent,
        recv_splits=received,
        recv_positions=torch.arange(sum(received), device=device),
    )
    items = [torch.zeros(sum(sent))] if sum(sent) else []
    return ModalityBatch(items=items, exchange=exchange)


def _shard(
    pool: GroupPool, batches: Mapping[str, ModalityBatch], text_tokens: int, device: torch.device
) -> Shard:
    """A step of one wave, in which every replica has some text of its own."""
    text = make_microbatch((text_tokens,), (pool.replica,), 0, device)
    groups = tuple(
        Group(pack=replica, replicas=(replica,), tokens=text_tokens, predicted_s=0.0)
        for replica in range(pool.replicas)
    )
    plan = PlanSummary(
        digest="0" * 32,
        replicas=pool.replicas,
        samples=pool.replicas,
        loss_tokens=pool.replicas * text_tokens,
        predicted_s=0.0,
        waves=(Wave(index=0, groups=groups, idle=()),),
        stages=(),
    )
    return Shard(
        job="measured",
        attempt=1,
        step=0,
        rank=pool.replica,
        replica=pool.replica,
        cursor_after="",
        plan=plan,
        microbatches=(
            replace(
                text,
                pack=pool.replica,
                vision=batches.get("vision"),
                audio=batches.get("audio"),
            ),
        ),
        size_bytes=0,
    )
