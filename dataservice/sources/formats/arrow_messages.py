"""Reads the messages of an Arrow IPC file: where its record batches and their buffers lie.

Arrow's own reader allocates what a message states. Here only a message's metadata are read, which
are small, and every size in them is compared with the file before anything else is read.

    stream    schema, record batches, end mark       as save_to_disk of Hugging Face datasets writes
    file      "ARROW1", a stream, footer, "ARROW1"   as pyarrow.ipc.new_file writes

Source: the Arrow columnar format, "Encapsulated message format"; Message.fbs, Schema.fbs.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import pyarrow as pa

END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
_CONTINUES = END_MARK[:4]
_MAGIC = b"ARROW1"
_MOST_METADATA_BYTES = 16 * 2**20
_MOST_SCHEMA_COLUMNS = 4096
_MOST_ARRAYS = 2**17  # and buffers, of one record batch
_SCHEMA, _DICTIONARIES, _RECORD_BATCH = 1, 2, 3
# Versions 4 (Arrow 0.8) and 5 (Arrow 1.0) differ only in unions, which are refused.
_VERSIONS = (3, 4)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What a batch states of one array: its values, and how many of them are null."""

    values: int
    nulls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """Where one buffer of a batch lies in the file."""

    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchMessage:
    """A record batch: the arrays and buffers of all its columns in the order of the schema, each
    array before its children. All buffers lie inside the file."""

    rows: int
    nodes: tuple[Node, ...]
    buffers: tuple[Buffer, ...]
    is_compressed: bool
    end_bytes: int


def read_schema(stream: IO[bytes]) -> tuple[pa.Schema, int]:
    """(The schema, the offset of the message behind it). Raises ValueError when this is no Arrow
    file, or one of another byte order or of before Arrow 0.15."""
    stream.seek(0)
    start = 8 if stream.read(6) == _MAGIC else 0
    size_bytes = stream.seek(0, 2)
    message = _message(stream, start, size_bytes)
    if message is None or message.kind != _SCHEMA:
        raise ValueError("it does not begin with a schema")
    if message.header.number(0, "h"):
        raise ValueError("its numbers are big-endian; write it on a machine of the usual order")
    stream.seek(start)
    data = stream.read(message.body_bytes - start)
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(data))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"its schema is damaged: {error}") from error
    if len(schema) > _MOST_SCHEMA_COLUMNS:
        raise ValueError(f"it has {len(schema):,} columns, above {_MOST_SCHEMA_COLUMNS:,}")
    return schema, message.end_bytes


def record_batches(stream: IO[bytes], start: int) -> Iterator[BatchMessage]:
    """The record batches from an offset on. Raises ValueError when one of them does not lie inside
    the file, or the file does not end as it must."""
    size_bytes = _end_of_messages(stream)
    while (message := _message(stream, start, size_bytes)) is not None:
        start = message.end_bytes
        if message.kind == _RECORD_BATCH:
            yield _batch(message)
        elif message.kind != _DICTIONARIES:
            raise ValueError(f"at byte {start:,} it has a message of unknown kind {message.kind}")


def _end_of_messages(stream: IO[bytes]) -> int:
    """Where messages end: at the file's end, or before the footer of a file that has one."""
    stream.seek(0)
    has_footer = stream.read(6) == _MAGIC
    end = stream.seek(0, 2)
    if not has_footer:
        return end
    stream.seek(max(0, end - 10))
    tail = stream.read(10)
    footer_bytes = int.from_bytes(tail[:4], "little")
    if tail[4:] != _MAGIC or footer_bytes > end - 18:
        raise ValueError("it does not end with a footer")
    return end - 10 - footer_bytes


# ---- one message --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    kind: int
    header: "_Table"
    body_bytes: int  # the offset of its body
    end_bytes: int


def _message(stream: IO[bytes], start: int, size_bytes: int) -> _Message | None:
    """The message at an offset; None for the end mark."""
    stream.seek(start)
    prefix = stream.read(8)
    if start + 8 > size_bytes:
        raise ValueError(
            "it ends without an end mark. If its writer left the mark out, append the 8 bytes "
            "FF FF FF FF 00 00 00 00"
        )
    if prefix == END_MARK:
        return None
    if prefix[:4] != _CONTINUES:
        raise ValueError(f"at byte {start:,} it has no message")
    metadata_bytes = int.from_bytes(prefix[4:], "little")
    body = start + 8 + metadata_bytes
    if metadata_bytes > _MOST_METADATA_BYTES or body > size_bytes:
        raise ValueError(f"the message at byte {start:,} states {metadata_bytes:,} bytes of header")
    root = _root(stream.read(metadata_bytes))
    end = body + root.number(3, "q")
    if not body <= end <= size_bytes:
        raise ValueError(f"the message at byte {start:,} states {end - body:,} bytes of body")
    if root.number(0, "h") not in _VERSIONS:
        raise ValueError("it is of a version of Arrow's format that is not read")
    header = root.table(2)
    if header is None:
        raise ValueError(f"the message at byte {start:,} is empty")
    return _Message(kind=root.number(1, "B"), header=header, body_bytes=body, end_bytes=end)


def _batch(message: _Message) -> BatchMessage:
    header, body = message.header, message.body_bytes
    nodes = [Node(values=values, nulls=nulls) for values, nulls in header.pairs(1)]
    rows = header.number(0, "q")
    if rows < 0 or any(not 0 <= node.nulls <= node.values for node in nodes):
        raise ValueError("a record batch states a number of rows below 0")
    buffers = []
    for offset, size in header.pairs(2):
        if not 0 <= offset <= offset + size <= message.end_bytes - body:
            raise ValueError(f"a record batch states {size:,} bytes beyond its end")
        buffers.append(Buffer(offset_bytes=body + offset, size_bytes=size))
    return BatchMessage(
        rows=rows,
        nodes=tuple(nodes),
        buffers=tuple(buffers),
        is_compressed=header.table(3) is not None,
        end_bytes=message.end_bytes,
    )


# ---- flatbuffers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Table:
    """One table of a flatbuffer: its fields by their numbers."""

    data: bytes
    at: int

    def number(self, field: int, code: str) -> int:
        """An integer in the code of `struct`; 0 when the field is absent."""
        place = self._place(field)
        return 0 if place is None else _number(self.data, place, code)

    def table(self, field: int) -> "_Table | None":
        """An inner table, or None when the field is absent."""
        place = self._place(field)
        if place is None:
            return None
        return _Table(self.data, place + _number(self.data, place, "I"))

    def pairs(self, field: int) -> Iterator[tuple[int, int]]:
        """A vector of structs of two 64-bit integers."""
        place = self._place(field)
        if place is None:
            return
        start = place + _number(self.data, place, "I")
        count = _number(self.data, start, "I")
        if count > _MOST_ARRAYS or start + 4 + 16 * count > len(self.data):
            raise ValueError("its header is damaged")
        yield from struct.iter_unpack("<qq", self.data[start + 4 : start + 4 + 16 * count])

    def _place(self, field: int) -> int | None:
        vtable = self.at - _number(self.data, self.at, "i")
        entry = 4 + 2 * field
        if entry >= _number(self.data, vtable, "H"):
            return None
        offset = _number(self.data, vtable + entry, "H")
        return self.at + offset if offset else None


def _root(data: bytes) -> _Table:
    return _Table(data, _number(data, 0, "I"))


def _number(data: bytes, at: int, code: str) -> int:
    size = struct.calcsize(f"<{code}")
    if not 0 <= at <= len(data) - size:
        raise ValueError("its header is damaged")
    (value,) = struct.unpack_from(f"<{code}", data, at)
    return int(value)
