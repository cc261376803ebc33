"""The size that a Parquet column's pages decompress to, known before Arrow decompresses them.

The sizes in the footer are a writer's claims, and Arrow does not compare pages with them: a page of
a kilobyte may decompress to two gigabytes. The true sizes are in the header of each page, so all
headers are read first, and the pages themselves are skipped.

Source: parquet-format, `PageHeader` in parquet.thrift.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from dataservice.core.errors import SourceError
from dataservice.core.limits import DecodeLimits
from dataservice.sources.formats.parquet_footer import ColumnChunk
from dataservice.sources.formats.thrift import I32, STRUCT, Struct, integer, read_struct

_HEADER_BYTES = 4096
_LONGEST_HEADER_BYTES = 2**24  # statistics may hold whole values
# Fields of PageHeader; and for each type of data page, the field of its own header and the field
# `encoding` within that.
_TYPE, _UNCOMPRESSED, _COMPRESSED = 1, 2, 3
_DATA_PAGES = {0: (5, 2), 3: (8, 4)}
_DICTIONARY_PAGE = 2
_DELTA_BYTE_ARRAY = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnPages:
    """One column in one row group: the sum and the maximum of its pages' uncompressed sizes, and
    the number of its values, items of lists included. `shares_prefixes`: each value repeats a part
    of the one before (DELTA_BYTE_ARRAY), so that decoded pages are larger than their uncompressed
    size."""

    size_bytes: int = 0
    largest_bytes: int = 0
    values: int = 0
    dictionary_bytes: int = 0
    shares_prefixes: bool = False


def column_pages(stream: IO[bytes], column: ColumnChunk) -> ColumnPages:
    """Read the page headers of a column. Raises ValueError when they are damaged."""
    size_bytes = largest_bytes = values = dictionary_bytes = 0
    shares_prefixes = False
    if not column.values:  # nothing of it is read, whatever pages it has
        return ColumnPages()
    for header in _headers(stream, column.offset_bytes, column.stored_bytes):
        page_bytes = integer(header, _UNCOMPRESSED, I32)
        size_bytes += page_bytes
        largest_bytes = max(largest_bytes, page_bytes)
        kind = integer(header, _TYPE, I32)
        if kind == _DICTIONARY_PAGE:
            dictionary_bytes = max(dictionary_bytes, page_bytes)
        own, encoding = _DATA_PAGES.get(kind, (0, 0))
        fields = header.get((own, STRUCT))
        if isinstance(fields, dict):
            values += integer(fields, 1, I32)
            shares_prefixes |= fields.get((encoding, I32)) == _DELTA_BYTE_ARRAY
    if values < column.values:
        raise ValueError(f"its pages hold {values:,} of the {column.values:,} values it states")
    return ColumnPages(
        size_bytes=size_bytes,
        largest_bytes=largest_bytes,
        values=values,
        dictionary_bytes=dictionary_bytes,
        shares_prefixes=shares_prefixes,
    )


def require_allowed(pages: ColumnPages, limits: DecodeLimits, what: str) -> None:
    """Raises SourceError when reading the column would take more than the limits allow."""
    for limit, value, unit in (
        ("max_page_bytes", pages.largest_bytes, "bytes in one page"),
        ("max_page_bytes", 4 * pages.dictionary_bytes, "bytes in four copies of its dictionary"),
        ("max_row_group_values", pages.values, "values"),
    ):
        if value > getattr(limits, limit):
            raise SourceError(
                f"{what} has {value:,} {unit}; the limit {limit} is {getattr(limits, limit):,}. "
                "Write the file again with smaller row groups, such as row_group_size=100."
            )


def _headers(stream: IO[bytes], start: int, size_bytes: int) -> Iterator[Struct]:
    end = start + size_bytes
    while start < end:
        header, header_bytes = _header(stream, start)
        yield header
        start += header_bytes + integer(header, _COMPRESSED, I32)


def _header(stream: IO[bytes], start: int) -> tuple[Struct, int]:
    """The header at an offset, and its own size in bytes."""
    wanted = _HEADER_BYTES
    while True:
        stream.seek(start)
        data = stream.read(wanted)
        try:
            return read_struct(data)
        except IndexError:
            if len(data) < wanted or wanted >= _LONGEST_HEADER_BYTES:
                raise ValueError(f"the page header at byte {start} does not end") from None
            wanted *= 16
