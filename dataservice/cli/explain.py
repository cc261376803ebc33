"""`dataservice explain`: how a step was planned; or a sample's file, its text and its steps."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dataservice.cli import show, show_preview
from dataservice.cli.connection import JobName, attempt_number, connected, step_or_sample
from dataservice.cli.progress import asking
from dataservice.cli.records import DIFFERS
from dataservice.cli.terminal import Terminal
from dataservice.core.errors import ServiceError
from dataservice.core.sample import SampleRef
from dataservice.engine.api import SampleStep
from dataservice.serving.coordinator_client import CoordinatorClient

if TYPE_CHECKING:  # they load codecs
    from dataservice.jobs.preview import SamplePreview


console = Terminal()


@connected
def explain(
    context: typer.Context,
    client: CoordinatorClient,
    job: JobName,
    step: Annotated[
        int | None, typer.Option(help="The step to explain.", min=0, callback=step_or_sample)
    ] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            help="Or: the id of a sample, as in mb.sample_ids.", min=0, callback=step_or_sample
        ),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            help="The attempt; by default the newest that has the step.",
            min=0,
            callback=attempt_number,
        ),
    ] = None,
    samples: Annotated[bool, typer.Option(help="Name every sample of every pack.")] = True,
    config: Annotated[
        Path | None, typer.Option("--config", help="The service's config (YAML), for --sample.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show how a step was planned: waves, CP groups, ranks, samples, and each stage's gain; or
    which record skipped it. Exits 3 where the plan made again differs from the recorded one. With
    --sample, show where a sample lies, what of it is learnt, and every step that it was in.

    Example: `dataservice explain vlm-sft --step 3`
    """
    if sample is not None and step is None:
        _explain_sample(client, job, sample, config, as_json=as_json)
        return
    if step is None or sample is not None:
        raise typer.BadParameter("give one of '--step' and '--sample'.", context)
    with asking("planning the step again"):
        explained = client.explain(job, step, attempt)
    if as_json:
        print(show.explained_json(explained))
    else:
        for part in show.explained_tables(explained, name_samples=samples):
            console.print(part)
    if not explained.as_recorded:
        raise typer.Exit(DIFFERS)


def _explain_sample(
    client: CoordinatorClient, job: str, sample_id: int, config: Path | None, *, as_json: bool
) -> None:
    """Print where a sample lies, its text as the tokens write it, and every step of the ledger that
    it was in. The text needs the job's files on this machine; without them the reason is told."""
    with asking("looking for the sample in the ledger"):
        ref, steps = _found(client, job, sample_id)
    with asking("reading and decoding"):
        preview, why = _previewed(client.job(job).record.spec_json, ref, config)
    if as_json:
        print(json.dumps(_fields(ref, steps, preview, why), indent=2))
        return
    marks = not console.is_terminal or console.no_color
    if preview is None:
        lines = [
            Text(show_preview.name(ref.source, ref.key), style="bold"),
            Text(show_preview.place(ref.location)),
            Text(f"its text cannot be shown from here: {why}\n", style="yellow"),
        ]
    else:
        lines = [*show_preview.preview_text(preview, marks=marks), show_preview.legend(marks=marks)]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(_steps_table(steps) if steps else f"no step of the ledger has sample {sample_id}")


def _found(
    client: CoordinatorClient, job: str, sample_id: int
) -> tuple[SampleRef, list[SampleStep]]:
    found = client.find_sample(job, sample_id)
    steps = [*found.steps]
    while found.next_step is not None:
        found = client.find_sample(job, sample_id, found.next_step)
        steps += found.steps
    return found.ref, steps


def _previewed(
    spec_json: str, ref: SampleRef, config: Path | None
) -> "tuple[SamplePreview | None, str]":
    """The sample as this machine reads it, or None and why it cannot."""
    from dataservice.jobs.job_file import job_from_json
    from dataservice.jobs.preview import preview_sample
    from dataservice.operate.config import read_config

    settings = read_config(config, {})
    try:
        preview = preview_sample(
            job_from_json(spec_json),
            ref,
            custom_processors=settings.custom_processors,
            limits=settings.limits,
            storage_profiles=settings.storage_profiles,
        )
    except ServiceError as error:  # the service has the files; this machine need not
        return None, str(error)
    return preview, ""


def _steps_table(steps: Sequence[SampleStep]) -> Table:
    table = Table(title="steps that it was in", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "attempt", "state", "labels"):
        table.add_column(name, justify="right" if name in ("step", "attempt") else "left")
    for each in steps:
        state = "committed" if each.fate == "committed" else "planned, not committed"
        labels = f"masked: {each.masked}" if each.masked else "learnt"
        table.add_row(str(each.step), str(each.attempt), state, Text(labels))
    return table


def _fields(
    ref: SampleRef, steps: Sequence[SampleStep], preview: "SamplePreview | None", why: str
) -> dict[str, object]:
    return {
        "sample_id": ref.sample_id,
        "source": ref.source,
        "key": ref.key,
        "location": asdict(ref.location),
        "steps": [asdict(step) for step in steps],
        "preview": show_preview.preview_fields(preview) if preview else None,
        "not_shown": why or None,
    }
