"""gRPC servers of the coordinator and of workers, with health and reflection services.

Stopping: the health service answers NOT_SERVING, new calls are refused, and calls in flight have a
grace period to end; then they are cancelled and the port is closed.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio
from dataservice_proto.heap_threshold import keep_freed_messages
from dataservice_proto.v1 import (
    coordinator_pb2,
    worker_pb2,
)
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dataservice.core.address import EVERY_HOST, join_address, split_address
from dataservice.core.errors import SpecError
from dataservice.core.ports import IndexHost, PackHost
from dataservice.core.tls import TlsSpec
from dataservice.core.whereabouts import ANYWHERE, Whereabouts
from dataservice.engine.api import CoordinatorApi
from dataservice.serving.access_control import AccessControl
from dataservice.serving.binding import bind
from dataservice.serving.channels import (
    DEFAULT_ADMISSION,
    DEFAULT_KEEPALIVE,
    Admission,
    Keepalive,
    server_options,
)
from dataservice.serving.coordinator_servicer import CoordinatorServicer
from dataservice.serving.coordinator_servicer import add_to_server as add_coordinator_to_server
from dataservice.serving.health_ports import status_of
from dataservice.serving.node_door import NodeDoor
from dataservice.serving.parts import MESSAGE_LIMIT_BYTES
from dataservice.serving.tls import server_credentials
from dataservice.serving.worker_servicer import WorkerServicer
from dataservice.serving.worker_servicer import add_to_server as add_worker_to_server

# When a stream is over for its sender, its last bytes may still be on their way; closing the
# connection at that moment would lose them.
FLUSH_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerHandle:
    """A running server. `address` is where others reach it, `listens` what it listens on, with the
    actual port; `service` is the name of the service in its health checks."""

    address: str
    listens: str
    service: str
    server: grpc.aio.Server
    health: health.aio.HealthServicer
    on_stop: Callable[[], None]

    async def tell_health(self, *, ready: bool) -> None:
        """Set what health checks at this port answer from now on; no effect once it stops."""
        for service in ("", self.service):
            await self.health.set(service, status_of(ready))

    async def stop(self, grace_s: float = 5.0) -> None:
        """Let calls in flight end within `grace_s`, then close. May be called twice."""
        await self.health.enter_graceful_shutdown()
        self.on_stop()
        await self.server.stop(grace_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpcWorker:
    """core.ports.ServedWorker: a worker's server and what to close behind it."""

    handle: ServerHandle
    servicer: WorkerServicer
    door: NodeDoor | None
    grace_s: float
    on_stopped: Callable[[], None]
    where: Whereabouts = ANYWHERE

    @property
    def address(self) -> str:
        """host:port where trainers and the coordinator reach it."""
        return self.handle.address

    async def stop(self) -> None:
        """Wait at most `grace_s` for open streams to finish, then close the port."""
        await self.handle.health.enter_graceful_shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                await self.servicer.quiet()
                await asyncio.sleep(FLUSH_S)
        if self.door is not None:
            await self.door.close()
        await self.handle.stop(0.0)
        self.on_stopped()


async def serve_coordinator(
    api: CoordinatorApi,
    listen: str,
    *,
    access: AccessControl | None = None,
    advertise_host: str | None = None,
    tls: TlsSpec | None = None,
    keepalive: Keepalive = DEFAULT_KEEPALIVE,
    admission: Admission = DEFAULT_ADMISSION,
) -> ServerHandle:
    """Serve the API at `listen` (host:port; port 0 picks a free one) to callers that `access`
    admits, by default everyone. Stopping ends the sessions at once. Raises SpecError where
    `listen` cannot be listened on."""
    access = access or AccessControl()
    server = grpc.aio.server(options=server_options(MESSAGE_LIMIT_BYTES, keepalive, admission))
    servicer = CoordinatorServicer(api, access)
    add_coordinator_to_server(servicer, server)
    service = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
    if access.open:  # reflection has no check of tokens
        _reflect(server, service)
    return await _started(server, service, listen, advertise_host, tls, on_stop=servicer.close)


async def serve_worker(
    host: PackHost,
    *,
    worker: str,
    listen: str,
    secret: bytes,
    indexing: IndexHost | None = None,
    advertise_host: str | None = None,
    tls: TlsSpec | None = None,
    keepalive: Keepalive = DEFAULT_KEEPALIVE,
    admission: Admission = DEFAULT_ADMISSION,
    grace_s: float = 5.0,
    on_stopped: Callable[[], None] = lambda: None,
    reflect: bool = True,
    refused: Counter[str] | None = None,
    sent: Counter[str] | None = None,
    same_node: str = "auto",
    where: Whereabouts = ANYWHERE,
) -> GrpcWorker:
    """Serve a host's packs at `listen`, and to ranks on this machine through `same_node`: see
    NodeDoor; `off` for none. Errands for indexes go to `indexing`. `on_stopped` runs after the port
    is closed. Tickets that are refused are counted in `refused`, and bytes of parts in `sent` by
    path, `grpc` or `same_node`. `where` it is, the worker tells its pool. Raises SpecError where
    `listen` cannot be listened on."""
    keep_freed_messages()
    server = grpc.aio.server(options=server_options(MESSAGE_LIMIT_BYTES, keepalive, admission))
    servicer = WorkerServicer(
        host, worker=worker, secret=secret, indexing=indexing, refused=refused, sent=sent
    )
    add_worker_to_server(servicer, server)
    service = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
    if reflect:
        _reflect(server, service)
    handle = await _started(server, service, listen, advertise_host, tls, on_stop=lambda: None)
    try:
        door = None if same_node == "off" else NodeDoor(servicer.parts_near, same_node)
    except SpecError:
        await handle.stop(0.0)
        raise
    servicer.door = door
    return GrpcWorker(
        handle=handle,
        servicer=servicer,
        door=door,
        grace_s=grace_s,
        on_stopped=on_stopped,
        where=where,
    )


async def _started(
    server: grpc.aio.Server,
    service: str,
    listen: str,
    advertise_host: str | None,
    tls: TlsSpec | None,
    *,
    on_stop: Callable[[], None],
) -> ServerHandle:
    healths = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    await healths.set(service, status_of(True))
    port = bind(server, listen, None if tls is None else server_credentials(tls))
    await server.start()
    listens_on, _ = split_address(listen)
    host = advertise_host or listens_on
    if host in EVERY_HOST:
        host = socket.gethostname()
    return ServerHandle(
        address=join_address(host, port),
        listens=join_address(listens_on, port),
        service=service,
        server=server,
        health=healths,
        on_stop=on_stop,
    )


def _reflect(server: grpc.aio.Server, service: str) -> None:
    names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
