"""Parquet: one sample per row, in the form that Hugging Face datasets writes; table_rows.py makes
samples of rows.

Row groups are the unit of reading. Each thread keeps its open files and the last row group, so that
neighbouring rows need one read; a row group too large to keep is decoded up to the wanted row.

A file of kilobytes can expand to gigabytes in three ways, each of which is bounded beforehand: its
pages (parquet_pages.py), values that many rows share (kept as Arrow's dictionaries), and rows as
Python objects (row_bytes.py).
"""

import contextlib
import posixpath
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import ClassVar, cast

import pyarrow as pa

from dataservice.core.errors import RESTORE, SampleError, SourceError, StorageAwayError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import RawSample, SampleLocation
from dataservice.sources.formats.parquet_file import Holding, ParquetFile
from dataservice.sources.formats.protocol import FilePiece, ScannedSample
from dataservice.sources.formats.table_columns import Columns, choose_columns, refuse_media
from dataservice.sources.formats.table_format import TableFormat
from dataservice.sources.formats.table_rows import Row
from dataservice.sources.storage import SourceFile, Storage

# Number of files that each thread keeps open.
OPEN_FILES = 8


class Parquet(TableFormat):
    """Parquet files; columns are chosen by name and type, file by file."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        super().__init__(spec, storage, limits)
        self._local = threading.local()

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All rows of a file, a few at a time. Raises SourceError when it is not a Parquet file."""
        return self.scan_piece(file, FilePiece(start=0, end=sys.maxsize))

    def divided(self, file: SourceFile, piece_bytes: int) -> tuple[FilePiece, ...]:
        """Pieces of whole row groups, each at its place among the stored bytes of all; see
        Divisible."""
        try:
            with self._groups(file) as (_, places):
                starts = [0]
                for place in places:
                    if not 0 <= place.start <= place.stop < file.size_bytes:
                        return ()  # a false footer, which the scan refuses
                    if place.start >= starts[-1] + piece_bytes:
                        starts.append(place.start)
        except StorageAwayError:
            raise
        except SourceError:
            return ()
        edges = [*starts, file.size_bytes]
        return tuple(FilePiece(start=start, end=end) for start, end in pairwise(edges))

    def records_in(self, file: SourceFile, piece: FilePiece) -> int:
        """Rows of a piece. They are not counted in names, which have the row group's number."""
        with self._groups(file) as (opened, places):
            rows = (
                meta.rows
                for meta, place in zip(opened.groups, places, strict=True)
                if place.start in range(piece.start, piece.end)
            )
            return sum(rows)

    def scan_piece(self, file: SourceFile, piece: FilePiece) -> Iterator[ScannedSample]:
        """The rows of a piece's row groups, a few at a time."""
        with self._groups(file) as (opened, places):
            for group, place in enumerate(places):
                if place.start not in range(piece.start, piece.end):
                    continue
                for row, cells in self._rows(opened, group, opened.holding(group)):
                    fallback_key = f"{posixpath.basename(file.path)}:{group}:{row}"
                    key, raw = self._samples.scanned(opened.columns, cells, file.path, fallback_key)
                    yield ScannedSample(
                        key=key,
                        location=SampleLocation(file=file.path, row_group=group, row=row),
                        raw=raw,
                        behind_bytes=min(place.stop, file.size_bytes),
                    )

    @contextlib.contextmanager
    def _groups(self, file: SourceFile) -> Iterator[tuple[ParquetFile, list[range]]]:
        """A file opened for indexing, and the place of each row group among the stored bytes of
        all."""
        with (
            self._storage.translate(file.path, "be read as Parquet"),
            contextlib.closing(self._open(file.path, indexing=True)) as opened,
        ):
            ends = accumulate((meta.stored_bytes for meta in opened.groups), initial=0)
            yield opened, [range(start, stop) for start, stop in pairwise(ends)]

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample from its row."""
        with self._storage.translate(location.file, "be read as Parquet"):
            columns, cells = self._row(location)
        if isinstance(cells, SampleError):
            raise cells
        return self._samples.sample(key, columns, cells, location.file)

    # ---- random access --------------------------------------------------------------------

    def _row(self, location: SampleLocation) -> tuple[Columns, Row | SampleError]:
        opened = self._kept_file(location.file)
        group, row = location.row_group, location.row
        if not (0 <= group < len(opened.groups) and 0 <= row < opened.groups[group].rows):
            raise SourceError(
                f"{self._owner}: {location.file} has no row {row} in row group {group}. The file "
                f"was changed after it was indexed. {RESTORE}"
            )
        table = self._kept_group(location, opened)
        if table is not None:
            batches = table.slice(row, 1).to_batches()
            cells = (
                cells for batch in batches for cells in self._samples.cells(batch, opened.columns)
            )
            return opened.columns, next(cells)
        rows = self._rows(opened, group, self._local.holding)
        return opened.columns, next(cells for at, cells in rows if at == row)

    def _kept_file(self, path: str) -> ParquetFile:
        """This file, kept open by this thread."""
        files: OrderedDict[str, ParquetFile] = self._local.__dict__.setdefault(
            "files", OrderedDict()
        )
        if path not in files:
            files[path] = self._open(path, indexing=False)
        files.move_to_end(path)
        while len(files) > OPEN_FILES:
            files.popitem(last=False)[1].close()
        return files[path]

    def _kept_group(self, location: SampleLocation, opened: ParquetFile) -> pa.Table | None:
        """This thread's last row group; None when the row group is too large to hold whole."""
        wanted = (location.file, location.row_group)
        if getattr(self._local, "group", None) != wanted:
            self._local.group = self._local.table = None
            self._local.holding = opened.holding(location.row_group)
            if self._local.holding == "whole":
                self._local.table = opened.table(location.row_group)
            self._local.group = wanted
        return cast("pa.Table | None", self._local.table)

    def _open(self, path: str, *, indexing: bool) -> ParquetFile:
        owner = f"{self._owner}: {path}"
        with contextlib.ExitStack() as opening:
            stream = opening.enter_context(self._storage.open(path))
            opened = ParquetFile.open(
                stream,
                owner=owner,
                columns_of=lambda schema: choose_columns(schema, self._spec, owner),
                limits=self._limits,
                looks_at_pages=indexing or self._storage.is_local,
                with_unknown=indexing,
            )
            opening.pop_all()
        return opened

    def _rows(
        self, opened: ParquetFile, group: int, holding: Holding
    ) -> Iterator[tuple[int, Row | SampleError]]:
        """(row in the group; its cells, or the error why it has none) for all rows of a row
        group."""
        row = 0
        columns = opened.columns
        for batch in opened.batches(group, holding):
            if columns.unknown and len(opened.names) > len(columns.read):
                refuse_media(batch, columns, opened.owner)
                batch = batch.select(columns.read)
            for cells in self._samples.cells(batch, columns):
                yield row, cells
                row += 1
        if row < opened.groups[group].rows:
            raise SourceError(
                f"{opened.owner} is damaged: its row group {group} ends before row {row} of "
                f"{opened.groups[group].rows:,}. Copy the file again."
            )
