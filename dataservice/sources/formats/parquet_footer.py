"""Reads a Parquet file's footer: its row groups, and the positions of their columns.

Every value is read from the place where Arrow reads it: a column's name and type from the schema,
since the copies in a row group are never read.

Source: parquet-format, `FileMetaData` in parquet.thrift.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from dataservice.sources.formats.thrift import (
    BINARY,
    I32,
    I64,
    STRUCT,
    Struct,
    integer,
    items,
    read_struct,
)

MAGIC = b"PAR1"
# The largest part of a large footer is one string: an index stores there which samples it left out.
# The limit on Thrift values bounds the rest.
MOST_FOOTER_BYTES = 64 * 2**20
_DEEPEST_COLUMN = 200
_DICTIONARIES = frozenset({2, 8})  # PLAIN_DICTIONARY, RLE_DICTIONARY
_BYTE_ARRAY = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A column of plain values: the names on the path from the schema's root to it."""

    names: tuple[str, ...]
    holds_texts: bool
    """Strings or bytes."""

    @property
    def path(self) -> str:
        """Its names joined by dots, as Arrow writes them."""
        return ".".join(self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChunk:
    """One column in one row group. Sizes and `values`, which include the items of lists, are
    unchecked claims of the file."""

    leaf: Leaf
    offset_bytes: int
    stored_bytes: int
    unfolded_bytes: int
    values: int
    has_dictionary: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Consecutive rows."""

    rows: int
    columns: tuple[ColumnChunk, ...]

    @property
    def stored_bytes(self) -> int:
        """Size in the file."""
        return sum(column.stored_bytes for column in self.columns)


def read_footer(stream: IO[bytes]) -> tuple[RowGroup, ...]:
    """The row groups of a file. Raises ValueError when it is not a Parquet file."""
    size_bytes = stream.seek(0, 2)
    stream.seek(max(0, size_bytes - 8))
    tail = stream.read(8)
    footer_bytes = int.from_bytes(tail[:4], "little")
    if tail[4:] != MAGIC or footer_bytes + 12 > size_bytes:
        raise ValueError("it does not end with a footer")
    if footer_bytes > MOST_FOOTER_BYTES:
        raise ValueError(f"its footer has {footer_bytes:,} bytes, above {MOST_FOOTER_BYTES:,}")
    stream.seek(size_bytes - 8 - footer_bytes)
    data = stream.read(footer_bytes)
    stream.seek(0)
    try:
        footer, _ = read_struct(data)
        leaves = list(_leaves(iter(items(footer, 2, dict))))
        return tuple(_row_group(group, leaves) for group in items(footer, 4, dict))
    except (IndexError, KeyError, UnicodeDecodeError) as error:
        raise ValueError("its footer is damaged") from error


def _leaves(elements: Iterator[Struct], above: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """The columns below the next element of a schema, which lists its tree in depth-first order."""
    element = next(elements, {})
    name = element[4, BINARY]
    names = (*above, name.decode() if isinstance(name, bytes) else "")
    if len(names) > _DEEPEST_COLUMN:
        raise ValueError(f"its columns are nested more than {_DEEPEST_COLUMN} deep")
    children = integer(element, 5, I32)
    if not children and (1, I32) in element:  # otherwise a group, perhaps without fields
        yield Leaf(names=names[1:], holds_texts=element[1, I32] == _BYTE_ARRAY)
    for _ in range(children):
        yield from _leaves(elements, names)


def _row_group(fields: Struct, leaves: Sequence[Leaf]) -> RowGroup:
    columns = items(fields, 1, dict)
    if len(columns) != len(leaves):
        raise ValueError(f"it has {len(leaves)} columns, and {len(columns)} in a row group")
    group = RowGroup(
        rows=integer(fields, 3, I64),
        columns=tuple(map(_column, columns, leaves)),
    )
    # Arrow allocates memory for the stated rows; each row has at least one value, perhaps an empty
    # one.
    least = min((column.values for column in group.columns), default=group.rows)
    if group.rows > least:
        raise ValueError(f"a row group states {group.rows:,} rows and {least:,} values")
    return group


def _column(chunk: Struct, leaf: Leaf) -> ColumnChunk:
    fields = chunk[3, STRUCT]
    if not isinstance(fields, dict):
        raise ValueError("its footer is damaged")
    pages, dictionary = integer(fields, 9, I64), integer(fields, 11, I64)
    return ColumnChunk(
        leaf=leaf,
        # 0 means none: a column without rows may have a dictionary and no data page.
        offset_bytes=dictionary if 0 < dictionary < pages else pages,
        stored_bytes=integer(fields, 7, I64),
        unfolded_bytes=integer(fields, 6, I64),
        values=integer(fields, 5, I64),
        has_dictionary=not _DICTIONARIES.isdisjoint(items(fields, 2, int)),
    )
