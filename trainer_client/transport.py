"""How the client reaches the service: gRPC channels, with TLS and a team's token if given.

The seam is one method: a `Transport` opens a channel to an address. Tests and special
networks bring their own.
"""

import os
import socket
import ssl
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import grpc
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc
from grpc.experimental import ChannelOptions

from trainer_client.address import is_loopback, split_address
from trainer_client.errors import BadArgument, ServiceUnreachable

_OPTIONS: list[tuple[str, int]] = [
    # A rank's routes of a whole step can exceed gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", 256 << 20),
    # A restarted service is found again within seconds, not gRPC's default of two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Detects within half a minute a peer that vanished without closing. The service allows pings
    # at this interval; a server with gRPC's default settings would treat them as abuse.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # The client decides what to try again, not gRPC.
    ("grpc.enable_retries", 0),
    # Trainers and the service are in one cluster, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
    # Channels do not share connections: closing a dataset closes its own, at once.
    ("grpc.use_local_subchannel_pool", 1),
]
_WORKER_OPTIONS: list[tuple[str, int]] = [
    # The thread that reads a stream takes its messages itself; else another thread of gRPC's takes
    # each and wakes it.
    (ChannelOptions.SingleThreadedUnaryStream, 1),
    # A message of 1 MiB in one frame, not in 64.
    ("grpc.http2.max_frame_size", 2 * 2**20),
]

PROBE_S = 2.0
REASON_S = 1.0  # for the last call, which only asks gRPC why it cannot connect
RETRY_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """PEM files for TLS. `certificate_file` and `key_file` go together, for mutual TLS;
    `server_name` is the name expected in the service's certificate, if it is not the host's."""

    ca_file: str | Path | None = None
    certificate_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate_file is None) != (self.key_file is None):
            raise BadArgument(
                f"tls has certificate_file={self.certificate_file} and key_file={self.key_file}; "
                "give both for mutual TLS, or neither."
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files. Raises BadArgument where one cannot be read."""

        def read(path: str | Path | None) -> bytes | None:
            try:
                return None if path is None else Path(path).read_bytes()
            except OSError as error:
                raise BadArgument(f"cannot read the TLS file {path}: {error.strerror}") from error

        return grpc.ssl_channel_credentials(
            read(self.ca_file), read(self.key_file), read(self.certificate_file)
        )


class Transport(Protocol):
    """Opens channels."""

    def channel(self, address: str, *, authorised: bool) -> grpc.Channel:
        """A channel to host:port; `authorised` calls carry the team's token."""
        ...


class GrpcTransport:
    """Channels over TCP, plain or TLS. The token is sent to the coordinator only; workers get
    tickets.

    `token_file` is read again for every call, so that a new token is used at once; with neither,
    DATASERVICE_TOKEN_FILE or DATASERVICE_TOKEN is used if set. Without TLS the token is sent to
    this machine only, unless `plaintext_token` (or DATASERVICE_PLAINTEXT_TOKEN=1) is set.

    Raises BadArgument where the token file cannot be read, or what is given is no token.
    """

    def __init__(
        self,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        tls: Tls | bool | None = None,
        plaintext_token: bool = False,
    ) -> None:
        self._token = _token_source(token, token_file)
        self._tls = (Tls() if tls else None) if isinstance(tls, bool) else tls
        self._last_credentials: grpc.ChannelCredentials | None = None
        allowed = os.environ.get("DATASERVICE_PLAINTEXT_TOKEN", "").lower() in ("1", "true")
        self._plaintext_token = plaintext_token or allowed

    def channel(self, address: str, *, authorised: bool) -> grpc.Channel:
        """A new channel; nothing is sent until it is used. Its TLS files are read again; where one
        cannot be, those of the channel before count. Raises BadArgument where there was none, or
        the token would be sent to another machine unencrypted."""
        options: list[tuple[str, int | str]] = [*_OPTIONS, *(() if authorised else _WORKER_OPTIONS)]
        if self._tls is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            if self._tls.server_name:
                options.append(("grpc.ssl_target_name_override", self._tls.server_name))
            channel = grpc.secure_channel(address, self._credentials(self._tls), options=options)
        if authorised and self._token is not None:
            self._require_private(address)
            channel = grpc.intercept_channel(channel, _BearerToken(self._token))
        return channel

    def _credentials(self, tls: Tls) -> grpc.ChannelCredentials:
        # A worker is connected in the midst of training, maybe while a file is being renewed.
        try:
            self._last_credentials = tls.credentials()
        except BadArgument:
            if self._last_credentials is None:
                raise
        return self._last_credentials

    def _require_private(self, address: str) -> None:
        if self._tls is None and not self._plaintext_token and not is_loopback(address):
            raise BadArgument(
                f"the token would go to {address} in the clear. Pass tls=True or tls=Tls(...); "
                "where the network itself is trusted, set DATASERVICE_PLAINTEXT_TOKEN=1."
            )


def _token_source(token: str | None, token_file: str | Path | None) -> Callable[[], str] | None:
    """A function that returns the current token; None where no token is set. Raises
    BadArgument."""
    if token is not None and token_file is not None:
        raise BadArgument("token and token_file were both given; give one of them.")
    if token is None and token_file is None:
        token_file = os.environ.get("DATASERVICE_TOKEN_FILE") or None
        token = None if token_file else os.environ.get("DATASERVICE_TOKEN")
    if token_file is not None:
        return _TokenFile(Path(token_file))
    token = (token or "").strip()
    if not token:
        return None
    if not _is_token(token):
        raise BadArgument(
            f"what was given as the token, {len(token)} characters, is no token: give one line of "
            "ASCII without spaces, as `dataservice token new` prints it."
        )
    return partial(str, token)


def _is_token(text: str) -> bool:
    # gRPC sends nothing else in a header, and fails every call that is given more.
    return text != "" and text.isascii() and text.isprintable() and " " not in text


class _TokenFile:
    """A token file whose content may change. While it is missing, or holds no token because it is
    being written, the last token is used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._last = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise BadArgument(f"cannot read the token file {path}: {reason}") from error
        if not _is_token(self._last):
            raise BadArgument(f"the token file {path} must hold one token and nothing else.")

    def __call__(self) -> str:
        with suppress(OSError, UnicodeDecodeError):
            found = self._path.read_text(encoding="ascii").strip()
            if _is_token(found):
                self._last = found
        return self._last


class _CallDetails(
    namedtuple("_CallDetails", ("method", "timeout", "metadata", "credentials", "wait_for_ready")),
    grpc.ClientCallDetails,
):
    """gRPC gives interceptors call details as a named tuple and expects one back."""


class _BearerToken(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds `authorization: Bearer …` to every call."""

    def __init__(self, token: Callable[[], str]) -> None:
        self._token = token

    def _with_token(self, details: grpc.ClientCallDetails) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), ("authorization", f"Bearer {self._token()}")],
            details.credentials,
            details.wait_for_ready,
        )

    def intercept_unary_unary(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return continuation(self._with_token(client_call_details), request)

    def intercept_stream_stream(self, continuation, client_call_details, request_iterator):  # type: ignore[no-untyped-def]
        return continuation(self._with_token(client_call_details), request_iterator)


def wait_until_reachable(
    channel: grpc.Channel, address: str, *, job: str, timeout_s: float
) -> None:
    """Wait until a coordinator answers a question about the job, even with a refusal.

    Raises ServiceUnreachable where none does, with the address, the time spent, gRPC's reason and
    what to check.
    """
    stub = coordinator_pb2_grpc.CoordinatorStub(channel)
    deadline_s = time.monotonic() + timeout_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            stub.GetJob(coordinator_pb2.JobRequest(job=job), timeout=left_s, wait_for_ready=True)
        except grpc.RpcError as waited:
            if _no_answer(waited):
                time.sleep(min(RETRY_S, left_s))  # the connection broke during the call
                continue
        return
    reason = "no answer"
    try:
        # Without wait_for_ready, gRPC says why the connection fails.
        stub.GetJob(coordinator_pb2.JobRequest(job=job), timeout=REASON_S)
    except grpc.RpcError as refused:
        if not _no_answer(refused):
            return
        reason = refused.details() or reason if isinstance(refused, grpc.Call) else reason
    raise ServiceUnreachable(
        f"no data service answers at {address} after {timeout_s:g} s ({reason}). "
        f"{_advice(address, reason)}"
    )


def _advice(address: str, reason: str) -> str:
    """What to check, depending on what the port speaks."""
    spoken = _tls_at(address)
    told = ("handshake failed", "verification", "not in peer certificate")
    refused = any(words in reason.lower() for words in told)
    if spoken == "none" and refused:
        return "The port speaks no TLS: leave tls out, or correct the address."
    if spoken == "mutual":
        return (
            "The service wants a client's certificate: pass tls=Tls(ca_file=..., "
            "certificate_file=..., key_file=...) with one that it accepts."
        )
    if spoken == "server" and refused:
        return (
            "This client does not accept the service's certificate: check the ca_file of tls, and "
            "set its server_name if the certificate bears another name than the address."
        )
    if spoken == "server":
        return "The port speaks TLS: pass tls=True, or tls=Tls(ca_file=...)."
    return (
        "Check that `dataservice serve` runs there, that host and port are right and open from "
        "this machine, and that both sides agree on TLS."
    )


def _tls_at(address: str) -> Literal["none", "server", "mutual"] | None:
    """What a port speaks: plaintext, TLS, or TLS that requires a client certificate; None where it
    does not answer."""
    host, port = split_address(address)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # this only finds out what the port speaks; nothing is sent
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=PROBE_S) as plain,
            context.wrap_socket(plain) as secured,
        ):
            # A client without a certificate is refused after the handshake.
            return "server" if secured.recv(1) else "mutual"
    except ssl.SSLError as error:
        return "mutual" if "CERTIFICATE_REQUIRED" in str(error.reason) else "none"
    except (OSError, ValueError):
        return None


def _no_answer(error: grpc.RpcError) -> bool:
    return isinstance(error, grpc.Call) and error.code() in (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
    )
