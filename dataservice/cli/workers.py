"""`dataservice workers` list, restart: what decodes, and how it is renewed under running jobs."""

import json
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from dataservice.cli.connection import connected
from dataservice.engine.api import WorkerStatus
from dataservice.serving.coordinator_client import CoordinatorClient

POLL_S = 1.0

workers = typer.Typer(
    help=(
        "Look at workers, and restart them under running jobs. For admins.\n\n"
        "Example: `dataservice workers list`"
    ),
    no_args_is_help=True,
)
console = Console()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@workers.command("list")
@connected
def list_workers(client: CoordinatorClient, as_json: AsJson = False) -> None:
    """List the workers: where each serves, and what it holds.

    Example: `dataservice workers list`
    """
    statuses = client.workers()
    if as_json:
        print(json.dumps([_fields(status) for status in statuses], indent=2))
    else:
        console.print(_table(statuses))


@workers.command()
@connected
def restart(
    client: CoordinatorClient,
    names: Annotated[list[str] | None, typer.Argument(help="Workers; by default all.")] = None,
    wait: Annotated[bool, typer.Option(help="Wait until all are replaced.")] = True,
    as_json: AsJson = False,
) -> None:
    """Replace workers one after another, under running jobs.

    Each gives its place to a successor and ends once the packs that it holds have been
    received: no step is delayed by more than it takes to decode it.

    Example: `dataservice workers restart worker-0.1`
    """
    left = client.restart_workers(names or [])
    successors: dict[str, str | None] = dict.fromkeys(left)
    if not as_json:
        console.print(f"replacing {', '.join(left)}", highlight=False)
    while wait and left:
        time.sleep(POLL_S)
        for name, successor in _replaced(left, client.workers()).items():
            left.remove(name)
            successors[name] = successor
            if not as_json:
                console.print(f"{name} is replaced by {successor}", highlight=False)
    if as_json:
        print(json.dumps(successors, indent=2))


def _replaced(workers: Sequence[str], statuses: Sequence[WorkerStatus]) -> dict[str, str]:
    """Those of the workers that have ended and whose successor serves, and its name."""
    known = {status.info.worker for status in statuses}
    serving = {
        _seat(status.info.worker): status.info.worker
        for status in statuses
        if status.info.state == "serving"
    }
    gone = [name for name in workers if name not in known and _seat(name) in serving]
    return {name: serving[_seat(name)] for name in gone}


def _seat(worker: str) -> str:
    """`worker-0` of `worker-0.1`."""
    return worker.rpartition(".")[0]


def _fields(status: WorkerStatus) -> dict[str, object]:
    info = status.info
    return {
        "worker": info.worker,
        "address": info.address,
        "slots": info.slots,
        "state": info.state,
        "packs": status.packs,
        "outstanding_tokens": status.outstanding_tokens,
    }


def _table(statuses: Sequence[WorkerStatus]) -> Table:
    table = Table(title="workers", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("worker", "address", "state", "slots", "packs", "tokens to decode"):
        table.add_column(
            name, justify="left" if name in ("worker", "address", "state") else "right"
        )
    for status in statuses:
        info = status.info
        table.add_row(
            info.worker,
            info.address,
            info.state,
            str(info.slots),
            str(status.packs),
            f"{status.outstanding_tokens:,.0f}",
        )
    return table
