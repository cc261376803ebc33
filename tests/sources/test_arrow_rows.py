"""Rows of Arrow's batches by byte ranges: what Arrow itself reads, for every type that is read."""

import io
import random
import struct
from typing import Any

import pyarrow as pa
import pytest

from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import ByteSpan
from dataservice.sources.formats.arrow_messages import read_schema, record_batches
from dataservice.sources.formats.arrow_rows import (
    ArrayOfBatch,
    SpanBytes,
    arrays_of,
    has_layout,
    is_readable,
    read_array,
)

TYPES: tuple[pa.DataType, ...] = (
    pa.null(), pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.string(),
    pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3), pa.date32(),
    pa.timestamp("us", tz="UTC"), pa.decimal128(9, 2), pa.list_(pa.bool_()), pa.list_(pa.null()),
    pa.large_list(pa.list_(pa.string())), pa.struct([("bytes", pa.binary()), ("on", pa.bool_())]),
    pa.list_(pa.struct([("role", pa.string()), ("parts", pa.list_(pa.int32()))])), pa.struct([]),
)  # fmt: skip
PASSED_OVER: tuple[pa.DataType, ...] = (
    pa.map_(pa.string(), pa.list_(pa.int8())), pa.list_(pa.float32(), 2),
    pa.dictionary(pa.int16(), pa.string()), pa.json_(),
)  # fmt: skip
REFUSED: tuple[pa.DataType, ...] = (
    pa.string_view(), pa.list_view(pa.int8()), pa.run_end_encoded(pa.int32(), pa.int8()),
    pa.sparse_union([pa.field("a", pa.int8())]), pa.list_(pa.binary_view()),
)  # fmt: skip


def some_value(kind: pa.DataType, rng: random.Random, nulls: float) -> Any:
    if pa.types.is_null(kind) or rng.random() < nulls:
        return None
    if isinstance(kind, pa.BaseExtensionType):
        return "{}"
    if pa.types.is_dictionary(kind):
        return rng.choice("abc")
    if pa.types.is_struct(kind):
        return {f.name: some_value(f.type, rng, nulls) for f in kind}
    if pa.types.is_map(kind):
        return [(str(k), [1]) for k in range(rng.randrange(3))]
    if pa.types.is_fixed_size_list(kind):
        return [0.5, 1.5]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return [some_value(kind.value_type, rng, nulls) for _ in range(rng.choice((0, 1, 3)))]
    if pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind):
        return rng.randbytes(3)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return rng.randbytes(rng.choice((0, 5, 50)))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return rng.choice(("", "é", "word " * 9))
    return rng.random() < 0.5 if pa.types.is_boolean(kind) else rng.randrange(100)


def written(batches: list[pa.RecordBatch]) -> io.BytesIO:
    stream = io.BytesIO()
    with pa.ipc.new_stream(stream, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return stream


def laid_out(stream: io.BytesIO) -> list[tuple[pa.Schema, dict[str, ArrayOfBatch]]]:
    """The arrays of all batches, their offsets loaded."""
    schema, start = read_schema(stream)
    names = [field.name for field in schema if is_readable(field.type)]
    out = []
    for message in record_batches(stream, start):
        arrays = arrays_of(message, schema, names, DEFAULT_LIMITS)
        for each in (inner for array in arrays.values() for inner in array.with_offsets()):
            each.load_offsets(sliced(stream, [each.offsets_span])[0])
        out.append((schema, arrays))
    return out


def sliced(stream: io.BytesIO, spans: list[ByteSpan]) -> list[bytes]:
    data = stream.getvalue()
    return [data[span.offset_bytes : span.offset_bytes + span.size_bytes] for span in spans]


@pytest.mark.parametrize("seed", range(4))
def test_any_rows_of_any_column_are_those_that_arrow_reads(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        kinds = rng.choices((*TYPES, *PASSED_OVER), k=rng.choice((1, 3, 8)))
        schema = pa.schema([(f"c{place}", kind) for place, kind in enumerate(kinds)])
        nulls = rng.choice((0, 0.3))
        batches = []
        for rows in (rng.choice((0, 1, 9, 70)), 12):
            values = [[some_value(kind, rng, nulls) for _ in range(rows)] for kind in kinds]
            arrays = [pa.array(v, kind) for v, kind in zip(values, kinds, strict=True)]
            first = rng.randrange(rows + 1)  # a slice is written from an offset within its arrays
            batches.append(pa.RecordBatch.from_arrays(arrays, schema=schema).slice(first))
        stream = written(batches)
        for theirs, (_, ours) in zip(batches, laid_out(stream), strict=True):
            start = rng.randrange(theirs.num_rows + 1)
            count = rng.randrange(theirs.num_rows - start + 1)
            for name, array in ours.items():
                spans = list(array.spans(start, count, "0"))
                assert all(span.size_bytes > 0 for span in spans)
                found = SpanBytes(spans, sliced(stream, spans))
                read = read_array(
                    schema.field(name).type, start, count, found, DEFAULT_LIMITS, place="0"
                )
                read.validate(full=True)
                assert found.taken == len(spans)
                assert read.to_pylist() == theirs.column(name).slice(start, count).to_pylist()


def test_every_type_is_read_passed_over_or_refused() -> None:
    assert all(map(is_readable, TYPES))
    assert not any(map(is_readable, (*PASSED_OVER, *REFUSED)))
    assert all(map(has_layout, (*TYPES, *PASSED_OVER, pa.list_(pa.json_()))))
    assert not any(map(has_layout, REFUSED))


def test_spans_of_other_values_are_noticed() -> None:
    kind = pa.list_(pa.string())
    stream = written([pa.record_batch({"c": pa.array([["ab"], ["c", "d"], []], kind)})])
    (_, arrays), *_ = laid_out(stream)
    spans = list(arrays["c"].spans(1, 1, "0"))
    blobs = sliced(stream, spans)
    for changed in (
        SpanBytes(spans[:-1], blobs[:-1]),
        SpanBytes(spans, [blobs[0], blobs[1], blobs[2][:-1]]),
        SpanBytes(spans, [struct.pack("<ii", 0, 9), *blobs[1:]]),
        SpanBytes(spans, [blobs[0][::-1], *blobs[1:]]),
        SpanBytes(spans[1:], blobs[1:]),
        SpanBytes([], []),
    ):
        with pytest.raises(ValueError, match=r"no .* bytes of|not in order"):
            read_array(kind, 1, 1, changed, DEFAULT_LIMITS, place="0")


def test_more_values_than_the_limit_are_refused() -> None:
    limits = DecodeLimits(max_row_group_values=2)
    with pytest.raises(ValueError, match="states 3 values"):
        read_array(pa.null(), 0, 3, SpanBytes([], []), limits, place="0")
    stream = written([pa.record_batch({"c": pa.array([[None] * 3], pa.list_(pa.null()))})])
    schema, start = read_schema(stream)
    (message,) = record_batches(stream, start)
    with pytest.raises(ValueError, match=r"3 values .*max_row_group_values is 2"):
        arrays_of(message, schema, ["c"], limits)
