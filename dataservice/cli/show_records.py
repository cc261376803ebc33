"""What commands print of a job's records: skipped steps, replays, the quarantine."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime

from rich.text import Text

from dataservice.cli.listing import Listing
from dataservice.core.job import QuarantineEntry, SkipRecord
from dataservice.engine.api import JobStatus, ReplayedStep
from dataservice.engine.error_budget import reason_example, reason_kind

NAMED_SAMPLES = 4  # of one kind of reason, in a table; --out writes all
CONTENT_WORDS = {
    "same": "deliver the same bytes",
    "differs": "differ",
    "unknown": "could not be compared",
}


def skip_lines(status: JobStatus) -> Iterator[Text]:
    """The records of skipped steps, in the order of recording."""
    for skip in status.skips:
        yield Text(f"{skip_words(skip)} ({local_time(skip.recorded_unix_s)})")


def version_lines(status: JobStatus) -> Iterator[Text]:
    """The versions of a job's file, what each one changed, and which one the next attempt uses."""
    for version in status.versions:
        attempts = ", no attempt yet"
        if version.first_attempt:
            last = f" to {version.last_attempt}"
            more = last if version.last_attempt > version.first_attempt else ""
            attempts = f", attempt {version.first_attempt}{more}"
        changes = f": {version.changes}" if version.changes else ""
        when = local_time(version.submitted_unix_s)
        yield Text(f"version {version.version} of the job file ({when}{attempts}){changes}")
    yield from pending_lines(status)


def note_lines(status: JobStatus) -> Iterator[Text]:
    """What the owner of a job should know of it."""
    for note in status.notes:
        yield Text(note, style="yellow")


def pending_lines(status: JobStatus) -> Iterator[Text]:
    """The version that was submitted and that no attempt uses yet."""
    if status.pending:
        yield Text(
            f"version {status.record.spec_version} of the job file takes effect with the next "
            f"attempt; attempt {status.attempt} goes on by version {status.attempt_version}",
            style="yellow",
        )


def recorded_skips(records: Sequence[SkipRecord], status: JobStatus) -> Iterator[Text]:
    """What was recorded just now, and what must be done for it to take effect."""
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
    """Date and time in the local zone, with the offset from UTC."""
    return datetime.fromtimestamp(unix_s).astimezone().isoformat(" ", "seconds")


def quarantine_table(entries: Sequence[QuarantineEntry]) -> Listing:
    """One row per source and kind of reason with an example, the most frequent first."""
    names = ("source", "samples", "times", "steps", "reason", "such as")
    table = Listing(names, words=("source", "reason", "such as"), title="quarantine")
    kinds: dict[tuple[str, str], list[QuarantineEntry]] = {}
    for entry in entries:
        kinds.setdefault((entry.source, reason_kind(entry.reason)), []).append(entry)
    for (source, _), alike in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        steps = [entry.step for entry in alike]
        table.add_row(
            source,
            str(len({entry.sample_id for entry in alike})),
            str(len(alike)),
            f"{min(steps)}-{max(steps)}",
            Text(reason_example(alike[0].reason)),
            Text(", ".join(dict.fromkeys(entry.key for entry in alike[:NAMED_SAMPLES]))),
        )
    return table


def replayed_lines(steps: Sequence[ReplayedStep], *, content: bool) -> Iterator[Text]:
    """Sentences on which steps agree, which were skipped and which is the first that differs; with
    `content`, the same for the content."""
    wrong = [step for step in steps if step.plan_digest != step.ledger_digest]
    skipped = sum(step.skipped for step in steps)
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
    if content:
        yield from _content_lines(steps)
    else:
        yield Text("plans are compared; what is delivered is not: --content compares it")


def _content_lines(steps: Sequence[ReplayedStep]) -> Iterator[Text]:
    of = {word: [step for step in steps if step.content == word] for word in CONTENT_WORDS}
    counts = ", ".join(f"{len(of[word])} {said}" for word, said in CONTENT_WORDS.items())
    yield Text(f"decoded again: {counts}", style="bold red" if of["differs"] else "green")
    for first in of["differs"][:1]:
        yield Text(f"the first is step {first.step} of attempt {first.attempt}: {first.note}")
        for pack in first.packs:
            yield Text(f"  pack {pack.pack}: {', '.join(pack.samples)}")
    for first in of["unknown"][:1]:
        yield Text(f"step {first.step} of attempt {first.attempt} is not compared: {first.note}")


def replayed_json(steps: Sequence[ReplayedStep], *, content: bool) -> str:
    """The counts, and the steps that differ."""
    return json.dumps(
        {
            "steps": len(steps),
            "skipped": sum(step.skipped for step in steps),
            "content_compared": content,
            "content_unknown": [step.step for step in steps if step.content == "unknown"],
            "differing": [asdict(step) for step in steps if step.differs],
        },
        indent=2,
    )
