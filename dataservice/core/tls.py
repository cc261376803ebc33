"""Which certificates the service shows, and which it trusts."""

from dataclasses import dataclass
from typing import ClassVar

from dataservice.core.job import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientTls:
    """PEM files of a client. Without `ca_file` the system's certificates are trusted;
    `server_name` is the name that the server's certificate must bear, by default its host."""

    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None


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
