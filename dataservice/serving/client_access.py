"""How this project's clients connect: TLS, a token for each call, and advice when either fails."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from dataservice.core.address import is_loopback, split_address
from dataservice.core.errors import TokenError
from dataservice.core.tls import ClientTls
from dataservice.serving.channels import channel_options
from dataservice.serving.identity import AUTHORIZATION
from dataservice.serving.tls import client_credentials, client_options, tls_at

GiveToken = Callable[[], str | None]
"""Gives the token to send; asked for each call, so that a new token is used at once."""


# What gRPC says where it does not accept a certificate, or cannot read the authorities'.
_UNACCEPTED = ("verif", "not in peer certificate", "handshake failed", "ssl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The credentials of a client. Without `tls` it connects in plaintext, and sends its token to
    its own machine only, unless `plaintext_token` is set."""

    token: GiveToken = lambda: None
    tls: ClientTls | None = None
    plaintext_token: bool = False

    def channel(self, address: str, answer_limit_bytes: int) -> grpc.Channel:
        """A new channel. Raises SpecError where a TLS file cannot be read."""
        options = channel_options(answer_limit_bytes)
        if self.tls is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            options = [*options, *client_options(self.tls)]
            channel = grpc.secure_channel(address, client_credentials(self.tls), options=options)
        return grpc.intercept_channel(channel, _BearerToken(self, address))

    def authorization(self, address: str) -> tuple[tuple[str, str], ...]:
        """Metadata of a call. Raises TokenError where the token would travel unencrypted."""
        token = self.token()
        if token is None:
            return ()
        private = self.tls is not None or is_loopback(split_address(address)[0])
        if not private and not self.plaintext_token:
            raise TokenError(
                f"the token would go to {address} in the clear. Connect by TLS (--ca-file, or "
                "--tls for the system's authorities); where the network itself is trusted, allow "
                "it with --plaintext-token."
            )
        return ((AUTHORIZATION, f"Bearer {token}"),)

    def mismatch(self, address: str, said: str) -> str:
        """Why a connection failed, of which gRPC `said` something, if TLS is the reason."""
        spoken = tls_at(address)
        if self.tls is None and spoken in ("server", "mutual"):
            return "The port speaks TLS: give --ca-file, or --tls for the system's authorities."
        if self.tls is not None and spoken == "none":
            return "The port speaks no TLS: leave --ca-file and --tls out, or correct the address."
        if self.tls is not None and spoken == "mutual":
            if self.tls.certificate_file is None:
                return "The service wants a certificate: give --cert-file and --key-file."
            return f"The service does not accept the certificate {self.tls.certificate_file}."
        if spoken == "server" and any(words in said.lower() for words in _UNACCEPTED):
            return (
                "This client does not accept the service's certificate: trust its authority with "
                "--ca-file, name it with --server-name if it bears another name than the address, "
                "or have it renewed if it has expired."
            )
        return ""


class _CallDetails(
    namedtuple("_CallDetails", ("method", "timeout", "metadata", "credentials", "wait_for_ready")),
    grpc.ClientCallDetails,
):
    """gRPC gives interceptors call details as a named tuple and expects one back."""


class _BearerToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the current token to every call."""

    def __init__(self, access: Access, address: str) -> None:
        self._access = access
        self._address = address

    def intercept_unary_unary(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return continuation(self._with_token(client_call_details), request)

    def intercept_unary_stream(self, continuation, client_call_details, request):  # type: ignore[no-untyped-def]
        return continuation(self._with_token(client_call_details), request)

    def _with_token(self, details: grpc.ClientCallDetails) -> _CallDetails:
        metadata = [*(details.metadata or ()), *self._access.authorization(self._address)]
        return _CallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )
