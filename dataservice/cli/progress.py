"""Progress: bars of indexing (one per source, with rows per second), measuring and replaying.

And what a service does while it starts.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from dataservice.cli.terminal import Terminal

if TYPE_CHECKING:  # they load the planner
    from dataservice.jobs.calibrate import Tell as TellMeasured
    from dataservice.jobs.indexing import Progress as Tell


@contextmanager
def index_progress(console: Console) -> Iterator["Tell"]:
    """Yields the function that `index_job` calls with its progress."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[rows]} rows"),
        TextColumn("{task.fields[rate]:.0f} rows/s"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def tell(source: str, rows: int, done_bytes: int, total_bytes: int) -> None:
            if source not in tasks:
                tasks[source] = bars.add_task(source, total=total_bytes, rows=0, rate=0.0)
            task = tasks[source]
            elapsed_s = bars.tasks[task].elapsed or 0.0
            rate = rows / elapsed_s if elapsed_s > 0 else 0.0
            bars.update(task, completed=done_bytes, rows=rows, rate=rate)

        yield tell


@contextmanager
def measuring_progress(console: Console, doing: str = "measuring") -> Iterator["TellMeasured"]:
    """Yields the function that `measure_model` calls with its progress, as a search may."""
    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        task = bars.add_task("starting", total=None)

        def tell(done: int, total: int, last: str) -> None:
            bars.update(task, completed=done, total=total, description=last)

        yield tell


@contextmanager
def steps_progress(console: Console, doing: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step."""
    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(doing, total=total)
        yield lambda: bars.advance(task)


def starting(console: Console, *, as_log: bool) -> Callable[[str], None]:
    """The function to call with what a start does next. On a terminal it prints a short line, with
    the seconds since the start began; elsewhere, and `as_log`, it writes to the log."""
    if as_log or not console.is_terminal:
        return logging.getLogger("dataservice.app").info
    began_s = time.monotonic()

    def tell(doing: str) -> None:
        passed = f"{time.monotonic() - began_s:4.0f} s"
        console.print(Text(f"{passed}  {doing} ...", style="cyan"), soft_wrap=True)

    return tell


@contextmanager
def asking(doing: str) -> Iterator[None]:
    """Shows on a terminal what a call to the service does, until the call ends."""
    with Terminal(stderr=True).status(f"{doing} ..."):
        yield
