"""A ticket → parts: bytes streamed from several workers at once into one buffer a part.

A part is a header, then its tensors' bytes in chunks. The header's size allocates one
buffer, every chunk is copied into it once, and the tensors are views of it. Each worker's
share of the ticket is one stream; the streams run side by side. From a worker on this machine the
chunks come through memory instead (see `node_link.py`); what does not, comes over gRPC after all.

Success: `fetch` returns every wanted part.
Failure: a stream that breaks, stalls or brings wrong bytes ends alone; `fetch` returns the
parts that did arrive whole, and one `TicketFailure` for each stream that did not finish.
Cancellation: closing the channels ends all streams; `fetch` then returns with failures.
"""

import hmac
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import grpc
import torch
from dataservice_proto.columns import TICKET, VERSION, TicketColumns, columns_of
from dataservice_proto.crc32 import crc32
from dataservice_proto.heap_threshold import keep_freed_messages
from dataservice_proto.v1 import worker_pb2

from trainer_client.chunks import Content, Stream, open_stream
from trainer_client.errors import (
    ClientError,
    CorruptPart,
    MalformedShard,
    MisuseError,
    ServiceTimeout,
    from_rpc,
)
from trainer_client.node_link import NodeLinkError, NodeLinks, NodeRefused, NodeStream
from trainer_client.patience import Patience
from trainer_client.recycled_buffers import RecycledBuffers
from trainer_client.transport import Transport

_DTYPES = {
    "<i4": torch.int32,
    "<i8": torch.int64,
    "<f4": torch.float32,
    "<f2": torch.float16,
    "|u1": torch.uint8,
}


@dataclass(frozen=True, slots=True)
class PartId:
    """A part of a step: the sequence of member `cp_rank` of a pack, or, with -1, `items`."""

    pack: int
    cp_rank: int
    items: tuple[int, ...]

    def __str__(self) -> str:
        if self.items:
            return f"items {list(self.items)} of pack {self.pack}"
        return f"sequence {self.cp_rank} of pack {self.pack}"


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A part that arrived whole: its tensors, in order, as (name, view)."""

    id: PartId
    tensors: tuple[tuple[str, torch.Tensor], ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TicketFailure:
    """A worker's stream that did not bring all its parts."""

    worker: str
    address: str
    error: ClientError


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What came of a ticket."""

    parts: dict[PartId, Part]
    failures: tuple[TicketFailure, ...]


Empty = Callable[[int], torch.Tensor]
"""A buffer of so many bytes, uint8."""


def _unpinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def _pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


class PartBuffer:
    """Receives one part's chunks."""

    def __init__(
        self, part_id: PartId, header: worker_pb2.PartHeader, empty: Empty = _unpinned
    ) -> None:
        self._id = part_id
        self._header = header
        self._sizes = [_size_bytes(tensor) for tensor in header.tensors]
        if sum(self._sizes) != header.size_bytes:
            raise CorruptPart(
                f"{part_id}: the header announces {header.size_bytes} bytes, its tensors take "
                f"{sum(self._sizes)}"
            )
        self._buffer = empty(header.size_bytes)
        self._bytes = self._buffer.numpy().data
        self._filled = 0
        self._crc32 = 0

    @property
    def full(self) -> bool:
        """True once every byte has come."""
        return self._filled == self._header.size_bytes

    def write(self, chunk: bytes | memoryview) -> None:
        """Copy a chunk behind the earlier ones: the one copy of its bytes."""
        end = self._filled + len(chunk)
        if end > self._header.size_bytes:
            raise CorruptPart(
                f"{self._id}: {end} bytes came, the header announces {self._header.size_bytes}"
            )
        self._bytes[self._filled : end] = chunk
        self._crc32 = crc32(chunk, self._crc32)
        self._filled = end

    def part(self) -> Part:
        """Check the sum and cut the tensors. Raises CorruptPart."""
        if self._crc32 != self._header.crc32:
            raise CorruptPart(
                f"{self._id}: crc32 of its {self._filled} bytes is {self._crc32:08x}, the worker "
                f"sent {self._header.crc32:08x}"
            )
        tensors, start = [], 0
        for tensor, size_bytes in zip(self._header.tensors, self._sizes, strict=True):
            raw = self._buffer[start : start + size_bytes]
            dtype = _DTYPES[tensor.dtype]
            if start % dtype.itemsize:
                raw = raw.clone()  # a view must be aligned to its type
            tensors.append((tensor.name, raw.view(dtype).view(tuple(tensor.shape))))
            start += size_bytes
        return Part(self._id, tuple(tensors), self._filled)


def _size_bytes(tensor: worker_pb2.TensorHeader) -> int:
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or any(length < 0 for length in tensor.shape):
        raise CorruptPart(
            f"tensor {tensor.name!r} has dtype {tensor.dtype!r} and shape {list(tensor.shape)}; "
            f"this client reads {', '.join(_DTYPES)}. Use the client of the service's release."
        )
    return dtype.itemsize * prod(tensor.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one worker streams for a ticket, in order."""

    worker: str
    address: str
    parts: tuple[PartId, ...]


def shares_of(ticket: worker_pb2.Ticket, addresses: Sequence[str]) -> tuple[Share, ...]:
    """What each worker streams for a ticket. Raises MalformedShard where the ticket contradicts
    itself, or is of another release."""
    try:
        if ticket.version != VERSION or len(addresses) != len(ticket.workers):
            raise ValueError(
                f"it is of version {ticket.version}, and {VERSION} is read here; it names "
                f"{len(ticket.workers)} workers, and {len(addresses)} addresses came"
            )
        columns = TicketColumns(
            columns_of(ticket, TICKET), sequences=ticket.sequences, parts=ticket.parts
        )
    except ValueError as error:
        raise MalformedShard(f"the ticket of step {ticket.step} cannot be read: {error}") from error
    return tuple(
        Share(
            worker=worker,
            address=address,
            parts=tuple(PartId(p.pack, p.member, p.items) for p in columns.parts_at(place)),
        )
        for place, (worker, address) in enumerate(zip(ticket.workers, addresses, strict=True))
    )


def receive(
    contents: Iterable[Content],
    parts: Sequence[PartId],
    empty: Empty = _unpinned,
) -> Iterable[Part | None]:
    """Read one worker's stream: a Part when one is whole, None for every other chunk.

    Raises CorruptPart where headers or bytes do not follow the ticket.
    """
    number, buffer = 0, None
    for content in contents:
        if isinstance(content, worker_pb2.PartHeader):
            if buffer is not None or content.part != number or number >= len(parts):
                raise CorruptPart(
                    f"the header of part {content.part} came where part {number} of "
                    f"{len(parts)} was due"
                )
            buffer = PartBuffer(parts[number], content, empty)
        elif buffer is None:
            raise CorruptPart(f"{len(content)} bytes came before a header")
        else:
            buffer.write(content)
        if buffer.full:
            yield buffer.part()
            number, buffer = number + 1, None
        else:
            yield None
    if number < len(parts):
        raise CorruptPart(f"the stream ended after {number} of {len(parts)} parts")


class PartFetcher:
    """Streams a ticket's parts, at most `streams` workers at once; see the module's contract.

    A stream that brings nothing for `stall_timeout_s` is given up: its worker may still be
    decoding, or be gone. On a slow network the limit is longer: see `patience.py`. With
    `pin_memory` bytes arrive in pinned memory, from which a GPU copies without the host's help.
    Without `same_node` all bytes come over gRPC. `received` are bytes of parts by their path.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        streams: int,
        stall_timeout_s: float,
        pin_memory: bool = False,
        same_node: bool = True,
    ) -> None:
        keep_freed_messages()
        self._links = NodeLinks(wanted=same_node)
        self.received: Counter[str] = Counter(grpc=0, same_node=0)
        self._transport = transport
        # Of pinned memory torch keeps what was freed, of other memory nobody does.
        self._empty = _pinned if pin_memory else RecycledBuffers().empty
        self._streams = streams
        self._patience = Patience(stall_timeout_s)
        self._look_every_s = min(1.0, stall_timeout_s / 8)
        self._channels: dict[str, grpc.Channel] = {}
        # May be held twice: a thread that holds it may be the one in which the collector closes.
        self._lock = threading.RLock()
        self._closed = False

    def fetch(
        self,
        ticket: worker_pb2.Ticket,
        shares: Sequence[Share],
        wanted: set[PartId],
        ticket_key: bytes,
    ) -> Fetched:
        """Stream from every worker whose share of the ticket has a wanted part; `ticket_key` is the
        key of the session that the ticket was given to."""
        streams = [
            _Stream(
                ticket,
                share,
                wanted,
                ticket_key,
                self._patience,
                self._links,
                self._empty,
            )
            for share in shares
            if not wanted.isdisjoint(share.parts)
        ]
        waiting, done = deque(streams), threading.Semaphore(0)
        threads = [
            threading.Thread(
                target=self._drain, args=(waiting, done), name="shard-fetch", daemon=True
            )
            for _ in range(min(self._streams, len(streams)))
        ]
        for thread in threads:
            thread.start()
        for _ in streams:
            self._watch(streams, done)
        self._patience.fetched(stalled=any(stream.stalled for stream in streams))
        for stream in streams:
            self.received.update(stream.received)
            if stream.crash is not None:
                raise stream.crash
        parts = {part.id: part for stream in streams for part in stream.parts}
        failures = tuple(stream.failure for stream in streams if stream.failure)
        for failure in failures:
            self._forget(failure.address)
        return Fetched(parts=parts, failures=failures)

    def close(self) -> None:
        """End every stream and close every channel."""
        with self._lock:
            self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        self._links.close()
        for channel in channels:
            channel.close()

    def _watch(self, streams: Sequence["_Stream"], done: threading.Semaphore) -> None:
        """Until one stream is done, end those that have stalled."""
        looked_s = time.monotonic()
        while not done.acquire(timeout=self._look_every_s):
            now_s = time.monotonic()
            # Add the time for which this process itself was stopped or short of CPU.
            late_s = now_s - looked_s - self._look_every_s
            looked_s = now_s
            for stream in streams:
                stream.give_up_if_stalled(self._patience.limit_s + late_s)

    def _drain(self, waiting: "deque[_Stream]", done: threading.Semaphore) -> None:
        while waiting:
            try:
                stream = waiting.popleft()
            except IndexError:
                return
            try:
                stream.run(self._channel(stream.share.address))
            except BaseException as crash:  # raised by `fetch`, in the caller's thread
                stream.crash = crash
            finally:
                done.release()

    def _channel(self, address: str) -> grpc.Channel | None:
        with self._lock:
            if self._closed:
                return None
            if address not in self._channels:
                self._channels[address] = self._transport.channel(address, authorised=False)
            return self._channels[address]

    def _forget(self, address: str) -> None:
        # A restarted worker may have another IP address; a new channel resolves the name again.
        with self._lock:
            channel = self._channels.pop(address, None)
        self._links.forget(address)
        if channel is not None:
            channel.close()


class _Stream:
    """One worker's share being fetched by one thread, watched by another."""

    def __init__(
        self,
        ticket: worker_pb2.Ticket,
        share: Share,
        wanted: set[PartId],
        ticket_key: bytes,
        patience: Patience,
        links: NodeLinks,
        empty: Empty,
    ) -> None:
        self.share = share
        self.received: Counter[str] = Counter()
        self._links = links
        self._ticket = ticket
        self._proof = hmac.digest(ticket_key, ticket.signature + share.worker.encode(), "sha256")
        self.stalled = False
        self._patience = patience
        self._empty = empty
        self.parts: list[Part] = []
        self.failure: TicketFailure | None = None
        self.crash: BaseException | None = None
        self._missing = wanted.intersection(share.parts)
        self._call: Stream | None = None
        self._heard_s = 0.0
        self._limit_s = 0.0

    def run(self, channel: grpc.Channel | None) -> None:
        """Stream to the end, or to the last wanted part; never raises a deliberate error."""
        try:
            if channel is None:
                raise MisuseError("the dataset is closed")
            if not self._read_near():
                self._read_far(channel)
        except grpc.RpcError as failed:
            self._fail(from_rpc(failed, self.share.address))
        except ClientError as error:
            self._fail(error)
        except ValueError:  # what gRPC raises on a closed channel
            self._fail(MisuseError("the dataset is closed"))

    def give_up_if_stalled(self, limit_s: float) -> None:
        """Cancel the call if it has brought nothing for `limit_s`."""
        call = self._call
        if call is not None and time.monotonic() - self._heard_s > limit_s:
            self.stalled, self._limit_s = True, limit_s
            call.cancel()

    def _read_near(self) -> bool:
        """Read what is missing through memory of this machine; whether that ends this stream."""
        address = self.share.address
        link = self._links.link(address, self._ticket.holder)
        if link is None:
            return False
        stream = NodeStream(link, self._request())
        try:
            self._read(stream, "same_node")
        except NodeRefused:
            return False  # gRPC says why
        except (NodeLinkError, CorruptPart) as error:
            if self.stalled:
                self._links.drop(address)
                raise ServiceTimeout(str(error)) from error
            self._links.broke(address, error)
            return not self._missing
        if not stream.done:
            self._links.drop(address)
        return True

    def _read_far(self, channel: grpc.Channel) -> None:
        address, holder = self.share.address, self._ticket.holder
        wanted = self._links.metadata(address)
        call = open_stream(channel, self._request(), wanted)
        self._read(call, "grpc")
        if wanted:
            self._links.told(address, holder, call.initial_metadata())

    def _request(self) -> worker_pb2.FetchRequest:
        return worker_pb2.FetchRequest(ticket=self._ticket, proof=self._proof)

    def _read(self, call: Stream, path: str) -> None:
        last = self.share.parts[-1]
        self._heard_s = time.monotonic()
        self._call = call
        try:
            within = False  # between parts a worker may be decoding
            for part in receive(call, self.share.parts, self._empty):
                self.received[path] += part.size_bytes if part is not None else 0
                before_s, self._heard_s = self._heard_s, time.monotonic()
                if within:
                    self._patience.paused(self._heard_s - before_s)
                within = part is None
                if part is not None and part.id in self._missing:
                    self.parts.append(part)
                    self._missing.discard(part.id)
                if not self._missing and part is not None and part.id != last:
                    return  # the rest of the ticket arrived before, from another worker
        finally:
            self._call = None
            call.cancel()  # of no effect on a stream that has ended

    def _fail(self, error: ClientError) -> None:
        if not self._missing:
            return  # it broke after the last byte that was needed
        if self.stalled:
            error = ServiceTimeout(f"nothing came for {self._limit_s:.3g} s")
        self.failure = TicketFailure(
            worker=self.share.worker, address=self.share.address, error=error
        )
