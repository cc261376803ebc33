"""Jobs, steps and workers, to and from protobuf; see wire_packs.py."""

from dataclasses import dataclass
from typing import get_args

from dataservice_proto.v1 import coordinator_pb2

from dataservice.core.job import (
    JobRecord,
    JobState,
    MixtureChange,
    QuarantineEntry,
    SkipAction,
    SkipRecord,
)
from dataservice.core.mixture_tree import MixtureSource, MixtureTree
from dataservice.core.plan import StepPlan
from dataservice.core.ports import WorkerInfo, WorkerState
from dataservice.core.sample import SampleRef
from dataservice.engine.api import (
    ContentVerdict,
    Fate,
    FoundSample,
    JobStatus,
    JobVersion,
    NamedPack,
    ReplayedStep,
    SampleStep,
    StepExplanation,
    StepFate,
    WorkerStatus,
)
from dataservice.serving.enum_values import known_value
from dataservice.serving.wire_packs import location_from_proto, location_to_proto

JOB_STATES: dict[str, JobState] = {word: word for word in get_args(JobState)}
SKIP_ACTIONS: dict[str, SkipAction] = {word: word for word in get_args(SkipAction)}
WORKER_STATES: dict[str, WorkerState] = {word: word for word in get_args(WorkerState)}
CONTENT_VERDICTS: dict[str, ContentVerdict] = {word: word for word in get_args(ContentVerdict)}
FATES: dict[str, Fate] = {word: word for word in get_args(Fate)}


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
        failure=status.failure,
        spec_version=status.record.spec_version,
        attempt_version=status.attempt_version,
        versions=[
            coordinator_pb2.JobVersion(
                version=each.version,
                submitted_unix_s=each.submitted_unix_s,
                changes=each.changes,
                first_attempt=each.first_attempt,
                last_attempt=each.last_attempt,
            )
            for each in status.versions
        ],
        notes=status.notes,
        mixture=None if status.mixture is None else _mixture_to_proto(status.mixture),
        validation=None if status.validation is None else job_status_to_proto(status.validation),
    )


def job_status_from_proto(message: coordinator_pb2.JobInfo) -> JobStatus:
    """A job and where it stands. Raises SpecError where this release lacks its state."""
    return JobStatus(
        record=JobRecord(
            name=message.name,
            spec_json=message.spec_json,
            index_fingerprint=message.index_fingerprint,
            state=known_value(message.state, JOB_STATES, f"job {message.name!r} is in state"),
            created_unix_s=message.created_unix_s,
            spec_version=message.spec_version or 1,
        ),
        samples=message.samples,
        attempt=message.attempt,
        world_size=message.world_size,
        planned_step=message.planned_step,
        committed_step=message.committed_step,
        quarantined=message.quarantined,
        skips=tuple(skip_record_from_proto(skip, message.name) for skip in message.skips),
        failure=message.failure,
        attempt_version=message.attempt_version,
        versions=tuple(
            JobVersion(
                version=each.version,
                submitted_unix_s=each.submitted_unix_s,
                changes=each.changes,
                first_attempt=each.first_attempt,
                last_attempt=each.last_attempt,
            )
            for each in message.versions
        ),
        notes=tuple(message.notes),
        mixture=_mixture_from_proto(message.mixture) if message.HasField("mixture") else None,
        validation=(
            job_status_from_proto(message.validation) if message.HasField("validation") else None
        ),
    )


def _mixture_to_proto(mixture: MixtureTree) -> coordinator_pb2.MixtureTree:
    return coordinator_pb2.MixtureTree(
        epochs=mixture.epochs,
        sources=[
            coordinator_pb2.MixtureSource(
                source=each.source,
                fingerprint=each.fingerprint,
                samples=each.samples,
                tokens=each.tokens,
                weight=each.weight,
                passes=each.passes,
                max_passes=each.max_passes,
            )
            for each in mixture.sources
        ],
        changes=[
            coordinator_pb2.MixtureChange(
                weights=change.weights, from_epoch=change.from_epoch, from_step=change.from_step
            )
            for change in mixture.changes
        ],
    )


def _mixture_from_proto(message: coordinator_pb2.MixtureTree) -> MixtureTree:
    return MixtureTree(
        epochs=message.epochs,
        sources=tuple(
            MixtureSource(
                source=each.source,
                fingerprint=each.fingerprint,
                samples=each.samples,
                tokens=each.tokens,
                weight=each.weight,
                passes=each.passes,
                max_passes=each.max_passes if each.HasField("max_passes") else None,
            )
            for each in message.sources
        ),
        changes=tuple(
            MixtureChange(
                weights=dict(change.weights),
                from_epoch=change.from_epoch if change.HasField("from_epoch") else None,
                from_step=change.from_step if change.HasField("from_step") else None,
            )
            for change in message.changes
        ),
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
    """Skipped steps of `job`. Raises SpecError where this release lacks the action."""
    steps = f"steps {message.first_step} to {message.last_step} are to"
    return SkipRecord(
        job=job,
        number=message.number,
        first_step=message.first_step,
        last_step=message.last_step,
        action=known_value(message.action, SKIP_ACTIONS, steps),
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
        content=step.content,
        note=step.note,
        packs=[
            coordinator_pb2.NamedPack(pack=each.pack, samples=each.samples) for each in step.packs
        ],
    )


def replayed_step_from_proto(message: coordinator_pb2.ReplayedStep) -> ReplayedStep:
    """A step of a range, planned again. Raises SpecError where this release lacks a value."""
    return ReplayedStep(
        step=message.step,
        attempt=message.attempt,
        skipped=message.skipped,
        ledger_digest=message.ledger_plan_digest,
        plan_digest=message.plan_digest,
        content=known_value(message.content, CONTENT_VERDICTS, "a step's content is"),
        note=message.note,
        packs=tuple(
            NamedPack(pack=each.pack, samples=tuple(each.samples)) for each in message.packs
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedStep:
    """A step planned again, as a client of the service sees it.

    `ledger_plan_digest` is what was recorded when the step was first planned; it equals
    `plan.digest` unless the index or the release has changed. `sample_keys` are
    source/key, aligned with the plan's samples; `quarantined` are "source/key: reason".
    `content` is the ledger's record of what was delivered, empty where it has none. `skipped_by`
    is set where the attempt skipped the step; then nothing else was recorded.
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
    content: bytes = b""

    @property
    def as_recorded(self) -> bool:
        """Whether the plan made again is the one that was trained. True also for a skipped step,
        of which no plan was trained."""
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


def found_sample_to_proto(found: FoundSample) -> coordinator_pb2.FindSampleResponse:
    """A sample's place and steps; its id is the caller's own."""
    return coordinator_pb2.FindSampleResponse(
        source=found.ref.source,
        key=found.ref.key,
        location=location_to_proto(found.ref.location),
        crc32=found.ref.crc32,
        steps=[
            coordinator_pb2.SampleStep(
                step=each.step, attempt=each.attempt, fate=each.fate, masked=each.masked
            )
            for each in found.steps
        ],
        next_step=found.next_step,
    )


def found_sample_from_proto(
    message: coordinator_pb2.FindSampleResponse, sample_id: int
) -> FoundSample:
    """The place and steps of this sample. Raises SpecError where this release lacks a fate."""
    return FoundSample(
        ref=SampleRef(
            sample_id=sample_id,
            source=message.source,
            key=message.key,
            location=location_from_proto(message.location),
            crc32=message.crc32 if message.HasField("crc32") else None,
        ),
        steps=tuple(
            SampleStep(
                step=each.step,
                attempt=each.attempt,
                fate=known_value(each.fate, FATES, f"step {each.step} is"),
                masked=each.masked,
            )
            for each in message.steps
        ),
        next_step=message.next_step if message.HasField("next_step") else None,
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
        content=(entry and entry.content) or b"",
        fates=[
            coordinator_pb2.StepFate(attempt=each.attempt, fate=each.fate)
            for each in explained.fates
        ],
        skipped_by=None if skip is None else skip_record_to_proto(skip),
    )


def explanation_from_proto(message: coordinator_pb2.ExplainStepResponse) -> ExplainedStep:
    """A step planned again, as a client sees it. Raises SpecError where this release lacks a
    value."""
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
        content=message.content,
    )


def _fate_from_proto(message: coordinator_pb2.StepFate) -> StepFate:
    return StepFate(attempt=message.attempt, fate=known_value(message.fate, FATES, "a step is"))


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
    """A worker as it is now. Raises SpecError where this release lacks a value."""
    info = WorkerInfo(
        worker=message.worker,
        address=message.address,
        slots=message.slots,
        state=known_value(message.state, WORKER_STATES, "a worker is"),
    )
    return WorkerStatus(
        info=info, packs=message.packs, outstanding_tokens=message.outstanding_tokens
    )
