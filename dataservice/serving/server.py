"""gRPC servers of the coordinator and of workers, with health and reflection services.

Stopping: the health service turns to NOT_SERVING, new calls are refused, calls in flight
have a grace period to end, then they are cancelled and the port is closed.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio
from dataservice_proto.v1 import (
    coordinator_pb2,
    coordinator_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from dataservice.core.errors import SpecError
from dataservice.core.ports import PackHost
from dataservice.engine.api import CoordinatorApi
from dataservice.serving.border import Border
from dataservice.serving.channels import DEFAULT_KEEPALIVE, Keepalive, server_options
from dataservice.serving.coordinator_servicer import CoordinatorServicer
from dataservice.serving.parts import MESSAGE_LIMIT_BYTES
from dataservice.serving.worker_servicer import WorkerServicer

# A stream is over for its sender while its last bytes are still on their way, and closing the
# connection then would reset it under them.
FLUSH_S = 0.2
HEALTH_LIMIT_BYTES = 4096

EVERY_INTERFACE = frozenset({"", "0.0.0.0", "[::]", "::", "*"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerHandle:
    """A server that runs. `address` is where others reach it, the port filled in."""

    address: str
    server: grpc.aio.Server
    health: health.aio.HealthServicer
    on_stop: Callable[[], None]

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
    grace_s: float
    on_stopped: Callable[[], None]

    @property
    def address(self) -> str:
        """host:port where trainers and the coordinator reach it."""
        return self.handle.address

    async def stop(self) -> None:
        """Finish the streams that are open, for `grace_s` at most, then close the port."""
        await self.handle.health.enter_graceful_shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.grace_s):
                await self.servicer.quiet()
                await asyncio.sleep(FLUSH_S)
        await self.handle.stop(0.0)
        self.on_stopped()


async def serve_coordinator(
    api: CoordinatorApi,
    listen: str,
    *,
    border: Border | None = None,
    advertise_host: str | None = None,
    credentials: grpc.ServerCredentials | None = None,
    keepalive: Keepalive = DEFAULT_KEEPALIVE,
) -> ServerHandle:
    """Serve the api at `listen` (host:port; port 0 picks a free one) to whom the border lets
    in, by default everyone. Raises SpecError when that cannot be listened on. Stopping ends the
    sessions at once."""
    border = border or Border()
    server = grpc.aio.server(options=server_options(MESSAGE_LIMIT_BYTES, keepalive))
    servicer = CoordinatorServicer(api, border)
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(servicer, server)
    service = coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name
    if border.open:  # only calls of the service itself are checked for tokens
        _reflect(server, service)
    return await _started(
        server, service, listen, advertise_host, credentials, on_stop=servicer.close
    )


async def serve_worker(
    host: PackHost,
    *,
    worker: str,
    listen: str,
    secret: bytes,
    advertise_host: str | None = None,
    credentials: grpc.ServerCredentials | None = None,
    keepalive: Keepalive = DEFAULT_KEEPALIVE,
    grace_s: float = 5.0,
    on_stopped: Callable[[], None] = lambda: None,
    reflect: bool = True,
) -> GrpcWorker:
    """Serve a host's packs at `listen`; `on_stopped` runs after the port is closed. Raises
    SpecError when `listen` cannot be listened on."""
    server = grpc.aio.server(options=server_options(MESSAGE_LIMIT_BYTES, keepalive))
    servicer = WorkerServicer(host, worker=worker, secret=secret)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    service = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
    if reflect:
        _reflect(server, service)
    handle = await _started(
        server, service, listen, advertise_host, credentials, on_stop=lambda: None
    )
    return GrpcWorker(handle=handle, servicer=servicer, grace_s=grace_s, on_stopped=on_stopped)


async def serve_health(healths: health.aio.HealthServicer, listen: str) -> grpc.aio.Server:
    """Answer health checks at `listen` in the clear, and nothing else. Raises SpecError when that
    cannot be listened on."""
    server = grpc.aio.server(options=server_options(HEALTH_LIMIT_BYTES, DEFAULT_KEEPALIVE))
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    _bind(server, listen, None)
    await server.start()
    return server


async def _started(
    server: grpc.aio.Server,
    service: str,
    listen: str,
    advertise_host: str | None,
    credentials: grpc.ServerCredentials | None,
    *,
    on_stop: Callable[[], None],
) -> ServerHandle:
    healths = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healths, server)
    await healths.set(service, health_pb2.HealthCheckResponse.SERVING)
    port = _bind(server, listen, credentials)
    await server.start()
    host = advertise_host or listen.rpartition(":")[0]
    if host in EVERY_INTERFACE:
        host = socket.gethostname()
    return ServerHandle(address=f"{host}:{port}", server=server, health=healths, on_stop=on_stop)


def _reflect(server: grpc.aio.Server, service: str) -> None:
    names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None) -> int:
    """Listen on the port, or on the first free one of a range such as 20100-20115."""
    host, colon, ports = listen.rpartition(":")
    first, _, last = ports.partition("-")
    last = last or first
    if not colon or not first.isdecimal() or not last.isdecimal() or int(last) > 65535:
        raise SpecError(f"listen address {listen!r} is not host:port, such as 0.0.0.0:50051.")
    for port in range(int(first), int(last) + 1):
        with contextlib.suppress(RuntimeError):
            if credentials is None:
                return server.add_insecure_port(f"{host}:{port}")
            return server.add_secure_port(f"{host}:{port}", credentials)
    raise SpecError(
        f"cannot listen on {listen}: another process has the port, or the host is not of this "
        "machine. Stop what uses the port, or choose another; port 0 picks a free one."
    )
