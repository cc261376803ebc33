"""What commands print: tables for people, JSON for programs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dataservice.cli.listing import Listing
from dataservice.cli.show_mixture import mixture_fields
from dataservice.cli.show_records import local_time, skip_words
from dataservice.core.job import QuarantineEntry
from dataservice.core.plan import Group, StageReport, StepPlan
from dataservice.core.sample import Modality
from dataservice.engine.api import JobStatus
from dataservice.serving.wire_jobs import ExplainedStep

if TYPE_CHECKING:  # they load the planner and codecs
    from dataservice.jobs.calibrate import Calibration
    from dataservice.planning.calibration import RelativeError

NAMED_SAMPLES = 4  # of one pack, in a table; --json names all
NAMED_BAD_SAMPLES = 5  # of one job, in a table; --json names all


def job_table(statuses: Sequence[JobStatus]) -> Listing:
    """One row per job."""
    names = ("job", "state", "samples", "attempt", "ranks", "planned", "committed", "masked")
    table = Listing(names, words=("job",), labels=("state",), title="jobs")
    for status in statuses:
        table.add_row(
            status.record.name,
            status.record.state,
            *_dashed(status.samples, status.attempt or -1, status.world_size or -1),
            *_dashed(status.planned_step, status.committed_step),
            str(status.quarantined),
        )
    return table


def jobs_json(statuses: Sequence[JobStatus]) -> str:
    """The same as a list of objects."""
    return json.dumps([_job_fields(status) for status in statuses], indent=2)


def job_json(status: JobStatus, masked: Sequence[QuarantineEntry]) -> str:
    """One job as a list of one object, with its mixture, its validation and its masked samples."""
    quarantine = [asdict(entry) for entry in masked]
    held_out = None if status.validation is None else _mixed_fields(status.validation)
    fields = {**_mixed_fields(status), "validation": held_out, "quarantine": quarantine}
    return json.dumps([fields], indent=2)


def _mixed_fields(status: JobStatus) -> dict[str, object]:
    mixture = None if status.mixture is None else mixture_fields(status.mixture)
    return {**_job_fields(status), "mixture": mixture}


def failure_lines(status: JobStatus) -> Iterator[Text]:
    """Why the last attempt failed, if it did."""
    if status.failure:
        yield Text(f"attempt {status.attempt} ended: {status.failure}", style="red")


def masked_samples(masked: Sequence[QuarantineEntry]) -> Iterator[Text]:
    """Which samples were masked and why, the newest first; each sample once."""
    newest = {entry.sample_id: entry for entry in masked}
    entries = sorted(newest.values(), key=lambda entry: (-entry.attempt, -entry.step))
    for entry in entries[:NAMED_BAD_SAMPLES]:
        yield Text(
            f"quarantined in step {entry.step} of attempt {entry.attempt}: "
            f"{entry.source}/{entry.key}: {entry.reason}",
            style="yellow",
        )
    if len(entries) > NAMED_BAD_SAMPLES:
        yield Text(f"and {len(entries) - NAMED_BAD_SAMPLES} more; --json names all", style="yellow")


def _job_fields(status: JobStatus) -> dict[str, object]:
    return {
        "job": status.record.name,
        "state": status.record.state,
        "samples": status.samples,
        "attempt": status.attempt,
        "world_size": status.world_size,
        "planned_step": status.planned_step,
        "committed_step": status.committed_step,
        "quarantined": status.quarantined,
        "index_fingerprint": status.record.index_fingerprint,
        "created_unix_s": status.record.created_unix_s,
        "skips": [asdict(skip) for skip in status.skips],
        "failure": status.failure,
        "spec_version": status.record.spec_version,
        "attempt_version": status.attempt_version,
        "versions": [asdict(version) for version in status.versions],
        "notes": list(status.notes),
    }


def explained_json(explained: ExplainedStep) -> str:
    """The whole plan with the names of its samples."""
    return json.dumps(
        {
            "attempt": explained.attempt,
            "step": explained.plan.step,
            "world_size": explained.world_size,
            "committed": explained.committed,
            "cursor": json.loads(explained.cursor),
            "predicted_s": explained.plan.predicted_s,
            "measured_s": explained.measured_s,
            "cost_version": explained.cost_version,
            "plan_digest": explained.plan_digest,
            "ledger_plan_digest": explained.ledger_plan_digest,
            "as_recorded": explained.as_recorded,
            "content_digest": explained.content.hex() or None,
            "attempts": {fate.attempt: fate.fate for fate in explained.fates},
            "skipped_by": None if explained.skipped_by is None else asdict(explained.skipped_by),
            "ranks_per_replica": explained.ranks_per_replica,
            "samples": list(explained.sample_keys),
            "quarantined": list(explained.quarantined),
            "plan": json.loads(explained.plan.to_json()),
        },
        indent=2,
    )


def explained_tables(explained: ExplainedStep, *, name_samples: bool) -> Iterator[Text | Table]:
    """A headline, the waves with their groups, the encoders, and what each stage gained."""
    plan = explained.plan
    yield _headline(explained)
    yield _waves_table(plan, explained.sample_keys if name_samples else ())
    if len(plan.item_sample):
        yield _encoder_table(plan)
    yield stage_table(plan.stages)
    for line in explained.quarantined:
        yield Text(f"quarantined {line}", style="yellow")


def calibration_json(made: "Calibration", path: Path) -> str:
    """The coefficients, each with its errors, and the file that they were written to."""
    return json.dumps(
        {
            "path": str(path),
            "version": made.file.cost.model.version,
            "cost": made.file.cost.model.to_dict(),
            "errors": {
                phase: {"fitted": asdict(fit.fitted), "held_out": asdict(fit.held_out)}
                for phase, fit in made.fits.items()
            },
            "memory": None if made.file.memory is None else made.file.memory.to_dict(),
            "bytes_errors": {
                phase: {"fitted": asdict(fit.fitted), "held_out": asdict(fit.held_out)}
                for phase, fit in made.bytes_fits.items()
            },
        },
        indent=2,
    )


def calibration_tables(made: "Calibration") -> Iterator[Text | Table]:
    """The coefficients by phase, their error on lengths held out, and what was assumed."""
    table = Table(title="coefficients, seconds")
    for name in ("phase", "coefficient", "value"):
        table.add_column(name, justify="right" if name == "value" else "left")
    for phase, fit in made.fits.items():
        for name, value in fit.cost.to_dict().items():
            assumed = " (assumed)" if name in fit.unmeasured else ""
            table.add_row(phase, name + assumed, f"{value:.4g}")
        table.add_section()
    yield table
    errors = Table(title="error, predicted against measured")
    for name in ("phase", "lengths", "measurements", "mean", "median", "largest"):
        errors.add_column(name, justify="left" if name in ("phase", "lengths") else "right")
    for phase, fit in made.fits.items():
        for which, error in (
            ("fitted", fit.fitted),
            ("held out", fit.held_out),
            *((f"held out, {part}", error) for part, error in fit.apart),
        ):
            errors.add_row(phase, which, str(error.count), *_shares(error))
    for phase, of_bytes in made.bytes_fits.items():
        for which, error in (("fitted", of_bytes.fitted), ("held out", of_bytes.held_out)):
            errors.add_row(f"{phase}, bytes", which, str(error.count), *_shares(error))
    yield errors
    yield from _memory_lines(made)
    if "ring_hop_s" in made.fits["llm"].unmeasured:
        yield Text(
            "no CP degree above 1 was measured: plans will take rings to be free. Measure with "
            "--ranks 2 or more before training with CP groups.",
            style="yellow",
        )


def _shares(error: "RelativeError") -> Iterator[str]:
    return (f"{value:.1%}" for value in (error.mean, error.median, error.largest))


def _memory_lines(made: "Calibration") -> Iterator[Text | Table]:
    memory = made.file.memory
    if memory is None:
        yield Text(
            "no memory was measured, as only CUDA tells a peak: give plan.memory_tokens, or write "
            "plan.memory yourself.",
            style="yellow",
        )
        return
    table = Table(title="memory of a rank, bytes")
    table.add_column("part")
    table.add_column("bytes", justify="right")
    for name, value in memory.to_dict().items():
        table.add_row(name, f"{value:,.0f}")
    yield table
    yield Text(
        "states_bytes is the whole model with its gradients, as it was measured: add the "
        "optimizer's, or write what a rank of yours holds before its first batch.",
        style="yellow",
    )


def stage_table(stages: Sequence[StageReport]) -> Table:
    """What each stage of planning achieved, against its lower bound."""
    table = Table(title="stages", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("stage", "algorithm", "unit", "before", "after", "bound", "over bound"):
        text = name in ("stage", "algorithm", "unit")
        table.add_column(name, justify="left" if text else "right")
    for report in stages:
        table.add_row(
            report.stage,
            report.algorithm,
            report.unit,
            *(f"{value:.4g}" for value in (report.before, report.after, report.lower_bound)),
            f"{report.gap:.1%}",
        )
    return table


def _headline(explained: ExplainedStep) -> Text:
    plan = explained.plan
    state = "committed" if explained.committed else "not committed"
    if explained.skipped_by is not None:
        state = "skipped"
    text = Text(
        f"step {plan.step} of attempt {explained.attempt} ({state}): {len(plan.sample_ids)} "
        f"samples, {int(plan.sample_tokens.sum())} tokens, {plan.replicas} replicas"
        f"{_ranks(explained)}, {plan.waves} waves, predicted {plan.predicted_s:.3f} s"
        f"{_measured(explained)}\n{_phases(plan)}"
    )
    for fate in explained.fates:
        if fate.attempt != explained.attempt:
            text.append(f"attempt {fate.attempt}: {fate.fate}\n")
    text.append(f"plan {explained.plan_digest} ")
    if explained.skipped_by is not None:
        text.append(
            f"would have been trained; {skip_words(explained.skipped_by)} "
            f"({local_time(explained.skipped_by.recorded_unix_s)})",
            style="yellow",
        )
    elif explained.as_recorded:
        text.append("made again (as recorded)", style="green")
        text.append(_content(explained))
    else:
        text.append(
            f"differs from the ledger's {explained.ledger_plan_digest}: the index, the job or the "
            "release has changed since, and what is shown is not what was trained",
            style="bold red",
        )
    return text


def _content(explained: ExplainedStep) -> Text:
    if not explained.content:
        return Text("\nwhat it delivered is not recorded", style="yellow")
    return Text(
        f"\ndelivered {explained.content.hex()} (recorded; `job replay --content` compares)"
    )


def _ranks(explained: ExplainedStep) -> str:
    if explained.ranks_per_replica == 1:
        return ""
    return f" of {explained.ranks_per_replica} ranks"


def _phases(plan: StepPlan) -> str:
    """Where a rank's predicted seconds go, on the mean of all ranks."""
    if plan.time is None:
        return ""
    parts = (f"{name} {value:.3f} s" for name, value in plan.time.phase_s.items() if value >= 5e-4)
    return f"of which a rank, on the mean: {', '.join(parts)}\n"


def _measured(explained: ExplainedStep) -> str:
    if explained.measured_s is None:
        return ""
    off = explained.measured_s / explained.plan.predicted_s - 1
    return f", measured {explained.measured_s:.3f} s ({off:+.0%})"


def _waves_table(plan: StepPlan, keys: Sequence[str]) -> Table:
    table = Table(title="waves", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("wave", "degree", "replicas", "samples", "tokens", "s", "which"):
        text = name in ("replicas", "which")
        table.add_column(name, justify="left" if text else "right", overflow="fold")
    for wave in range(plan.waves):
        idle = []
        for group in plan.groups(wave):
            if group.pack < 0:
                idle.append(group.replicas[0])
            else:
                table.add_row(*_group_row(plan, group, keys))
        if idle:
            table.add_row(str(wave), "-", ranges(idle), "0", "0", "0", "idle", style="dim")
        table.add_section()
    return table


def _group_row(plan: StepPlan, group: Group, keys: Sequence[str]) -> list[str]:
    samples = plan.samples_of(group.pack).tolist()
    named = [keys[s] for s in samples[:NAMED_SAMPLES]] if keys else []
    if keys and len(samples) > NAMED_SAMPLES:
        named.append(f"and {len(samples) - NAMED_SAMPLES} more")
    return [
        str(group.wave),
        str(group.degree),
        ranges(group.replicas),
        str(len(samples)),
        str(group.tokens),
        f"{group.seconds:.3f}",
        ", ".join(named),
    ]


def _encoder_table(plan: StepPlan) -> Table:
    """Items and tokens of each encoder by wave: the least and the most of any replica."""
    table = Table(title="encoders", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("wave", "encoder", "items", "tokens", "least", "most", "away from their text"):
        table.add_column(name, justify="left" if name == "encoder" else "right")
    pack = plan.pack_of_sample[plan.item_sample]
    for wave in range(plan.waves):
        for modality in Modality:
            chosen = (plan.pack_wave[pack] == wave) & (plan.item_modality == modality)
            if not chosen.any():
                continue
            loads = [
                int(plan.item_encoder_tokens[chosen & (plan.item_replica == r)].sum())
                for r in range(plan.replicas)
            ]
            away = sum(
                int(plan.item_replica[i]) not in plan.replicas_of(int(pack[i]))
                for i in chosen.nonzero()[0]
            )
            table.add_row(
                str(wave),
                modality.name.lower(),
                *(str(n) for n in (int(chosen.sum()), sum(loads), min(loads), max(loads), away)),
            )
    return table


def ranges(numbers: Sequence[int]) -> str:
    """`0,1,2,5` as `0-2,5`; numbers that do not ascend keep their order."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _dashed(*values: int) -> list[str]:
    return ["-" if value < 0 else str(value) for value in values]
