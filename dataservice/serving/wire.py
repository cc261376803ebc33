"""The only place where protobuf messages and core dataclasses become each other.

Every `x_to_proto` has its `x_from_proto`; what goes over and back is equal to what was sent.
Values that no sender of ours writes raise SpecError.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from dataservice_proto.v1 import coordinator_pb2, worker_pb2
from numpy.typing import NDArray

from dataservice.core.errors import SpecError
from dataservice.core.job import JobRecord, QuarantineEntry, SkipAction, SkipRecord
from dataservice.core.orders import (
    BadSample,
    FeatureRoutes,
    ItemsOfPack,
    Microbatch,
    PackKey,
    PackOrder,
    PackReceipt,
    PackSample,
    PartSpec,
    RankShard,
    SourceWork,
    Ticket,
    WantedParts,
)
from dataservice.core.plan import StepPlan
from dataservice.core.ports import WorkerInfo, WorkerState
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.team import TeamShare
from dataservice.engine.api import (
    JobStatus,
    ReplayedStep,
    StepExplanation,
    StepFate,
    WorkerStatus,
)

JOB_STATES: dict[str, Literal["active", "draining"]] = {
    "active": "active",
    "draining": "draining",
}

SKIP_ACTIONS: dict[str, SkipAction] = {"skip": "skip", "train": "train"}
WORKER_STATES: dict[str, WorkerState] = {
    "serving": "serving",
    "silent": "silent",
    "draining": "draining",
}
FATES: dict[str, Literal["planned", "committed", "skipped"]] = {
    "planned": "planned",
    "committed": "committed",
    "skipped": "skipped",
}

# ---- packs: coordinator and worker --------------------------------------------------------


def pack_key_to_proto(key: PackKey) -> worker_pb2.PackKey:
    """A pack's name."""
    return worker_pb2.PackKey(
        job=key.job, step=key.step, plan_digest=key.plan_digest, pack=key.pack
    )


def pack_key_from_proto(message: worker_pb2.PackKey) -> PackKey:
    """A pack's name."""
    return PackKey(
        job=message.job, step=message.step, plan_digest=message.plan_digest, pack=message.pack
    )


def pack_order_to_proto(order: PackOrder) -> worker_pb2.PackOrder:
    """What a worker is to decode and assemble."""
    return worker_pb2.PackOrder(
        key=pack_key_to_proto(order.key),
        degree=order.degree,
        pipeline=order.pipeline,
        samples=[_pack_sample_to_proto(sample) for sample in order.samples],
        team_weight=order.share.weight,
        team_limit=order.share.limit,
    )


def pack_order_from_proto(message: worker_pb2.PackOrder) -> PackOrder:
    """What a worker is to decode and assemble. Raises SpecError on numbers that no order has."""
    if message.degree < 1:
        raise SpecError(f"a pack order has degree {message.degree}; it must be at least 1.")
    if not (message.team_weight > 0 and message.team_limit > 0):
        raise SpecError(
            f"a pack order has team weight {message.team_weight} and limit {message.team_limit}; "
            "both must be above 0. Run one release of coordinator and workers."
        )
    return PackOrder(
        key=pack_key_from_proto(message.key),
        degree=message.degree,
        pipeline=message.pipeline,
        samples=tuple(_pack_sample_from_proto(sample) for sample in message.samples),
        share=TeamShare(weight=message.team_weight, limit=message.team_limit),
    )


def _pack_sample_to_proto(sample: PackSample) -> worker_pb2.PackSample:
    location = sample.ref.location
    return worker_pb2.PackSample(
        sample_id=sample.ref.sample_id,
        source=sample.ref.source,
        key=sample.ref.key,
        location=worker_pb2.SampleLocation(
            file=location.file,
            spans=[
                worker_pb2.ByteSpan(
                    name=span.name, offset_bytes=span.offset_bytes, size_bytes=span.size_bytes
                )
                for span in location.spans
            ],
            row_group=location.row_group,
            row=location.row,
        ),
        llm_tokens=sample.lengths.llm_tokens,
        loss_tokens=sample.lengths.loss_tokens,
        items=[_item_to_proto(item) for item in sample.lengths.items],
        crc32=sample.ref.crc32,
    )


def _pack_sample_from_proto(message: worker_pb2.PackSample) -> PackSample:
    location = SampleLocation(
        file=message.location.file,
        spans=tuple(
            ByteSpan(name=span.name, offset_bytes=span.offset_bytes, size_bytes=span.size_bytes)
            for span in message.location.spans
        ),
        row_group=message.location.row_group,
        row=message.location.row,
    )
    return PackSample(
        ref=SampleRef(
            sample_id=message.sample_id,
            source=message.source,
            key=message.key,
            location=location,
            crc32=message.crc32 if message.HasField("crc32") else None,
        ),
        lengths=SampleLengths(
            llm_tokens=message.llm_tokens,
            loss_tokens=message.loss_tokens,
            items=tuple(_item_from_proto(item) for item in message.items),
        ),
    )


def _item_to_proto(item: ItemLengths) -> worker_pb2.ItemLengths:
    return worker_pb2.ItemLengths(
        modality=int(item.modality),
        encoder_tokens=item.encoder_tokens,
        llm_tokens=item.llm_tokens,
        position=item.position,
        shape=item.shape,
    )


def _item_from_proto(message: worker_pb2.ItemLengths) -> ItemLengths:
    return ItemLengths(
        modality=_modality(message.modality),
        encoder_tokens=message.encoder_tokens,
        llm_tokens=message.llm_tokens,
        position=message.position,
        shape=tuple(message.shape),
    )


def pack_receipt_to_proto(receipt: PackReceipt) -> worker_pb2.PackReceipt:
    """What assembling a pack took."""
    return worker_pb2.PackReceipt(
        key=pack_key_to_proto(receipt.key),
        size_bytes=receipt.size_bytes,
        decode_s=receipt.decode_s,
        bad_samples=[
            worker_pb2.BadSample(
                sample_id=bad.sample_id, source=bad.source, key=bad.key, reason=bad.reason
            )
            for bad in receipt.bad_samples
        ],
        sources=[
            worker_pb2.SourceWork(
                source=work.source,
                samples=work.samples,
                read_s=work.read_s,
                decode_s=work.decode_s,
                read_bytes=work.read_bytes,
            )
            for work in receipt.sources
        ],
    )


def pack_receipt_from_proto(message: worker_pb2.PackReceipt) -> PackReceipt:
    """What assembling a pack took."""
    return PackReceipt(
        key=pack_key_from_proto(message.key),
        size_bytes=message.size_bytes,
        decode_s=message.decode_s,
        bad_samples=tuple(
            BadSample(sample_id=bad.sample_id, source=bad.source, key=bad.key, reason=bad.reason)
            for bad in message.bad_samples
        ),
        sources=tuple(
            SourceWork(
                source=work.source,
                samples=work.samples,
                read_s=work.read_s,
                decode_s=work.decode_s,
                read_bytes=work.read_bytes,
            )
            for work in message.sources
        ),
    )


# ---- tickets: coordinator, rank and worker ------------------------------------------------


def ticket_to_proto(ticket: Ticket) -> worker_pb2.Ticket:
    """The right to stream some parts."""
    return worker_pb2.Ticket(
        worker=ticket.worker,
        address=ticket.address,
        rank=ticket.rank,
        expires_unix_s=ticket.expires_unix_s,
        parts=[
            worker_pb2.PartSpec(
                key=pack_key_to_proto(part.key),
                cp_rank=part.cp_rank,
                items=part.items,
                tensors=part.tensors,
            )
            for part in ticket.parts
        ],
        signature=ticket.signature,
    )


def ticket_from_proto(message: worker_pb2.Ticket) -> Ticket:
    """The right to stream some parts; not yet checked."""
    return Ticket(
        worker=message.worker,
        address=message.address,
        rank=message.rank,
        expires_unix_s=message.expires_unix_s,
        parts=tuple(
            PartSpec(
                key=pack_key_from_proto(part.key),
                cp_rank=part.cp_rank,
                items=tuple(part.items),
                tensors=tuple(part.tensors),
            )
            for part in message.parts
        ),
        signature=message.signature,
    )


# ---- shards: coordinator and rank ---------------------------------------------------------


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
        microbatches=[_microbatch_to_proto(microbatch) for microbatch in shard.microbatches],
        tickets=[ticket_to_proto(ticket) for ticket in shard.tickets],
        summary=summary,
    )


def rank_shard_from_proto(message: coordinator_pb2.RankShard) -> RankShard:
    """One rank's part of a step, the summary left aside."""
    return RankShard(
        job=message.job,
        attempt=message.attempt,
        step=message.step,
        rank=message.rank,
        replica=message.replica,
        plan_digest=message.plan_digest,
        cursor_after=message.cursor_after,
        loss_tokens=message.loss_tokens,
        microbatches=tuple(_microbatch_from_proto(each) for each in message.microbatches),
        tickets=tuple(ticket_from_proto(ticket) for ticket in message.tickets),
    )


def step_summary_to_proto(plan: StepPlan) -> coordinator_pb2.StepSummary:
    """The groups of the whole step. One way: a rank shows them and needs no plan."""
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
        phases=[
            _phase_to_proto(
                modality, microbatch.encodes.get(modality, ()), microbatch.routes.get(modality)
            )
            for modality in modalities
        ],
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
                ItemsOfPack(pack=each.pack, items=tuple(each.items)) for each in phase.encodes
            )
            for route, phase in zip(routes, message.phases, strict=True)
        },
        routes={route.modality: route for route in routes},
    )


def _phase_to_proto(
    modality: Modality, encodes: tuple[ItemsOfPack, ...], routes: FeatureRoutes | None
) -> coordinator_pb2.EncoderPhase:
    phase = coordinator_pb2.EncoderPhase(
        modality=coordinator_pb2.Modality.Value(modality.name),
        encodes=[coordinator_pb2.ItemsOfPack(pack=each.pack, items=each.items) for each in encodes],
    )
    if routes is not None:
        phase.send_rows.extend(routes.send_rows.tolist())
        phase.send_splits.extend(routes.send_splits.tolist())
        phase.recv_splits.extend(routes.recv_splits.tolist())
        phase.recv_positions.extend(routes.recv_positions.tolist())
    return phase


def _routes_from_proto(phase: coordinator_pb2.EncoderPhase) -> FeatureRoutes:
    return FeatureRoutes(
        modality=_modality(phase.modality),
        send_rows=_int32(phase.send_rows),
        send_splits=_int32(phase.send_splits),
        recv_splits=_int32(phase.recv_splits),
        recv_positions=_int32(phase.recv_positions),
    )


# ---- jobs: coordinator and CLI ------------------------------------------------------------


def job_status_to_proto(status: JobStatus) -> coordinator_pb2.JobInfo:
    """A job and where it stands."""
    return coordinator_pb2.JobInfo(
        name=status.record.name,
        state=status.record.state,
        spec_json=status.record.spec_json,
        index_fingerprint=status.record.index_fingerprint,
        samples=status.samples,
        attempt=status.attempt,
        world_size=status.world_size,
        planned_step=status.planned_step,
        committed_step=status.committed_step,
        quarantined=status.quarantined,
        created_unix_s=status.record.created_unix_s,
        skips=[skip_record_to_proto(skip) for skip in status.skips],
    )


def job_status_from_proto(message: coordinator_pb2.JobInfo) -> JobStatus:
    """A job and where it stands. Raises SpecError on a state that this release lacks."""
    state = JOB_STATES.get(message.state)
    if state is None:
        raise SpecError(
            f"job {message.name!r} is in state {message.state!r}; this release knows active and "
            "draining. Use the CLI of the service's release."
        )
    return JobStatus(
        record=JobRecord(
            name=message.name,
            spec_json=message.spec_json,
            index_fingerprint=message.index_fingerprint,
            state=state,
            created_unix_s=message.created_unix_s,
        ),
        samples=message.samples,
        attempt=message.attempt,
        world_size=message.world_size,
        planned_step=message.planned_step,
        committed_step=message.committed_step,
        quarantined=message.quarantined,
        skips=tuple(skip_record_from_proto(skip, message.name) for skip in message.skips),
    )


def skip_record_to_proto(skip: SkipRecord) -> coordinator_pb2.SkippedRange:
    """Skipped steps; the job is the caller's own."""
    return coordinator_pb2.SkippedRange(
        number=skip.number,
        first_step=skip.first_step,
        last_step=skip.last_step,
        action=skip.action,
        from_attempt=skip.from_attempt,
        recorded_unix_s=skip.recorded_unix_s,
    )


def skip_record_from_proto(message: coordinator_pb2.SkippedRange, job: str) -> SkipRecord:
    """Skipped steps of `job`. Raises SpecError on an action that this release lacks."""
    action = SKIP_ACTIONS.get(message.action)
    if action is None:
        raise SpecError(
            f"steps {message.first_step} to {message.last_step} are to {message.action!r}, which "
            "this release does not know. Use the CLI of the service's release."
        )
    return SkipRecord(
        job=job,
        number=message.number,
        first_step=message.first_step,
        last_step=message.last_step,
        action=action,
        from_attempt=message.from_attempt,
        recorded_unix_s=message.recorded_unix_s,
    )


def replayed_step_to_proto(step: ReplayedStep) -> coordinator_pb2.ReplayedStep:
    """A step of a range, planned again."""
    return coordinator_pb2.ReplayedStep(
        step=step.step,
        attempt=step.attempt,
        skipped=step.skipped,
        ledger_plan_digest=step.ledger_digest,
        plan_digest=step.plan_digest,
    )


def replayed_step_from_proto(message: coordinator_pb2.ReplayedStep) -> ReplayedStep:
    """A step of a range, planned again."""
    return ReplayedStep(
        step=message.step,
        attempt=message.attempt,
        skipped=message.skipped,
        ledger_digest=message.ledger_plan_digest,
        plan_digest=message.plan_digest,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedStep:
    """A step planned again, as a client of the service sees it.

    `ledger_plan_digest` is what was recorded when the step was first planned; it equals
    `plan.digest` unless the index or the release has changed. `sample_keys` are
    source/key, aligned with the plan's samples; `quarantined` are "source/key: reason".
    Where the attempt skipped the step there is `skipped_by`, and nothing was recorded.
    """

    attempt: int
    plan: StepPlan
    plan_digest: str
    ledger_plan_digest: str
    cursor: str
    committed: bool
    world_size: int
    sample_keys: tuple[str, ...]
    quarantined: tuple[str, ...]
    cost_version: str = ""
    measured_s: float | None = None
    ranks_per_replica: int = 1
    fates: tuple[StepFate, ...] = ()
    skipped_by: SkipRecord | None = None

    @property
    def as_recorded(self) -> bool:
        """The plan made again is the one that was trained; or none was, the step being
        skipped."""
        return self.skipped_by is not None or self.plan_digest == self.ledger_plan_digest


def quarantine_entry_to_proto(entry: QuarantineEntry) -> coordinator_pb2.QuarantinedSample:
    """A masked sample; the job is the caller's own."""
    return coordinator_pb2.QuarantinedSample(
        attempt=entry.attempt,
        step=entry.step,
        sample_id=entry.sample_id,
        source=entry.source,
        key=entry.key,
        reason=entry.reason,
    )


def quarantine_entry_from_proto(
    message: coordinator_pb2.QuarantinedSample, job: str
) -> QuarantineEntry:
    """A masked sample of `job`."""
    return QuarantineEntry(
        job=job,
        attempt=message.attempt,
        step=message.step,
        sample_id=message.sample_id,
        source=message.source,
        key=message.key,
        reason=message.reason,
    )


def explanation_to_proto(explained: StepExplanation) -> coordinator_pb2.ExplainStepResponse:
    """A step, planned again."""
    entry, skip = explained.entry, explained.skipped_by
    return coordinator_pb2.ExplainStepResponse(
        attempt=explained.attempt,
        plan_json=explained.plan.to_json(),
        plan_digest=explained.plan.digest,
        ledger_plan_digest="" if entry is None else entry.plan_digest,
        cursor=explained.cursor.to_json(),
        committed=entry is not None and entry.committed_unix_s is not None,
        world_size=explained.topology.world_size,
        sample_keys=explained.sample_keys,
        quarantined=explained.quarantined,
        cost_version=explained.plan.cost_version if entry is None else entry.cost_version,
        measured_s=None if entry is None else entry.measured_s,
        ranks_per_replica=explained.topology.ranks_per_replica,
        fates=[
            coordinator_pb2.StepFate(attempt=each.attempt, fate=each.fate)
            for each in explained.fates
        ],
        skipped_by=None if skip is None else skip_record_to_proto(skip),
    )


def explanation_from_proto(message: coordinator_pb2.ExplainStepResponse) -> ExplainedStep:
    """What of it a client is told. Raises SpecError on words that this release lacks."""
    skipped = message.HasField("skipped_by")
    return ExplainedStep(
        attempt=message.attempt,
        plan=StepPlan.from_json(message.plan_json),
        plan_digest=message.plan_digest,
        ledger_plan_digest=message.ledger_plan_digest,
        cursor=message.cursor,
        committed=message.committed,
        world_size=message.world_size,
        sample_keys=tuple(message.sample_keys),
        quarantined=tuple(message.quarantined),
        cost_version=message.cost_version,
        measured_s=message.measured_s if message.HasField("measured_s") else None,
        ranks_per_replica=message.ranks_per_replica or 1,
        fates=tuple(map(_fate_from_proto, message.fates)),
        skipped_by=skip_record_from_proto(message.skipped_by, "") if skipped else None,
    )


def _fate_from_proto(message: coordinator_pb2.StepFate) -> StepFate:
    fate = FATES.get(message.fate)
    if fate is None:
        raise SpecError(
            f"a step is {message.fate!r}, which this release does not know. Use the CLI of the "
            "service's release."
        )
    return StepFate(attempt=message.attempt, fate=fate)


def worker_status_to_proto(status: WorkerStatus) -> coordinator_pb2.WorkerStatus:
    """A worker as it is now."""
    return coordinator_pb2.WorkerStatus(
        worker=status.info.worker,
        address=status.info.address,
        slots=status.info.slots,
        state=status.info.state,
        packs=status.packs,
        outstanding_tokens=status.outstanding_tokens,
    )


def worker_status_from_proto(message: coordinator_pb2.WorkerStatus) -> WorkerStatus:
    """A worker as it is now. Raises SpecError on words that this release lacks."""
    state = WORKER_STATES.get(message.state)
    if state is None:
        raise SpecError(
            f"a worker is {message.state!r}, which this release does not know. Use the CLI of the "
            "service's release."
        )
    info = WorkerInfo(
        worker=message.worker, address=message.address, slots=message.slots, state=state
    )
    return WorkerStatus(
        info=info, packs=message.packs, outstanding_tokens=message.outstanding_tokens
    )


def measured_from_proto(message: coordinator_pb2.CommitStepRequest) -> float | None:
    """The seconds a rank tells, if it does. Raises SpecError where they cannot be any."""
    if not message.HasField("measured_s"):
        return None
    if not (math.isfinite(message.measured_s) and message.measured_s >= 0):
        raise SpecError(
            f"step {message.step} was measured as {message.measured_s} s; seconds are finite and "
            "at least 0. Leave measured_s out where a step was not measured."
        )
    return message.measured_s


def _int32(values: Iterable[int]) -> NDArray[np.int32]:
    return np.array(list(values), dtype=np.int32)


def _modality(value: int) -> Modality:
    try:
        return Modality(value)
    except ValueError as error:
        known = ", ".join(f"{each.value} ({each.name.lower()})" for each in Modality)
        raise SpecError(
            f"modality {value} is not known; this release knows {known}. Run one release of "
            "coordinator and workers."
        ) from error
