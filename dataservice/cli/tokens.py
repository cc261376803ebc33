"""`dataservice token`: tokens for teams."""

import json
from datetime import UTC, datetime
from typing import Annotated

import typer
import yaml

from dataservice.cli.terminal import Terminal
from dataservice.operate.tokens_file import expiry, make_token

tokens = typer.Typer(
    help="Make tokens for teams. Example: `dataservice token new --team vision`",
    no_args_is_help=True,
)


@tokens.command()
def new(
    team: Annotated[
        str | None, typer.Option(help="Team whose jobs the token is for; an admin's may have none.")
    ] = None,
    role: Annotated[str, typer.Option(help="admin, team, or reader.")] = "team",
    name: Annotated[str | None, typer.Option(help="The token's name in the audit log.")] = None,
    expires: Annotated[
        str,
        typer.Option(help="When it expires: 90d, 12h, 4w, a date such as 2026-12-31, or never."),
    ] = "90d",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a token, and print it with its entry for the service's tokens file.

    The token is shown this once; the service keeps its hash.

    Example: `dataservice token new --team vision --role team --expires 90d`
    """
    token, record = make_token(
        team=team, role=role, name=name, expires=expiry(expires, datetime.now(tz=UTC))
    )
    entry = record.model_dump(mode="json", exclude_none=True)
    if as_json:
        print(json.dumps({"token": token, "entry": entry}, indent=2))
        return
    told = Terminal(stderr=True)
    told.print("The token, shown this once; give it to the team by a safe way:", highlight=False)
    print(token)
    told.print("Its entry, to be added to the service's tokens file:", highlight=False)
    print(yaml.safe_dump([entry], sort_keys=False), end="")
