"""What `status` prints: jobs and what each one waits for, for people and for programs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.filesize import decimal
from rich.text import Text

from dataservice.cli.listing import Listing
from dataservice.core.health import (
    Diagnosed,
    FleetHealth,
    JobHealth,
    JobProgress,
    ServiceHealth,
    Severity,
)

NAMED_RANKS = 8  # of one job, those that wait longest; --json names all
STYLES: dict[Severity, str] = {"info": "green", "slow": "yellow", "stalled": "bold red"}
WORST_FIRST: tuple[Severity, ...] = ("stalled", "slow", "info")


def worst(jobs: Sequence[Diagnosed]) -> Severity:
    """The highest severity of all findings; info where there are none."""
    said = {finding.severity for job in jobs for finding in job.findings}
    return next((severity for severity in WORST_FIRST if severity in said), "info")


def health_json(health: ServiceHealth, *, indent: int | None = 2) -> str:
    """The whole health as one object; on one line without `indent`."""
    jobs = [
        {
            **asdict(each.health),
            "ranks": [rank._asdict() for rank in each.health.ranks],
            "findings": [asdict(found) for found in each.findings],
        }
        for each in health.jobs
    ]
    plain = {"jobs": jobs, "fleet": asdict(health.fleet), "troubles": health.troubles}
    return json.dumps(plain, indent=indent)


def health_view(health: ServiceHealth, *, detailed: bool) -> Iterator[RenderableType]:
    """The workers, one row per job, every finding, and the progress of jobs that are trained;
    `detailed` adds the progress of all jobs, their sources and their ranks."""
    for trouble in health.troubles:
        yield Text(f"the service: {trouble}; see its log", style=STYLES["stalled"])
    yield _fleet_line(health.fleet)
    if health.fleet.shortfall:
        yield Text(f"the workers: {health.fleet.shortfall}", style=STYLES["slow"])
    if not health.jobs:
        yield Text("no job is registered; see `dataservice job submit --help`")
        return
    yield _jobs_table(health.jobs)
    for each in health.jobs:
        for finding in each.findings:
            yield Text(f"{each.health.job}: {finding.text}", style=STYLES[finding.severity])
    for each in health.jobs:
        progress = each.health.progress
        if progress is not None and (detailed or _is_trained(each.health)):
            yield _progress_table(each.health.job, progress)
        if detailed:
            yield from _details(each.health)


def _fleet_line(fleet: FleetHealth) -> Text:
    lost = fleet.workers < fleet.wanted_workers
    sent_bytes, sent = fleet.grpc_bytes + fleet.same_node_bytes, ""
    if sent_bytes:
        near = fleet.same_node_bytes / sent_bytes
        sent = f", {decimal(sent_bytes)} sent, {near:.0%} through memory"
    return Text(
        f"{fleet.workers} of {fleet.wanted_workers} workers, {fleet.busy_slots:.1f} of "
        f"{fleet.slots} slots busy{sent}",
        style="yellow" if lost else "",
    )


def _jobs_table(jobs: Sequence[Diagnosed]) -> Listing:
    numbers = ("ranks", "trained", "planned", "decoded", "steps/s", "samples/s", "wait s")
    names = ("job", "state", *numbers)
    table = Listing(names, words=("job",), labels=("state",))
    for each in jobs:
        job, severity = each.health, worst([each])
        table.add_row(
            job.job,
            Text(_state(job, severity), style=STYLES[severity]),
            f"{sum(rank.live for rank in job.ranks)}/{job.world_size}",
            _or_dash(job.committed_step),
            _or_dash(job.planned_step),
            f"{job.decoded_steps}/{job.window_steps}",
            f"{job.steps_per_s:.3g}",
            f"{job.samples_per_s:.4g}",
            f"{job.exposed_wait_s:.2g}",
        )
    return table


def _state(job: JobHealth, severity: Severity) -> str:
    if severity != "info":
        return severity
    return "running" if _is_trained(job) else "idle"


def _is_trained(job: JobHealth) -> bool:
    return any(rank.live for rank in job.ranks)


def _progress_table(job: str, progress: JobProgress) -> Listing:
    """How many samples of each source are drawn, of those of the epoch and of all epochs."""
    names = ("source", "this epoch", "of", "%", "all epochs", "in all", "% in all", "masked")
    reached = f"step {progress.step}" if progress.step >= 0 else "no step"
    title = (
        f"{job}: samples drawn, {reached} trained, epoch {progress.epoch + 1} of {progress.epochs}"
    )
    table = Listing(names, words=("source",), title=title)
    for each in progress.sources:
        table.add_row(
            each.source,
            f"{each.epoch_drawn:,}",
            f"{each.epoch_samples:,}",
            _percent(each.epoch_drawn, each.epoch_samples),
            f"{each.drawn:,}",
            f"{each.samples:,}",
            _percent(each.drawn, each.samples),
            f"{each.masked:,}",
        )
    return table


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _details(job: JobHealth) -> Iterator[RenderableType]:
    if job.sources:
        yield _sources_table(job)
    if job.ranks:
        yield _ranks_table(job)


def _sources_table(job: JobHealth) -> Listing:
    names = ("source", "samples", "read s", "decode s", "cpu s", "s/sample", "usual", "masked")
    table = Listing(names, words=("source",), title="sources, a step")
    for source in job.sources:
        seconds = source.read_s + source.decode_s
        table.add_row(
            source.source,
            f"{source.samples:.1f}",
            f"{source.read_s:.3g}",
            f"{source.decode_s:.3g}",
            f"{source.read_cpu_s + source.decode_cpu_s:.3g}",
            f"{seconds / source.samples:.2g}" if source.samples else "-",
            f"{source.usual_s:.2g}" if source.usual_s else "-",
            str(source.quarantined),
        )
    return table


def _ranks_table(job: JobHealth) -> Listing:
    names = ("rank", "client", "trained", "wait s/step", "heard s ago")
    table = Listing(names, words=("client",), title="ranks that wait most")
    ranks = sorted(job.ranks, key=lambda rank: (rank.live, -rank.wait_s, -rank.quiet_s))
    for rank in ranks[:NAMED_RANKS]:
        table.add_row(
            str(rank.rank),
            rank.client if rank.live else f"{rank.client}, gone",
            _or_dash(rank.committed_step),
            f"{rank.wait_s:.2g}",
            f"{rank.quiet_s:.0f}",
        )
    return table


def _or_dash(step: int) -> str:
    return str(step) if step >= 0 else "-"
