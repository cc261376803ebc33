"""Parts for ranks on this machine: through memory that both have mapped, not through gRPC.

    rank ── FETCH, its ticket ──► NodeDoor ──► granted parts, as for gRPC
    rank ◄── window: memory of this connection ── each byte copied into it once

Contract.
  Rights       The same as over gRPC: a rank learns of the socket, and its key for it, from a Fetch
               that was granted, so behind TLS where there is any; and each request shows its ticket
               and proof. A window belongs to one connection, and what is in it was granted there.
               Packs' own memory is never mapped by a rank: it is filled again with samples of other
               teams.
  Success      The bytes are those that gRPC would have sent, under the same checksums.
  Failure      A refusal is told; anything else closes the connection. The rank then asks over gRPC.
  Cancelling   A rank that goes away, or is killed, closes its connection: the window is unmapped
               here, and freed by the kernel once no one has it mapped.
  Bounds       `CONNECTIONS` at once, of one holder one, which the newest has: of WINDOW_BYTES each.
"""

import asyncio
import contextlib
import fcntl
import hmac
import logging
import mmap
import os
import secrets
import socket
import struct
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from dataservice_proto import same_node
from dataservice_proto.same_node import Frames, Kind
from dataservice_proto.v1 import worker_pb2
from google.protobuf.message import DecodeError

from dataservice.core.descriptor_limit import NEAR_RANKS
from dataservice.core.errors import ServiceError, SpecError
from dataservice.engine.tasks import cancel_all
from dataservice.serving.parts import Tensor, part_pieces

log = logging.getLogger(__name__)

SLOTS = 4
SLOT_BYTES = 2**20  # a slot stays in a processor's cache from one copy to the other
WINDOW_BYTES = SLOTS * SLOT_BYTES
CONNECTIONS = NEAR_RANKS
HANDSHAKE_S = 5.0
_READ_BYTES = 2**16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_FUTURE_WRITE = 0x10  # F_SEAL_FUTURE_WRITE, which Python names from 3.13 on
_CREDENTIALS = struct.Struct("3i")  # process, user and group

Parts = AsyncGenerator[tuple[worker_pb2.PartHeader, Sequence[tuple[str, Tensor]]], None]
GrantedParts = Callable[[worker_pb2.FetchRequest, str], Parts]
"""The parts of a request, by a peer of this name. Raises ServiceError."""


class NodeDoor:
    """Listens on a Unix socket; see the module's contract. Used on one event loop."""

    def __init__(self, parts: GrantedParts, where: str = "auto") -> None:
        """`where` is a folder for the socket, or `auto`: in the network namespace, without a file.
        Raises SpecError where there can be no socket."""
        self._parts = parts
        self._secret = secrets.token_bytes(32)
        self._held: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket = f"@dataservice-{secrets.token_hex(16)}"
        if where != "auto":
            self._socket = str(Path(where) / f"{secrets.token_hex(8)}.socket")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.setblocking(False)
        try:
            self._listening.bind(same_node.socket_address(self._socket))
            self._listening.listen(CONNECTIONS)
        except OSError as error:
            self._listening.close()
            raise SpecError(
                f"same_node: no socket can be made in {where}: {error.strerror or error}. Give a "
                "folder that workers may write to and whose path has less than 80 bytes, auto, or "
                "off."
            ) from error
        self._accepting = asyncio.create_task(self._accept(), name="same node")

    def announced(self, holder: str) -> tuple[tuple[str, str | bytes], ...]:
        """Where a holder finds this door, as metadata of an answer to it."""
        key = same_node.key_of(self._secret, holder)
        return (same_node.SOCKET, self._socket), (same_node.KEY, key)

    async def close(self) -> None:
        """Close every connection, and the socket."""
        await cancel_all(self._accepting, *self._tasks)
        self._listening.close()
        if not self._socket.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(self._socket)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listening)
            except OSError as error:  # no descriptor is left: ranks are served over gRPC
                log.warning("same node: a connection is not taken: %s", error)
                await asyncio.sleep(1.0)
                continue
            if len(self._tasks) >= CONNECTIONS:
                connection.close()
                continue
            connection.setblocking(False)
            task = loop.create_task(self._serve(connection), name="same node, a rank")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        peer = _peer_of(connection)
        with contextlib.closing(connection):
            try:
                rank = _Rank(connection)
                async with asyncio.timeout(HANDSHAKE_S):
                    holder = await self._greet(rank)
                with contextlib.closing(_Window()) as window:
                    await rank.give(window, holder, self._secret)
                    while True:
                        await self._answer(rank, window, holder, peer)
            except (OSError, EOFError, TimeoutError):
                pass  # it has gone: a rank that ended, or that closed what it had no use for
            except (ValueError, DecodeError) as error:
                log.warning("same node: %s does not follow the protocol: %s", peer, error)
            except Exception:
                log.exception("same node: a connection of %s ends, gRPC goes on", peer)

    async def _greet(self, rank: "_Rank") -> str:
        """The holder, which has proven that it is. Raises ValueError."""
        await rank.send(Kind.WELCOME, rank.nonce)
        hello = await rank.next(Kind.HELLO)
        holder_bytes = len(hello) - same_node.NONCE_BYTES - same_node.PROOF_BYTES
        if holder_bytes <= 0:
            raise ValueError("a greeting without a holder")
        holder = hello[:holder_bytes].decode()
        rank.their_nonce = hello[holder_bytes:][: same_node.NONCE_BYTES]
        key = same_node.key_of(self._secret, holder)
        proof = same_node.proof_of(key, "rank", rank.nonce, rank.their_nonce)
        if not hmac.compare_digest(proof, hello[-same_node.PROOF_BYTES :]):
            raise ValueError("a greeting by another key than its holder's")
        if (earlier := self._held.get(holder)) is not None:
            earlier.cancel()
        task = asyncio.current_task()
        assert task is not None
        self._held[holder] = task
        task.add_done_callback(lambda ended: self._forget(holder, ended))
        return holder

    def _forget(self, holder: str, task: "asyncio.Task[None]") -> None:
        if self._held.get(holder) is task:
            del self._held[holder]

    async def _answer(self, rank: "_Rank", window: "_Window", holder: str, peer: str) -> None:
        request = worker_pb2.FetchRequest.FromString(await rank.next(Kind.FETCH))
        if request.ticket.holder != holder:
            raise ValueError("a ticket of another holder")
        try:
            async with contextlib.aclosing(self._parts(request, peer)) as parts:
                async for header, tensors in parts:
                    await rank.send(Kind.HEADER, header.SerializeToString())
                    for pieces in part_pieces(tensors, SLOT_BYTES):
                        await rank.room()
                        size_bytes = window.fill(pieces)
                        rank.taken += 1
                        await rank.send(Kind.FILLED, same_node.SIZE.pack(size_bytes))
        except ServiceError as error:
            await rank.send(Kind.REFUSED, type(error).__name__.encode())
        else:
            await rank.send(Kind.END)


class _Rank:
    """One connection. `taken` are the slots of its window that are not freed."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = Frames()
        self.nonce = secrets.token_bytes(same_node.NONCE_BYTES)
        self.their_nonce = b""
        self.taken = 0

    async def give(self, window: "_Window", holder: str, secret: bytes) -> None:
        """Hand the window over. A new connection has room for so few bytes."""
        key = same_node.key_of(secret, holder)
        told = same_node.proof_of(key, "worker", self.nonce, self.their_nonce)
        told += same_node.SIZES.pack(SLOTS, SLOT_BYTES)
        socket.send_fds(self._connection, [same_node.frame(Kind.WINDOW, told)], [window.descriptor])
        window.handed_over()

    async def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises OSError when the rank has gone."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, same_node.frame(kind, payload))

    async def room(self) -> None:
        """Wait until a slot is free."""
        while self.taken >= SLOTS:
            await self._freed(await self._next())

    async def next(self, wanted: Kind) -> bytes:
        """The next frame, of this kind; slots are freed meanwhile. Raises EOFError, ValueError."""
        while True:
            kind, payload = await self._next()
            if kind is wanted:
                return payload
            await self._freed((kind, payload))

    async def _freed(self, told: tuple[Kind, bytes]) -> None:
        if told[0] is not Kind.FREED or self.taken == 0:
            raise ValueError(f"{told[0].name} is out of turn")
        self.taken -= 1

    async def _next(self) -> tuple[Kind, bytes]:
        loop = asyncio.get_running_loop()
        while (told := self._frames.take()) is None:
            data = await loop.sock_recv(self._connection, _READ_BYTES)
            if not data:
                raise EOFError
            self._frames.feed(data)
        return told


class _Window:
    """Memory of one connection. Its size is sealed, and that only this mapping writes to it."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, WINDOW_BYTES)
            self._memory = mmap.mmap(self.descriptor, WINDOW_BYTES)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            with contextlib.suppress(OSError):  # a kernel before 5.1: a rank spoils its own bytes
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _FUTURE_WRITE)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._slot = 0

    def handed_over(self) -> None:
        """The rank has the descriptor."""
        os.close(self.descriptor)
        self.descriptor = -1

    def fill(self, pieces: Sequence[memoryview]) -> int:
        """Copy these into the next slot, end to end; their size."""
        at = begin = self._slot * SLOT_BYTES
        self._slot = (self._slot + 1) % SLOTS
        for piece in pieces:
            self._memory[at : at + len(piece)] = piece
            at += len(piece)
        return at - begin

    def close(self) -> None:
        """Unmap it."""
        if self.descriptor >= 0:
            self.handed_over()
        self._memory.close()


def _peer_of(connection: socket.socket) -> str:
    """The process at the other end, for the log: 0 where it is in another namespace."""
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(told)
    return f"process {process} of user {user} on this machine"
