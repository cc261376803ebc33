"""Parquet: one sample a row, in the form that Hugging Face datasets writes.

    image (or the source's image_column)   struct{bytes, path}, a list of them, bytes, or a path
    conversations, messages                list<struct>, or a string of JSON
    text and other textual columns         as they are

Row groups are the unit of reading. Each thread keeps its open files and the last row group,
so that neighbouring rows cost one read; a row group too large to keep is walked up to the row.
"""

import posixpath
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, cast

import pyarrow as pa
import pyarrow.parquet as pq

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import MediaBlob, RawSample, SampleLocation
from dataservice.sources.formats.content import parse_json, record_key
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.storage import SourceFile, Storage

Row = dict[str, object]

_DEFAULT_IMAGE_COLUMN = "image"
_JSON_COLUMNS = ("conversations", "messages")
_SCAN_ROWS = 32
_OPEN_FILES = 8
_KEPT_ROW_GROUP_BYTES = 64 * 1024 * 1024  # a thread and source


class Parquet:
    """Parquet files; columns are chosen by name and type, file by file."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def __init__(self, spec: SourceSpec, storage: Storage) -> None:
        self._spec = spec
        self._owner = f"source {spec.name!r}"
        self._storage = storage
        self._local = threading.local()

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All rows of a file, a few at a time. Raises SourceError when it is no Parquet file."""
        with self._storage.translate(file.path, "be read as Parquet"), self._open(file.path) as pf:
            columns = self._columns(pf.schema_arrow, file.path)
            behind_bytes = 0
            for group in range(pf.num_row_groups):
                behind_bytes += _stored_bytes(pf, group)
                for row, cells in _rows(pf, group, columns):
                    key, raw = self._scanned(file.path, group, row, cells)
                    yield ScannedSample(
                        key=key,
                        location=SampleLocation(file=file.path, row_group=group, row=row),
                        raw=raw,
                        behind_bytes=min(behind_bytes, file.size_bytes),
                    )

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample from its row."""
        with self._storage.translate(location.file, "be read as Parquet"):
            cells = self._row(location)
        record, media = self._parse(cells, location.file)
        return RawSample(key=key, record=record, media=media)

    # ---- rows to samples ------------------------------------------------------------------

    def _scanned(
        self, path: str, group: int, row: int, cells: Row
    ) -> tuple[str, RawSample | SampleError]:
        key = record_key(cells, f"{posixpath.basename(path)}:{group}:{row}")
        try:
            record, media = self._parse(cells, path)
        except SampleError as error:
            return key, error
        return key, RawSample(key=key, record=record, media=media)

    def _parse(self, cells: Row, path: str) -> tuple[Row, tuple[MediaBlob, ...]]:
        column = self._image_column(cells)
        record = {
            name: parse_json(value, f"column {name!r}")
            if name in _JSON_COLUMNS and isinstance(value, str)
            else _without_nulls(value)
            for name, value in cells.items()
            if name != column and value is not None
        }
        value = cells.get(column) if column else None
        images = value if isinstance(value, list) else [] if value is None else [value]
        media = tuple(
            self._blob(image, f"{column}[{place}]", path) for place, image in enumerate(images)
        )
        return record, media

    def _blob(self, cell: object, place: str, path: str) -> MediaBlob:
        """One image cell; null bytes mean that its path, beside the Parquet file, holds them."""
        data, name = cell, ""
        if isinstance(cell, Mapping):
            data, name = cell.get("bytes"), str(cell.get("path") or "")
        elif isinstance(cell, str):
            data, name = None, cell
        if data is None:
            if not name:
                raise SampleError(
                    f"{place} has neither bytes nor a path. Store the image's file in `bytes`."
                )
            return MediaBlob(kind="image", name=name, data=self._storage.read_beside(path, name))
        if not isinstance(data, bytes):
            raise SampleError(
                f"{place} holds {type(data).__name__}; it must be struct{{bytes, path}}, the "
                "encoded bytes, or a path."
            )
        return MediaBlob(kind="image", name=name or place, data=data)

    # ---- columns --------------------------------------------------------------------------

    def _image_column(self, names: "Sequence[str] | Row") -> str | None:
        """The source's image column; `images` stands in for an absent default."""
        wanted = self._spec.image_column
        if wanted in names:
            return wanted
        return "images" if wanted == _DEFAULT_IMAGE_COLUMN and "images" in names else None

    def _columns(self, schema: pa.Schema, path: str) -> list[str]:
        """The image column and the textual ones; vectors and other binaries stay unread."""
        image = self._image_column(schema.names)
        if image is None and self._spec.image_column != _DEFAULT_IMAGE_COLUMN:
            raise SourceError(
                f"{self._owner}: {path} has no column {self._spec.image_column!r}; it has "
                f"{', '.join(schema.names)}. Correct the source's image_column."
            )
        return [f.name for f in schema if f.name == image or _is_textual(f.type)]

    # ---- random access --------------------------------------------------------------------

    def _row(self, location: SampleLocation) -> Row:
        pf = self._kept_file(location.file)
        group, row = location.row_group, location.row
        if not (
            0 <= group < pf.num_row_groups and 0 <= row < pf.metadata.row_group(group).num_rows
        ):
            raise SourceError(
                f"{self._owner}: {location.file} has no row {row} in row group {group}. The file "
                "was changed after it was indexed: run `dataservice index JOB.yaml`."
            )
        columns = self._columns(pf.schema_arrow, location.file)
        if pf.metadata.row_group(group).total_byte_size > _KEPT_ROW_GROUP_BYTES:
            return next(cells for at, cells in _rows(pf, group, columns) if at == row)
        return cast(Row, self._kept_group(location, pf, columns).slice(row, 1).to_pylist()[0])

    def _kept_file(self, path: str) -> pq.ParquetFile:
        """This thread's open file."""
        files: OrderedDict[str, pq.ParquetFile] = self._local.__dict__.setdefault(
            "files", OrderedDict()
        )
        if path not in files:
            files[path] = self._open(path)
        files.move_to_end(path)
        while len(files) > _OPEN_FILES:
            files.popitem(last=False)[1].close()
        return files[path]

    def _kept_group(
        self, location: SampleLocation, pf: pq.ParquetFile, columns: Sequence[str]
    ) -> pa.Table:
        """This thread's last row group."""
        wanted = (location.file, location.row_group)
        if getattr(self._local, "group", None) != wanted:
            self._local.group = None
            self._local.table = pf.read_row_group(
                location.row_group, columns=list(columns), use_threads=False
            )
            self._local.group = wanted
        return cast(pa.Table, self._local.table)

    def _open(self, path: str) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(path, filesystem=self._storage.fs)
        except pa.ArrowInvalid as error:
            raise SourceError(
                f"{self._owner}: {path} is not a Parquet file, or a truncated one: {error}. Copy "
                "the file again, or correct the source's format."
            ) from error


def _rows(pf: pq.ParquetFile, group: int, columns: Sequence[str]) -> Iterator[tuple[int, Row]]:
    """(row in the group, cells) of a row group, holding a few rows at a time."""
    row = 0
    batches = pf.iter_batches(
        batch_size=_SCAN_ROWS, row_groups=[group], columns=list(columns), use_threads=False
    )
    for batch in batches:
        for cells in batch.to_pylist():
            yield row, cells
            row += 1


def _stored_bytes(pf: pq.ParquetFile, group: int) -> int:
    meta = pf.metadata.row_group(group)
    return sum(meta.column(k).total_compressed_size for k in range(meta.num_columns))


def _is_textual(kind: pa.DataType) -> bool:
    """Whether a column may be part of a JSON record: text, plain scalars, and nests of text."""
    if pa.types.is_dictionary(kind):
        return _is_textual(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = kind.value_type
        numeric = pa.types.is_integer(inner) or pa.types.is_floating(inner)
        return not numeric and _is_textual(inner)
    if pa.types.is_struct(kind):
        return all(_is_textual(kind.field(k).type) for k in range(kind.num_fields))
    return (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
    )


def _without_nulls(value: object) -> object:
    """A struct's absent fields come as None; a record simply lacks them."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
