"""`dataservice job` skip, replay, quarantine: a job's steps and bad samples, as recorded."""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from dataservice.cli import show_records as show
from dataservice.cli.connection import JobName, attempt_number, connected
from dataservice.cli.progress import steps_progress
from dataservice.cli.terminal import Terminal
from dataservice.core.errors import SpecError
from dataservice.core.job import LAST_STEP, QuarantineEntry
from dataservice.engine.api import JobStatus, ReplayedStep
from dataservice.serving.coordinator_client import CoordinatorClient

DIFFERS = 3
"""Exit status where a plan made again, or the content decoded again, differs from the record."""

console = Terminal()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@connected
def skip(
    client: CoordinatorClient,
    job: JobName,
    steps: Annotated[
        list[str], typer.Argument(help="Steps, such as 1200-1210 or 7; both ends are included.")
    ],
    undo: Annotated[bool, typer.Option("--undo", help="Train these steps after all.")] = False,
    as_json: AsJson = False,
) -> None:
    """Skip steps, for example after a loss spike: their samples are drawn but not trained.

    It applies to attempts that begin from now on: stop the trainers, and restart them from a
    checkpoint before the steps.

    Example: `dataservice job skip vlm-sft 1200-1210 1300`
    """
    ranges = [_range(word) for word in steps]
    records = client.skip(job, ranges, "train" if undo else "skip")
    if as_json:
        print(json.dumps([asdict(record) for record in records], indent=2))
        return
    status = client.job(job)
    for line in show.recorded_skips(records, status):
        console.print(line)


@connected
def replay(
    client: CoordinatorClient,
    job: JobName,
    steps: Annotated[
        str, typer.Option(help="Steps, such as 0-99; those that were planned are taken.")
    ],
    attempt: Annotated[
        int | None,
        typer.Option(
            help="The attempt; by default the newest that has each step.",
            min=0,
            callback=attempt_number,
        ),
    ] = None,
    content: Annotated[
        bool,
        typer.Option(
            "--content",
            help="Also have workers decode the steps again, and compare every token and every byte "
            "of media with what was delivered.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Plan steps of the ledger again and compare. Exits 3 where a plan differs from the recorded
    one; with --content, also where the bytes differ.

    Decoding takes the same time as it took for training, on the team's share of the workers.
    Training goes on.

    Example: `dataservice job replay vlm-sft --steps 0-99 --content`
    """
    first, last = _range(steps)
    replayed: list[ReplayedStep] = []
    with steps_progress(Terminal(stderr=True), "replaying", last - first + 1) as advance:
        for step in client.replay(job, first, last, attempt, content=content):
            replayed.append(step)
            advance()
    if as_json:
        print(show.replayed_json(replayed, content=content))
    else:
        for line in show.replayed_lines(replayed, content=content):
            console.print(line, soft_wrap=True)
    if any(step.differs for step in replayed):
        raise typer.Exit(DIFFERS)


@connected
def quarantine(
    client: CoordinatorClient,
    job: JobName,
    source: Annotated[str | None, typer.Option(help="Show this source only.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write every entry to FILE.jsonl or FILE.csv.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show why samples were masked, by source and reason, or export every masked sample.

    Example: `dataservice job quarantine vlm-sft --source ocr --out bad.csv`
    """
    if out is not None and out.suffix not in (".jsonl", ".csv"):
        raise SpecError(f"--out is {out}; it must end in .jsonl or .csv.")
    entries = [e for e in client.quarantine(job) if source is None or e.source == source]
    if source is not None and not entries:
        _require_source(client.job(job), source)
    if out is not None:
        _export(entries, out)
    if as_json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
        return
    console.print(show.quarantine_table(entries))
    if out is not None:
        console.print(f"wrote {len(entries)} entries to {out}", highlight=False)


def _require_source(job: JobStatus, source: str) -> None:
    """Raises SpecError where the job has no such source; they are known once the job is open."""
    known = [each.source for each in job.mixture.sources] if job.mixture is not None else [source]
    if source not in known:
        raise SpecError(
            f"job {job.record.name!r} has no source {source!r}; its sources are "
            f"{', '.join(known)}. Name one of them, or leave out --source for all."
        )


def _range(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if found is None:
        raise SpecError(f"{text!r} is no range of steps; write it as 1200-1210, or 7 for one.")
    first, last = int(found[1]), int(found[2] or found[1])
    if max(first, last) > LAST_STEP:
        raise SpecError(f"{text!r} goes beyond the greatest step, {LAST_STEP}. Give a smaller one.")
    return first, last


def _export(entries: Sequence[QuarantineEntry], out: Path) -> None:
    try:
        with out.open("w", encoding="utf-8", newline="") as stream:
            if out.suffix == ".jsonl":
                stream.writelines(json.dumps(asdict(entry)) + "\n" for entry in entries)
                return
            names = [field.name for field in fields(QuarantineEntry)]
            rows = csv.DictWriter(stream, names)
            rows.writeheader()
            rows.writerows(asdict(entry) for entry in entries)
    except OSError as error:
        raise SpecError(f"{out} cannot be written: {error.strerror}. Choose another.") from error
