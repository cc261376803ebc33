"""TLS of the service's own ends: certificates that are renewed under a running server, and what
a connection that failed has met.
"""

import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import ClassVar, Literal, cast

import grpc

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT
from dataservice.serving.channels import Options

logger = logging.getLogger(__name__)

PROBE_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientTls:
    """PEM files of a client. Without `ca_file` the system's certificates are trusted;
    `server_name` is the name that the server's certificate must bear, by default its host."""

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """As the files are now. Raises SpecError naming one that cannot be read."""
        if (self.certificate_file is None) != (self.key_file is None):
            raise SpecError(
                f"the client's certificate is {self.certificate_file} and its key "
                f"{self.key_file}. Give both for mutual TLS, or neither."
            )
        return grpc.ssl_channel_credentials(
            _read(self.ca_file), _read(self.key_file), _read(self.certificate_file)
        )

    @property
    def options(self) -> Options:
        """Options of a channel."""
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsSpec:
    """Certificates of the coordinator and of every worker, as PEM files on each of their hosts.
    Renewed files are taken up without a restart."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    certificate_file: str
    """The certificate, followed by those between it and its authority."""
    key_file: str
    """Its private key."""
    ca_file: str | None = None
    """Authority that the coordinator trusts for workers; by default the system's."""
    client_ca_file: str | None = None
    """Ask clients for a certificate of this authority (mutual TLS)."""
    server_name: str | None = None
    """Name that workers' certificates bear, where it is not the host under which they are
    reached; trainers give the same as server_name of their `Tls`."""

    @property
    def client(self) -> ClientTls:
        """How the coordinator connects to workers; for mutual TLS it shows its own certificate."""
        mutual = self.client_ca_file is not None
        return ClientTls(
            ca_file=self.ca_file,
            certificate_file=self.certificate_file if mutual else None,
            key_file=self.key_file if mutual else None,
            server_name=self.server_name,
        )


def server_credentials(spec: TlsSpec) -> grpc.ServerCredentials:
    """Credentials that follow the files of `spec`. Raises SpecError while they are unusable."""
    files = _ServerFiles(spec)
    # gRPC documents None for "as before", which its types leave out.
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], files)
    return grpc.dynamic_ssl_server_credentials(
        files.read(), fetch, require_client_authentication=spec.client_ca_file is not None
    )


class _ServerFiles:
    """gRPC asks for the certificate at every handshake, from threads of its own. Files that are
    half renewed are left for the next handshake; the last that were whole stay in use."""

    def __init__(self, spec: TlsSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._stamp = self._look()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """The new certificate, or None where nothing has changed."""
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp:
                return None
            self._stamp = stamp
            try:
                fresh = self.read()
            except SpecError as error:
                logger.error("the certificate in use stays: %s", error)
                return None
            logger.info("certificate taken up from %s", self._spec.certificate_file)
            return fresh

    def read(self) -> grpc.ServerCertificateConfiguration:
        """Read and check the files. Raises SpecError."""
        spec = self._spec
        chain, key = _read(spec.certificate_file), _read(spec.key_file)
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
        return grpc.ssl_server_certificate_configuration(
            [(key, chain)], root_certificates=_read(spec.client_ca_file)
        )

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        spec = self._spec
        files = (spec.certificate_file, spec.key_file, spec.client_ca_file)
        return tuple(file_stamp(Path(file)) for file in files if file is not None)


def _no_password() -> str:
    # Without this, OpenSSL would ask for one at the terminal.
    raise ValueError("the key is encrypted")


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does, by being written or replaced; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(path: str | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise SpecError(
            f"the TLS file {path} cannot be read: {error.strerror}. Check the path and its "
            "permissions."
        ) from error


def is_loopback(host: str) -> bool:
    """Whether what is sent to this host stays on this machine."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def tls_at(address: str) -> Literal["none", "server", "mutual"] | None:
    """What a port speaks: plaintext, TLS, or TLS that wants a client's certificate; None when
    it does not answer within `PROBE_S`."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it is asked what it speaks, and told nothing
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_S) as plain,
            context.wrap_socket(plain) as secured,
        ):
            # A client without a certificate is turned away behind the handshake.
            return "server" if secured.recv(1) else "mutual"
    except ssl.SSLError as error:
        return "mutual" if "CERTIFICATE_REQUIRED" in str(error.reason) else "none"
    except (OSError, ValueError):
        return None
