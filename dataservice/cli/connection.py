"""How the commands that ask a service reach it: the same options for each of them."""

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dataservice.core.address import split_address
from dataservice.core.errors import ServiceError, SpecError
from dataservice.core.job import LAST_STEP
from dataservice.core.tls import ClientTls
from dataservice.serving.client_access import Access, GiveToken
from dataservice.serving.coordinator_client import CoordinatorClient

DEFAULT_ADDRESS = "127.0.0.1:50051"
TOKEN_VARIABLE = "DATASERVICE_TOKEN"
PANEL = "Connection"
COMPLETION_S = 3.0  # the user has pressed the tab key and waits
LAST_ATTEMPT = 2**31 - 1  # that a request can carry

Command = Callable[..., None]


def _option(name: str, help_text: str) -> object:
    variable = f"DATASERVICE_{name.removeprefix('--').replace('-', '_').upper()}"
    return typer.Option(name, envvar=variable, help=help_text, rich_help_panel=PANEL)


def connect(
    service: Annotated[
        str,
        typer.Option(
            "--service",
            envvar="DATASERVICE_ADDRESS",
            help="host:port of the service; [host]:port for IPv6.",
            rich_help_panel=PANEL,
        ),
    ] = DEFAULT_ADDRESS,
    token_file: Annotated[
        Path | None,
        _option("--token-file", "File with the team's token, in place of DATASERVICE_TOKEN."),
    ] = None,
    tls: Annotated[bool, _option("--tls", "Connect with TLS, trusting the system's CAs.")] = False,
    ca_file: Annotated[
        Path | None, _option("--ca-file", "Connect with TLS, trusting this CA (PEM).")
    ] = None,
    cert_file: Annotated[
        Path | None, _option("--cert-file", "Client certificate (PEM), for mutual TLS.")
    ] = None,
    key_file: Annotated[Path | None, _option("--key-file", "Its private key (PEM).")] = None,
    server_name: Annotated[
        str | None, _option("--server-name", "Name in the service's certificate, if it differs.")
    ] = None,
    plaintext_token: Annotated[
        bool, _option("--plaintext-token", "Allow sending the token to other hosts without TLS.")
    ] = False,
) -> CoordinatorClient:
    """A client of the service that the options name. Raises SpecError where a file cannot be used
    or the address is invalid."""
    split_address(service)
    secured = tls or any((ca_file, cert_file, key_file, server_name))
    files = ClientTls(
        ca_file=_text(ca_file),
        certificate_file=_text(cert_file),
        key_file=_text(key_file),
        server_name=server_name,
    )
    access = Access(
        token=token_giver(token_file),
        tls=files if secured else None,
        plaintext_token=plaintext_token,
    )
    return CoordinatorClient(service, access=access)


Connect = Callable[[], CoordinatorClient]


def connected(command: Command) -> Command:
    """A command with the options of a connection, given its client as `client`."""

    def run(connecting: Connect, **given: object) -> None:
        with connecting() as client:
            command(client=client, **given)

    return _with_options(command, "client", run)


def may_connect(command: Command) -> Command:
    """A command with the options of a connection, given what makes its client as `connecting`: it
    need not be made."""
    return _with_options(command, "connecting", command)


def _with_options(command: Command, own_name: str, connecting_to: Command) -> Command:
    """The command as typer sees it: with the options of a connection in place of `own_name`."""
    options = inspect.signature(connect).parameters
    own = inspect.signature(command)
    kept = [each for name, each in own.parameters.items() if name != own_name]

    @functools.wraps(command)
    def run(**given: object) -> None:
        wanted = {name: given.pop(name) for name in options}
        connecting_to(connecting=functools.partial(connect, **wanted), **given)  # type: ignore[arg-type]

    keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options.values()]
    run.__signature__ = own.replace(parameters=[*kept, *keywords])  # type: ignore[attr-defined]
    return run


def job_names(context: typer.Context) -> list[str]:
    """Names of the service's jobs, for completion in a shell; none where it does not answer."""
    options = inspect.signature(connect).parameters
    given = {
        name: context.params[name] if context.params.get(name) is not None else option.default
        for name, option in options.items()
    }
    with suppress(ServiceError), connect(**given) as client:
        return [status.record.name for status in client.jobs(timeout_s=COMPLETION_S)]
    return []


JobName = Annotated[str, typer.Argument(help="Name of the job.", autocompletion=job_names)]


def step_or_sample(number: int | None) -> int | None:
    """The callback of an option for a step or a sample. Raises BadParameter where no job comes so
    far: as `max` of the option, it would stand in every help with its 16 digits."""
    return _at_most(LAST_STEP, number)


def attempt_number(number: int | None) -> int | None:
    """The same for an attempt, above what a request can carry."""
    return _at_most(LAST_ATTEMPT, number)


def _at_most(greatest: int, number: int | None) -> int | None:
    if number is not None and number > greatest:
        raise typer.BadParameter(f"{number} is above {greatest}, the greatest there is.")
    return number


def token_giver(token_file: Path | None) -> GiveToken:
    """Gives the token from a file, which is read again for each call, or from the environment."""
    return _token_of_environment if token_file is None else functools.partial(_token_of, token_file)


def _token_of_environment() -> str | None:
    token = os.environ.get(TOKEN_VARIABLE, "").strip() or None
    if token is not None and not _is_one_token(token):
        raise SpecError(f"{TOKEN_VARIABLE} must hold one token and nothing else.")
    return token


def _token_of(path: Path) -> str:
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SpecError(
            f"the token file {path} cannot be read: {reason}. Check --token-file."
        ) from error
    if not _is_one_token(token):
        raise SpecError(f"the token file {path} must hold one token and nothing else.")
    return token


def _is_one_token(text: str) -> bool:
    """Whether it can be sent as a token: gRPC takes no other characters."""
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
