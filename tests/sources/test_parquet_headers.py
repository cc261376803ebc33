"""Our own reading of Parquet's headers: it agrees with Arrow on every sound file, and a hostile
file cannot show it one thing and Arrow another."""

import io
import random
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataservice.core.errors import SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.sample import Modality
from dataservice.sources.formats import thrift
from dataservice.sources.formats.parquet_footer import read_footer
from dataservice.sources.formats.parquet_pages import column_pages
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.formats.thrift import I32, I64, STRUCT, Struct, read_struct
from dataservice.sources.index_part import SCHEMA
from dataservice.sources.length_columns import lengths_of
from dataservice.sources.soundness import require_bounded, require_schema, require_sound
from tests.fuzz.thrift_writer import LIST, encoded, with_footer

CODECS = ("none", "snappy", "gzip", "brotli", "lz4", "zstd")
TYPES: tuple[pa.DataType, ...] = (
    pa.bool_(), pa.int8(), pa.int64(), pa.uint32(), pa.float32(), pa.float64(), pa.string(),
    pa.large_string(), pa.binary(), pa.binary(7), pa.date32(), pa.timestamp("us", tz="UTC"),
    pa.decimal128(9, 2), pa.null(), pa.dictionary(pa.int32(), pa.string()),
    pa.list_(pa.int32()), pa.list_(pa.list_(pa.string())), pa.map_(pa.string(), pa.int64()),
    pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
    pa.list_(pa.struct([("role", pa.string()), ("content", pa.list_(pa.string()))])),
)  # fmt: skip


# ---- sound files --------------------------------------------------------------------------


def some_value(kind: pa.DataType, rng: random.Random) -> Any:
    """A value of a type; texts may be long, so that statistics and pages are."""
    if rng.random() < 0.1 or pa.types.is_null(kind):
        return None
    if pa.types.is_dictionary(kind):
        return some_value(kind.value_type, rng)
    if pa.types.is_struct(kind):
        return {field.name: some_value(field.type, rng) for field in kind}
    if pa.types.is_map(kind):
        return [(str(k), k) for k in range(rng.randrange(3))]
    if pa.types.is_list(kind):
        return [some_value(kind.value_type, rng) for _ in range(rng.choice((0, 1, 3)))]
    if pa.types.is_fixed_size_binary(kind):
        return rng.randbytes(7)
    if pa.types.is_binary(kind):
        return rng.randbytes(rng.choice((0, 5, 5000)))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return rng.choice(string.ascii_letters) * rng.choice((0, 1, 20, 9000))
    return rng.random() < 0.5 if pa.types.is_boolean(kind) else rng.randrange(100)


def some_file(rng: random.Random) -> io.BytesIO:
    """A file that Arrow wrote: any types, codec, pages and encodings; often without rows."""
    rows = rng.choice((0, 0, 1, 7, 300))
    kinds = rng.choices(TYPES, k=rng.choice((1, 4, 9)))
    table = pa.table(
        {
            rng.choice(("", "a.", "é ")) + f"c{place}": pa.array(
                [some_value(kind, rng) for _ in range(rows)], kind
            )
            for place, kind in enumerate(kinds)
        }
    )
    stream = io.BytesIO()
    options = {
        "compression": rng.choice(CODECS),
        "use_dictionary": rng.random() < 0.6,
        "data_page_version": rng.choice(("1.0", "2.0")),
        "data_page_size": rng.choice((1, 200, None)),
        "write_statistics": rng.random() < 0.7,
        "write_page_index": rng.random() < 0.3,
        "write_page_checksum": rng.random() < 0.3,
        "dictionary_pagesize_limit": rng.choice((10, 2**20)),
        "store_schema": rng.random() < 0.5,
    }
    with pq.ParquetWriter(stream, table.schema, **options) as writer:
        for _ in range(rng.choice((1, 1, 3))):  # one without rows may stand between others
            part = table.slice(rng.randrange(rows + 1), rng.randrange(rows + 1))
            writer.write_table(part, row_group_size=rng.choice((1, 50, 1000)))
    return stream


@pytest.mark.parametrize("seed", range(4))
def test_every_file_that_arrow_writes_is_read_as_arrow_reads_it(seed: int) -> None:
    rng = random.Random(seed)
    for number in range(100):
        stream = some_file(rng)
        groups = read_footer(stream)
        metadata = pq.read_metadata(stream)
        assert [g.rows for g in groups] == [
            metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)
        ]
        for place, group in enumerate(groups):
            for column, chunk in enumerate(group.columns):
                theirs = metadata.row_group(place).column(column)
                pages = column_pages(stream, chunk)  # raises when it finds a header damaged
                seen = f"file {number}, row group {place}, column {theirs.path_in_schema!r}"
                assert chunk.leaf.path == theirs.path_in_schema, seen
                assert chunk.leaf.holds_texts == (theirs.physical_type == "BYTE_ARRAY"), seen
                assert chunk.stored_bytes == theirs.total_compressed_size, seen
                assert chunk.values == pages.values == theirs.num_values, seen
                headers_bytes = theirs.total_uncompressed_size - pages.size_bytes
                assert headers_bytes > 0 or not chunk.values, seen
                assert bool(pages.dictionary_bytes) <= chunk.has_dictionary, seen


def some_index_row(rng: random.Random) -> dict[str, Any]:
    spans, items_ = rng.choice((0, 1, 3)), rng.choice((0, 0, 1, 5))
    modalities = [rng.choice(tuple(Modality)) for _ in range(items_)]
    tokens = [rng.randrange(1, 99) for _ in range(items_)]
    return {
        "key": "k" * rng.choice((1, 30, 3000)),
        "file": rng.choice(("a.tar", "b" * 200)),
        "span_name": [rng.choice(("", "n", "n" * 300)) for _ in range(spans)],
        "span_offset_bytes": [rng.randrange(2**40) for _ in range(spans)],
        "span_size_bytes": [rng.randrange(2**30) for _ in range(spans)],
        "row_group": rng.randrange(9),
        "row": rng.randrange(9),
        "crc32": rng.randrange(2**32),
        "llm_tokens": 1 + 9 * items_ + rng.randrange(5),
        "loss_tokens": rng.randrange(2),
        "item_modality": list(map(int, modalities)),
        "item_encoder_tokens": tokens,
        "item_llm_tokens": [rng.randrange(1, 9) for _ in range(items_)],
        "item_position": [9 * k for k in range(items_)],
        "item_shape": [
            [1, 28, 28, 3] if each is Modality.VISION else [rng.randrange(999)]
            for each in modalities
        ],
        "content": rng.randbytes(16),
        "item_kind": [rng.choice((None, int(each) * 2)) for each in modalities],
        "item_grid": [rng.choice((None, [1, each, 1, 2])) for each in tokens],
        "item_seconds_per_patch": [rng.choice((None, 0.5)) for _ in modalities],
        "item_key_frames_s": [rng.choice((None, [], [0.0, 2.5])) for _ in modalities],
    }


def test_every_index_part_is_sound_also_one_without_rows() -> None:
    """Arrow gives a column without rows a dictionary and no page of data, at offset 0."""
    rng = random.Random(0)
    for number in range(60):
        counts = rng.choice(((0,), (1,), (40, 3), (5, 0, 200)))
        stream = io.BytesIO()
        with pq.ParquetWriter(stream, SCHEMA, compression="zstd") as writer:
            for rows in counts:
                values = [some_index_row(rng) for _ in range(rows)]
                writer.write_table(pa.Table.from_pylist(values, schema=SCHEMA))
        require_bounded(stream, DEFAULT_LIMITS)
        part = pq.ParquetFile(stream)
        require_schema(part.schema_arrow)
        for place in range(part.num_row_groups):
            table = part.read_row_group(place)
            require_sound(table, lengths_of(table), DEFAULT_LIMITS)
        assert part.metadata.num_rows == sum(counts), number


# ---- hostile files ------------------------------------------------------------------------


def texts() -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.table({"text": ["some", "words"], "n": [1, 2]}), stream)
    return stream.getvalue()


def columns(footer: Struct) -> list[Struct]:
    """The metadata of the columns of the first row group."""
    (group,) = cast(list[Struct], footer[4, LIST])
    return [cast(Struct, chunk[3, STRUCT]) for chunk in cast(list[Struct], group[1, LIST])]


def name_others(footer: Struct) -> None:
    for column in columns(footer):
        column[3, LIST] = [b"unread"]


def deny_texts(footer: Struct) -> None:
    for column in columns(footer):
        column[1, I32] = 1


def move_dictionary(footer: Struct) -> None:
    for column in columns(footer):
        column[11, I32] = 4


def forget_dictionary(footer: Struct) -> None:
    """As some writers do for a column without one."""
    for column in columns(footer):
        column[9, I64] = column.get((11, I64), column[9, I64])
        column[11, I64] = 0


@pytest.mark.parametrize(
    "change",
    [name_others, deny_texts, move_dictionary, forget_dictionary],
    ids=lambda c: c.__name__,
)
def test_what_arrow_does_not_believe_is_not_believed(change: Callable[[Struct], None]) -> None:
    whole = texts()
    changed = with_footer(whole, change)
    assert changed != with_footer(whole, lambda _: None)
    assert read_footer(io.BytesIO(changed)) == read_footer(io.BytesIO(whole))


def add_a_column(footer: Struct) -> None:
    (group,) = cast(list[Struct], footer[4, LIST])
    cast(list[Struct], group[1, LIST]).append({(3, STRUCT): columns(footer)[0]})


def lose_the_schema(footer: Struct) -> None:
    footer[2, LIST] = cast(list[Struct], footer[2, LIST])[:2]


def state_rows(footer: Struct) -> None:
    (group,) = cast(list[Struct], footer[4, LIST])
    group[3, I64] = 2**31


def list_numbers(footer: Struct) -> None:
    footer[4, LIST] = [1, 2]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (add_a_column, "2 columns, and 3 in a row group"),
        (lose_the_schema, "its footer is damaged"),
        (state_rows, "states 2,147,483,648 rows and 2 values"),
        (list_numbers, "a list of another type in field 4"),
    ],
    ids=lambda c: getattr(c, "__name__", ""),
)
def test_a_footer_that_contradicts_itself_is_refused(
    change: Callable[[Struct], None], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        read_footer(io.BytesIO(with_footer(texts(), change)))


def test_what_another_reader_would_take_for_something_else_is_refused() -> None:
    """A field that stands twice; a number, of a field or in it, that a reader may cut."""
    once = encoded({(2, I32): 2**30})[:-1]
    with pytest.raises(ValueError, match="field 2 twice"):
        read_struct(once + encoded({(2, I32): 10}))
    for struct in ({(2, I32): 2**32 + 10}, {(2**16 + 2, I32): 10}, {(2, I64): 2**64 + 10}):
        with pytest.raises(ValueError, match=r"above (16|32|64) bits"):
            read_struct(encoded(struct))
    edges: Struct = {(2**15 - 1, I32): -(2**31), (1, I32): 2**31 - 1, (2, I64): 2**63 - 1}
    assert read_struct(encoded(edges))[0] == edges


def test_a_header_of_more_values_than_a_file_has_use_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three bytes are a struct, whose object has hundreds."""
    many: Struct = {(1, LIST): [{(1, I32): 0} for _ in range(60)]}
    assert read_struct(encoded(many))[0] == many
    monkeypatch.setattr(thrift, "MOST_VALUES", 100)
    with pytest.raises(ValueError, match="more than 100 values"):
        read_struct(encoded(many))


@pytest.mark.parametrize(("values", "reason"), [(3, "hold 2 of the 3"), (0, "2 rows and 0 values")])
def test_a_column_of_other_values_than_it_states_is_refused(
    tmp_path: Path, spec: Callable[..., SourceSpec], values: int, reason: str
) -> None:
    """Arrow would go on behind the column, or hold that nothing is there and lose the rows."""

    def restate(footer: Struct) -> None:
        for column in columns(footer):
            column[5, I64] = values

    path = tmp_path / "a.parquet"
    path.write_bytes(with_footer(texts(), restate))
    source = spec(path, "parquet")
    with pytest.raises(SourceError, match=reason):
        list(open_format(source).scan(list_files(source)[0]))
