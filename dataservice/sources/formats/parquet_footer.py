"""What a Parquet file's footer says: row groups, and where their columns lie.

Source: parquet-format, `FileMetaData` in parquet.thrift.
"""

from dataclasses import dataclass
from typing import IO

from dataservice.sources.formats.thrift import Struct, integer, read_struct, structs

MAGIC = b"PAR1"
# Objects for a footer, ours and Arrow's, take some fifty times its size.
MOST_FOOTER_BYTES = 8 * 2**20
_DICTIONARIES = frozenset({2, 8})  # PLAIN_DICTIONARY, RLE_DICTIONARY
_BYTE_ARRAY = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChunk:
    """One column in one row group. Sizes are claims; `holds_texts`: strings or bytes."""

    path: str
    offset_bytes: int
    stored_bytes: int
    unfolded_bytes: int
    holds_texts: bool
    has_dictionary: bool

    @property
    def column(self) -> str:
        """The top-level column it is part of."""
        return self.path.split(".")[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """Consecutive rows."""

    rows: int
    columns: tuple[ColumnChunk, ...]

    @property
    def stored_bytes(self) -> int:
        """Its size in the file."""
        return sum(column.stored_bytes for column in self.columns)


def read_footer(stream: IO[bytes]) -> tuple[RowGroup, ...]:
    """The row groups of a file. Raises ValueError when it is no Parquet file."""
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
        return tuple(_row_group(group) for group in structs(footer, 4))
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("its footer is damaged") from error


def _row_group(fields: Struct) -> RowGroup:
    columns = [chunk[3] for chunk in structs(fields, 1)]
    return RowGroup(
        rows=integer(fields, 3),
        columns=tuple(_column(column) for column in columns if isinstance(column, dict)),
    )


def _column(fields: Struct) -> ColumnChunk:
    names, encodings = fields[3], fields[2]
    if not isinstance(names, list) or not isinstance(encodings, list):
        raise ValueError("its footer is damaged")
    start = integer(fields, 9)
    if 11 in fields:  # a dictionary page, which comes first
        start = min(start, integer(fields, 11))
    return ColumnChunk(
        path=b".".join(name for name in names if isinstance(name, bytes)).decode(),
        offset_bytes=start,
        stored_bytes=integer(fields, 7),
        unfolded_bytes=integer(fields, 6),
        holds_texts=fields.get(1) == _BYTE_ARRAY,
        has_dictionary=any(each in _DICTIONARIES for each in encodings if isinstance(each, int)),
    )
