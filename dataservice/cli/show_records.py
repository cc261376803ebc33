"""What commands print of a job's records: skipped steps, replays, the quarantine."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dataservice.core.job import QuarantineEntry, SkipRecord
from dataservice.engine.api import JobStatus, ReplayedStep
from dataservice.engine.budget import reason_kind

NAMED_SAMPLES = 4  # of one kind of reason; --out has all


def skip_lines(status: JobStatus) -> Iterator[Text]:
    """What was recorded of skipped steps, in the order of recording."""
    for skip in status.skips:
        yield Text(f"{skip_words(skip)} ({local_time(skip.recorded_unix_s)})")


def recorded_skips(records: Sequence[SkipRecord], status: JobStatus) -> Iterator[Text]:
    """What was recorded just now, and what a trainer has to do for it."""
    for record in records:
        yield Text(skip_words(record), style="green")
    if status.attempt:
        yield Text(
            f"attempt {status.attempt} is not changed: stop the trainers, and restart them from "
            "a checkpoint that lies before these steps"
        )
    for record in records:
        if record.first_step <= status.committed_step:
            yield Text(
                f"steps up to {status.committed_step} are trained already: a checkpoint that lies "
                f"behind step {record.first_step} has what was trained of "
                f"{record.first_step}-{record.last_step}, whatever is recorded",
                style="yellow",
            )


def skip_words(skip: SkipRecord) -> str:
    """A record, as a sentence."""
    does = {"skip": "skips", "train": "trains after all"}[skip.action]
    return (
        f"every attempt from {skip.from_attempt} on {does} steps {skip.first_step} to "
        f"{skip.last_step}"
    )


def local_time(unix_s: float) -> str:
    """Date and time here, with the offset from UTC."""
    return datetime.fromtimestamp(unix_s).astimezone().isoformat(" ", "seconds")


def quarantine_table(entries: Sequence[QuarantineEntry]) -> Table:
    """One row a source and kind of reason, the most frequent first."""
    table = Table(title="quarantine", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("source", "samples", "times", "steps", "reason", "such as"):
        words = name in ("source", "reason", "such as")
        table.add_column(name, justify="left" if words else "right", overflow="fold")
    kinds: dict[tuple[str, str], list[QuarantineEntry]] = {}
    for entry in entries:
        kinds.setdefault((entry.source, reason_kind(entry.reason)), []).append(entry)
    for (source, reason), alike in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        steps = [entry.step for entry in alike]
        table.add_row(
            source,
            str(len({entry.sample_id for entry in alike})),
            str(len(alike)),
            f"{min(steps)}-{max(steps)}",
            Text(reason),
            Text(", ".join(dict.fromkeys(entry.key for entry in alike[:NAMED_SAMPLES]))),
        )
    return table


def differing(steps: Sequence[ReplayedStep]) -> list[ReplayedStep]:
    """Steps whose plan made again is not the recorded one."""
    return [step for step in steps if step.plan_digest != step.ledger_digest]


def replayed_lines(steps: Sequence[ReplayedStep]) -> Iterator[Text]:
    """In words: what agrees, what was skipped, and the first that differs."""
    wrong, skipped = differing(steps), sum(step.skipped for step in steps)
    rest = f", {skipped} were skipped" if skipped else ""
    agree = len(steps) - len(wrong) - skipped
    span = f"steps {steps[0].step} to {steps[-1].step}" if steps else "no steps"
    style = "bold red" if wrong else "green"
    yield Text(f"{span}: {agree} plan as recorded, {len(wrong)} differ{rest}", style=style)
    if wrong:
        first = wrong[0]
        yield Text(
            f"the first is step {first.step} of attempt {first.attempt}: it now plans to "
            f"{first.plan_digest}, the ledger says {first.ledger_digest}. The index, the job or "
            "the release has changed since; trainers that resume get other packs of the same "
            "samples only if the index is the same."
        )


def replayed_json(steps: Sequence[ReplayedStep]) -> str:
    """Counts, and the steps that differ."""
    return json.dumps(
        {
            "steps": len(steps),
            "skipped": sum(step.skipped for step in steps),
            "differing": [asdict(step) for step in differing(steps)],
        },
        indent=2,
    )
