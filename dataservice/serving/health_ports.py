"""gRPC health checks: at a port of their own, and the check of the port that trainers use.

Contract. A `HealthPort` needs neither the event loop nor any thread but its own, so it still
answers when those hang. `READY` says whether the service can be used; `LIVENESS` says whether it
can become usable again without a restart.
"""

import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any, cast

import grpc
from dataservice_proto.v1 import coordinator_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dataservice.core.address import EVERY_HOST, join_address, split_address
from dataservice.core.errors import SpecError
from dataservice.core.tls import TlsSpec
from dataservice.serving.binding import bind
from dataservice.serving.channels import DEFAULT_KEEPALIVE, channel_options, server_options
from dataservice.serving.status_codes import ServiceUnreachableError

READY = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
LIVENESS = "liveness"
HEALTH_LIMIT_BYTES = 4096


def status_of(well: bool) -> "health_pb2.HealthCheckResponse.ServingStatus":
    """The health status of gRPC."""
    answer = health_pb2.HealthCheckResponse
    return answer.SERVING if well else answer.NOT_SERVING


class HealthPort:
    """Serves health checks at an address, without TLS, and nothing else."""

    def __init__(self, listen: str) -> None:
        """Raises SpecError where `listen` cannot be listened on."""
        own = ThreadPoolExecutor(1, thread_name_prefix="health")
        self._healths = health.HealthServicer(
            experimental_non_blocking=True, experimental_thread_pool=own
        )
        self.tell(True, True)
        self._server = grpc.server(
            own, options=server_options(HEALTH_LIMIT_BYTES, DEFAULT_KEEPALIVE)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._healths, self._server)
        port = bind(self._server, listen, None)
        self.address = join_address(split_address(listen)[0], port)
        self._server.start()

    def tell(self, ready: bool, alive: bool) -> None:
        """Set what is answered from now on. May be called from any thread."""
        for service in ("", READY):
            self._healths.set(service, status_of(ready))
        self._healths.set(LIVENESS, status_of(alive))

    def stop(self) -> None:
        """Close the port."""
        self._server.stop(None)


class OwnRequest:
    """A request to our own port, over a connection of its own, as a trainer would make one."""

    def __init__(self, address: str, *, tls: TlsSpec | None, limit_s: float) -> None:
        """`address` is what the server listens on, with its actual port."""
        host, port = split_address(address)
        self._address = join_address("127.0.0.1" if host in EVERY_HOST else host, port)
        self._tls = tls
        self._limit_s = limit_s

    def __call__(self) -> None:
        """Make the request. Any answer will do; raises ServiceUnreachableError where none comes."""
        try:
            with self._channel() as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                stub.Check(health_pb2.HealthCheckRequest(service=READY), timeout=self._limit_s)
        except grpc.RpcError as error:
            call = cast(grpc.Call, error)  # as every RpcError that a call raises
            raise ServiceUnreachableError(f"{call.code().name}, {call.details()}") from error
        except (OSError, SpecError) as error:
            raise ServiceUnreachableError(str(error)) from error

    def _channel(self) -> grpc.Channel:
        options = channel_options(HEALTH_LIMIT_BYTES)
        if self._tls is None:
            return grpc.insecure_channel(self._address, options=options)
        # Only our own certificate is accepted, whoever signed it and whatever name it bears.
        name = _served_name(self._address, self._tls.certificate_file, self._limit_s)
        client = self._tls.client
        credentials = grpc.ssl_channel_credentials(
            _bytes(self._tls.certificate_file),
            _bytes(client.key_file),
            _bytes(client.certificate_file),
        )
        named = [*options, ("grpc.ssl_target_name_override", name)]
        return grpc.secure_channel(self._address, credentials, options=named)


def _served_name(address: str, certificate_file: str, limit_s: float) -> str:
    """A name in the certificate that is served there. Raises OSError where it is not the one in
    `certificate_file`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(certificate_file)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    host, port = split_address(address)
    with (
        socket.create_connection((host, int(port)), timeout=limit_s) as plain,
        context.wrap_socket(plain) as secured,
    ):
        # Python writes no types for it: pairs of a kind and a name, both text.
        names: Any = (secured.getpeercert() or {}).get("subjectAltName", ())
    kind, first = next((each for each in names if each[0] in ("DNS", "IP Address")), ("", host))
    if kind == "IP Address":
        return str(ip_address(str(first)))  # Python writes IPv6 out in full, gRPC in short
    return str(first).replace("*", "self", 1)


def _bytes(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()
