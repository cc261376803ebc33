"""What a worker and its decoder processes say to each other, over a Unix stream socket.

Everything is plain data: orders go as JSON, answers as a fixed header with raw bytes behind
it, a large sample as the descriptor of a memory file. A worker believes no answer: what does
not fit the order is a ProtocolError, and costs the process its life and nothing else.
"""

import json
import os
import socket
import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from dataservice.core.orders import PackSample
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)

_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<BIddQ")
ANSWER_LIMIT_BYTES = 2**20
TICK_S = 1.0
DESCRIPTORS = 4  # that may come at once


class ProtocolError(Exception):
    """A decoder process has answered what makes no sense."""


class Kind(IntEnum):
    """What an answer is, and its payload."""

    BUILT = 0  # the order's pipeline was built: its pad token as text
    REFUSED = 1  # the pipeline cannot be built: JSON [error, message]
    INLINE = 2  # a sample: its bytes
    MEMORY = 3  # a sample: empty, and a descriptor
    BAD = 4  # no sample: the reason as text


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One message of a decoder process. `descriptor` is -1 where there is none."""

    kind: Kind
    seconds: float = 0.0
    read_s: float = 0.0
    read_bytes: int = 0
    payload: bytes = b""
    descriptor: int = -1


def receive(sock: socket.socket, size_bytes: int) -> tuple[bytes, list[int]]:
    """At most so many bytes, and the descriptors that came with them, which no child inherits:
    socket.recv_fds of Python 3.11 leaves its flags out."""
    room = socket.CMSG_SPACE(DESCRIPTORS * array("i").itemsize)
    data, messages, _, _ = sock.recvmsg(size_bytes, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array("i")
    for level, kind, payload in messages:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(payload) - len(payload) % descriptors.itemsize
            descriptors.frombytes(payload[:whole])
    return data, list(descriptors)


# ---- orders -------------------------------------------------------------------------------


def order_bytes(pipeline: str, samples: Sequence[PackSample]) -> bytes:
    """An order to decode these samples in turn."""
    plain = {"pipeline": pipeline, "samples": [_plain(sample) for sample in samples]}
    data = json.dumps(plain, separators=(",", ":")).encode()
    return _LENGTH.pack(len(data)) + data


def read_order(sock: socket.socket) -> tuple[str, list[PackSample]] | None:
    """The next order; None once the worker is gone."""
    try:
        (length,) = _LENGTH.unpack(_exactly(sock, _LENGTH.size))
        plain = json.loads(_exactly(sock, length))
    except OSError:
        return None
    return plain["pipeline"], [_sample(each) for each in plain["samples"]]


def _plain(sample: PackSample) -> list[Any]:
    ref, lengths = sample.ref, sample.lengths
    at = ref.location
    spans = [(span.name, span.offset_bytes, span.size_bytes) for span in at.spans]
    return [
        (ref.sample_id, ref.source, ref.key, ref.crc32),
        (at.file, at.row_group, at.row, spans),
        (lengths.llm_tokens, lengths.loss_tokens),
        [(i.modality, i.encoder_tokens, i.llm_tokens, i.position, i.shape) for i in lengths.items],
    ]


def _sample(plain: list[Any]) -> PackSample:
    (sample_id, source, key, crc32), (file, row_group, row, spans), (llm, loss), items = plain
    location = SampleLocation(
        file=file,
        spans=tuple(ByteSpan(name=n, offset_bytes=at, size_bytes=s) for n, at, s in spans),
        row_group=row_group,
        row=row,
    )
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
    ref = SampleRef(sample_id=sample_id, source=source, key=key, location=location, crc32=crc32)
    return PackSample(ref=ref, lengths=lengths)


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
    """Raises OSError when nobody listens. The descriptor stays the caller's."""
    times = answer.seconds, answer.read_s, answer.read_bytes
    header = _HEADER.pack(answer.kind, len(answer.payload), *times)
    data = header + answer.payload
    if answer.descriptor < 0:
        sock.sendall(data)
        return
    sent = socket.send_fds(sock, [data], [answer.descriptor])
    sock.sendall(memoryview(data)[sent:])


@dataclass(kw_only=True, slots=True)
class AnswerReader:
    """Reads a decoder process's answers from its socket. Raises ProtocolError, OSError, and
    TimeoutError once `left_s` is used up.

    Time in which this process was itself stopped does not count: whoever was stopped with it
    is not late.
    """

    sock: socket.socket
    left_s: float = 0.0
    _descriptors: list[int] = field(default_factory=list)

    def read(self) -> Answer:
        """The next answer. Its descriptor is the caller's to close."""
        code, length, seconds, read_s, read_bytes = _HEADER.unpack(self._bytes(_HEADER.size))
        if code not in list(Kind) or length > ANSWER_LIMIT_BYTES:
            raise ProtocolError(f"an answer of kind {code} with {length} bytes")
        payload = self._bytes(length)
        kind, descriptor = Kind(code), -1
        if kind is Kind.MEMORY:
            if not self._descriptors:
                raise ProtocolError("a memory file was announced and not sent")
            descriptor = self._descriptors.pop(0)
        return Answer(
            kind=kind,
            seconds=seconds,
            read_s=read_s,
            read_bytes=read_bytes,
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
        """Close the socket, and descriptors that came with an answer nobody read."""
        self.sock.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
