"""`dataservice workers` list, restart: shows workers, and replaces them while jobs run."""

import json
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from dataservice.cli.connection import connected
from dataservice.cli.listing import Listing
from dataservice.cli.terminal import Terminal
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
console = Terminal()

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@workers.command("list")
@connected
def list_workers(client: CoordinatorClient, as_json: AsJson = False) -> None:
    """List the workers: the address and the packs of each.

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
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of workers; by default all.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until all are replaced.")] = True,
    as_json: AsJson = False,
) -> None:
    """Replace workers one after another while jobs run.

    Each worker is replaced by a successor, and ends once ranks have received the packs that it
    holds. No step is delayed by more than the time of decoding it.

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
    """The workers that have ended and whose successor serves: name → the successor's name."""
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


def _table(statuses: Sequence[WorkerStatus]) -> Listing:
    names = ("worker", "address", "state", "slots", "packs", "tokens to decode")
    table = Listing(names, words=names[:2], labels=("state",), title="workers")
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
