"""Single rows of an Arrow record batch by byte ranges, without reading the rest of the batch.

In a batch each column is an array, whose values of all rows lie behind one another. A row is a few
bytes of each of its buffers: the spans that `ArrayOfBatch.spans` gives, in this order:

    validity    one bit a value, if any value of the array is null; its name also has the place of
                the array, such as 2.0.1: the second child of the first child of the third column
    offsets     of texts, bytes and lists: where each value begins, and where the last one ends
    values      numbers, or the bytes of texts
    children    of structs and lists, likewise

`read_array` makes an array of the bytes of these spans. Spans of no bytes are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ByteSpan
from dataservice.sources.formats.arrow_messages import BatchMessage, Buffer, Node


@dataclass(kw_only=True, slots=True)
class ArrayOfBatch:
    """An array of a batch: its buffers in the file, which are large enough for its values.
    `offsets` int64[values + 1] of texts, bytes and lists are loaded later."""

    kind: pa.DataType
    values: int
    validity: Buffer | None
    offsets_at: Buffer | None
    values_at: Buffer | None
    children: list["ArrayOfBatch"]
    offsets: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, dtype=np.int64))

    def with_offsets(self) -> Iterator["ArrayOfBatch"]:
        """This array and those below it, where they have offsets."""
        if self.offsets_at and self.values:
            yield self
        for child in self.children:
            yield from child.with_offsets()

    @property
    def offsets_span(self) -> ByteSpan:
        """All its offsets in the file."""
        assert self.offsets_at is not None
        return _span("offsets", self.offsets_at, 0, _width(self.kind) * (self.values + 1))

    def load_offsets(self, data: bytes) -> None:
        """Take the bytes of `offsets_span`. Raises ValueError when they lead out of the array."""
        self.offsets = _offsets(data, self.kind)
        held = self.values_at.size_bytes if self.values_at else self.children[0].values
        if self.offsets[-1] > held:
            raise ValueError(f"offsets lead to {self.offsets[-1]:,} of {held:,} values or bytes")

    def spans(self, start: int, count: int, place: str) -> Iterator[ByteSpan]:
        """The bytes of `count` values from `start` on, of the array at a place."""
        if not count:
            return
        if self.validity:
            yield _span(f"validity {place}", self.validity, start // 8, _bits_bytes(start, count))
        if self.offsets_at:
            width = _width(self.kind)
            yield _span("offsets", self.offsets_at, width * start, width * (count + 1))
            start, end = int(self.offsets[start]), int(self.offsets[start + count])
            count = end - start
            if self.values_at and count:
                yield _span("values", self.values_at, start, count)
        elif self.values_at:
            bits = _bit_width(self.kind)
            first = start * bits // 8
            size = _bits_bytes(start, count) if bits == 1 else count * bits // 8
            yield _span("values", self.values_at, first, size)
        for number, child in enumerate(self.children):
            yield from child.spans(start, count, f"{place}.{number}")


def arrays_of(
    batch: BatchMessage, schema: pa.Schema, names: Sequence[str], limits: DecodeLimits
) -> dict[str, ArrayOfBatch]:
    """The arrays of the columns of these names, in the order of the names. Raises ValueError when
    the batch does not fit the schema, or states more values than `max_row_group_values` or than its
    buffers hold."""
    nodes, buffers = iter(batch.nodes), iter(batch.buffers)
    arrays = {}
    try:
        for column in schema:
            array = _array_of(column.type, nodes, buffers)
            if column.name in names:
                _require_whole(array, batch.rows, limits, f"column {column.name!r}")
                arrays[column.name] = array
    except StopIteration as error:
        raise ValueError("a record batch has fewer arrays than the schema") from error
    return {name: arrays[name] for name in names}


@dataclass(slots=True)
class SpanBytes:
    """The spans of some rows and their bytes, taken one by one."""

    spans: Sequence[ByteSpan]
    blobs: Sequence[bytes]
    taken: int = 0

    def take(self, name: str, size_bytes: int) -> bytes:
        """The next span's bytes. Raises ValueError when it is of another name or size."""
        if not self.is_next(name) or len(self.blobs[self.taken]) != size_bytes:
            raise ValueError(f"its spans have no {size_bytes:,} bytes of {name} at {self.taken}")
        self.taken += 1
        return self.blobs[self.taken - 1]

    def is_next(self, name: str) -> bool:
        """Whether the next span has this name."""
        return self.taken < len(self.spans) and self.spans[self.taken].name == name


def read_array(
    kind: pa.DataType,
    start: int,
    count: int,
    found: SpanBytes,
    limits: DecodeLimits,
    *,
    place: str,
) -> "pa.Array[Any]":
    """The array of `count` values from `start` on, which is at a place. Raises ValueError when the
    spans are not of such values."""
    if not 0 <= count <= limits.max_row_group_values:
        raise ValueError(f"it states {count:,} values of {kind!s:.80}")
    if not count or pa.types.is_null(kind):
        return cast("pa.Array[Any]", pa.nulls(count, cast(Any, kind)))
    validity = None
    if found.is_next(f"validity {place}"):
        validity = _bits(found.take(f"validity {place}", _bits_bytes(start, count)), start, count)
    if pa.types.is_struct(kind):
        inner = [
            read_array(
                kind.field(number).type, start, count, found, limits, place=f"{place}.{number}"
            )
            for number in range(kind.num_fields)
        ]
        return pa.Array.from_buffers(kind, count, [validity], children=inner)
    if _has_offsets(kind):
        width = _width(kind)
        offsets = _offsets(found.take("offsets", width * (count + 1)), kind)
        first, inside = int(offsets[0]), int(offsets[-1] - offsets[0])
        rebased = pa.py_buffer((offsets - first).astype(f"<i{width}").tobytes())
        if _is_list(kind):
            items = read_array(kind.field(0).type, first, inside, found, limits, place=f"{place}.0")
            return pa.Array.from_buffers(kind, count, [validity, rebased], children=[items])
        values = pa.py_buffer(found.take("values", inside) if inside else b"")
        return pa.Array.from_buffers(kind, count, [validity, rebased, values])
    if pa.types.is_boolean(kind):
        values = _bits(found.take("values", _bits_bytes(start, count)), start, count)
    else:
        values = pa.py_buffer(found.take("values", count * _bit_width(kind) // 8))
    return pa.Array.from_buffers(kind, count, [validity, values])


# ---- the layout of a batch ----------------------------------------------------------------


def is_readable(kind: pa.DataType) -> bool:
    """Whether `read_array` reads such arrays."""
    if _is_list(kind):
        return is_readable(kind.field(0).type)
    if pa.types.is_struct(kind):
        return all(is_readable(kind.field(place).type) for place in range(kind.num_fields))
    plain = pa.types.is_primitive(kind) or pa.types.is_null(kind) or pa.types.is_decimal(kind)
    return plain or pa.types.is_fixed_size_binary(kind) or _is_text(kind)


def has_layout(kind: pa.DataType) -> bool:
    """Whether the buffers of such an array are known, so that it can at least be passed over."""
    kind = stored_type(kind)
    other_nests = pa.types.is_map(kind) or pa.types.is_fixed_size_list(kind)
    if not (other_nests or _is_list(kind) or pa.types.is_struct(kind)):
        return is_readable(kind)
    return all(has_layout(kind.field(place).type) for place in range(kind.num_fields))


def stored_type(kind: pa.DataType) -> pa.DataType:
    """The type as which values are stored: of extension types and dictionaries' indices."""
    if isinstance(kind, pa.BaseExtensionType):
        return stored_type(kind.storage_type)
    return kind.index_type if isinstance(kind, pa.DictionaryType) else kind


def _array_of(kind: pa.DataType, nodes: Iterator[Node], buffers: Iterator[Buffer]) -> ArrayOfBatch:
    """The next array of a batch, with its children."""
    kind = stored_type(kind)
    node = next(nodes)
    is_null, has_offsets = pa.types.is_null(kind), _has_offsets(kind)
    has_values = not is_null and not pa.types.is_nested(kind)
    validity = None if is_null else next(buffers)
    return ArrayOfBatch(
        kind=kind,
        values=node.values,
        validity=validity if node.nulls else None,
        offsets_at=next(buffers) if has_offsets else None,
        values_at=next(buffers) if has_values else None,
        children=[
            _array_of(kind.field(place).type, nodes, buffers) for place in range(kind.num_fields)
        ],
    )


def _require_whole(array: ArrayOfBatch, least: int, limits: DecodeLimits, what: str) -> None:
    """Raises ValueError unless an array has at least so many values, and buffers that hold them."""
    values = array.values
    if not least <= values <= limits.max_row_group_values:
        raise ValueError(
            f"{what} states {values:,} values in a record batch of {least:,}; the limit "
            f"max_row_group_values is {limits.max_row_group_values:,}"
        )
    sizes = [(array.validity, -(-values // 8))]
    if array.offsets_at:
        sizes.append((array.offsets_at, _width(array.kind) * (values + 1) if values else 0))
    elif array.values_at:
        sizes.append((array.values_at, -(-values * _bit_width(array.kind) // 8)))
    if any(buffer and buffer.size_bytes < size for buffer, size in sizes):
        raise ValueError(f"{what} states {values:,} values, more than its buffers hold")
    of_struct = pa.types.is_struct(array.kind)
    for child in array.children:
        _require_whole(child, values if of_struct else 0, limits, what)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    """Whether values are texts or bytes of any length."""
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
    )


def _has_offsets(kind: pa.DataType) -> bool:
    return _is_text(kind) or _is_list(kind) or pa.types.is_map(kind)


def _width(kind: pa.DataType) -> int:
    """Bytes of one offset."""
    large = (pa.types.is_large_string, pa.types.is_large_binary, pa.types.is_large_list)
    return 8 if any(is_of(kind) for is_of in large) else 4


def _bit_width(kind: pa.DataType) -> int:
    return int(kind.bit_width)


def _bits_bytes(start: int, count: int) -> int:
    """Bytes that hold these bits."""
    return -(-(start + count) // 8) - start // 8


def _bits(data: bytes, start: int, count: int) -> pa.Buffer:
    """Bits from `start` on, of which `data` begins with the byte of the first."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    return pa.py_buffer(np.packbits(bits[start % 8 :][:count], bitorder="little").tobytes())


def _offsets(data: bytes, kind: pa.DataType) -> NDArray[np.int64]:
    offsets = np.frombuffer(data, f"<i{_width(kind)}").astype(np.int64)
    if offsets[0] < 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"the offsets of its {kind!s:.80} are not in order")
    return offsets


def _span(name: str, buffer: Buffer, start: int, size_bytes: int) -> ByteSpan:
    return ByteSpan(name=name, offset_bytes=buffer.offset_bytes + start, size_bytes=size_bytes)
