"""`dataservice status`: who waits for whom, once, for a monitor, or live."""

import time
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from dataservice.cli.connection import connected, job_names
from dataservice.cli.show_health import health_json, health_view, worst
from dataservice.core.errors import SpecError
from dataservice.core.health import ServiceHealth
from dataservice.serving.coordinator_client import CoordinatorClient
from dataservice.serving.errors import ServiceUnreachableError

STALLED = 4
"""Exit status of `--check` where something stands until someone acts."""

console = Console()


@connected
def status(
    client: CoordinatorClient,
    job: Annotated[
        str | None,
        typer.Argument(help="Only this job, with its sources and ranks.", autocompletion=job_names),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it live, until ^C.")] = False,
    every_s: Annotated[float, typer.Option("--every", help="Seconds between looks.", min=0.2)] = (
        2.0
    ),
    check: Annotated[
        bool, typer.Option("--check", help="Exit 4 where a job is stalled; for monitors.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; with --watch an object a line.")
    ] = False,
) -> None:
    """Show what jobs do, and who waits for whom and why.

    Each job has a sentence: what holds it up, by how much, and what would help. `slow` jobs
    lose time; `stalled` ones stand until someone acts.

    Example: `dataservice status vlm-sft --watch`
    """
    if watch and check:
        raise SpecError("--check looks once and exits; leave out --check or --watch.")
    if watch:
        _watch(client, job or "", every_s, as_json=as_json)
        return
    health = client.health(job or "")
    if as_json:
        print(health_json(health))
    else:
        console.print(_view(health, job), highlight=False)
    if check and worst(health.jobs) == "stalled":
        raise typer.Exit(STALLED)


def _watch(client: CoordinatorClient, job: str, every_s: float, *, as_json: bool) -> None:
    """A coordinator that is away for a moment does not end the watching."""
    try:
        if as_json:
            for seen in looks_at(client, job, every_s):
                if isinstance(seen, ServiceHealth):
                    print(health_json(seen, indent=None), flush=True)
            return
        with Live(console=console, auto_refresh=False) as live:
            for seen in looks_at(client, job, every_s):
                live.update(_view(seen, job), refresh=True)
    except KeyboardInterrupt:
        return


def looks_at(
    client: CoordinatorClient, job: str, every_s: float
) -> Iterator[ServiceHealth | ServiceUnreachableError]:
    """One look after another; raises only what the first one meets."""
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
