"""How the client reaches the service: gRPC channels, with TLS and a team's token if given.

The seam is one method: a `Transport` opens a channel to an address. Tests and special
networks bring their own.
"""

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import grpc
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from trainer_client.errors import BadArgument, ServiceUnreachable

_OPTIONS: list[tuple[str, int]] = [
    # A whole step's routes for one rank can pass gRPC's usual 4 MiB.
    ("grpc.max_receive_message_length", 256 << 20),
    # A restarted service is found again within seconds, not gRPC's usual two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Finds a peer that vanished without closing, within half a minute. The service allows
    # pings this often; a server with gRPC's default settings would take them for abuse.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # What is worth trying again is decided here, not by gRPC.
    ("grpc.enable_retries", 0),
    # Trainers and the service are in one cluster, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
    # Channels do not share connections: closing a dataset closes its own, at once.
    ("grpc.use_local_subchannel_pool", 1),
]

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tls:
    """PEM files for TLS. `certificate_file` and `key_file` go together, for mutual TLS;
    `server_name` overrides the name that the service's certificate must bear."""

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
        """Read the files. Raises BadArgument naming a file that cannot be read."""

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
    """Channels over TCP, plain or TLS. The token goes to the coordinator alone: workers are
    shown tickets."""

    def __init__(self, *, token: str | None = None, tls: Tls | bool | None = None) -> None:
        self._token = token
        self._tls = (Tls() if tls else None) if isinstance(tls, bool) else tls

    def channel(self, address: str, *, authorised: bool) -> grpc.Channel:
        """A new channel; nothing is sent until it is used."""
        if self._tls is None:
            channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            options: list[tuple[str, int | str]] = [*_OPTIONS]
            if self._tls.server_name:
                options.append(("grpc.ssl_target_name_override", self._tls.server_name))
            channel = grpc.secure_channel(address, self._tls.credentials(), options=options)
        if authorised and self._token is not None:
            channel = grpc.intercept_channel(channel, _BearerToken(self._token))
        return channel


class _CallDetails(
    namedtuple("_CallDetails", ("method", "timeout", "metadata", "credentials", "wait_for_ready")),
    grpc.ClientCallDetails,
):
    """gRPC hands interceptors call details as a named tuple and wants one back."""


class _BearerToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds `authorization: Bearer …` to every call."""

    def __init__(self, token: str) -> None:
        self._header = ("authorization", f"Bearer {token}")

    def _with_token(self, details: grpc.ClientCallDetails) -> _CallDetails:
        return _CallDetails(
            details.method,
            details.timeout,
            [*(details.metadata or ()), self._header],
            details.credentials,
            details.wait_for_ready,
        )

    def intercept_unary_unary(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return continuation(self._with_token(client_call_details), request)


def wait_until_reachable(
    channel: grpc.Channel, address: str, *, job: str, timeout_s: float
) -> None:
    """Return once a coordinator answers a question about the job, be it with a refusal.

    Raises ServiceUnreachable with the address, the time spent, gRPC's reason and what to
    check.
    """
    stub = coordinator_pb2_grpc.CoordinatorStub(channel)
    try:
        stub.GetJob(coordinator_pb2.JobRequest(job=job), timeout=timeout_s, wait_for_ready=True)
    except grpc.RpcError as waited:
        if not _no_answer(waited):
            return
        reason = "no answer"
        try:
            # Without waiting, gRPC says why the connection fails.
            stub.GetJob(coordinator_pb2.JobRequest(job=job), timeout=1.0)
        except grpc.RpcError as refused:
            if not _no_answer(refused):
                return
            reason = refused.details() or reason if isinstance(refused, grpc.Call) else reason
        raise ServiceUnreachable(
            f"no data service answers at {address} after {timeout_s:g} s ({reason}). Check that "
            "`dataservice serve` runs there, that host and port are right and open from this "
            "machine, and that both sides agree on TLS."
        ) from None


def _no_answer(error: grpc.RpcError) -> bool:
    return isinstance(error, grpc.Call) and error.code() in (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
    )
