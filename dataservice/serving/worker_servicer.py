"""The Worker service over a PackHost: commands from the coordinator, streams to ranks."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
from dataservice_proto import same_node
from dataservice_proto.v1 import worker_pb2, worker_pb2_grpc

from dataservice.core.authority import check_command
from dataservice.core.errors import ServiceError, SpecError, TicketError
from dataservice.core.orders import PackOrder, PackReceipt, PartSpec, Ticket
from dataservice.core.ports import IndexHost, PackHost
from dataservice.core.receipts import PackAnswers, PackReceipts
from dataservice.core.tickets import check_ticket, parts_at
from dataservice.engine.tasks import cancel_all
from dataservice.serving import wire_index, wire_packs
from dataservice.serving.node_door import NodeDoor, Parts
from dataservice.serving.parts import (
    CHUNK_BYTES,
    MESSAGE_LIMIT_BYTES,
    Tensor,
    part_chunks,
    part_header,
)
from dataservice.serving.status_codes import answered

log = logging.getLogger(__name__)

# About 200 bytes each; a message holds 4 MiB.
NAMES_IN_A_MESSAGE = 4096

# Receipts in a message: of packs of some hundred samples each, 8 bytes for each.
ANSWERED_AT_ONCE = 256
# How long a receipt may wait for others to go with it. Ranks do not wait for receipts, and a
# message for each of a step's thousands of packs takes the coordinator longer than all else.
TOLD_WITHIN_S = 0.2

# Of a bad sample in a message, the lengths of it, its key and its reason, and some to spare.
LENGTHS_BYTES = 16

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """Checks the caller, converts, and maps errors; the host does the work."""

    def __init__(
        self,
        host: PackHost,
        *,
        worker: str,
        secret: bytes,
        indexing: IndexHost | None = None,
        refused: Counter[str] | None = None,
        sent: Counter[str] | None = None,
    ) -> None:
        """Tickets that are refused are counted in `refused`, by the reason; bytes of parts in
        `sent`, by their path. `door` is where ranks on this machine may ask."""
        self._host = host
        self._indexing = indexing
        self._worker = worker
        self._secret = secret
        self._refused = Counter() if refused is None else refused
        self._sent = Counter() if sent is None else sent
        self.door: NodeDoor | None = None
        self._streams = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    async def quiet(self) -> None:
        """Wait until no stream is open."""
        await self._quiet.wait()

    async def Prepare(
        self, request: worker_pb2.PackOrders, context: Context
    ) -> AsyncIterator[worker_pb2.PackAnswers]:
        """Forget what is released, then decode and assemble packs; each is answered when it is
        ready, together with others."""
        async with answered(context, "Prepare"):
            check_command(context.invocation_metadata() or (), self._secret)
            if request.released:
                self._host.release(wire_packs.pack_keys_from_proto(request.released))
            orders = await asyncio.to_thread(wire_packs.pack_orders_from_proto, request)
            # The caller may leave before the end.
            async with contextlib.aclosing(self._prepared(orders)) as prepared:
                async for message in prepared:
                    yield message

    async def _prepared(
        self, orders: Sequence[PackOrder]
    ) -> AsyncGenerator[worker_pb2.PackAnswers, None]:
        done: asyncio.Queue[asyncio.Task[PackReceipt]] = asyncio.Queue()
        packs = {asyncio.create_task(self._host.prepare(each)): each.key.pack for each in orders}
        for task in packs:
            task.add_done_callback(done.put_nowait)
        left = len(packs)
        try:
            while left:
                ended = await _ended_together(done, most=min(left, ANSWERED_AT_ONCE))
                left -= len(ended)
                for message in _answers({packs[task]: task for task in ended}):
                    yield message
        finally:
            # The caller has gone, or a pack's failure is none of ours; the host goes on decoding.
            await cancel_all(*packs)

    async def Release(
        self, request: worker_pb2.ReleaseRequest, context: Context
    ) -> worker_pb2.ReleaseResponse:
        """Forget packs."""
        async with answered(context, "Release"):
            check_command(context.invocation_metadata() or (), self._secret)
            self._host.release(wire_packs.pack_keys_from_proto(request.packs))
        return worker_pb2.ReleaseResponse()

    async def Held(
        self, request: worker_pb2.HeldRequest, context: Context
    ) -> AsyncIterator[worker_pb2.HeldPacks]:
        """Name every pack that was ordered here and is not yet released, the storage that is waited
        for, and the bytes that were sent."""
        async with answered(context, "Held"):
            check_command(context.invocation_metadata() or (), self._secret)
            held, outages = self._host.held(), self._host.outages()
            yield worker_pb2.HeldPacks(
                outages=map(wire_packs.storage_outage_to_proto, outages),
                grpc_bytes=self._sent["grpc"],
                same_node_bytes=self._sent["same_node"],
            )
            for start in range(0, len(held), NAMES_IN_A_MESSAGE):
                keys = held[start : start + NAMES_IN_A_MESSAGE]
                yield worker_pb2.HeldPacks(packs=wire_packs.pack_keys_to_proto(keys))

    async def Index(
        self, request: worker_pb2.IndexOrder, context: Context
    ) -> AsyncIterator[worker_pb2.IndexAnswer]:
        """Do something for an index."""
        async with answered(context, "Index"):
            check_command(context.invocation_metadata() or (), self._secret)
            if self._indexing is None:
                raise SpecError(f"{self._worker} does not index.")
            order = wire_index.index_order_from_proto(request)
            async with contextlib.aclosing(self._indexing.index(order)) as answers:
                async for answer in answers:
                    yield wire_index.index_answer_to_proto(answer)

    async def Fetch(  # type: ignore[override]  # registered with no serialiser, see add_to_server
        self, request: worker_pb2.FetchRequest, context: Context
    ) -> AsyncIterator[bytes]:
        """Stream the parts of a ticket, in its order, as serialised FetchChunks; waits for parts
        that are not ready."""
        async with answered(context, "Fetch"):
            parts = self._parts(request, context.peer(), "grpc")
            async with contextlib.aclosing(parts):
                first = True
                async for header, tensors in parts:
                    if first:  # it is granted
                        await self._announce(request, context)
                        first = False
                    yield worker_pb2.FetchChunk(header=header).SerializeToString()
                    for data in part_chunks(tensors, CHUNK_BYTES):
                        yield data

    def parts_near(self, request: worker_pb2.FetchRequest, peer: str) -> Parts:
        """The parts of a ticket for a rank on this machine."""
        return self._parts(request, peer, "same_node")

    async def _announce(self, request: worker_pb2.FetchRequest, context: Context) -> None:
        """Say where the door is to a rank that would use it."""
        wanted = (same_node.WANTED, same_node.VERSION)
        if self.door is not None and wanted in (context.invocation_metadata() or ()):
            holder = request.ticket.holder
            await context.send_initial_metadata(self.door.announced(holder))

    async def _parts(self, request: worker_pb2.FetchRequest, peer: str, path: str) -> Parts:
        """Header and tensors of each part of a ticket. Raises what refuses it."""
        self._streams += 1
        self._quiet.clear()
        try:
            ticket = self._granted(request, peer)
            for part, spec in enumerate(parts_at(ticket, self._worker)):
                tensors, crc32s = await self._tensors(spec)
                if crc32s is not None:
                    header = part_header(part, tensors, crc32s)
                else:  # it reads every byte: in a thread, so that other streams go on
                    header = await asyncio.to_thread(part_header, part, tensors)
                yield header, tensors
                self._sent[path] += header.size_bytes
        finally:
            self._streams -= 1
            if self._streams == 0:
                self._quiet.set()

    def _granted(self, request: worker_pb2.FetchRequest, peer: str) -> Ticket:
        ticket = wire_packs.ticket_from_proto(request.ticket)
        try:
            check_ticket(
                ticket, request.proof, self._secret, worker=self._worker, now_unix_s=time.time()
            )
        except TicketError as error:
            self._refused[error.fault] += 1
            about = {
                "worker": self._worker,
                "rank": ticket.rank,
                "job": ticket.job,
                "step": ticket.step,
            }
            log.warning("a ticket from %s is refused: %s", peer, error, extra=about)
            raise
        if not ticket.sequences and not ticket.parts:
            raise TicketError("the ticket names no parts. Ask the coordinator for the shard again.")
        return ticket

    async def _tensors(
        self, spec: PartSpec
    ) -> tuple[Sequence[tuple[str, Tensor]], Sequence[int] | None]:
        """A part's tensors, and the CRC-32 of each where it is known."""
        if spec.items:
            items = await self._host.items(spec.key, spec.items, spec.ranges)
            return [("item", item) for item in items.arrays], items.crc32s
        held = await self._host.sequence(spec.key, spec.cp_rank)
        if unknown := set(spec.tensors) - held.keys():
            raise TicketError(
                f"the ticket names {', '.join(sorted(unknown))}; a sequence has "
                f"{', '.join(held)}. Run one release of coordinator and workers."
            )
        named = [(name, held[name]) for name in held if not spec.tensors or name in spec.tensors]
        return named, None


def add_to_server(servicer: WorkerServicer, server: grpc.aio.Server) -> None:
    """Serve all methods; of Fetch the answers are bytes already."""
    fetch: Any = grpc.unary_stream_rpc_method_handler(
        servicer.Fetch, request_deserializer=worker_pb2.FetchRequest.FromString
    )
    name = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
    # Handlers are asked in turn: this one knows Fetch alone.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Fetch": fetch}),))
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)


async def _ended_together(
    done: "asyncio.Queue[asyncio.Task[PackReceipt]]", *, most: int
) -> list["asyncio.Task[PackReceipt]"]:
    """The next pack that ends, and those that end soon after it, `most` in all. A failure is told
    at once: the pack is ordered elsewhere."""
    ended = [await done.get()]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(TOLD_WITHIN_S):
            while len(ended) < most and _went_well(ended[-1]):
                ended.append(await done.get())
    while not done.empty() and len(ended) < most:
        ended.append(done.get_nowait())
    return ended


def _went_well(pack: "asyncio.Task[PackReceipt]") -> bool:
    return not pack.cancelled() and pack.exception() is None


def _answers(ended: Mapping[int, "asyncio.Task[PackReceipt]"]) -> Iterator[worker_pb2.PackAnswers]:
    """What became of packs. Raises what is no error of the service."""
    receipts, failures = [], {}
    for pack, task in ended.items():
        try:
            receipts.append(task.result())
        except ServiceError as error:
            failures[pack] = error
    yield from _messages(receipts, failures)


def _messages(
    receipts: Sequence[PackReceipt], failures: Mapping[int, ServiceError]
) -> Iterator[worker_pb2.PackAnswers]:
    """The answers in one message, or in some where each of many bad samples has a reason and they
    do not fit."""
    answers = PackAnswers(receipts=PackReceipts.of(receipts), failures=failures)
    message = wire_packs.pack_answers_to_proto(answers)
    if message.ByteSize() <= MESSAGE_LIMIT_BYTES:
        yield message
    elif receipts and failures:
        yield from _messages(receipts, {})
        yield from _messages((), failures)
    elif len(receipts) > 1:
        half = len(receipts) // 2
        yield from _messages(receipts[:half], {})
        yield from _messages(receipts[half:], {})
    elif receipts:
        yield from _messages([_shortened(receipts[0])], {})
    else:  # an error cuts what it says, so that any of them fits
        for pack, error in failures.items():
            yield wire_packs.pack_answers_to_proto(PackAnswers(failures={pack: error}))


def _shortened(receipt: PackReceipt) -> PackReceipt:
    """The receipt with reasons that fit into a message, and that say how long they were. Keys are
    cut only where they alone do not: a worker is told of them in a message of the same size."""
    bad = receipt.bad_samples
    bare = replace(receipt, bad_samples=tuple(replace(each, key="", reason="") for each in bad))
    answers = PackAnswers(receipts=PackReceipts.of([bare]))
    size_bytes = wire_packs.pack_answers_to_proto(answers).ByteSize()
    room = MESSAGE_LIMIT_BYTES - size_bytes - LENGTHS_BYTES * len(bad)
    keys_bytes = sum(len(each.key.encode()) for each in bad)
    most_key = None if keys_bytes < room else room // len(bad)
    most = max(0, room - keys_bytes) // len(bad)
    log.warning(
        "%d bad samples of pack %d give more reasons than fit into a message: each is cut to %d "
        "bytes",
        *(len(bad), receipt.key.pack, most),
        extra={"job": receipt.key.job, "step": receipt.key.step},
    )
    return replace(
        receipt,
        bad_samples=tuple(
            replace(
                each,
                key=each.key if most_key is None else _cut(each.key, most_key),
                reason=_cut(each.reason, most),
            )
            for each in bad
        ),
    )


def _cut(reason: str, most_bytes: int) -> str:
    """A reason in at most so many bytes; one that is cut says so, where there is room to."""
    data = reason.encode()
    if len(data) <= most_bytes:
        return reason
    note = f" … (of {len(data):,} bytes)".encode()
    note = note if len(note) <= most_bytes // 2 else b""
    return data[: most_bytes - len(note)].decode(errors="ignore") + note.decode()
