"""How the coordinator commands workers over gRPC.

Nothing is tried twice here: the engine knows which other worker could take a pack. A call
that is cancelled is cancelled at the worker too, which goes on decoding (see workers/host).
"""

import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio
from dataservice_proto.v1 import worker_pb2, worker_pb2_grpc

from dataservice.core.errors import ServiceError, WorkerLostError
from dataservice.core.orders import PackKey, PackOrder, PackReceipt
from dataservice.core.ports import WorkerInfo
from dataservice.serving import wire
from dataservice.serving.authority import COMMAND_METADATA, command_token
from dataservice.serving.channels import channel_options
from dataservice.serving.errors import error_of, is_unreachable
from dataservice.serving.parts import MESSAGE_LIMIT_BYTES

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True, eq=False)
class _Line:
    channel: grpc.aio.Channel
    calls: int = 0
    lost: bool = False


class GrpcWorkerLink:
    """core.ports.WorkerLink with one channel an address. Used on one event loop."""

    def __init__(
        self,
        secret: bytes,
        *,
        prepare_timeout_s: float = 300.0,
        release_timeout_s: float = 10.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """A pack that is not ready after `prepare_timeout_s` counts as a lost worker."""
        self._metadata = ((COMMAND_METADATA, command_token(secret)),)
        self._prepare_timeout_s = prepare_timeout_s
        self._release_timeout_s = release_timeout_s
        self._credentials = credentials
        self._lines: dict[str, _Line] = {}

    async def prepare(self, worker: WorkerInfo, order: PackOrder) -> PackReceipt:
        """Have a pack decoded. Raises WorkerLostError, or what the worker raised."""
        async with self._stub(worker) as stub:
            receipt = await stub.Prepare(
                wire.pack_order_to_proto(order),
                timeout=self._prepare_timeout_s,
                metadata=self._metadata,
            )
        return wire.pack_receipt_from_proto(receipt)

    async def release(self, worker: WorkerInfo, job: str, packs: Sequence[PackKey]) -> None:
        """Have packs forgotten. A worker that cannot be told is logged, no more."""
        request = worker_pb2.ReleaseRequest(packs=map(wire.pack_key_to_proto, packs))
        try:
            async with self._stub(worker) as stub:
                await stub.Release(
                    request, timeout=self._release_timeout_s, metadata=self._metadata
                )
        except WorkerLostError as error:
            logger.info("%d packs of %s stay where they are: %s", len(packs), job, error)
        except ServiceError as error:
            logger.warning("%s refused to release packs of %s: %s", worker.worker, job, error)

    async def close(self) -> None:
        """Close all channels; calls in flight are cancelled."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            await line.channel.close()

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
            # Closing cancels what is in flight, so the last call to end closes.
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
        options = channel_options(MESSAGE_LIMIT_BYTES)
        if self._credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._credentials, options=options)
