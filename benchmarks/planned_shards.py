"""Shards of a planned step as the engine cuts it, without a service: contents come from memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.cut_microbatches import ItemsOfPack, microbatches_of
from benchmarks.cut_microbatches import Microbatch as CutMicrobatch
from dataservice.core.layout import member_rows
from dataservice.core.plan import StepPlan
from dataservice.engine.shards import StepParts
from trainer_client.shard import (
    FeatureExchange,
    Group,
    Microbatch,
    ModalityBatch,
    PlanSummary,
    Shard,
    Wave,
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Contents:
    """A sample: its `ids` and `labels`, int64 [tokens], and its items as (modality, rows or pixels
    or sound, position of its first token)."""

    id: int
    ids: Tensor
    labels: Tensor
    items: Sequence[tuple[str, Tensor, int]]


def shard_of(parts: StepParts, samples: Sequence[Contents], replica: int) -> Shard:
    """A replica's shard of a step that holds `samples`, in the plan's order."""
    plan = parts.plan
    return Shard(
        job="planned",
        attempt=1,
        step=plan.step,
        rank=replica,
        replica=replica,
        cursor_after="",
        plan=PlanSummary(
            digest=plan.digest,
            replicas=plan.replicas,
            samples=len(samples),
            loss_tokens=0,
            predicted_s=plan.predicted_s,
            stages=(),
            waves=tuple(_wave_of(plan, wave) for wave in range(plan.waves)),
        ),
        microbatches=tuple(
            _microbatch_of(cut, plan, samples) for cut in microbatches_of(parts, replica)
        ),
        size_bytes=0,
    )


def _wave_of(plan: StepPlan, wave: int) -> Wave:
    groups = tuple(
        Group(pack=g.pack, replicas=g.replicas, tokens=g.tokens, predicted_s=g.seconds)
        for g in plan.groups(wave)
        if g.pack >= 0
    )
    return Wave(index=wave, groups=groups, idle=())


def _microbatch_of(cut: CutMicrobatch, plan: StepPlan, samples: Sequence[Contents]) -> Microbatch:
    held = [samples[k] for k in plan.samples_of(cut.pack)] if cut.pack >= 0 else []
    padded: NDArray[np.int64] = np.diff(cut.cu_seqlens)
    rows = member_rows(padded, len(cut.cp_group), cut.cp_rank)
    columns = {
        "input_ids": [_padded_to(s.ids, room, 0) for s, room in zip(held, padded, strict=True)],
        "labels": [_padded_to(s.labels, room, -100) for s, room in zip(held, padded, strict=True)],
        "position_ids": [torch.arange(room) for room in padded],
    }
    empty = torch.empty(0, dtype=torch.int64)
    return microbatch(
        cut,
        {name: torch.cat([empty, *pieces])[rows] for name, pieces in columns.items()},
        lambda of: _encoded(of, _items_of(of.pack, plan, samples)),
    )


def microbatch(
    cut: CutMicrobatch,
    columns: Mapping[str, Tensor],
    encoded: Callable[[ItemsOfPack], list[Tensor]],
) -> Microbatch:
    """What the client makes of `cut`: this replica's `columns` of its pack, int64 [tokens], and by
    `encoded` what it encodes of each."""
    batches: dict[str, Any] = {
        modality.name.lower(): ModalityBatch(
            items=[rows for of in cut.encodes[modality] for rows in encoded(of)],
            exchange=FeatureExchange(
                send_rows=torch.from_numpy(routes.send_rows).long(),
                send_splits=routes.send_splits.tolist(),
                recv_splits=routes.recv_splits.tolist(),
                recv_positions=torch.from_numpy(routes.recv_positions).long(),
            ),
        )
        for modality, routes in cut.routes.items()
    }
    return Microbatch(
        wave=cut.wave,
        pack=cut.pack,
        cp_group=cut.cp_group,
        cp_rank=cut.cp_rank,
        predicted_s=cut.seconds,
        cu_seqlens=torch.from_numpy(cut.cu_seqlens),
        lengths=torch.from_numpy(cut.lengths),
        sample_ids=torch.from_numpy(cut.sample_ids),
        **columns,  # type: ignore[arg-type]
        **batches,
    )


def _encoded(of: ItemsOfPack, items: Sequence[Tensor]) -> list[Tensor]:
    """The rows or frames of the units that are encoded of a pack's `items`."""
    chosen = [items[place] for place in of.items]
    if not of.ranges:
        return chosen
    return [
        rows[units.first * len(rows) // units.of : units.stop * len(rows) // units.of]
        for rows, units in zip(chosen, of.ranges, strict=True)
    ]


def _padded_to(values: Tensor, room: int, filler: int) -> Tensor:
    return torch.cat([values, values.new_full((int(room) - len(values),), filler)])


def _items_of(pack: int, plan: StepPlan, samples: Sequence[Contents]) -> list[Tensor]:
    return [rows for k in plan.samples_of(pack) for _, rows, _ in samples[k].items]
