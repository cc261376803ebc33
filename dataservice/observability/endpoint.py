"""Where a Prometheus scrapes a registry: the coordinator's, or a worker's.

Contract. The server has a thread of its own, and one more for each scrape, which ends when
nothing comes for `REQUEST_S`; `stop` ends it within half a second. Scrapes are not authenticated:
the network decides who may scrape.
"""

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from dataservice.core.address import EVERY_HOST, join_address, split_address
from dataservice.core.errors import SpecError

# Between two bytes of a request; Prometheus sends them all at once.
REQUEST_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricsEndpoint:
    """The HTTP server that a Prometheus scrapes, in a thread of its own."""

    address: str
    server: WSGIServer
    thread: threading.Thread

    def stop(self) -> None:
        """Close the port; takes up to half a second."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def serve_metrics(registry: CollectorRegistry, listen: str) -> MetricsEndpoint:
    """Serve /metrics at `listen`: host:port, where port 0 picks a free one, or host:first-last
    for the first free one of a range. Raises SpecError where none can be listened on."""
    host, ports = split_address(listen)
    first, _, last = ports.partition("-")
    for port in range(int(first), int(last or first) + 1):
        try:
            server, thread = start_http_server(port, _bound(host), registry=registry)
        except OSError as error:
            refusal = error
            continue
        server.RequestHandlerClass = _impatient(server.RequestHandlerClass)
        address = join_address(host, server.server_port)
        return MetricsEndpoint(address=address, server=server, thread=thread)
    remedy = "Stop what uses the port, or choose another; port 0 picks a free one"
    if last:
        remedy = (
            "Stop what uses these ports, or give more of them: each worker takes one, and a second "
            "while it is replaced"
        )
    raise SpecError(f"cannot serve metrics at {listen}: {refusal.strerror}. {remedy}.") from refusal


def _impatient(handler: Any) -> Any:
    """The same handler, whose thread does not wait for ever for a request that never comes."""

    class Impatient(handler):  # type: ignore[misc]  # the library gives it no type
        timeout = REQUEST_S

        def handle(self) -> None:
            with suppress(TimeoutError):
                super().handle()

    return Impatient


def _bound(host: str) -> str:
    """The host to bind, so that "every address" covers IPv4 and IPv6, as it does for gRPC."""
    if host not in EVERY_HOST:
        return host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
