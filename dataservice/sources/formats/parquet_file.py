"""One open Parquet file, whose row groups are checked before they are decompressed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from dataservice.core.errors import SourceError
from dataservice.core.limits import DecodeLimits
from dataservice.sources.formats.parquet_footer import ColumnChunk, RowGroup, read_footer
from dataservice.sources.formats.parquet_pages import (
    ColumnPages,
    column_pages,
    require_allowed,
)
from dataservice.sources.formats.table_columns import Columns

KEPT_BYTES = 64 * 2**20
FEW_ROWS = 32
_READ_BUFFER_BYTES = 256 * 1024

Holding = Literal["whole", "few rows", "one row"]
"""The part of a row group that may be in memory at once."""
Rows = TypeVar("Rows", pa.RecordBatch, pa.Table)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFile:
    """`columns` says what each column of the schema is for; `names` are the columns that are read,
    those of `views` as plain values. With `looks_at_pages`, every page's header is read first,
    which over a network costs a request per page."""

    owner: str
    stream: IO[bytes]
    opened: pq.ParquetFile
    groups: tuple[RowGroup, ...]
    columns: Columns
    names: list[str]
    views: frozenset[str]
    limits: DecodeLimits
    looks_at_pages: bool

    @staticmethod
    def open(
        stream: IO[bytes],
        *,
        owner: str,
        columns_of: Callable[[pa.Schema], Columns],
        limits: DecodeLimits,
        looks_at_pages: bool,
        with_unknown: bool,
    ) -> "ParquetFile":
        """Open a file. `columns_of` chooses columns from the schema; columns of unknown use are
        read only on request.

        Raises:
            SourceError: the file is not Parquet or lacks the columns; the message begins with
                `owner`.
        """
        try:
            groups = read_footer(stream)
            opened = pq.ParquetFile(
                stream,
                # Shared values stay shared: as plain values, a page may grow a million times.
                read_dictionary=_shared_columns(groups),
                pre_buffer=False,
                buffer_size=_READ_BUFFER_BYTES,
                page_checksum_verification=True,
            )
        except (pa.ArrowInvalid, ValueError) as error:
            raise SourceError(
                f"{owner} is not a Parquet file, or a truncated one: {error}. Copy the file again, "
                "or correct the source's format."
            ) from error
        stated: pa.Schema = opened.schema_arrow
        plain = list(map(_plain_field, stated))
        columns = columns_of(pa.schema(plain).with_metadata(stated.metadata))
        return ParquetFile(
            owner=owner,
            stream=stream,
            opened=opened,
            groups=groups,
            columns=columns,
            names=[*columns.read, *(columns.unknown if with_unknown else ())],
            views=frozenset(a.name for a, b in zip(stated, plain, strict=True) if a != b),
            limits=limits,
            looks_at_pages=looks_at_pages,
        )

    def close(self) -> None:
        """Close the file and its stream."""
        self.opened.close(force=True)
        self.stream.close()

    def holding(self, group: int) -> Holding:
        """The part of a row group to hold. Raises SourceError when even one row takes more than the
        limits allow, ValueError when its pages are damaged."""
        claimed_bytes, found_bytes, shares_prefixes = 0, 0, False
        for column in self.groups[group].columns:
            if column.leaf.names[0] not in self.names:
                continue
            what = f"{self.owner}: column {column.leaf.path!r} of row group {group}"
            pages = self._pages(column)
            require_allowed(pages, self.limits, what)
            if pages.dictionary_bytes and not column.has_dictionary:
                raise ValueError(f"{what} has a dictionary that the footer does not name")
            if pages.shares_prefixes and pages.values > self.groups[group].rows:
                raise SourceError(
                    f"{what} keeps lists as DELTA_BYTE_ARRAY, whose size shows only once they "
                    "are decoded. Write the file again with another encoding."
                )
            claimed_bytes += column.unfolded_bytes
            found_bytes += pages.size_bytes
            shares_prefixes |= pages.shares_prefixes
        if shares_prefixes:
            return "one row"
        return "whole" if max(claimed_bytes, found_bytes) <= KEPT_BYTES else "few rows"

    def _pages(self, column: ColumnChunk) -> ColumnPages:
        """The figures of a column's page headers, or those that the footer has of them."""
        if self.looks_at_pages:
            return column_pages(self.stream, column)
        return ColumnPages(values=column.values)

    def batches(self, group: int, holding: Holding) -> Iterator[pa.RecordBatch]:
        """A row group from its beginning, a few rows at a time."""
        batches = self.opened.iter_batches(
            batch_size=1 if holding == "one row" else FEW_ROWS,
            row_groups=[group],
            columns=self.names,
            use_threads=False,
        )
        return map(self._plain, batches)

    def table(self, group: int) -> pa.Table:
        """A whole row group."""
        rows = self.opened.read_row_group(group, columns=self.names, use_threads=False)
        return self._plain(rows)

    def _plain(self, rows: Rows) -> Rows:
        for name in self.views.intersection(self.names):
            place = rows.schema.get_field_index(name)
            field = _plain_field(rows.schema.field(place))
            column: Any = rows.column(place)
            rows = rows.set_column(place, field, column.cast(field.type))
        return rows


def _plain_field(field: "pa.Field[Any]") -> "pa.Field[Any]":
    """The field with the plain type of the same values where Arrow's views are in it, as Parquet
    files say that a writer had them: what columns are for, and the size of rows, is told by plain
    types alone."""
    return field.with_type(_plain_type(field.type))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        fields = [kind.field(place) for place in range(kind.num_fields)]
        return pa.struct(list(map(_plain_field, fields)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        items = _plain_field(kind.value_field)
        return pa.list_(items) if pa.types.is_list(kind) else pa.large_list(items)
    return kind


def _shared_columns(groups: Sequence[RowGroup]) -> list[str]:
    """Columns of strings or bytes that have a dictionary in some row group."""
    shared = {
        column.leaf.path
        for group in groups
        for column in group.columns
        if column.leaf.holds_texts and column.has_dictionary
    }
    return sorted(shared)
