"""The soak's tables, for the terminal and as a Markdown page of results."""

import os
import platform
from collections.abc import Iterable, Sequence

import numpy as np
from rich.table import Table

from soak.chaos import KINDS
from soak.run import SoakResult

QUANTILES = (50, 90, 99)
MIB = 2**20

Rows = list[list[str]]


def recovery_rows(result: SoakResult) -> Rows:
    """By kind of fault: seconds to the next committed step of each team, and the longest that
    training stood still."""
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
    """First and last quarter of act 2."""
    rows = []
    for name, (first, last) in result.growth.items():
        if name.endswith("bytes"):
            title = name.replace("_bytes", " MiB").replace("_", " ")
            rows.append([title, f"{first / MIB:,.0f}", f"{last / MIB:,.0f}"])
        else:
            rows.append([name, f"{first:.0f}", f"{last:.0f}"])
    return rows


GROWTH_HEAD = ["coordinator and its family", "first quarter", "last quarter"]


def summary(result: SoakResult) -> str:
    """One sentence."""
    jobs = len(result.jobs)
    samples = sum(job.samples for job in result.jobs)
    launches = sum(job.launches for job in result.jobs)
    return (
        f"{result.kills} kills and {len(result.faults) - result.kills} other faults in "
        f"{result.seconds:.0f} s; {jobs} jobs of 2 teams trained {samples} samples in "
        f"{launches} launches; broken promises: {len(result.broken)}"
    )


def tables(result: SoakResult) -> Iterable[Table]:
    """For the terminal."""
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
    """For benchmarks/results."""
    machine = f"{os.cpu_count()} CPUs, {platform.processor() or platform.machine()}"
    parts = [
        "# Soak",
        f"`{command}` on {machine}, {platform.system()}, Python {platform.python_version()}.",
        summary(result) + ".",
        "## Recovery",
        _markdown_table(RECOVERY_HEAD, recovery_rows(result)),
        "`next step`: from the fault to the next step that the service has committed for a team. "
        "`stood still`: the longest time between two of the next five commits. `measured` counts "
        "a fault once for each team, and leaves out those that the next fault followed at once. "
        "Seconds of a pause or a cut itself are included.",
        "## What the service holds while the coordinator is spared",
        _markdown_table(GROWTH_HEAD, growth_rows(result)),
    ]
    if result.broken:
        parts += ["## Broken", "\n".join(f"- {line}" for line in result.broken)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(head: list[str], rows: Rows) -> str:
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
