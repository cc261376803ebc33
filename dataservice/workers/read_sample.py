"""A sample as it was read, as bytes that one process hands to another.

    the length of a JSON object │ that object │ its files │ the parts of a format of the user's own

A small one travels in a message, a large one as the descriptor of a sealed memory file.
"""

import io
import json
import os
import struct
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO

from dataservice.core.sample import MediaBlob, RawSample, Unparsed
from dataservice.workers.sample_memory import INLINE_LIMIT_BYTES, write_memory

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True, slots=True)
class RawBytes:
    """A sample's bytes: in `data`, or in a memory file whose `descriptor` whoever has it closes."""

    data: bytes = b""
    descriptor: int = -1


def raw_buffers(raw: RawSample) -> list[bytes]:
    """Everything that the sample is made of, end to end."""
    unparsed = raw.unparsed
    head = json.dumps(
        {
            "key": raw.key,
            "record": raw.record,
            "placeholders": raw.placeholders,
            "piece": raw.piece,
            "loss_weight": raw.loss_weight,
            "media": [(blob.kind, blob.name, len(blob.data)) for blob in raw.media],
            "unparsed": unparsed and (unparsed.source, [len(part) for part in unparsed.parts]),
        }
    ).encode()
    buffers = [_LENGTH.pack(len(head)), head, *(blob.data for blob in raw.media)]
    buffers += unparsed.parts if unparsed else ()
    return buffers


def raw_bytes(raw: RawSample) -> RawBytes:
    """The sample as bytes. Raises OSError where there is no memory for a file."""
    buffers = raw_buffers(raw)
    size_bytes = sum(map(len, buffers))
    if size_bytes <= INLINE_LIMIT_BYTES:
        return RawBytes(data=b"".join(buffers))
    return RawBytes(descriptor=write_memory([*buffers], size_bytes))


def raw_of(read: RawBytes) -> RawSample:
    """The sample that these bytes are of; closes the descriptor."""
    if read.descriptor < 0:
        return _parsed(io.BytesIO(read.data))
    with open(read.descriptor, "rb") as stream:
        stream.seek(0)  # a process that died may have read it before
        return _parsed(stream)


def close_all(reads: Iterable[RawBytes | None]) -> None:
    """Close the descriptors of samples that nobody takes."""
    for read in reads:
        if read is not None and read.descriptor >= 0:
            os.close(read.descriptor)


def _parsed(stream: IO[bytes]) -> RawSample:
    (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
    plain = json.loads(stream.read(length))
    media = tuple(
        MediaBlob(kind=kind, name=name, data=stream.read(size_bytes))
        for kind, name, size_bytes in plain.pop("media")
    )
    parts = plain.pop("unparsed")
    unparsed = parts and Unparsed(source=parts[0], parts=tuple(map(stream.read, parts[1])))
    return RawSample(**plain, media=media, unparsed=unparsed)


class ReadSample:
    """A sample that was read ahead, for a decoder to take. Its memory is given back with the last
    reference to it."""

    def __init__(self, read: RawBytes) -> None:
        self._read = read
        self.size_bytes = len(read.data)
        if read.descriptor >= 0:
            weakref.finalize(self, os.close, read.descriptor).atexit = False
            self.size_bytes = os.fstat(read.descriptor).st_size

    @property
    def bytes(self) -> RawBytes:
        """Its bytes; the descriptor stays its own."""
        return self._read

    def copy(self) -> RawBytes:
        """Its bytes, with a descriptor that is the caller's to close."""
        if self._read.descriptor < 0:
            return self._read
        return RawBytes(descriptor=os.dup(self._read.descriptor))
