"""`dataservice status`: who waits for whom, once, for a monitor, or live."""

import os
import threading
import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from dataservice.cli.connection import connected, job_names
from dataservice.cli.show_health import health_json, health_view, worst
from dataservice.cli.terminal import Terminal
from dataservice.core.errors import SpecError
from dataservice.core.health import ServiceHealth
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.serving.status_codes import ServiceUnreachableError

STALLED = 4
"""Exit status of `--check` where a job does not go on until someone acts."""
UNWELL = 5
"""Exit status of `--check` where the service does not answer, or reports that it does not work."""
CHECK_S = 10.0
"""Longest time that `--check` takes, whatever hangs; the service has ANSWER_S of it to answer."""
ANSWER_S = 6.0

console = Terminal()


@connected
def status(
    client: CoordinatorClient,
    job: Annotated[
        str | None,
        typer.Argument(
            help="Show this job only, with its sources and ranks.", autocompletion=job_names
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until ^C.")] = False,
    every_s: Annotated[
        float, typer.Option("--every", help="Seconds between two refreshes.", min=0.2)
    ] = (2.0),
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="For monitors: exit within 10 s, with 4 if a job is stalled and 5 if the service "
            "does not answer or does not work.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; with --watch one object a line.")
    ] = False,
) -> None:
    """Show what jobs do, and who waits for whom and why.

    Each job has a sentence: what it waits for, the time it loses, and what would help. `slow` jobs
    lose time; `stalled` jobs do not go on until someone acts.

    Example: `dataservice status vlm-sft --watch`
    """
    if watch and check:
        raise SpecError("--check looks once and exits; leave out --check or --watch.")
    if watch:
        _watch(client, job or "", every_s, as_json=as_json)
        return
    health = _checked(client, job or "") if check else client.health(job or "")
    if as_json:
        print(health_json(health))
    else:
        console.print(_view(health, job), highlight=False)
    if check and health.troubles:
        raise typer.Exit(UNWELL)
    if check and worst(health.jobs) == "stalled":
        raise typer.Exit(STALLED)


def _checked(client: CoordinatorClient, job: str) -> ServiceHealth:
    """The service's health. If no answer comes in time, the process ends with status UNWELL."""
    ending = threading.Timer(CHECK_S, _end_unwell)
    ending.daemon = True
    ending.start()
    try:
        return client.health(job, timeout_s=ANSWER_S)
    except ServiceUnreachableError as error:
        Terminal(stderr=True).print(
            f"[bold red]not well:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        raise typer.Exit(UNWELL) from error
    finally:
        ending.cancel()


def _end_unwell() -> None:
    """End the process at once: what hangs, such as a name lookup, may not be interruptible."""
    os.write(2, f"not well: no answer within {CHECK_S:g} s\n".encode())
    os._exit(UNWELL)


def _watch(client: CoordinatorClient, job: str, every_s: float, *, as_json: bool) -> None:
    """Show the health again and again. A coordinator that is briefly away does not end it."""
    try:
        if as_json:
            for seen in looks_at(client, job, every_s):
                if isinstance(seen, ServiceHealth):
                    print(health_json(seen, indent=None), flush=True)
            return
        if not console.is_terminal:  # there a live view would appear once, when it ends
            for seen in looks_at(client, job, every_s):
                console.print(_view(seen, job), "", highlight=False)
            return
        with Live(console=console, auto_refresh=False) as live:
            for seen in looks_at(client, job, every_s):
                live.update(_view(seen, job), refresh=True)
    except KeyboardInterrupt:
        return


def looks_at(
    client: CoordinatorClient, job: str, every_s: float
) -> Iterator[ServiceHealth | ServiceUnreachableError]:
    """The health, asked for again and again; raises only the error of the first request."""
    yield client.health(job)
    while True:
        time.sleep(every_s)
        try:
            yield client.health(job)
        except ServiceUnreachableError as error:
            yield error


def _view(seen: ServiceHealth | ServiceUnreachableError, job: str | None) -> RenderableType:
    if isinstance(seen, ServiceHealth):
        return Group(*health_view(seen, detailed=bool(job)))
    return Text.from_markup(f"[bold red]{escape(str(seen))}[/]")
