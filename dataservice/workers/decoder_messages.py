"""Messages between a worker and its decoder processes, over a Unix stream socket. The coordinator
and the processes that open jobs for it use the same messages.

Everything is plain data: an order is JSON, an answer is a fixed header followed by raw bytes, and a
large sample travels as the descriptor of a memory file. A worker checks every answer: one that does
not fit its order is a ProtocolError, for which the decoder process is killed and nothing else is
lost.
"""

import json
import os
import socket
import struct
import time
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

from dataservice.core import errors
from dataservice.core.errors import ServiceError, SpecError
from dataservice.core.orders import PackSample
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.workers.byte_cache import NOTHING_KEPT, KeptReads
from dataservice.workers.kept_files import CacheSpec
from dataservice.workers.read_sample import RawBytes

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<BIddddQ?QQQ")
ANSWER_LIMIT_BYTES = 2**20
MESSAGE_LIMIT = 4000  # characters of an error message, which may quote a user's text
TICK_S = 1.0
DESCRIPTORS = 4  # most descriptors in one message


class ProtocolError(Exception):
    """A decoder process sent an answer that breaks the protocol."""


class Kind(IntEnum):
    """The kind of an answer; the comment on each says what its payload is."""

    BUILT = 0  # the order's pipeline was built: its pad token, or JSON of its digests
    REFUSED = 1  # the pipeline cannot be built: JSON [error, message]
    INLINE = 2  # a sample, or a job's record: its bytes; or how far indexing is: JSON
    MEMORY = 3  # a sample, or half a catalog, or part of an index: JSON or empty, and a descriptor
    BAD = 4  # no sample: the reason as text; or no part of an index: JSON
    FILLED = 5  # a sample in memory that the worker has: its number
    NEW = 6  # a sample in memory that is filled again later: its number, and a descriptor
    AWAY = 7  # no sample for now, its storage does not answer: the reason as text
    DONE = 8  # nothing follows: empty
    BEGUN = 9  # of several samples none is done, and all are read and tokenised: empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One message of a decoder process. `descriptor` is -1 where there is none."""

    kind: Kind
    seconds: float = 0.0
    read_s: float = 0.0
    cpu_s: float = 0.0
    read_cpu_s: float = 0.0
    read_bytes: int = 0
    reused: bool = False
    kept: KeptReads = NOTHING_KEPT
    payload: bytes = b""
    descriptor: int = -1


def receive(sock: socket.socket, size_bytes: int) -> tuple[bytes, list[int]]:
    """At most `size_bytes` bytes, and the descriptors that came with them. No child inherits the
    descriptors: socket.recv_fds of Python 3.11 cannot ask for that, since it ignores its flags."""
    room = socket.CMSG_SPACE(DESCRIPTORS * array("i").itemsize)
    data, messages, _, _ = sock.recvmsg(size_bytes, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array("i")
    for level, kind, payload in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(payload) - len(payload) % descriptors.itemsize
            descriptors.frombytes(payload[:whole])
    return data, list(descriptors)


# ---- orders -------------------------------------------------------------------------------


_NOT_READ, _IN_MEMORY = -2, -1


def send_order(
    sock: socket.socket,
    pipeline: str,
    samples: Sequence[PackSample],
    *,
    reads: Sequence[RawBytes | None] = (),
    free: Sequence[int] = (),
    gone: Sequence[int] = (),
) -> None:
    """An order to decode these samples in turn, with the bytes of those that were read ahead. Of
    the memory in which samples were handed over, `free` may be filled again and `gone` is not read
    any more. Raises OSError when nobody listens."""
    given = [*reads, *[None] * (len(samples) - len(reads))]
    plain = {
        "pipeline": pipeline,
        "samples": [_plain(sample) for sample in samples],
        "reads": [_NOT_READ if r is None else _stated(r) for r in given],
        "free": list(free),
        "gone": list(gone),
    }
    small = [r.data for r in given if r is not None and r.descriptor < 0]
    sock.sendall(plain_bytes(plain) + b"".join(small))
    for read in given:
        if read is not None and read.descriptor >= 0:
            socket.send_fds(sock, [b"\0"], [read.descriptor])


def _stated(read: RawBytes) -> int:
    return _IN_MEMORY if read.descriptor >= 0 else len(read.data)


def send_hello(
    sock: socket.socket,
    *,
    credentials: Mapping[str, str] | None,
    link: socket.socket | None = None,
    reads: bool = False,
    ahead: int = 0,
    cache: CacheSpec | None = None,
    ranges: CacheSpec | None = None,
) -> None:
    """The first message to a decoder: with which variables of the environment it opens storage,
    None where it opens none; its end of the link between a process that `reads` and the one that
    it reads for, where there are two; and in how many threads it reads ahead, where it decodes
    nothing; and where it keeps what it has decoded, and ranges that it has read."""
    plain = {
        "credentials": credentials,
        "reads": reads,
        "ahead": ahead,
        "cache": None if cache is None else asdict(cache),
        "ranges": None if ranges is None else asdict(ranges),
    }
    data = plain_bytes(plain)
    descriptors = [] if link is None else [link.fileno()]
    sent = socket.send_fds(sock, [data], descriptors)
    sock.sendall(memoryview(data)[sent:])


def read_hello(sock: socket.socket) -> tuple[dict[str, Any], socket.socket | None]:
    """What `send_hello` sent. Raises OSError when the worker is gone."""
    begun, descriptors = receive(sock, _LENGTH.size)
    length = begun + _exactly(sock, _LENGTH.size - len(begun))
    hello: dict[str, Any] = json.loads(_exactly(sock, *_LENGTH.unpack(length)))
    return hello, socket.socket(fileno=descriptors[0]) if descriptors else None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOrder:
    """What `send_order` was given. Descriptors among the `reads` are the receiver's to close."""

    pipeline: str
    samples: list[PackSample]
    reads: list[RawBytes | None]
    free: list[int]
    gone: list[int]


def read_order(sock: socket.socket) -> DecodeOrder | None:
    """The next order; None once the worker is gone."""
    try:
        plain = read_plain(sock)
        reads = _read_ahead(sock, plain["reads"])
    except OSError:
        return None
    return DecodeOrder(
        pipeline=plain["pipeline"],
        samples=[_sample(each) for each in plain["samples"]],
        reads=reads,
        free=plain["free"],
        gone=plain["gone"],
    )


def _read_ahead(sock: socket.socket, stated: Sequence[int]) -> list[RawBytes | None]:
    """First the bytes of all small samples, then the descriptors of the others. Raises OSError."""
    small = {n: RawBytes(data=_exactly(sock, size)) for n, size in enumerate(stated) if size >= 0}
    reads = [small.get(n) for n in range(len(stated))]
    for n, size in enumerate(stated):
        if size == _IN_MEMORY:
            _, (descriptor,) = receive(sock, 1)
            reads[n] = RawBytes(descriptor=descriptor)
    return reads


def plain_bytes(plain: Mapping[str, Any]) -> bytes:
    """Plain data in the form in which it is sent."""
    data = json.dumps(plain, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


def read_plain(sock: socket.socket) -> dict[str, Any]:
    """Read data that `plain_bytes` wrote. Raises OSError when the sender is gone."""
    (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
    plain: dict[str, Any] = json.loads(_exactly(sock, length))
    return plain


def plain_ref(ref: SampleRef) -> list[Any]:
    """A sample's name and place as plain data."""
    at = ref.location
    spans = [(span.name, span.offset_bytes, span.size_bytes) for span in at.spans]
    return [
        (ref.sample_id, ref.source, ref.key, ref.crc32),
        (at.file, at.row_group, at.row, at.piece, spans),
    ]


def ref_of_plain(plain: list[Any]) -> SampleRef:
    """What `plain_ref` was made of."""
    (sample_id, source, key, crc32), (file, row_group, row, piece, spans) = plain
    location = SampleLocation(
        file=file,
        spans=tuple(ByteSpan(name=n, offset_bytes=o, size_bytes=s) for n, o, s in spans),
        row_group=row_group,
        row=row,
        piece=piece,
    )
    return SampleRef(sample_id=sample_id, source=source, key=key, location=location, crc32=crc32)


def _plain(sample: PackSample) -> list[Any]:
    lengths = sample.lengths
    return [
        *plain_ref(sample.ref),
        (lengths.llm_tokens, lengths.loss_tokens, sample.epoch),
        [(i.modality, i.encoder_tokens, i.llm_tokens, i.position, i.shape) for i in lengths.items],
    ]


def _sample(plain: list[Any]) -> PackSample:
    *ref, (llm, loss, epoch), items = plain
    lengths = SampleLengths(
        llm_tokens=llm,
        loss_tokens=loss,
        items=tuple(
            ItemLengths(
                modality=Modality(modality),
                encoder_tokens=encoder_tokens,
                llm_tokens=llm_tokens,
                position=position,
                shape=tuple(shape),
            )
            for modality, encoder_tokens, llm_tokens, position, shape in items
        ),
    )
    return PackSample(ref=ref_of_plain(ref), lengths=lengths, epoch=epoch)


def _exactly(sock: socket.socket, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    view = memoryview(data)
    while len(view):
        got = sock.recv_into(view)
        if got == 0:
            raise ConnectionResetError("the worker ended")
        view = view[got:]
    return bytes(data)


# ---- answers ------------------------------------------------------------------------------


def send_answer(sock: socket.socket, answer: Answer) -> None:
    """Send an answer; the caller keeps and closes its descriptor. Raises OSError when nobody
    listens."""
    times = answer.seconds, answer.read_s, answer.cpu_s, answer.read_cpu_s
    header = _HEADER.pack(
        answer.kind, len(answer.payload), *times, answer.read_bytes, answer.reused, *answer.kept
    )
    data = header + answer.payload
    if answer.descriptor < 0:
        sock.sendall(data)
        return
    sent = socket.send_fds(sock, [data], [answer.descriptor])
    sock.sendall(memoryview(data)[sent:])


def refusal(error: BaseException) -> Answer:
    """An error as an answer to the owner: its class if it is one of ours, and its message, cut to
    MESSAGE_LIMIT."""
    kind = type(error).__name__ if isinstance(error, ServiceError) else ""
    text = str(error) if kind else f"{type(error).__name__}: {error}"
    return Answer(kind=Kind.REFUSED, payload=json.dumps([kind, text[:MESSAGE_LIMIT]]).encode())


@contextmanager
def refusing(sock: socket.socket, too_large: str) -> Iterator[None]:
    """Answers with a refusal where the body fails; `too_large` says so for want of memory."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except MemoryError:
        send_answer(sock, refusal(SpecError(too_large)))
    except BaseException as error:  # a panic in a library may not be an Exception
        send_answer(sock, refusal(error))


def refused(answer: Answer, what: str) -> ServiceError:
    """The error that a refusal carries. An error that is not one of ours becomes a SpecError which
    says that `what` cannot be used. Raises ProtocolError when the refusal carries none."""
    try:
        kind, text = json.loads(answer.payload)
    except ValueError as error:
        raise ProtocolError("a refusal without an error") from error
    named = getattr(errors, str(kind), None)
    if isinstance(named, type) and issubclass(named, ServiceError):
        return named(str(text))
    return SpecError(f"{what} cannot be used: {text}")


@dataclass(kw_only=True, slots=True)
class AnswerReader:
    """Reads a decoder process's answers from its socket. Raises ProtocolError, OSError, and
    TimeoutError when `left_s` is used up.

    Time during which this process itself was stopped does not count: a decoder that was stopped
    together with it is not late.
    """

    sock: socket.socket
    left_s: float = 0.0
    _descriptors: list[int] = field(default_factory=list)

    def read(self, kinds: Collection[Kind] = tuple(Kind)) -> Answer:
        """The next answer, of one of these kinds. Its descriptor is the caller's to close; those
        that no answer should have come with are closed with the socket."""
        code, length, *numbers = _HEADER.unpack(self._bytes(_HEADER.size))
        seconds, read_s, cpu_s, read_cpu_s, read_bytes, reused, *kept = numbers
        if code not in kinds or length > ANSWER_LIMIT_BYTES:
            raise ProtocolError(f"an answer of kind {code} with {length} bytes")
        payload = self._bytes(length)
        kind, descriptor = Kind(code), -1
        announced = kind in (Kind.MEMORY, Kind.NEW)
        if len(self._descriptors) != announced:
            sent = len(self._descriptors)
            raise ProtocolError(f"an answer {kind.name} with {sent} descriptors")
        if announced:
            descriptor = self._descriptors.pop()
        return Answer(
            kind=kind,
            seconds=seconds,
            read_s=read_s,
            cpu_s=cpu_s,
            read_cpu_s=read_cpu_s,
            read_bytes=read_bytes,
            reused=reused,
            kept=KeptReads(*kept),
            payload=payload,
            descriptor=descriptor,
        )

    def _bytes(self, size_bytes: int) -> bytes:
        parts: list[bytes] = []
        while size_bytes:
            part, descriptors = self._receive(size_bytes)
            self._descriptors += descriptors
            if not part:
                raise ConnectionResetError("the process ended")
            parts.append(part)
            size_bytes -= len(part)
        return b"".join(parts)

    def _receive(self, size_bytes: int) -> tuple[bytes, list[int]]:
        while True:
            self.sock.settimeout(max(0.0, min(TICK_S, self.left_s)))
            began_s = time.monotonic()
            try:
                return receive(self.sock, size_bytes)
            except (TimeoutError, BlockingIOError):
                if self.left_s <= 0:
                    raise TimeoutError from None
            finally:
                self.left_s -= min(time.monotonic() - began_s, 2 * TICK_S)

    def close(self) -> None:
        """Close the socket, and the descriptors of answers that were not read."""
        self.sock.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
