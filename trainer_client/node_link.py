"""Parts from workers on this rank's own machine, through memory that both have mapped.

    NodeLinks ── a granted Fetch told of a socket ──▶ NodeLink ── fetch ──▶ NodeStream
                                                       window ── views of what fills a slot ──▶

The first stream of a worker comes over gRPC. Where its answer names a socket that can be opened and
that proves to be the worker's, later ones come through a window: the worker copies the bytes into
it, and they are copied out of it once, into the buffer of their part, under the same checksums.

Success: a NodeStream gives what a stream of gRPC would.
Failure: whatever goes wrong raises NodeLinkError, and the caller asks over gRPC for what is
missing. A socket that cannot be opened, as on another machine, is not tried again; a link that
breaks is opened again, `BREAKS` times.
Cancellation: `cancel` and `close` wake a thread that reads, which gets NodeLinkError.
"""

import fcntl
import hmac
import logging
import mmap
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from dataservice_proto import same_node
from dataservice_proto.same_node import Frames, Kind
from dataservice_proto.v1 import worker_pb2
from google.protobuf.message import DecodeError

from trainer_client.chunks import Content

log = logging.getLogger(__name__)

BREAKS = 3
HANDSHAKE_S = 2.0
MOST_WINDOW_BYTES = 2**30
_READ_BYTES = 2**14


class NodeLinkError(Exception):
    """Parts did not come through a window. Never leaves this package: gRPC goes on."""


class NodeRefused(NodeLinkError):
    """The worker refused a request, and serves the next."""


@dataclass(frozen=True, slots=True)
class Announced:
    """Where a worker told a holder of tickets to find it, and their key."""

    socket: str
    key: bytes
    holder: str


class NodeLink:
    """A connection to a worker of this machine. Used by one thread at a time."""

    def __init__(self, announced: Announced) -> None:
        """Raises NodeLinkError where there is no such socket here, or another answers."""
        self._frames = Frames()
        self._slot = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        weakref.finalize(self, self._socket.close)  # of a dataset that nobody closed
        self._window: memoryview | None = None
        try:
            self._socket.settimeout(HANDSHAKE_S)
            self._socket.connect(same_node.socket_address(announced.socket))
            self._open(announced)
            self._socket.settimeout(None)
        except (OSError, ValueError) as error:
            self.close()
            raise NodeLinkError(f"the socket {announced.socket}: {error}") from error
        except NodeLinkError:
            self.close()
            raise

    def _open(self, announced: Announced) -> None:
        nonce, key = secrets.token_bytes(same_node.NONCE_BYTES), announced.key
        theirs = self.next(Kind.WELCOME)
        proof = same_node.proof_of(key, "rank", theirs, nonce)
        self.send(Kind.HELLO, announced.holder.encode() + nonce + proof)
        data, descriptors, _, _ = socket.recv_fds(
            self._socket, _READ_BYTES, 1, socket.MSG_CMSG_CLOEXEC
        )
        try:
            self._frames.feed(data)
            told = self.next(Kind.WINDOW)
            proof = same_node.proof_of(key, "worker", theirs, nonce)
            if not descriptors or not hmac.compare_digest(told[: same_node.PROOF_BYTES], proof):
                raise NodeLinkError("what answers is not the worker")
            self._slots, self._slot_bytes = same_node.SIZES.unpack(told[same_node.PROOF_BYTES :])
            self._window = self._mapped(descriptors[0])
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _mapped(self, descriptor: int) -> memoryview:
        """The window. One that could shrink could end this process."""
        size_bytes = self._slots * self._slot_bytes
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise NodeLinkError("its memory is not sealed")
        if not 0 < size_bytes <= min(MOST_WINDOW_BYTES, os.fstat(descriptor).st_size):
            raise NodeLinkError(f"its memory has not {size_bytes:,} bytes")
        return memoryview(mmap.mmap(descriptor, size_bytes, prot=mmap.PROT_READ))

    @property
    def open(self) -> bool:
        """Until it breaks or is closed."""
        return self._socket.fileno() >= 0

    def close(self) -> None:
        """End it, also while a thread reads; may be called twice."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._window = None  # unmapped with its last view

    def cut(self) -> None:
        """Wake a thread that reads, which then closes it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Raises OSError."""
        self._socket.sendall(same_node.frame(kind, payload))

    def frame(self) -> tuple[Kind, bytes]:
        """The next frame. Raises OSError, ValueError."""
        while (told := self._frames.take()) is None:
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("the worker has closed it")
            self._frames.feed(data)
        return told

    def next(self, wanted: Kind) -> bytes:
        """The next frame, of this kind. Raises OSError, ValueError."""
        kind, payload = self.frame()
        if kind is not wanted:
            raise ValueError(f"{kind.name} is out of turn")
        return payload

    def filled(self, payload: bytes) -> memoryview:
        """The bytes of the slot that was filled. Raises ValueError."""
        (size_bytes,) = same_node.SIZE.unpack(payload)
        if self._window is None or not 0 < size_bytes <= self._slot_bytes:
            raise ValueError(f"a slot of {size_bytes:,} bytes")
        begin = self._slot * self._slot_bytes
        self._slot = (self._slot + 1) % self._slots
        return self._window[begin : begin + size_bytes]


class NodeStream:
    """A request through a link: headers, and views that hold until the next is asked for."""

    def __init__(self, link: NodeLink, request: worker_pb2.FetchRequest) -> None:
        self._link = link
        self._request = request
        self.done = False

    def __iter__(self) -> Iterator[Content]:
        """Raises NodeLinkError."""
        link = self._link
        try:
            link.send(Kind.FETCH, self._request.SerializeToString())
            while True:
                kind, payload = link.frame()
                if kind is Kind.FILLED:
                    yield link.filled(payload)
                    link.send(Kind.FREED)
                elif kind is Kind.HEADER:
                    yield worker_pb2.PartHeader.FromString(payload)
                elif kind in (Kind.END, Kind.REFUSED):
                    self.done = True
                    break
                else:
                    raise ValueError(f"{kind.name} is out of turn")
        except (OSError, ValueError, DecodeError) as error:
            raise NodeLinkError(str(error)) from error
        if kind is Kind.REFUSED:
            raise NodeRefused(payload.decode(errors="replace"))

    def cancel(self) -> None:
        """Ends what is under way; of no effect on a stream that has ended."""
        if not self.done:
            self._link.cut()


@dataclass(slots=True)
class _Door:
    """What is known of a worker's address."""

    announced: Announced | None = None
    link: NodeLink | None = None
    breaks: int = 0


class NodeLinks:
    """The links of a rank by the workers' addresses. May be used by many threads, each with an
    address of its own."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._doors: dict[str, _Door] = {}
        self._lock = threading.RLock()  # the collector may close in a thread that holds it

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """What a call over gRPC says, so that its answer tells where the worker is found."""
        with self._lock:
            tried = self._doors[address].breaks >= BREAKS if address in self._doors else False
        return () if tried or not self._wanted else ((same_node.WANTED, same_node.VERSION),)

    def told(self, address: str, holder: str, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        """What the answer of a call with `metadata` said."""
        said = dict(metadata)
        where, key = said.get(same_node.SOCKET), said.get(same_node.KEY)
        if isinstance(where, str) and isinstance(key, bytes):
            with self._lock:
                self._doors.setdefault(address, _Door()).announced = Announced(where, key, holder)

    def link(self, address: str, holder: str) -> NodeLink | None:
        """An open link to a worker that told this holder of its socket; None where there is
        none."""
        with self._lock:
            door = self._doors.get(address)
        if door is None or door.announced is None or door.breaks >= BREAKS:
            return None
        if door.announced.holder != holder:  # of an earlier session
            self._close(door)
            door.announced = None
            return None
        if door.link is None or not door.link.open:
            try:
                door.link = NodeLink(door.announced)
            except NodeLinkError as error:
                log.info("the worker at %s is reached over gRPC alone: %s", address, error)
                door.link, door.announced, door.breaks = None, None, BREAKS
        return door.link

    def broke(self, address: str, error: Exception) -> None:
        """A link did not bring what it should have."""
        with self._lock:
            door = self._doors.get(address)
        if door is not None:
            log.warning("a worker at %s, on this machine, is asked over gRPC: %s", address, error)
            self._close(door)
            door.breaks += 1

    def drop(self, address: str) -> None:
        """Close a link that is in the middle of a stream; the next stream opens another."""
        with self._lock:
            door = self._doors.get(address)
        if door is not None:
            self._close(door)

    def forget(self, address: str) -> None:
        """Another worker may be at the address now."""
        with self._lock:
            door = self._doors.pop(address, None)
        if door is not None:
            self._close(door)

    def close(self) -> None:
        """Close all links, and open none any more."""
        with self._lock:
            self._wanted = False
            doors = list(self._doors.values())
            self._doors.clear()
        for door in doors:
            self._close(door)

    @staticmethod
    def _close(door: _Door) -> None:
        link, door.link = door.link, None
        if link is not None:
            link.close()
