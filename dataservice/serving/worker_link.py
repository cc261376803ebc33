"""How the coordinator commands workers over gRPC.

Slow is not dead: an order has no deadline here, because the engine knows how long it may take and
which other worker could do it. A worker is *lost* when its connection breaks, or pings on it stay
unanswered (see channels.py), and a question over a new connection is not answered either; a
connection may break while both ends work. Orders are the only calls that are repeated. Cancelling
a call cancels it at the worker too, which goes on decoding (see workers/host.py).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc
import grpc.aio
from dataservice_proto.v1 import worker_pb2, worker_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dataservice.core.authority import COMMAND_METADATA, command_token
from dataservice.core.errors import ServiceError, SpecError, WorkerLostError
from dataservice.core.index_orders import IndexAnswer, IndexOrder
from dataservice.core.order_columns import PackOrders
from dataservice.core.orders import Holdings, PackKey, PackKeys, PackOrder, PackSet, StorageOutage
from dataservice.core.ports import WorkerInfo
from dataservice.core.receipts import PackAnswers
from dataservice.core.tls import ClientTls
from dataservice.engine.fair_threads import FairThreads
from dataservice.serving import wire_index, wire_packs
from dataservice.serving.channels import DEFAULT_KEEPALIVE, Keepalive, channel_options
from dataservice.serving.parts import MESSAGE_LIMIT_BYTES
from dataservice.serving.status_codes import error_of, is_unreachable
from dataservice.serving.tls import client_credentials, client_options

log = logging.getLogger(__name__)

# How long a release of few packs may wait for an order to the same worker, to go with it: a call of
# its own costs as much as the order of a small step.
RELEASE_WAIT_S = 0.02
FEW_PACKS = 256
# Seconds without a call after which a channel is closed, once one to a new address is made: each
# renewed worker has another address.
IDLE_S = 300.0

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


_Waiting = dict["asyncio.Future[None]", Sequence[worker_pb2.PackKeys]]
"""Packs to be forgotten, each by what is done once an order has taken them along."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Line:
    """A channel and what calls along it, made once."""

    channel: grpc.aio.Channel
    calls: int = 0
    idle_since_s: float = 0.0
    lost: bool = False
    stub: "worker_pb2_grpc.WorkerAsyncStub" = field(init=False)

    def __post_init__(self) -> None:
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)


class GrpcWorkerLink:
    """core.ports.WorkerLink with one channel for each address that was called of late. Used on one
    event loop."""

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
        `threads` if given, because an order may have thousands of samples; few are written at
        once."""
        self._metadata = ((COMMAND_METADATA, command_token(secret)),)
        self._answer_timeout_s = answer_timeout_s
        self._release_timeout_s = release_timeout_s
        self._tls = tls
        self._last_credentials: grpc.ChannelCredentials | None = None
        self._keepalive = keepalive
        self._threads = threads
        self._lines: dict[str, _Line] = {}
        self._idle: list[_Line] = []  # to be closed
        self._waiting: dict[str, _Waiting] = {}  # for an order, by address

    async def order(
        self, worker: WorkerInfo, orders: Sequence[PackOrder]
    ) -> AsyncGenerator[PackAnswers, None]:
        """Have packs of one step decoded; there is no deadline. Raises WorkerLostError, the
        worker's own error, or SpecError where the samples of one pack do not fit into a message."""
        asked = PackOrders.of(orders)
        left = {pack: place for place, pack in enumerate(asked.pack.tolist())}
        repeated = False
        while left:
            try:
                now = asked if not repeated else asked.only(list(left.values()))
                async with contextlib.aclosing(self._prepare(worker, now)) as call:
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
        self, worker: WorkerInfo, orders: PackOrders
    ) -> AsyncGenerator[PackAnswers, None]:
        key = orders.key(0)
        if self._threads is None or orders.written_soon:
            requests = _requests(orders)
        else:
            requests = await self._threads.run(key.job, partial(_requests, orders))
        if requests[0].ByteSize() < MESSAGE_LIMIT_BYTES // 2:  # there is room
            requests[0].released.extend(self._taken_along(worker.address))
        for request in requests:
            async with self._stub(worker) as stub:
                call = stub.Prepare(request, metadata=self._metadata)
                try:
                    async for message in call:
                        yield wire_packs.pack_answers_from_proto(message, key)
                finally:
                    call.cancel()  # of one that has ended it does nothing

    async def release(self, worker: WorkerInfo, job: str, packs: Sequence[PackKey]) -> None:
        """Have packs forgotten: few of them by the next order, if one follows soon. If the worker
        cannot be reached, that is only logged."""
        keys = wire_packs.pack_keys_to_proto(packs)
        if len(packs) <= FEW_PACKS and await self._go_along(worker.address, keys):
            return
        request = worker_pb2.ReleaseRequest(packs=keys)
        try:
            async with self._stub(worker) as stub:
                await stub.Release(
                    request, timeout=self._release_timeout_s, metadata=self._metadata
                )
        except WorkerLostError as error:
            log.info("%d packs of %s stay where they are: %s", len(packs), job, error)
        except ServiceError as error:
            log.warning("%s refused to release packs of %s: %s", worker.worker, job, error)

    async def _go_along(self, address: str, keys: Sequence[worker_pb2.PackKeys]) -> bool:
        """Whether an order has taken these along. One that does not arrive loses them: whoever asks
        what is held sees to such packs."""
        waiting = self._waiting.setdefault(address, {})
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting[taken] = keys
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(RELEASE_WAIT_S):
                    await taken
            finally:
                waiting.pop(taken, None)
                if not waiting and self._waiting.get(address) is waiting:
                    del self._waiting[address]
        return not taken.cancelled()

    def _taken_along(self, address: str) -> Iterator[worker_pb2.PackKeys]:
        """What waits for an order to this worker."""
        for taken, keys in self._waiting.pop(address, {}).items():
            yield from keys
            if not taken.done():  # whoever waited may be about to give up
                taken.set_result(None)

    async def ask_held(self, worker: WorkerInfo) -> Holdings:
        """What a worker holds or decodes, and what it waits for. Raises WorkerLostError, or the
        worker's own error."""
        keys: list[PackKeys] = []
        outages: list[StorageOutage] = []
        grpc_bytes = same_node_bytes = 0
        async with self._stub(worker) as stub:
            call = stub.Held(
                worker_pb2.HeldRequest(), timeout=self._answer_timeout_s, metadata=self._metadata
            )
            async for message in call:
                keys += wire_packs.keys_of_plans_from_proto(message.packs)
                outages += map(wire_packs.storage_outage_from_proto, message.outages)
                grpc_bytes += message.grpc_bytes
                same_node_bytes += message.same_node_bytes
        return Holdings(
            packs=PackSet(keys),
            outages=tuple(outages),
            grpc_bytes=grpc_bytes,
            same_node_bytes=same_node_bytes,
        )

    async def index(
        self, worker: WorkerInfo, order: IndexOrder
    ) -> AsyncGenerator[IndexAnswer, None]:
        """Have an errand for an index carried out; there is no deadline. Raises WorkerLostError, or
        the errand's own error."""
        async with self._stub(worker) as stub:
            call = stub.Index(wire_index.index_order_to_proto(order), metadata=self._metadata)
            try:
                async for message in call:
                    yield wire_index.index_answer_from_proto(message)
            finally:
                call.cancel()  # of one that has ended it does nothing

    async def close(self) -> None:
        """Close all channels; calls in flight are cancelled."""
        lines, self._lines, self._idle = [*self._lines.values(), *self._idle], {}, []
        for line in lines:
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
            while self._idle:
                await self._idle.pop().channel.close()
            yield line.stub
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
            line.idle_since_s = time.monotonic()
            # Closing cancels calls in flight, so the last call that ends closes the channel.
            if line.lost and line.calls == 0:
                if self._lines.get(worker.address) is line:
                    del self._lines[worker.address]
                await line.channel.close()

    def _line(self, address: str) -> _Line:
        line = self._lines.get(address)
        if line is None or line.lost:
            self._set_idle_aside()
            line = self._lines[address] = _Line(channel=self._channel(address))
        return line

    def _set_idle_aside(self) -> None:
        """No call finds an idle line any more: the next one closes it."""
        before_s = time.monotonic() - IDLE_S
        lines = self._lines.items()
        idle = [at for at, line in lines if not line.calls and line.idle_since_s < before_s]
        self._idle += map(self._lines.pop, idle)

    def _channel(self, address: str) -> grpc.aio.Channel:
        options = channel_options(MESSAGE_LIMIT_BYTES, self._keepalive)
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=options)
        options = [*options, *client_options(self._tls)]
        return grpc.aio.secure_channel(address, self._credentials(self._tls), options=options)

    def _credentials(self, tls: ClientTls) -> grpc.ChannelCredentials:
        """Read again for each channel, because certificates are renewed. While a file cannot be
        read, those of the channel before stay in use."""
        try:
            self._last_credentials = client_credentials(tls)
        except SpecError as error:
            if self._last_credentials is None:
                raise
            log.error("the certificates in use stay: %s", error)
        return self._last_credentials


def _requests(orders: PackOrders) -> list[worker_pb2.PackOrders]:
    """The orders in one message, or in some where they do not fit. Raises SpecError where those of
    one pack do not."""
    request = wire_packs.pack_orders_to_proto(orders)
    size_bytes = request.ByteSize()
    if size_bytes <= MESSAGE_LIMIT_BYTES:
        return [request]
    if len(orders) == 1:
        raise SpecError(
            f"pack {orders.pack[0]} of step {orders.step} has {orders.counts[0]:,} samples, "
            f"whose keys and places take {size_bytes:,} bytes; a worker takes at most "
            f"{MESSAGE_LIMIT_BYTES:,}. Lower memory_tokens, or index samples under shorter keys."
        )
    half = len(orders) // 2
    return [*_requests(orders[:half]), *_requests(orders[half:])]
