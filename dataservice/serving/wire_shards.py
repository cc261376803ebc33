"""A rank's part of a step, to and from protobuf; see wire_packs.py.

Columns are bytes at both ends: nothing is converted here by sample or by item.
"""

from typing import Any

from dataservice_proto import columns
from dataservice_proto.v1 import coordinator_pb2

from dataservice.core.errors import ConflictError
from dataservice.core.orders import RankShard, ShardColumns, StepSummary, WantedParts
from dataservice.core.plan import StageReport
from dataservice.core.positions import PositionRule
from dataservice.serving.wire_packs import ticket_fields, ticket_from_proto


def require_columns_read(request: coordinator_pb2.OpenSessionRequest, client: str) -> None:
    """Raises ConflictError where a rank's client reads columns of another version."""
    if request.columns != columns.VERSION:
        reads = f"version {request.columns}" if request.columns else "none, as before version 1"
        raise ConflictError(
            f"this service sends shards as columns of version {columns.VERSION}; the client of "
            f"rank {request.rank} ({client}) reads {reads}. Install the client of the service's "
            "release on all ranks."
        )


def wanted_parts_to_proto(wanted: WantedParts) -> coordinator_pb2.WantedParts:
    """Which bytes a rank asks for."""
    return coordinator_pb2.WantedParts(
        tokens=wanted.tokens, media=wanted.media, labels=wanted.labels
    )


def wanted_parts_from_proto(message: coordinator_pb2.WantedParts) -> WantedParts:
    """Which bytes a rank asks for."""
    return WantedParts(tokens=message.tokens, media=message.media, labels=message.labels)


def rank_shard_to_proto(shard: RankShard) -> coordinator_pb2.RankShard:
    """One rank's part of a step."""
    return coordinator_pb2.RankShard(**rank_shard_fields(shard))


def rank_shard_fields(shard: RankShard) -> dict[str, Any]:
    """The fields of `rank_shard_to_proto`'s message, for one that holds it: a message that is given
    another copies it, fields are written once."""
    of = shard.columns
    return {
        "job": shard.job,
        "attempt": shard.attempt,
        "step": shard.step,
        "rank": shard.rank,
        "replica": shard.replica,
        "plan_digest": shard.plan_digest,
        "cursor_after": shard.cursor_after,
        "loss_tokens": shard.loss_tokens,
        "weighted_loss_tokens": shard.weighted_loss_tokens,
        "samples": shard.samples,
        "predicted_s": shard.predicted_s,
        "columns": {
            "version": columns.VERSION,
            "waves": of.waves,
            "replicas": of.replicas,
            "rings": of.rings,
            **of.columns,
        },
        "ticket": None if shard.ticket is None else ticket_fields(shard.ticket),
        "addresses": () if shard.ticket is None else shard.ticket.addresses,
        "summary": None if shard.summary is None else step_summary_to_proto(shard.summary),
        "positions": {
            "scheme": shard.positions.scheme,
            "tokens_per_second": shard.positions.tokens_per_second,
            "past_time": shard.positions.past_time,
        },
    }


def rank_shard_from_proto(message: coordinator_pb2.RankShard) -> RankShard:
    """One rank's part of a step."""
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
        samples=message.samples,
        predicted_s=message.predicted_s,
        columns=ShardColumns(
            waves=message.columns.waves,
            replicas=message.columns.replicas,
            rings=message.columns.rings,
            columns=columns.columns_of(message.columns, columns.SHARD),
        ),
        ticket=(
            ticket_from_proto(message.ticket, tuple(message.addresses))
            if message.HasField("ticket")
            else None
        ),
        summary=(step_summary_from_proto(message.summary) if message.HasField("summary") else None),
        positions=PositionRule(
            scheme="mrope" if message.positions.scheme == "mrope" else "sequence",
            tokens_per_second=message.positions.tokens_per_second,
            past_time=message.positions.past_time,
        ),
    )


def step_summary_to_proto(summary: StepSummary) -> coordinator_pb2.StepSummary:
    """The groups of the whole step."""
    return coordinator_pb2.StepSummary(
        version=columns.VERSION,
        plan_digest=summary.plan_digest,
        replicas=summary.replicas,
        waves=summary.waves,
        packs=summary.packs,
        predicted_s=summary.predicted_s,
        samples=summary.samples,
        stages=[
            coordinator_pb2.StageReport(
                stage=stage.stage,
                algorithm=stage.algorithm,
                unit=stage.unit,
                before=stage.before,
                after=stage.after,
                lower_bound=stage.lower_bound,
            )
            for stage in summary.stages
        ],
        **summary.columns,
    )


def step_summary_from_proto(message: coordinator_pb2.StepSummary) -> StepSummary:
    """The groups of the whole step."""
    return StepSummary(
        plan_digest=message.plan_digest,
        replicas=message.replicas,
        waves=message.waves,
        packs=message.packs,
        predicted_s=message.predicted_s,
        samples=message.samples,
        stages=tuple(
            StageReport(
                stage=stage.stage,
                algorithm=stage.algorithm,
                unit=stage.unit,
                before=stage.before,
                after=stage.after,
                lower_bound=stage.lower_bound,
            )
            for stage in message.stages
        ),
        columns=columns.columns_of(message, columns.SUMMARY),
    )
