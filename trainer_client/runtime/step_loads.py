"""The loads that measure.py runs of what a step has beside its encoders and its decoder.

Steps with nothing but an exchange of feature rows, and steps without any microbatch, by the
runtime that trains: what is measured is the phase that it reports.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import Module

from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.loads import Groups, Load, device_of, feature_row
from trainer_client.runtime.phases import EXCHANGE, GRADIENTS
from trainer_client.runtime.ring_attention import PackedAttention
from trainer_client.runtime.step import Features, MultimodalModel, run_step
from trainer_client.shard import (
    FeatureExchange,
    Microbatch,
    ModalityBatch,
    PlanSummary,
    Shard,
    Wave,
)


class RowsAlone(Module):
    """A model whose encoder has its feature rows already, and whose decoder adds them up."""

    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.row = torch.nn.Parameter(row)

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
        """One row of logits of two tokens."""
        total = torch.stack([arrived.rows.sum() for arrived in features.values()]).sum()
        return total.expand(1, 2)


def exchange_loads(
    model: MultimodalModel, pool: GroupPool, groups: Groups, counts: Sequence[int]
) -> Iterator[Load]:
    """Feature rows from the first member of every group to the next, and their gradients back. The
    others keep theirs."""
    members = groups.of(pool.replica)
    target, sends = members[1 % len(members)], pool.replica == members[0]
    alone = RowsAlone(feature_row(model))
    for count in counts:
        sent, received = [0] * pool.replicas, [0] * pool.replicas
        if len(members) == groups.degree and pool.replica in members[:2]:
            sent[target] = count if sends else 0
            received[members[0]] = 0 if sends else count
        microbatch = _exchanging(pool.replica, sent, received, device_of(model))
        shard = _shard(pool, (microbatch,))

        def run(shard: Shard = shard) -> float:
            return run_step(alone, shard, pool).phase_s[EXCHANGE]

        yield Load(phase=EXCHANGE, tokens=(count,), groups=groups, run=run)


def gradients_load(model: MultimodalModel, pool: GroupPool, groups: Groups) -> Load:
    """A step without microbatches, in which every weight has a gradient."""
    module, shard = cast(Module, model), _shard(pool, ())

    def run() -> float:
        return run_step(module, shard, pool).phase_s[GRADIENTS]

    def prepare() -> None:
        for weight in module.parameters():
            # Of ones: memory of zeros is made when it is first used, which is in the sum.
            weight.grad = torch.ones_like(weight) if weight.requires_grad else None

    return Load(phase=GRADIENTS, tokens=(1,), groups=groups, run=run, prepare=prepare)


def _exchanging(
    replica: int, sent: list[int], received: list[int], device: torch.device
) -> Microbatch:
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    exchange = FeatureExchange(
        send_rows=torch.arange(sum(sent), device=device),
        send_splits=sent,
        recv_splits=received,
        recv_positions=torch.arange(sum(received), device=device),
    )
    items = [torch.zeros(sum(sent))] if sum(sent) else []
    return Microbatch(
        wave=0,
        pack=-1,
        cp_group=(replica,),
        cp_rank=0,
        predicted_s=0.0,
        input_ids=nothing,
        labels=nothing,
        position_ids=nothing,
        cu_seqlens=torch.zeros(1, dtype=torch.int32),
        lengths=torch.zeros(0, dtype=torch.int32),
        sample_ids=torch.zeros(0, dtype=torch.int64),
        vision=ModalityBatch(items=items, exchange=exchange),
    )


def _shard(pool: GroupPool, microbatches: tuple[Microbatch, ...]) -> Shard:
    waves = tuple(Wave(index=k, groups=(), idle=()) for k in range(len(microbatches)))
    plan = PlanSummary(
        digest="0" * 32,
        replicas=pool.replicas,
        samples=0,
        loss_tokens=0,
        predicted_s=0.0,
        waves=waves,
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
        microbatches=microbatches,
        size_bytes=0,
    )
