"""The soak's tables, for the terminal and as a Markdown page of results."""

import os
import platform
from collections.abc import Iterable, Sequence

import numpy as np
from rich.table import Table

from benchmarks.harness import hardware
from soak.chaos import KINDS
from soak.run import SoakResult

QUANTILES = (50, 90, 99)
MIB = 2**20

Rows = list[list[str]]

AUDIT_NOTE = (
    "A finding is a sample that was lost or trained twice along the surviving checkpoints, a step "
    "that its ranks trained by different plans, or a byte that is not the one that a decode past "
    "the service gives. `launches` are starts of a job's trainers, each from the newest checkpoint "
    "and at the next world size."
)
RECOVERY_NOTE = (
    "`next step`: from the fault to the next step that the service has committed for a team. "
    "`stood still`: the longest time between two of the next five commits. `measured` counts a "
    "fault once for each team that it hit, and leaves out those that the next fault followed at "
    "once. Seconds of a pause or a cut itself are included."
)
DOMINATED_BY = """What the seconds go to:

- **rank, all ranks**: a fork, a new attempt, and its first steps planned and decoded anew.
- **decoder, nursery**: the sample in hand is decoded a second time; a nursery loads its libraries \
first.
- **worker, Ray node**: the packs it held are decoded again by the other worker, alone until Ray \
has started a process and that has imported the service.
- **coordinator**: Python's imports, the start of Ray's client, and the ranks' retries, each up \
to 2 s apart. Workers go on with what they hold."""
LEAKS_NOTE = (
    "Medians while the coordinator is spared. The family is every process that came of the "
    "service: workers, their decoders, Ray. After the service had stopped, no process or socket "
    "of it was left."
)


def recovery_rows(result: SoakResult) -> Rows:
    """By kind of fault: seconds to each team's next committed step, and the longest time between
    two of the commits after it."""
    rows = []
    for kind in (*KINDS, "all"):
        faults = [fault for fault in result.faults if kind in (fault.kind, "all")]
        measured = [each for fault in faults for each in fault.recovery.values()]
        if faults:
            first = _quantiles([each.first_s for each in measured])
            stall = _quantiles([each.stall_s for each in measured])
            rows.append([kind, str(len(faults)), str(len(measured)), *first, *stall])
    return rows


def _quantiles(seconds: Sequence[float]) -> list[str]:
    if not seconds:
        return ["-"] * len(QUANTILES)
    return [f"{np.percentile(seconds, q):.1f}" for q in QUANTILES]


RECOVERY_HEAD = [
    "fault",
    "times",
    "measured",
    *(f"next step p{q} s" for q in QUANTILES),
    *(f"stood still p{q} s" for q in QUANTILES),
]


def growth_rows(result: SoakResult) -> Rows:
    """Medians of the first and the last quarter of act 2."""
    rows = []
    for name, (first, last) in result.growth.items():
        if name.endswith("bytes"):
            title = name.replace("_bytes", " MiB").replace("_", " ")
            rows.append([title, f"{first / MIB:,.0f}", f"{last / MIB:,.0f}"])
        else:
            rows.append([name, f"{first:.0f}", f"{last:.0f}"])
    return rows


GROWTH_HEAD = ["coordinator and its family", "first quarter", "last quarter"]


def audit_rows(result: SoakResult) -> Rows:
    """By team: the jobs trained to their end, and the audit's findings."""
    rows = []
    for team in sorted({job.job.rpartition("-")[0] for job in result.jobs}):
        jobs = [job for job in result.jobs if job.job.rpartition("-")[0] == team]
        sizes = sorted({size for job in jobs for size in job.world_sizes})
        counts = (
            len(jobs),
            sum(job.launches for job in jobs),
            sum(job.steps for job in jobs),
            sum(job.samples for job in jobs),
            sum(len(job.findings) for job in jobs),
        )
        rows.append([team, ", ".join(map(str, sizes)), *(f"{count:,}" for count in counts)])
    return rows


AUDIT_HEAD = ["team", "ranks", "jobs", "launches", "steps", "samples", "findings"]


def summary(result: SoakResult) -> str:
    """The result in one sentence."""
    jobs = len(result.jobs)
    samples = sum(job.samples for job in result.jobs)
    launches = sum(job.launches for job in result.jobs)
    watched = f"{len(result.samples)} samples, of at least {result.options.least_watched}"
    return (
        f"{result.kills} kills and {len(result.faults) - result.kills} other faults in "
        f"{result.seconds:.0f} s; {jobs} jobs of {len(audit_rows(result))} teams trained "
        f"{samples:,} samples in {launches} launches; broken promises: {len(result.broken)}"
        + ("" if result.judges_growth else f"; growth could not be judged by {watched}")
    )


def tables(result: SoakResult) -> Iterable[Table]:
    """The tables for the terminal."""
    yield _table("the audit of every sample", AUDIT_HEAD, audit_rows(result))
    yield _table(
        "from a fault to the next committed step, and how long training stood still",
        RECOVERY_HEAD,
        recovery_rows(result),
    )
    if result.samples:
        yield _table("what the service holds in act 2 (medians)", GROWTH_HEAD, growth_rows(result))


def _table(title: str, head: list[str], rows: Rows) -> Table:
    table = Table(title=title)
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def markdown(result: SoakResult, command: str) -> str:
    """The page for benchmarks/results."""
    parts = [
        f"# Soak: {result.kills} kills",
        f"`{command}` on {hardware()}, Python {platform.python_version()}; load average "
        f"{os.getloadavg()[1]:.1f} when it ended.",
        f"{summary(result)}.",
        "## Audit",
        _markdown_table(AUDIT_HEAD, audit_rows(result)),
        AUDIT_NOTE,
        "## Recovery",
        _markdown_table(RECOVERY_HEAD, recovery_rows(result)),
        RECOVERY_NOTE,
        DOMINATED_BY,
        "## Leaks",
        _markdown_table(GROWTH_HEAD, growth_rows(result)),
        LEAKS_NOTE if not result.broken else "",
        "## Broken\n\n" + "\n".join(f"- {line}" for line in result.broken) if result.broken else "",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _markdown_table(head: list[str], rows: Rows) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
