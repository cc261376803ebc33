"""Progress bars: of indexing, one a source with rows a second; of measuring a model; of steps."""

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

if TYPE_CHECKING:  # they load the planner
    from dataservice.calibrate import Tell as TellMeasured
    from dataservice.job_setup import Progress as Tell


@contextmanager
def index_progress(console: Console) -> Iterator["Tell"]:
    """Yields the function that `index_job` tells of its progress."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[rows]} rows"),
        TextColumn("{task.fields[rate]:.0f} rows/s"),
        TimeRemainingColumn(),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console) as bars:

        def tell(source: str, rows: int, done_bytes: int, total_bytes: int) -> None:
            if source not in tasks:
                tasks[source] = bars.add_task(source, total=total_bytes, rows=0, rate=0.0)
            task = tasks[source]
            elapsed_s = bars.tasks[task].elapsed or 0.0
            rate = rows / elapsed_s if elapsed_s > 0 else 0.0
            bars.update(task, completed=done_bytes, rows=rows, rate=rate)

        yield tell


@contextmanager
def measuring_progress(console: Console) -> Iterator["TellMeasured"]:
    """Yields the function that `measure_model` tells of its progress."""
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as bars:
        task = bars.add_task("starting", total=None)

        def tell(done: int, total: int, last: str) -> None:
            bars.update(task, completed=done, total=total, description=last)

        yield tell


@contextmanager
def steps_progress(console: Console, doing: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields the function that is called once a step."""
    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(doing, total=total)
        yield lambda: bars.advance(task)


@contextmanager
def asking(doing: str) -> Iterator[None]:
    """Says on a terminal what a call to the service does, for as long as it takes."""
    with Console(stderr=True).status(f"{doing} ..."):
        yield
