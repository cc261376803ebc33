"""The health of running jobs and the reports of ranks, to and from protobuf; see wire_packs.py."""

from dataclasses import fields
from typing import Any, get_args

from dataservice_proto.v1 import coordinator_pb2

from dataservice.core.errors import SpecError
from dataservice.core.health import (
    Diagnosed,
    Finding,
    FleetHealth,
    JobHealth,
    JobProgress,
    RankHealth,
    RankReport,
    ServiceHealth,
    Severity,
    SourceHealth,
    SourceProgress,
)
from dataservice.core.plan import PHASES
from dataservice.serving import wire_packs
from dataservice.serving.enum_values import known_value

SEVERITIES: dict[str, Severity] = {name: name for name in get_args(Severity)}
# The names of releases before this one, which had each pass by itself and waiting in the exchange.
OLDER_PHASES = {
    **{f"{name}_{way}": name for name in PHASES[:4] for way in ("forward", "backward")},
    "bubble": "waiting",
    "other": "gradients",
}
MOST_PHASES = 32
MOST_SECONDS = 1e9  # whose sums stay finite

Trained = coordinator_pb2.CommitStepRequest | coordinator_pb2.TrainedStep


def phases_from_proto(message: Trained) -> dict[str, float]:
    """Seconds of a rank's step by phase, for the phases that plans predict: another release may
    send others, which get no metric. Raises SpecError where there are too many phases or a number
    of seconds is invalid."""
    if len(message.phase_s) > MOST_PHASES:
        raise SpecError(
            f"step {message.step} has {len(message.phase_s)} phases; at most {MOST_PHASES} are "
            "taken. Leave phase_s out, or send what StepResult.phase_s holds."
        )
    known: dict[str, float] = {}
    given = message.phase_s
    for name in given:  # its items are found by code in Python
        seconds = given[name]
        _require_seconds(seconds, "phase %r of step %d", name[:40], message.step)
        phase = OLDER_PHASES.get(name, name)
        if phase in PHASES:
            known[phase] = known.get(phase, 0.0) + seconds
    return known


def measured_from_proto(message: Trained) -> float | None:
    """The seconds that a rank measured, None where it sent none. Raises SpecError where the number
    is invalid."""
    if not message.HasField("measured_s"):
        return None
    _require_seconds(message.measured_s, "measured_s of step %d", message.step)
    return message.measured_s


def report_from_proto(message: coordinator_pb2.ReportRequest) -> RankReport:
    """A rank's report. Raises SpecError where its values are invalid."""
    _require_seconds(message.waited_s, "waited_s")
    _require_seconds(message.waiting_s, "waiting_s")
    if message.steps < 0:
        raise SpecError(f"steps is {message.steps}; a rank has begun 0 or more.")
    return RankReport(
        step=message.step,
        steps=message.steps,
        waited_s=message.waited_s,
        waiting_s=message.waiting_s,
    )


def health_to_proto(health: ServiceHealth) -> coordinator_pb2.GetHealthResponse:
    """Jobs and workers as they are now."""
    return coordinator_pb2.GetHealthResponse(
        jobs=map(_job_to_proto, health.jobs),
        fleet=coordinator_pb2.FleetHealth(**_values(health.fleet)),
        troubles=health.troubles,
    )


def health_from_proto(message: coordinator_pb2.GetHealthResponse) -> ServiceHealth:
    """Jobs and workers as they are now. Raises SpecError where this release lacks a value."""
    fleet = message.fleet
    return ServiceHealth(
        jobs=tuple(map(_job_from_proto, message.jobs)),
        fleet=FleetHealth(
            workers=fleet.workers,
            wanted_workers=fleet.wanted_workers,
            slots=fleet.slots,
            slots_per_worker=fleet.slots_per_worker,
            busy_slots=fleet.busy_slots,
            waiting_teams=tuple(fleet.waiting_teams),
            shortfall=fleet.shortfall,
            grpc_bytes=fleet.grpc_bytes,
            same_node_bytes=fleet.same_node_bytes,
        ),
        troubles=tuple(message.troubles),
    )


def _job_to_proto(job: Diagnosed) -> coordinator_pb2.JobHealth:
    plain = _values(job.health)
    plain["ranks"] = [coordinator_pb2.RankHealth(**rank._asdict()) for rank in job.health.ranks]
    plain["sources"] = [
        coordinator_pb2.SourceHealth(**_values(source)) for source in job.health.sources
    ]
    plain["progress"] = _progress_to_proto(job.health.progress)
    plain["outages"] = map(wire_packs.storage_outage_to_proto, job.health.outages)
    findings = [
        coordinator_pb2.Finding(severity=each.severity, text=each.text) for each in job.findings
    ]
    return coordinator_pb2.JobHealth(**plain, findings=findings)


def _job_from_proto(message: coordinator_pb2.JobHealth) -> Diagnosed:
    plain = _fields(message, JobHealth)
    plain["missing_ranks"] = tuple(message.missing_ranks)
    plain["ranks"] = tuple(
        RankHealth(**{name: getattr(rank, name) for name in RankHealth._fields})
        for rank in message.ranks
    )
    plain["sources"] = tuple(
        SourceHealth(**_fields(source, SourceHealth)) for source in message.sources
    )
    plain["progress"] = _progress_from_proto(message)
    plain["outages"] = tuple(map(wire_packs.storage_outage_from_proto, message.outages))
    findings = tuple(
        Finding(severity=known_value(each.severity, SEVERITIES, "a finding is"), text=each.text)
        for each in message.findings
    )
    return Diagnosed(health=JobHealth(**plain), findings=findings)


def _progress_to_proto(progress: JobProgress | None) -> coordinator_pb2.JobProgress | None:
    if progress is None:
        return None
    plain = _values(progress)
    plain["sources"] = [
        coordinator_pb2.SourceProgress(**_values(source)) for source in progress.sources
    ]
    return coordinator_pb2.JobProgress(**plain)


def _progress_from_proto(job: coordinator_pb2.JobHealth) -> JobProgress | None:
    if not job.HasField("progress"):
        return None
    plain = _fields(job.progress, JobProgress)
    plain["sources"] = tuple(
        SourceProgress(**_fields(source, SourceProgress)) for source in job.progress.sources
    )
    return JobProgress(**plain)


# The fields of the messages have the names of the dataclasses' fields.


def _values(noun: Any) -> dict[str, Any]:
    return {field.name: getattr(noun, field.name) for field in fields(noun)}


def _fields(message: Any, noun: Any) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in fields(noun)}


def _require_seconds(seconds: float, what: str, *of: object) -> None:
    """`what`, filled in with `of`, names them where they are no seconds."""
    if not 0 <= seconds <= MOST_SECONDS:
        raise SpecError(
            f"{what % of} is {seconds} s; from 0 to {MOST_SECONDS:.0e} are taken. Leave it out "
            "where it was not measured."
        )
