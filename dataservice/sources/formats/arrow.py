"""Arrow IPC: one sample per row, in files as Hugging Face's `save_to_disk` writes them (streams)
and as `pyarrow.ipc.new_file` does; table_rows.py makes samples of rows.

A row is read by the byte ranges of its cells (arrow_rows.py), whatever the size of its record
batch. Arrow's own reader sees the schema alone. What a message states is compared with the file
and the limits before it is believed (arrow_messages.py); compressed batches have no cells that
could be read by themselves, and are refused.
"""

import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, cast

import pyarrow as pa

from dataservice.core.errors import RESTORE, SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import cut
from dataservice.core.sample import ByteSpan, RawSample, SampleLocation
from dataservice.sources.formats.arrow_messages import BatchMessage, read_schema, record_batches
from dataservice.sources.formats.arrow_rows import (
    ArrayOfBatch,
    SpanBytes,
    arrays_of,
    has_layout,
    is_readable,
    read_array,
)
from dataservice.sources.formats.listing import listed_files
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.table_columns import Columns, choose_columns, refuse_media
from dataservice.sources.formats.table_format import KEPT_DESCRIPTIONS, TableFormat
from dataservice.sources.formats.table_rows import Row
from dataservice.sources.storage import SourceFile, Storage

# Rows that are scanned at once.
FEW_ROWS = 256
FEW_BYTES = 8 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrowFile:
    """What a file's schema says: all its columns, what each is for, and where batches begin."""

    schema: pa.Schema
    columns: Columns
    batches_at: int


class Arrow(TableFormat):
    """Arrow files; columns are chosen by name and type, file by file."""

    suffixes: ClassVar[tuple[str, ...]] = (".arrow",)

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        super().__init__(spec, storage, limits)
        self._opened = lru_cache(KEPT_DESCRIPTIONS)(self._open)

    def files(self) -> tuple[SourceFile, ...]:
        """The files at the source's URL. Of a folder of `save_to_disk`, those that its
        `state.json` names; a folder of several splits is refused."""
        return listed_files(
            self._storage,
            self._storage.files(self.suffixes),
            self._owner,
            list_names=("state.json",),
            names_in=_data_files,
        )

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All rows of a file, a few at a time. Raises SourceError when it is not an Arrow file, or
        a damaged one."""
        with (
            self._storage.translate(file.path, "be read as Arrow"),
            self._damage(file.path, "Arrow file"),
        ):
            opened = self._open(file.path)
            with self._storage.open(file.path) as stream:
                for number, batch in enumerate(record_batches(stream, opened.batches_at)):
                    for row, spans, cells in self._rows(file.path, opened, batch):
                        fallback_key = f"{posixpath.basename(file.path)}:{number}:{row}"
                        key, raw = self._samples.scanned(
                            opened.columns, cells, file.path, fallback_key
                        )
                        yield ScannedSample(
                            key=key,
                            location=SampleLocation(
                                file=file.path, spans=spans, row_group=number, row=row
                            ),
                            raw=raw,
                            behind_bytes=batch.end_bytes,
                        )

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample from the byte ranges of its cells."""
        size_bytes = sum(span.size_bytes for span in location.spans)
        self._limits.check("max_sample_bytes", size_bytes, "the row: bytes")
        with self._storage.translate(location.file, "be read as Arrow"):
            columns, batch = self._row(location)
            (cells,) = self._samples.cells(batch, columns)
        if isinstance(cells, SampleError):
            raise cells
        return self._samples.sample(key, columns, cells, location.file)

    # ---- files ----------------------------------------------------------------------------

    def _open(self, path: str) -> ArrowFile:
        """A file by its schema. Raises ValueError when it is no Arrow file, SourceError when its
        columns cannot be read."""
        owner = f"{self._owner}: {path}"
        with self._storage.open(path) as stream:
            schema, batches_at = read_schema(stream)
        if len(set(schema.names)) < len(schema.names):
            raise ValueError("two of its columns have one name")
        # An extension's values are those of the type that stores them.
        fields = [_stored_field(field) for field in schema]
        schema = pa.schema(fields, cast("dict[bytes | str, bytes | str] | None", schema.metadata))
        columns = choose_columns(schema, self._spec, owner)
        if not columns.read:
            raise SourceError(
                f"{owner} has no column of text, numbers or media; it has "
                f"{cut(', '.join(schema.names))}. Correct the source's url or its ignore."
            )
        scanned = (*columns.read, *columns.unknown)
        for field in schema:
            known = is_readable if field.name in scanned else has_layout
            if not known(field.type):
                raise SourceError(
                    f"{owner}: column {field.name!r} is of type {field.type!s:.200}, which is not "
                    "read from Arrow files. Write it as a plain type, or leave it out (in "
                    "datasets: cast_column, remove_columns)."
                )
        return ArrowFile(schema=schema, columns=columns, batches_at=batches_at)

    # ---- rows -----------------------------------------------------------------------------

    def _rows(
        self, path: str, opened: ArrowFile, message: BatchMessage
    ) -> Iterator[tuple[int, tuple[ByteSpan, ...], Row | SampleError]]:
        """(row in a record batch; the spans that a sample is made of; its cells, or the error why
        it has none)."""
        columns = opened.columns
        scanned = (*columns.read, *columns.unknown)
        arrays = self._arrays(path, opened, message, scanned)
        for rows, size_bytes in _windows(arrays, message.rows):
            if len(rows) == 1:  # as a row of any size stands alone
                try:
                    self._limits.check("max_sample_bytes", size_bytes, "the row: bytes")
                except SampleError as error:
                    yield rows.start, tuple(_spans(arrays, rows, columns.read)), error
                    continue
            spans = tuple(_spans(arrays, rows, scanned))
            batch = self._read(path, opened, scanned, rows, spans)
            refuse_media(batch, columns, f"{self._owner}: {path}")
            each_cells = self._samples.cells(batch.select(columns.read), columns)
            for row, cells in zip(rows, each_cells, strict=True):
                yield row, tuple(_spans(arrays, range(row, row + 1), columns.read)), cells

    def _arrays(
        self, path: str, opened: ArrowFile, message: BatchMessage, names: Sequence[str]
    ) -> dict[str, ArrayOfBatch]:
        """The arrays of these columns, with their offsets."""
        if message.is_compressed:
            raise SourceError(
                f"{self._owner}: {path} has compressed record batches, whose rows cannot be read "
                "one by one. Write it without compression, as save_to_disk does (in pyarrow: "
                "IpcWriteOptions(compression=None); media inside are compressed already)."
            )
        arrays = arrays_of(message, opened.schema, names, self._limits)
        lists = [each for array in arrays.values() for each in array.with_offsets()]
        blobs = self._storage.read_spans(path, [each.offsets_span for each in lists])
        for each, data in zip(lists, blobs, strict=True):
            each.load_offsets(data)
        return arrays

    def _read(
        self,
        path: str,
        opened: ArrowFile,
        names: Sequence[str],
        rows: range,
        spans: Sequence[ByteSpan],
    ) -> pa.RecordBatch:
        """These rows of a batch, of these columns. Raises ValueError when the spans hold others."""
        found = SpanBytes(spans, self._storage.read_spans(path, spans))
        schema = pa.schema([opened.schema.field(name) for name in names])
        arrays = [
            read_array(field.type, rows.start, len(rows), found, self._limits, place=str(number))
            for number, field in enumerate(schema)
        ]
        if found.taken < len(spans):
            raise ValueError("its spans hold more than its columns")
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        batch.validate(full=True)
        return batch

    def _row(self, location: SampleLocation) -> tuple[Columns, pa.RecordBatch]:
        """The columns of a file, and a batch of one row."""
        row = location.row
        try:
            opened = self._opened(location.file)
            names, rows = opened.columns.read, range(row, row + 1)
            return opened.columns, self._read(location.file, opened, names, rows, location.spans)
        except ValueError as error:
            raise SourceError(
                f"{self._owner}: {location.file} has no row {row} of record batch "
                f"{location.row_group} where the index says ({cut(error)}). The file was changed "
                f"after it was indexed. {RESTORE}"
            ) from error


def _windows(arrays: Mapping[str, ArrayOfBatch], rows: int) -> Iterator[tuple[range, int]]:
    """(Neighbouring rows that are read together, their bytes): a few rows, or a single one of any
    size."""
    first = size_bytes = 0
    for row in range(rows):
        row_bytes = sum(span.size_bytes for span in _spans(arrays, range(row, row + 1), arrays))
        if row > first and (size_bytes + row_bytes > FEW_BYTES or row - first == FEW_ROWS):
            yield range(first, row), size_bytes
            first, size_bytes = row, 0
        size_bytes += row_bytes
    if rows:
        yield range(first, rows), size_bytes


def _spans(
    arrays: Mapping[str, ArrayOfBatch], rows: range, names: Iterable[str]
) -> Iterator[ByteSpan]:
    for number, name in enumerate(names):
        yield from arrays[name].spans(rows.start, len(rows), str(number))


def _stored_field(field: "pa.Field[Any]") -> "pa.Field[Any]":
    kind = field.type
    is_extension = isinstance(kind, pa.BaseExtensionType)
    return field.with_type(kind.storage_type) if is_extension else field


def _data_files(state: Mapping[str, object]) -> list[str]:
    """The files that a `state.json` names."""
    stated = cast(Sequence[Mapping[str, str]], state["_data_files"])
    return [each["filename"] for each in stated]
