"""Makes samples of a table's rows, whichever format the table is stored in.

    image, audio, jpg, image_2 …    struct{bytes, path}, a list of them, bytes, or a path
    conversations, messages         list<struct>, or a string of JSON
    text and other textual columns  as they are

table_columns.py decides which columns are media.
"""

from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np
import pyarrow as pa

from dataservice.core.errors import SampleError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import cut
from dataservice.core.sample import MediaBlob, MediaKind, RawSample
from dataservice.sources.formats.completeness import Completeness
from dataservice.sources.formats.content import parse_json, record_key
from dataservice.sources.formats.layout import laid_out, loss_weight_of
from dataservice.sources.formats.media_names import path_kind
from dataservice.sources.formats.media_refs import (
    MediaFiles,
    in_named_order,
    media_ref,
    read_ref,
    read_refs,
    refs_in_parts,
    without_held,
)
from dataservice.sources.formats.row_bytes import row_bytes
from dataservice.sources.formats.signatures import HEAD_BYTES, signature_kind
from dataservice.sources.formats.table_columns import Columns

Row = dict[str, object]
"""The cells of a row by column, as Python objects."""

_JSON_COLUMNS = ("conversations", "messages")


class TableRows:
    """The rows of one source's files."""

    def __init__(self, spec: SourceSpec, storage: MediaFiles, limits: DecodeLimits) -> None:
        self._spec = spec
        self._storage = storage
        self._limits = limits
        self._completeness = Completeness(spec)

    def scanned(
        self, columns: Columns, cells: Row | SampleError, path: str, fallback_key: str
    ) -> tuple[str, RawSample | SampleError]:
        """(A row's key; its sample, or the error why it has none)."""
        if isinstance(cells, SampleError):
            # Raised here, it would keep its batch until the next collection of cycles.
            return fallback_key, cells
        key = record_key(cells, fallback_key)
        try:
            return key, self.sample(key, columns, cells, path)
        except SampleError as error:
            return key, error

    def sample(self, key: str, columns: Columns, cells: Row, path: str) -> RawSample:
        """A sample of a row of the file at `path`. Raises SampleError when it cannot be used."""
        record = {
            name: parse_json(value, f"column {name!r}")
            if name in _JSON_COLUMNS and isinstance(value, str)
            else _without_nulls(value)
            for name in columns.record
            if (value := cells.get(name)) is not None
        }
        laid = laid_out(record, self._spec)
        media = self._media(columns, cells, path)
        in_columns = {blob.kind for blob in media}
        refs = [ref for ref in refs_in_parts(laid) if ref.kind not in in_columns]
        media += read_refs(refs, path, self._storage, self._limits)
        self._completeness.require(record, media, file=path)
        return RawSample(
            key=key,
            record=without_held(laid, refs),
            media=in_named_order(media, laid),
            placeholders=self._spec.placeholders,
            loss_weight=loss_weight_of(record, self._spec),
        )

    def _media(self, columns: Columns, cells: Row, path: str) -> list[MediaBlob]:
        found: list[tuple[str, int, object]] = []
        for column in columns.media:
            value = cells.get(column)
            values = value if isinstance(value, list) else [value]
            found += [(column, at, cell) for at, cell in enumerate(values) if cell is not None]
        self._limits.check("max_media_items", len(found), "the row: media")
        media: list[MediaBlob] = []
        size_bytes, chosen = 0, self._spec.media_columns
        for column, place, cell in found:
            blob = self._blob(columns.media[column], cell, f"{column}[{place}]", path)
            size_bytes += len(blob.data)
            self._limits.check("max_sample_bytes", size_bytes, "the row: bytes of its media")
            if column in chosen.get(blob.kind, (column,)):
                media.append(blob)
        return media

    def _blob(self, kind: MediaKind | None, cell: object, place: str, path: str) -> MediaBlob:
        """One cell. When its bytes are null, they are in the file at its path, relative to the
        table's file."""
        data, name = cell, ""
        if isinstance(cell, Mapping):
            data, name = cell.get("bytes"), str(cell.get("path") or "")
        elif isinstance(cell, str):
            data, name = None, cell
        if data is None:
            if not name:
                raise SampleError(
                    f"{place} has neither bytes nor a path. Store the file in `bytes`."
                )
            ref = media_ref(kind or "image", name, key="", where=place)
            data = read_ref(ref, path, self._storage, self._limits).data
            name = "" if ref.is_held else name
        if not isinstance(data, bytes):
            raise SampleError(
                f"{place} holds {type(data).__name__}; it must be struct{{bytes, path}}, the "
                "encoded bytes, or a path."
            )
        kind = kind or signature_kind(data[:HEAD_BYTES]) or path_kind(name)
        if kind is None:
            raise SampleError(
                f"{place} holds {len(data):,} bytes that are no known image, clip or recording. "
                f"Write ignore: [{place.partition('[')[0]}] in the source if they are no part of "
                "the sample, or rename the column to image, video or audio."
            )
        return MediaBlob(kind=kind, name=cut(name or place), data=data)

    def cells(self, batch: pa.RecordBatch, columns: Columns) -> Iterator[Row | SampleError]:
        """Rows as Python objects, one at a time; a row that would be too large gives an error
        instead."""
        sizes = {"max_record_bytes": np.zeros(batch.num_rows, np.int64)}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            limit = "max_sample_bytes" if name in columns.media else "max_record_bytes"
            sizes[limit] = sizes.get(limit, 0) + row_bytes(column)
        for row in range(batch.num_rows):
            try:
                for limit, each in sizes.items():
                    self._limits.check(limit, int(each[row]), "the row: bytes")
            except SampleError as error:
                yield error
            else:
                yield cast(Row, batch.slice(row, 1).to_pylist()[0])


def _without_nulls(value: object) -> object:
    """The value without fields that are None: Arrow gives None for a struct's absent fields, a
    record omits them."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
