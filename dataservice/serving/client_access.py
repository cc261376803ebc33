"""How a client of ours connects: TLS, a token for each call, and what to say when neither fits."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from dataservice.core.errors import TokenError
from dataservice.serving.channels import channel_options
from dataservice.serving.identity import AUTHORIZATION
from dataservice.serving.tls import ClientTls, is_loopback, tls_at

GiveToken = Callable[[], str | None]
"""The token to send with a call; asked for each, so that a new one is taken up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """What a client shows and expects. Without `tls` it talks plaintext, and sends a token to
    its own machine only, unless `plaintext_token` allows more."""

    token: GiveToken = lambda: None
    tls: ClientTls | None = None
    plaintext_token: bool = False

    def channel(self, address: str, answer_limit_bytes: int) -> grpc.Channel:
        """A new channel. Raises SpecError naming a TLS file that cannot be read."""
        options = channel_options(answer_limit_bytes)
        if self.tls is None:
            channel = grpc.insecure_channel(address, options=options)
        else:
            channel = grpc.secure_channel(
                address, self.tls.credentials(), options=options + self.tls.options
            )
        return grpc.intercept_channel(channel, _BearerToken(self, address))

    def authorization(self, address: str) -> tuple[tuple[str, str], ...]:
        """Metadata of a call. Raises TokenError rather than send a token that all can read."""
        token = self.token()
        if token is None:
            return ()
        private = self.tls is not None or is_loopback(address.rpartition(":")[0])
        if not private and not self.plaintext_token:
            raise TokenError(
                f"the token would go to {address} in the clear. Connect by TLS (--ca-file, or "
                "--tls for the system's authorities); where the network itself is trusted, allow "
                "it with --plaintext-token."
            )
        return ((AUTHORIZATION, f"Bearer {token}"),)

    def mismatch(self, address: str) -> str:
        """Why a connection that failed could not be made, as far as TLS is the reason."""
        spoken = tls_at(address)
        if self.tls is None and spoken in ("server", "mutual"):
            return "The port speaks TLS: give --ca-file, or --tls for the system's authorities."
        if self.tls is not None and spoken == "none":
            return "The port speaks no TLS: leave --ca-file and --tls out, or correct the address."
        if self.tls is not None and spoken == "mutual":
            if self.tls.certificate_file is None:
                return "The service wants a certificate: give --cert-file and --key-file."
            return f"The service does not accept the certificate {self.tls.certificate_file}."
        return ""


class _CallDetails(
    namedtuple("_CallDetails", ("method", "timeout", "metadata", "credentials", "wait_for_ready")),
    grpc.ClientCallDetails,
):
    """gRPC hands interceptors call details as a named tuple and wants one back."""


class _BearerToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """Adds the token of the moment to every call."""

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
