"""A rank's part of a step, to and from protobuf; see wire_packs.py."""

from collections.abc import Iterable

import numpy as np
from dataservice_proto.v1 import coordinator_pb2
from numpy.typing import NDArray

from dataservice.core.orders import (
    FeatureRoutes,
    ItemsOfPack,
    Microbatch,
    PackItems,
    RankShard,
    WantedParts,
)
from dataservice.core.plan import StepPlan
from dataservice.core.positions import PositionRule
from dataservice.core.sample import ItemNotes, Modality
from dataservice.serving.wire_packs import (
    modality_from_proto,
    ranges_from_proto,
    ranges_to_proto,
    ticket_from_proto,
    ticket_to_proto,
)


def wanted_parts_to_proto(wanted: WantedParts) -> coordinator_pb2.WantedParts:
    """Which bytes a rank asks for."""
    return coordinator_pb2.WantedParts(
        tokens=wanted.tokens, media=wanted.media, labels=wanted.labels
    )


def wanted_parts_from_proto(message: coordinator_pb2.WantedParts) -> WantedParts:
    """Which bytes a rank asks for."""
    return WantedParts(tokens=message.tokens, media=message.media, labels=message.labels)


def rank_shard_to_proto(
    shard: RankShard, summary: coordinator_pb2.StepSummary | None = None
) -> coordinator_pb2.RankShard:
    """One rank's part of a step, with the summary of the whole step where one is given."""
    return coordinator_pb2.RankShard(
        job=shard.job,
        attempt=shard.attempt,
        step=shard.step,
        rank=shard.rank,
        replica=shard.replica,
        plan_digest=shard.plan_digest,
        cursor_after=shard.cursor_after,
        loss_tokens=shard.loss_tokens,
        weighted_loss_tokens=shard.weighted_loss_tokens,
        microbatches=[_microbatch_to_proto(microbatch) for microbatch in shard.microbatches],
        tickets=[ticket_to_proto(ticket) for ticket in shard.tickets],
        summary=summary,
        positions=coordinator_pb2.PositionRule(
            scheme=shard.positions.scheme,
            tokens_per_second=shard.positions.tokens_per_second,
            past_time=shard.positions.past_time,
        ),
    )


def rank_shard_from_proto(message: coordinator_pb2.RankShard) -> RankShard:
    """One rank's part of a step, without the summary."""
    return RankShard(
        job=message.job,
        attempt=message.attempt,
        step=message.step,
        rank=message.rank,
        replica=message.replica,
        plan_digest=message.plan_digest,
        cursor_after=message.cursor_after,
        loss_tokens=message.loss_tokens,
        weighted_loss_tokens=(
            message.weighted_loss_tokens if message.HasField("weighted_loss_tokens") else None
        ),
        microbatches=tuple(_microbatch_from_proto(each) for each in message.microbatches),
        tickets=tuple(ticket_from_proto(ticket) for ticket in message.tickets),
        positions=PositionRule(
            scheme="mrope" if message.positions.scheme == "mrope" else "sequence",
            tokens_per_second=message.positions.tokens_per_second,
            past_time=message.positions.past_time,
        ),
    )


def step_summary_to_proto(plan: StepPlan) -> coordinator_pb2.StepSummary:
    """The groups of the whole step. There is no way back: a rank does not need the whole plan."""
    return coordinator_pb2.StepSummary(
        replicas=plan.replicas,
        waves=plan.waves,
        predicted_s=plan.predicted_s,
        pack_wave=plan.pack_wave.tolist(),
        pack_degree=plan.pack_degree.tolist(),
        pack_replicas=plan.pack_replicas.tolist(),
        pack_tokens=plan.pack_tokens.tolist(),
        pack_seconds=plan.pack_seconds.tolist(),
        stages=[
            coordinator_pb2.StageReport(
                stage=stage.stage,
                algorithm=stage.algorithm,
                unit=stage.unit,
                before=stage.before,
                after=stage.after,
                lower_bound=stage.lower_bound,
            )
            for stage in plan.stages
        ],
        samples=len(plan.sample_ids),
    )


def _microbatch_to_proto(microbatch: Microbatch) -> coordinator_pb2.Microbatch:
    modalities = sorted(microbatch.encodes.keys() | microbatch.routes.keys())
    return coordinator_pb2.Microbatch(
        wave=microbatch.wave,
        pack=microbatch.pack,
        cp_group=microbatch.cp_group,
        cp_rank=microbatch.cp_rank,
        seconds=microbatch.seconds,
        sample_ids=microbatch.sample_ids.tolist(),
        cu_seqlens=microbatch.cu_seqlens.tolist(),
        lengths=microbatch.lengths.tolist(),
        phases=[_phase_to_proto(microbatch, modality) for modality in modalities],
        items=_items_to_proto(microbatch.items),
        loss_weights=microbatch.loss_weights.tolist(),
    )


def _microbatch_from_proto(message: coordinator_pb2.Microbatch) -> Microbatch:
    routes = [_routes_from_proto(phase) for phase in message.phases]
    return Microbatch(
        wave=message.wave,
        pack=message.pack,
        cp_group=tuple(message.cp_group),
        cp_rank=message.cp_rank,
        seconds=message.seconds,
        sample_ids=np.array(message.sample_ids, dtype=np.int64),
        cu_seqlens=_int32(message.cu_seqlens),
        lengths=_int32(message.lengths),
        encodes={
            route.modality: tuple(
                ItemsOfPack(
                    pack=each.pack,
                    items=tuple(each.items),
                    ranges=ranges_from_proto(each.ranges),
                )
                for each in phase.encodes
            )
            for route, phase in zip(routes, message.phases, strict=True)
        },
        routes={route.modality: route for route in routes},
        encode_notes={
            route.modality: _notes_from_proto(
                phase.notes, sum(len(each.items) for each in phase.encodes)
            )
            for route, phase in zip(routes, message.phases, strict=True)
        },
        items=_items_from_proto(message.items),
        loss_weights=np.array(list(message.loss_weights), dtype=np.float64),
    )


def _items_to_proto(items: PackItems) -> coordinator_pb2.PackItems:
    return coordinator_pb2.PackItems(
        modality=items.modality.tolist(),
        start=items.start.tolist(),
        tokens=items.tokens.tolist(),
        notes=_notes_to_proto(items.notes),
    )


def _items_from_proto(message: coordinator_pb2.PackItems) -> PackItems:
    return PackItems(
        modality=np.array(list(message.modality), dtype=np.int8),
        start=_int32(message.start),
        tokens=_int32(message.tokens),
        notes=_notes_from_proto(message.notes, len(message.modality)),
    )


def _notes_to_proto(notes: ItemNotes) -> coordinator_pb2.ItemNotes:
    """Columns in which nothing is known are left out."""
    spans = notes.seconds_per_patch
    return coordinator_pb2.ItemNotes(
        kind=notes.kind.tolist() if (notes.kind >= 0).any() else (),
        grid=notes.grid.ravel().tolist() if notes.grid.any() else (),
        seconds_per_patch=() if np.isnan(spans).all() else spans.tolist(),
    )


def _notes_from_proto(message: coordinator_pb2.ItemNotes, items: int) -> ItemNotes:
    notes = ItemNotes.unknown(items)
    if message.kind:
        notes.kind[:] = list(message.kind)
    if message.grid:
        notes.grid[:] = _int32(message.grid).reshape(-1, 4)
    if message.seconds_per_patch:
        notes.seconds_per_patch[:] = list(message.seconds_per_patch)
    return notes


def _phase_to_proto(microbatch: Microbatch, modality: Modality) -> coordinator_pb2.EncoderPhase:
    encodes, routes = microbatch.encodes.get(modality, ()), microbatch.routes.get(modality)
    notes = microbatch.encode_notes.get(modality)
    phase = coordinator_pb2.EncoderPhase(
        modality=coordinator_pb2.Modality.Value(modality.name),
        encodes=[
            coordinator_pb2.ItemsOfPack(
                pack=each.pack, items=each.items, ranges=ranges_to_proto(each.ranges)
            )
            for each in encodes
        ],
        notes=None if notes is None else _notes_to_proto(notes),
    )
    if routes is not None:
        phase.send_rows.extend(routes.send_rows.tolist())
        phase.send_splits.extend(routes.send_splits.tolist())
        phase.recv_splits.extend(routes.recv_splits.tolist())
        phase.recv_positions.extend(routes.recv_positions.tolist())
    return phase


def _routes_from_proto(phase: coordinator_pb2.EncoderPhase) -> FeatureRoutes:
    return FeatureRoutes(
        modality=modality_from_proto(phase.modality),
        send_rows=_int32(phase.send_rows),
        send_splits=_int32(phase.send_splits),
        recv_splits=_int32(phase.recv_splits),
        recv_positions=_int32(phase.recv_positions),
    )


def _int32(values: Iterable[int]) -> NDArray[np.int32]:
    return np.array(list(values), dtype=np.int32)
