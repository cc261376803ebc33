"""Where a Prometheus scrapes a registry: the coordinator's, or a worker's.

Contract. The server has a thread of its own, and one more for each scrape; `stop` ends it within
half a second. Who scrapes is not asked: the network decides who may.
"""

import threading
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

from dataservice.core.errors import SpecError


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
    for the first free one of a range. Raises SpecError when none can be listened on."""
    host, _, ports = listen.rpartition(":")
    first, _, last = ports.partition("-")
    for port in range(int(first), int(last or first) + 1):
        try:
            server, thread = start_http_server(
                port, host.strip("[]") or "0.0.0.0", registry=registry
            )
        except OSError as error:
            refusal = error
            continue
        address = f"{host}:{server.server_port}"
        return MetricsEndpoint(address=address, server=server, thread=thread)
    raise SpecError(
        f"cannot serve metrics at {listen}: {refusal.strerror}. Stop what uses the port, or "
        "choose another; port 0 picks a free one."
    ) from refusal
