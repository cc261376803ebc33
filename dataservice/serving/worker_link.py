"""How the coordinator commands workers over gRPC.

Slow is not dead: an order has no deadline here, because the engine knows how long it may take and
which other worker could do it. A worker is *lost* when its connection breaks, or pings on it stay
unanswered (see channels.py), and a question over a new connection is not answered either; a
connection may break while both ends work. Orders are the only calls that are repeated. Cancelling
a call cancels it at the worker too, which goes on decoding (see workers/host.py).
"""

import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

import grpc
import grpc.aio
from dataservice_proto.v1 import worker_pb2, worker_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataservice.core.authority import COMMAND_METADATA, command_token
from dataservice.core.errors import ServiceError, SpecError, WorkerLostError
from dataservice.core.orders import Holdings, PackKey, PackOrder, StorageOutage
from dataservice.core.ports import WorkerInfo
from dataservice.core.receipts import PackAnswers
from dataservice.core.tls import ClientTls
from dataservice.engine.fair_threads import FairThreads
from dataservice.serving import wire_packs
from dataservice.serving.channels import DEFAULT_KEEPALIVE, Keepalive, channel_options
from dataservice.serving.parts import MESSAGE_LIMIT_BYTES
from dataservice.serving.status_codes import error_of, is_unreachable
from dataservice.serving.tls import client_credentials, client_options

log = logging.getLogger(__name__)

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


@dataclass(kw_only=True, slots=True, eq=False)
class _Line:
    channel: grpc.aio.Channel
    calls: int = 0
    lost: bool = False


class GrpcWorkerLink:
    """core.ports.WorkerLink with one channel for each address. Used on one event loop."""

    def __init__(
        self,
        secret: bytes,
        *,
        answer_timeout_s: float = 5.0,
        release_timeout_s: float = 10.0,
        tls: ClientTls | None = None,
        keepalive: Keepalive = DEFAULT_KEEPALIVE,
        threads: FairThreads | None = None,
    ) -> None:
        """`answer_timeout_s` is the deadline of calls that need no decoding. Orders are written in
        `threads` if given, because an order may have thousands of samples."""
        self._metadata = ((COMMAND_METADATA, command_token(secret)),)
        self._answer_timeout_s = answer_timeout_s
        self._release_timeout_s = release_timeout_s
        self._tls = tls
        self._keepalive = keepalive
        self._threads = threads
        self._lines: dict[str, _Line] = {}

    async def order(
        self, worker: WorkerInfo, orders: Sequence[PackOrder]
    ) -> AsyncGenerator[PackAnswers, None]:
        """Have packs of one step decoded; there is no deadline. Raises WorkerLostError, the
        worker's own error, or SpecError where the samples of one pack do not fit into a message."""
        left = {order.key.pack: order for order in orders}
        repeated = False
        while left:
            try:
                async with contextlib.aclosing(self._prepare(worker, list(left.values()))) as call:
                    async for answers in call:
                        for pack in (*answers.receipts.pack.tolist(), *answers.failures):
                            left.pop(pack, None)
                        yield answers
            except WorkerLostError as error:
                if repeated or not await self._answers(worker):
                    raise
                log.info("%s answers again, orders are repeated: %s", worker.worker, error)
            else:
                if left:
                    raise ServiceError(
                        f"{worker.worker} ended a call with {len(left)} packs unanswered. If it "
                        "is of another release, renew it: `dataservice workers restart`."
                    )
            repeated = True

    async def _prepare(
        self, worker: WorkerInfo, orders: Sequence[PackOrder]
    ) -> AsyncGenerator[PackAnswers, None]:
        writing = partial(_requests, orders)
        key = orders[0].key
        requests = writing() if self._threads is None else await self._threads.run(key.job, writing)
        for request in requests:
            async with self._stub(worker) as stub:
                call = stub.Prepare(request, metadata=self._metadata)
                try:
                    async for message in call:
                        yield wire_packs.pack_answers_from_proto(message, key)
                finally:
                    call.cancel()  # of one that has ended it does nothing

    async def release(self, worker: WorkerInfo, job: str, packs: Sequence[PackKey]) -> None:
        """Have packs forgotten. If the worker cannot be reached, that is only logged."""
        request = worker_pb2.ReleaseRequest(packs=wire_packs.pack_keys_to_proto(packs))
        try:
            async with self._stub(worker) as stub:
                await stub.Release(
                    request, timeout=self._release_timeout_s, metadata=self._metadata
                )
        except WorkerLostError as error:
            log.info("%d packs of %s stay where they are: %s", len(packs), job, error)
        except ServiceError as error:
            log.warning("%s refused to release packs of %s: %s", worker.worker, job, error)

    async def ask_held(self, worker: WorkerInfo) -> Holdings:
        """What a worker holds or decodes, and what it waits for. Raises WorkerLostError, or the
        worker's own error."""
        keys: set[PackKey] = set()
        outages: list[StorageOutage] = []
        async with self._stub(worker) as stub:
            call = stub.Held(
                worker_pb2.HeldRequest(), timeout=self._answer_timeout_s, metadata=self._metadata
            )
            async for message in call:
                keys.update(wire_packs.pack_keys_from_proto(message.packs))
                outages += map(wire_packs.storage_outage_from_proto, message.outages)
        return Holdings(packs=frozenset(keys), outages=tuple(outages))

    async def close(self) -> None:
        """Close all channels; calls in flight are cancelled."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            await line.channel.close()

    async def _answers(self, worker: WorkerInfo) -> bool:
        """Whether the worker answers, over a new connection, that it serves."""
        async with self._channel(worker.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(
                    health_pb2.HealthCheckRequest(service=SERVICE), timeout=self._answer_timeout_s
                )
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @contextlib.asynccontextmanager
    async def _stub(self, worker: WorkerInfo) -> AsyncIterator["worker_pb2_grpc.WorkerAsyncStub"]:
        line = self._line(worker.address)
        line.calls += 1
        try:
            yield worker_pb2_grpc.WorkerStub(line.channel)
        except grpc.aio.AioRpcError as error:
            if not is_unreachable(error):
                raise error_of(error) from error
            line.lost = True
            raise WorkerLostError(
                f"{worker.worker} at {worker.address} does not answer: {error.code().name}, "
                f"{error.details()}."
            ) from error
        finally:
            line.calls -= 1
            # Closing cancels calls in flight, so the last call that ends closes the channel.
            if line.lost and line.calls == 0:
                if self._lines.get(worker.address) is line:
                    del self._lines[worker.address]
                await line.channel.close()

    def _line(self, address: str) -> _Line:
        line = self._lines.get(address)
        if line is None or line.lost:
            line = _Line(channel=self._channel(address))
            self._lines[address] = line
        return line

    def _channel(self, address: str) -> grpc.aio.Channel:
        options = channel_options(MESSAGE_LIMIT_BYTES, self._keepalive)
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        # Read again for each channel, because certificates are renewed.
        options = [*options, *client_options(self._tls)]
        return grpc.aio.secure_channel(address, client_credentials(self._tls), options=options)


def _requests(orders: Sequence[PackOrder]) -> list[worker_pb2.PackOrders]:
    """The orders in one message, or in some where they do not fit. Raises SpecError where those of
    one pack do not."""
    request = wire_packs.pack_orders_to_proto(orders)
    size_bytes = request.ByteSize()
    if size_bytes <= MESSAGE_LIMIT_BYTES:
        return [request]
    if len(orders) == 1:
        (order,) = orders
        raise SpecError(
            f"pack {order.key.pack} of step {order.key.step} has {len(order.samples):,} samples, "
            f"whose keys and places take {size_bytes:,} bytes; a worker takes at most "
            f"{MESSAGE_LIMIT_BYTES:,}. Lower memory_tokens, or index samples under shorter keys."
        )
    half = len(orders) // 2
    return [*_requests(orders[:half]), *_requests(orders[half:])]
