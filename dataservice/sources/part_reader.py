"""Reads a part of an index: it is a user's file, so it is checked before it is used.

Arrow reads without threads of its own: one that still holds a Python file when the process ends
would end it with status 134.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataservice.core.errors import IndexStaleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.index_folder import IndexFolder, part_name
from dataservice.sources.index_part import (
    ADDED_COLUMNS,
    DETAIL_COLUMNS,
    ITEM_NOTES,
    LENGTH_COLUMNS,
    PACKED,
    ROWS_PER_GROUP,
    SCHEMA,
)
from dataservice.sources.length_columns import lengths_of
from dataservice.sources.length_records import LengthRecords
from dataservice.sources.manifest import AGAIN, PartRecord
from dataservice.sources.packed_lengths import is_known, pack_lengths, unpack_lengths
from dataservice.sources.rows_digest import LOSS_WEIGHT, RowsDigest
from dataservice.sources.soundness import (
    require_bounded,
    require_listed_alike,
    require_schema,
    require_sound,
)

_ROW_COLUMNS = [*LENGTH_COLUMNS, *DETAIL_COLUMNS, *ITEM_NOTES, LOSS_WEIGHT]
_COLUMNS = [*_ROW_COLUMNS, "content"]
ROWS_A_SHARE = 8 * ROWS_PER_GROUP  # of lengths, about: several shares are read at once
_LENGTHS_ALONE = [*LENGTH_COLUMNS, "item_shape"]


def read_part(
    folder: IndexFolder, record: PartRecord, limits: DecodeLimits, name: str = ""
) -> Iterator[tuple[pa.Table, LengthTable]]:
    """The columns of a part, one row group at a time, each with its lengths. A row that is no piece
    of a document has the piece 0, and one without a loss weight has 1, also where the part is of a
    release without the column. The part of a piece of a file has a `name` of its own.

    Raises IndexStaleError when the part is missing, damaged, or not the one that the manifest's
    `record` describes; the last is known only at the part's end.
    """
    name = name or part_name(record.file.name)
    found, digest = 0, RowsDigest()
    with _in_words(folder, name), folder.open(name) as stream:
        require_bounded(stream, limits)
        part = pq.ParquetFile(stream)
        require_schema(part.schema_arrow)
        for group in range(part.num_row_groups):
            whole = part.read_row_group(group, columns=[*_COLUMNS, PACKED], use_threads=False)
            table = _filled(whole.select(name for name in whole.schema.names if name != PACKED))
            lengths = lengths_of(table)
            require_sound(table, lengths, limits)
            if PACKED in whole.schema.names:
                _require_same(whole[PACKED], lengths, limits)
            digest.add(table)
            found += table.num_rows
            yield table, lengths
    if found != record.rows:
        raise IndexStaleError(_other_rows(folder, name, found, record))
    if (digest.identity, digest.places) != (record.identity, record.places):
        raise IndexStaleError(_damaged(folder, name, "holds other samples than its manifest says"))


def require_whole(folder: IndexFolder, record: PartRecord, limits: DecodeLimits, name: str) -> None:
    """Read every row of a part. Raises as `read_part` does."""
    for _ in read_part(folder, record, limits, name):
        pass


def part_lengths(
    folder: IndexFolder, record: PartRecord, limits: DecodeLimits
) -> list[Callable[[], Sequence[LengthRecords]]]:
    """Shares of a part's lengths, one behind the other; each reads its own. Their values are
    checked, and the part's rows and columns; neither its headers before Arrow reads them, nor its
    digests: read it in a process that may die, and by `read_part` before anything of it is kept.

    A share raises IndexStaleError when the part is missing or damaged, or has other rows than the
    manifest's `record` says.
    """
    part = _PartLengths(folder, record, limits)
    shares = max(1, record.rows // ROWS_A_SHARE)
    return [partial(part.read, k, shares) for k in range(shares)]


class _PartLengths:
    """The lengths of one part. May be read from several threads."""

    def __init__(self, folder: IndexFolder, record: PartRecord, limits: DecodeLimits) -> None:
        self._folder, self._record, self._limits = folder, record, limits
        self._footer: pq.FileMetaData | None = None  # takes longer to be read than a share

    def read(self, share: int, shares: int) -> Sequence[LengthRecords]:
        name = part_name(self._record.file.name)
        with _in_words(self._folder, name), self._folder.open(name) as stream:
            part = pq.ParquetFile(_arrow_file(stream), metadata=self._footer)
            if self._footer is None:
                self._footer = _with_rows(part, self._folder, name, self._record).metadata
            begin, end = (part.num_row_groups * k // shares for k in (share, share + 1))
            groups = range(begin, end)
            packed = _packed(part, groups, self._limits)
            return packed or [_lengths_alone(part, groups, self._limits)]


def _lengths_alone(part: pq.ParquetFile, groups: range, limits: DecodeLimits) -> LengthRecords:
    """The lengths of these row groups by their own columns."""
    table = part.read_row_groups(list(groups), columns=_LENGTHS_ALONE, use_threads=False)
    require_listed_alike(table)
    records = LengthRecords.of(lengths_of(table))
    records.require_sound(limits)
    return records


def _packed(
    part: pq.ParquetFile, groups: range, limits: DecodeLimits
) -> list[LengthRecords] | None:
    """The packed lengths of each of these row groups; None where another release wrote them."""
    if PACKED not in part.schema_arrow.names:
        return None
    cells: Any = part.read_row_groups(list(groups), columns=[PACKED], use_threads=False)[PACKED]
    found, row = [], 0
    for group in groups:
        rows = part.metadata.row_group(group).num_rows
        if rows:
            records = unpack_lengths(memoryview(cells[row].as_buffer() or b""), limits)
            if records is None:
                return None
            if len(records.llm_tokens) != rows:
                raise ValueError(f"it packs lengths of other than the {rows:,} rows of a group")
            found.append(records)
            row += rows
    return found


def _require_same(cells: Any, lengths: LengthTable, limits: DecodeLimits) -> None:
    """Raises ValueError where the first of a row group's cells packs other lengths than these."""
    if not len(cells):
        return
    first = cells[0].as_buffer() or b""
    if first != pack_lengths(lengths) and unpack_lengths(memoryview(first), limits) is not None:
        raise ValueError("it packs other lengths than it has")


def packed_cells(folder: IndexFolder, record: PartRecord) -> Iterator[tuple[int, bytes]]:
    """Of each row group of a part, how many rows it has, and their lengths packed. The part is not
    checked. Raises IndexStaleError where it cannot be read."""
    name = part_name(record.file.name)
    with _in_words(folder, name), folder.open(name) as stream:
        part = pq.ParquetFile(stream)
        for group in range(part.num_row_groups):
            rows, cell = part.metadata.row_group(group).num_rows, b""
            if PACKED in part.schema_arrow.names and rows:
                cells: Any = part.read_row_group(group, columns=[PACKED], use_threads=False)[PACKED]
                cell = cells[0].as_py() or b""
            if rows and not is_known(cell):  # another release has written it
                table = part.read_row_group(group, columns=_LENGTHS_ALONE, use_threads=False)
                cell = pack_lengths(lengths_of(table))
            if rows:
                yield rows, cell


def read_part_rows(
    folder: IndexFolder, record: PartRecord, rows: NDArray[np.int64], limits: DecodeLimits
) -> Iterator[pa.Table]:
    """These rows of a part, which rise, by row group: `read_part`'s columns but for the digests of
    contents. They are checked, and nothing else of the part: see `part_lengths`, also for what
    it raises."""
    name = part_name(record.file.name)
    with _in_words(folder, name), folder.open(name) as stream:
        part = _with_rows(pq.ParquetFile(_arrow_file(stream)), folder, name, record)
        sizes = [part.metadata.row_group(k).num_rows for k in range(part.num_row_groups)]
        starts = np.cumsum([0, *sizes])
        cuts = np.searchsorted(rows, starts)
        for group in np.flatnonzero(np.diff(cuts)).tolist():
            own = rows[cuts[group] : cuts[group + 1]] - starts[group]
            table = _filled(
                part.read_row_group(group, columns=_ROW_COLUMNS, use_threads=False).take(
                    pa.array(own)
                )
            )
            require_sound(table, lengths_of(table), limits)
            yield table


def _arrow_file(stream: IO[bytes]) -> "pa.NativeFile | IO[bytes]":
    """A local file as Arrow itself reads it, several at once; any other as it is."""
    try:
        return pa.OSFile(f"/proc/self/fd/{stream.fileno()}", "r")
    except (OSError, AttributeError):  # of another machine, or in memory
        return stream


def _with_rows(
    part: pq.ParquetFile, folder: IndexFolder, name: str, record: PartRecord
) -> pq.ParquetFile:
    """The part, if it has the columns of an index and as many rows as its manifest says."""
    require_schema(part.schema_arrow)
    if part.metadata.num_rows != record.rows:
        raise IndexStaleError(_other_rows(folder, name, part.metadata.num_rows, record))
    for number in range(part.num_row_groups):
        rows = part.metadata.row_group(number).num_rows
        if rows > ROWS_PER_GROUP:
            raise ValueError(f"row group {number} has {rows:,} rows")
    return part


def _filled(table: pa.Table) -> pa.Table:
    """The table with the meaning of empty cells in their place, or in that of a whole column."""
    for name, empty in ADDED_COLUMNS.items():
        place, kind = table.schema.get_field_index(name), SCHEMA.field(name).type
        if place < 0:
            cells = pa.array(np.full(table.num_rows, empty), type=kind)
            table = table.append_column(name, cells)
        else:
            given: Any = table[name]
            table = table.set_column(place, name, pc.fill_null(given, pa.scalar(empty, kind)))
    return table


def read_numbers(
    folder: IndexFolder, record: PartRecord, *names: str
) -> Iterator[tuple[NDArray[np.int32], ...]]:
    """These numbers of each of a part's samples, one row group at a time. The part is not checked.
    Raises IndexStaleError where it cannot be read."""
    name = part_name(record.file.name)
    with _in_words(folder, name), folder.open(name) as stream:
        part = pq.ParquetFile(stream)
        for group in range(part.num_row_groups):
            table = part.read_row_group(group, columns=list(names), use_threads=False)
            yield tuple(table[name].to_numpy() for name in names)


@contextmanager
def _in_words(folder: IndexFolder, name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise IndexStaleError(_damaged(folder, name, f"is missing or damaged ({error})")) from error


def _other_rows(folder: IndexFolder, name: str, found: int, record: PartRecord) -> str:
    return _damaged(folder, name, f"has {found} rows, its manifest says {record.rows}")


def _damaged(folder: IndexFolder, name: str, what: str) -> str:
    return (
        f"{folder.owner}: {folder.path}/{name} {what}. Write it again: {AGAIN}; the same files "
        "give the same index, and checkpoints fit it."
    )
