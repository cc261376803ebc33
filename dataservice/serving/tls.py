"""TLS of the service's servers and clients: certificates that are renewed while a server runs, and
the reason why a connection failed.
"""

import logging
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, cast

import grpc

from dataservice.core.address import split_address
from dataservice.core.errors import SpecError
from dataservice.core.private_files import file_stamp, others_may
from dataservice.core.tls import ClientTls, TlsSpec
from dataservice.serving.channels import Options

log = logging.getLogger(__name__)

PROBE_S = 2.0


def client_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    """Credentials from the files as they are now. Raises SpecError where one cannot be read."""
    if (tls.certificate_file is None) != (tls.key_file is None):
        raise SpecError(
            f"the client's certificate is {tls.certificate_file} and its key {tls.key_file}. "
            "Give both for mutual TLS, or neither."
        )
    return grpc.ssl_channel_credentials(
        _read(tls.ca_file), _read(tls.key_file), _read(tls.certificate_file)
    )


def client_options(tls: ClientTls) -> Options:
    """The channel options that a client with TLS needs."""
    return [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []


def server_credentials(spec: TlsSpec) -> grpc.ServerCredentials:
    """Credentials that are renewed when the files of `spec` change. Raises SpecError where the
    files cannot be used."""
    files = _ServerFiles(spec)
    # gRPC's documentation allows None for "as before", its types do not.
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], files)
    return grpc.dynamic_ssl_server_credentials(
        files.read(), fetch, require_client_authentication=spec.client_ca_file is not None
    )


class _ServerFiles:
    """Gives gRPC the certificate, which it asks for at every handshake, from its own threads.
    While only one of certificate and key is renewed, the last valid pair stays in use."""

    def __init__(self, spec: TlsSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._stamp = self._told = self._look()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificate; None if nothing has changed."""
        with self._lock:
            stamp = self._look()
            told, self._told = self._told, stamp
            if stamp == self._stamp:
                return None
            try:
                fresh = self.read()
            except SpecError as error:
                # It is tried at each handshake: `chmod`, say, may mend it and leave its stamp.
                if stamp != told:
                    log.error("the certificate in use stays: %s", error)
                return None
            self._stamp = stamp
            log.info("certificate taken up from %s", self._spec.certificate_file)
            return fresh

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Read and check the files. Raises SpecError."""
        spec = self._spec
        chain, key = _read(spec.certificate_file), _read(spec.key_file)
        if others_may(Path(spec.key_file)):
            log.warning("insecure: whoever is on this machine may use key %s", spec.key_file)
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                spec.certificate_file, spec.key_file, password=_no_password
            )
        except (OSError, ValueError) as error:
            raise SpecError(
                f"{spec.certificate_file} and {spec.key_file} are no certificate with its key, "
                f"both PEM and without a password: {error}. Write both anew."
            ) from error
        assert chain is not None
        assert key is not None
        _tell_dates(spec.certificate_file, chain)
        return grpc.ssl_server_certificate_configuration(
            [(key, chain)], root_certificates=_read(spec.client_ca_file)
        )

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        spec = self._spec
        files = (spec.certificate_file, spec.key_file, spec.client_ca_file)
        return tuple(file_stamp(Path(file)) for file in files if file is not None)


def _tell_dates(file: str, chain: bytes) -> None:
    """Log where one of the certificates is not valid now. It is served all the same: clocks may
    differ, and its renewal is taken up while the service runs."""
    from cryptography import x509  # which no client needs, and takes a tenth of a command's start

    now = datetime.now(UTC)
    with suppress(ValueError):  # one that OpenSSL reads, and this library does not
        for each in x509.load_pem_x509_certificates(chain):
            begins, ends = each.not_valid_before_utc, each.not_valid_after_utc
            if not begins <= now <= ends:
                log.error(
                    "no client will connect: certificate %s is valid from %s to %s, and it is %s. "
                    "Renew it, or set the clock; a renewed file is taken up without a restart",
                    *(file, begins, ends, now.replace(microsecond=0)),
                )


def _no_password() -> str:
    # Without this, OpenSSL would ask for a password at the terminal.
    raise ValueError("the key is encrypted")


def _read(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise SpecError(
            f"the TLS file {path} cannot be read: {error.strerror}. Check the path and its "
            "permissions."
        ) from error


def tls_at(address: str) -> Literal["none", "server", "mutual"] | None:
    """What a port speaks: plaintext, TLS, or TLS that requires a client certificate; None where it
    does not answer within `PROBE_S`."""
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
