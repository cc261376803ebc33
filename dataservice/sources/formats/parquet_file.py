"""One open Parquet file, whose row groups are checked before they are decompressed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Literal

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


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFile:
    """`columns` says what each column of the schema is for; `names` are the columns that are read.
    With `looks_at_pages`, every page's header is read first, which over a network costs a request
    per page."""

    owner: str
    stream: IO[bytes]
    opened: pq.ParquetFile
    groups: tuple[RowGroup, ...]
    columns: Columns
    names: list[str]
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
        columns = columns_of(opened.schema_arrow)
        return ParquetFile(
            owner=owner,
            stream=stream,
            opened=opened,
            groups=groups,
            columns=columns,
            names=[*columns.read, *(columns.unknown if with_unknown else ())],
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
        return self.opened.iter_batches(
            batch_size=1 if holding == "one row" else FEW_ROWS,
            row_groups=[group],
            columns=self.names,
            use_threads=False,
        )

    def table(self, group: int) -> pa.Table:
        """A whole row group."""
        return self.opened.read_row_group(group, columns=self.names, use_threads=False)


def _shared_columns(groups: Sequence[RowGroup]) -> list[str]:
    """Columns of strings or bytes that have a dictionary in some row group."""
    shared = {
        column.leaf.path
        for group in groups
        for column in group.columns
        if column.leaf.holds_texts and column.has_dictionary
    }
    return sorted(shared)
