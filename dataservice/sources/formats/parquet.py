"""Parquet: one sample a row, in the form that Hugging Face datasets writes.

    image (or the source's image_column)   struct{bytes, path}, a list of them, bytes, or a path
    conversations, messages                list<struct>, or a string of JSON
    text and other textual columns         as they are

Row groups are the unit of reading. Each thread keeps its open files and the last row group,
so that neighbouring rows cost one read; a row group too large to keep is walked up to the row.

A file of kilobytes may unfold to gigabytes at three places, and each is bounded before it is
entered: its pages (parquet_pages.py), values that many rows share (kept as Arrow's
dictionaries), and rows as Python objects (parquet_rows.py).
"""

import contextlib
import posixpath
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, cast

import numpy as np
import pyarrow as pa

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaBlob, RawSample, SampleLocation
from dataservice.sources.formats.content import parse_json, record_key
from dataservice.sources.formats.parquet_file import Holding, ParquetFile
from dataservice.sources.formats.parquet_rows import row_bytes
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.storage import SourceFile, Storage

Row = dict[str, object]

_DEFAULT_IMAGE_COLUMN = "image"
_JSON_COLUMNS = ("conversations", "messages")
_OPEN_FILES = 8


class Parquet:
    """Parquet files; columns are chosen by name and type, file by file."""

    suffixes: ClassVar[tuple[str, ...]] = (".parquet",)

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        self._spec = spec
        self._owner = f"source {spec.name!r}"
        self._storage = storage
        self._limits = limits
        self._local = threading.local()

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All rows of a file, a few at a time. Raises SourceError when it is no Parquet file."""
        with (
            self._storage.translate(file.path, "be read as Parquet"),
            contextlib.closing(self._open(file.path, looks_at_pages=True)) as opened,
        ):
            behind_bytes = 0
            for group, meta in enumerate(opened.groups):
                behind_bytes += meta.stored_bytes
                for row, cells in self._rows(opened, group, opened.holding(group)):
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
        if isinstance(cells, SampleError):
            raise cells
        record, media = self._parse(cells, location.file)
        return RawSample(key=key, record=record, media=media)

    # ---- rows to samples ------------------------------------------------------------------

    def _scanned(
        self, path: str, group: int, row: int, cells: Row | SampleError
    ) -> tuple[str, RawSample | SampleError]:
        key = f"{posixpath.basename(path)}:{group}:{row}"
        if isinstance(cells, SampleError):
            return key, cells
        key = record_key(cells, key)
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
        self._limits.check("max_media_items", len(images), "the row: images")
        media, size_bytes = [], 0
        for place, image in enumerate(images):
            media.append(self._blob(image, f"{column}[{place}]", path))
            size_bytes += len(media[-1].data)
            self._limits.check("max_sample_bytes", size_bytes, "the row: bytes of its images")
        return record, tuple(media)

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
            data = self._storage.read_beside(path, name, self._limits)
            return MediaBlob(kind="image", name=name, data=data)
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

    def _row(self, location: SampleLocation) -> Row | SampleError:
        opened = self._kept_file(location.file)
        group, row = location.row_group, location.row
        if not (0 <= group < len(opened.groups) and 0 <= row < opened.groups[group].rows):
            raise SourceError(
                f"{self._owner}: {location.file} has no row {row} in row group {group}. The file "
                "was changed after it was indexed: run `dataservice index JOB.yaml`."
            )
        table = self._kept_group(location, opened)
        if table is not None:
            batches = table.slice(row, 1).to_batches()
            return next(cells for batch in batches for cells in self._cells(batch))
        rows = self._rows(opened, group, self._local.holding)
        return next(cells for at, cells in rows if at == row)

    def _kept_file(self, path: str) -> ParquetFile:
        """This thread's open file."""
        files: OrderedDict[str, ParquetFile] = self._local.__dict__.setdefault(
            "files", OrderedDict()
        )
        if path not in files:
            files[path] = self._open(path, looks_at_pages=self._storage.is_local)
        files.move_to_end(path)
        while len(files) > _OPEN_FILES:
            files.popitem(last=False)[1].close()
        return files[path]

    def _kept_group(self, location: SampleLocation, opened: ParquetFile) -> pa.Table | None:
        """This thread's last row group; None for one that is not held whole."""
        wanted = (location.file, location.row_group)
        if getattr(self._local, "group", None) != wanted:
            self._local.group = self._local.table = None
            self._local.holding = opened.holding(location.row_group)
            if self._local.holding == "whole":
                self._local.table = opened.table(location.row_group)
            self._local.group = wanted
        return cast("pa.Table | None", self._local.table)

    def _open(self, path: str, *, looks_at_pages: bool) -> ParquetFile:
        with contextlib.ExitStack() as opening:
            stream = opening.enter_context(self._storage.open(path))
            opened = ParquetFile.open(
                stream,
                owner=f"{self._owner}: {path}",
                columns_of=lambda schema: self._columns(schema, path),
                limits=self._limits,
                looks_at_pages=looks_at_pages,
            )
            opening.pop_all()
        return opened

    def _rows(
        self, opened: ParquetFile, group: int, holding: Holding
    ) -> Iterator[tuple[int, Row | SampleError]]:
        """(row in the group, its cells or why it has none) of all rows of a row group."""
        row = 0
        for batch in opened.batches(group, holding):
            for cells in self._cells(batch):
                yield row, cells
                row += 1
        if row < opened.groups[group].rows:
            raise SourceError(
                f"{opened.owner} is damaged: its row group {group} ends before row {row} of "
                f"{opened.groups[group].rows:,}. Copy the file again."
            )

    def _cells(self, batch: pa.RecordBatch) -> Iterator[Row | SampleError]:
        """Rows as objects, one at a time; those that would be too large are not made."""
        image = self._image_column(batch.schema.names)
        sizes = {"max_record_bytes": np.zeros(batch.num_rows, np.int64)}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            limit = "max_sample_bytes" if name == image else "max_record_bytes"
            sizes[limit] = sizes.get(limit, 0) + row_bytes(column)
        for row in range(batch.num_rows):
            try:
                for limit, each in sizes.items():
                    self._limits.check(limit, int(each[row]), "the row: bytes")
            except SampleError as error:
                yield error
            else:
                yield cast(Row, batch.slice(row, 1).to_pylist()[0])


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
