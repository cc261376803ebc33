"""A rank's part of a step, to and from protobuf; see wire_packs.py.

Columns are bytes at both ends: nothing is converted here by sample or by item. All ranks ask for
their shards at once, so the answers are written field by field, without messages.
"""

from functools import lru_cache

from dataservice_proto import columns
from dataservice_proto.v1 import coordinator_pb2

from dataservice.core.errors import ConflictError
from dataservice.core.field_bytes import BYTES, NUMBER, fields, heads_of, numbers, texts, within
from dataservice.core.orders import RankShard, ShardColumns, StepSummary, WantedParts
from dataservice.core.plan import StageReport
from dataservice.core.positions import PositionRule
from dataservice.serving.wire_packs import ticket_from_proto, ticket_parts


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
    return coordinator_pb2.GetShardResponse.FromString(shard_answer(shard, shard.job)).shard


def shard_answer(shard: RankShard, job: str) -> bytes:
    """A GetShardResponse, as it is sent, with one rank's part of a step; the rank knows its job as
    `job`. Parts that were made together are written together, each to be taken once."""
    together = None if shard.made_with is None else shard.made_with()
    if together is None:
        return _answer(shard, _common(shard, job))
    written = together.written.get(job)
    if written is None:
        common = _common(shard, job)
        answers = {each.rank: _answer(each, common) for each in together.shards}
        written = together.written[job] = answers
    answer = written.pop(shard.rank, None)
    return _answer(shard, _common(shard, job)) if answer is None else answer


def _answer(shard: RankShard, common: bytes) -> bytes:
    parts = [
        common,
        *numbers(_SHARD_NUMBERS, rank=shard.rank, replica=shard.replica),
        *within(_SHARD["columns"], _columns(shard.columns)),
    ]
    if shard.ticket is not None:
        parts += within(_SHARD["ticket"], ticket_parts(shard.ticket))
        parts += texts(_SHARD["addresses"], shard.ticket.addresses)
    if shard.summary is not None:
        parts += within(_SHARD["summary"], [step_summary_message(shard.summary)])
    return b"".join(within(_RESPONSE["shard"], parts))


_RESPONSE = heads_of(coordinator_pb2.GetShardResponse, BYTES)
_SHARD = heads_of(coordinator_pb2.RankShard, BYTES)
_SHARD_NUMBERS = heads_of(coordinator_pb2.RankShard, NUMBER)
_COLUMNS = heads_of(coordinator_pb2.ShardColumns, BYTES)


def _common(shard: RankShard, job: str) -> bytes:
    """The fields that are the same for all ranks."""
    return coordinator_pb2.RankShard(
        job=job,
        attempt=shard.attempt,
        step=shard.step,
        plan_digest=shard.plan_digest,
        cursor_after=shard.cursor_after,
        loss_tokens=shard.loss_tokens,
        weighted_loss_tokens=shard.weighted_loss_tokens,
        samples=shard.samples,
        predicted_s=shard.predicted_s,
        positions=coordinator_pb2.PositionRule(
            scheme=shard.positions.scheme,
            tokens_per_second=shard.positions.tokens_per_second,
            past_time=shard.positions.past_time,
        ),
    ).SerializeToString()


def _columns(of: ShardColumns) -> list[bytes]:
    written = of.written or fields(_COLUMNS, of.columns)
    return [_counts(of.waves, of.replicas, of.rings), *written]


@lru_cache(maxsize=64)
def _counts(waves: int, replicas: int, rings: int) -> bytes:
    return coordinator_pb2.ShardColumns(
        version=columns.VERSION, waves=waves, replicas=replicas, rings=rings
    ).SerializeToString()


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


def step_summary_message(summary: StepSummary) -> bytes:
    """The groups of the whole step as they are sent; written once for all who ask."""
    if not summary.written:
        summary.written.append(_step_summary(summary).SerializeToString())
    return summary.written[0]


def _step_summary(summary: StepSummary) -> coordinator_pb2.StepSummary:
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
