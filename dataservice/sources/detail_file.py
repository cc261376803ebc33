"""Locations and shapes of all samples, in an Arrow file that is mapped and not loaded."""

import os
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa

from dataservice.core.sample import (
    ByteSpan,
    IntArray,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.sources.index_part import DETAIL_COLUMNS, LENGTH_COLUMNS, SCHEMA

_SCHEMA = pa.schema([SCHEMA.field(name) for name in (*DETAIL_COLUMNS, *LENGTH_COLUMNS)])
_BATCH_ROWS = 16_384


class DetailFile:
    """Rows by number. Rows are fetched batch by batch: taking from a whole Arrow table at once
    would first copy its string columns into one piece."""

    def __init__(self, reader: pa.ipc.RecordBatchFileReader) -> None:
        self._batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
        self._starts = np.cumsum([0, *(b.num_rows for b in self._batches)], dtype=np.int64)

    def take(self, rows: IntArray) -> list[dict[str, Any]]:
        """The cells of these rows, in this order; repeats are allowed."""
        rows = np.asarray(rows, dtype=np.int64)
        batch_of = np.searchsorted(self._starts, rows, side="right") - 1
        out: list[dict[str, Any]] = [{}] * len(rows)
        for number in np.unique(batch_of):
            places = np.flatnonzero(batch_of == number)
            taken = self._batches[number].take(pa.array(rows[places] - self._starts[number]))
            for place, cells in zip(places, taken.to_pylist(), strict=True):
                out[place] = cells
        return out


class DetailWriter:
    """Collects parts into a temporary file that lives as long as its DetailFile."""

    def __enter__(self) -> "DetailWriter":
        descriptor, self._path = tempfile.mkstemp(prefix="dataservice-", suffix=".arrow")
        os.close(descriptor)
        self._writer = pa.ipc.new_file(self._path, _SCHEMA)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()
        os.unlink(self._path)  # a mapped file stays readable without a name

    def write(self, table: pa.Table) -> None:
        """Append the rows of one part."""
        self._writer.write_table(table.select(_SCHEMA.names), max_chunksize=_BATCH_ROWS)

    def finish(self) -> DetailFile:
        """Map what was written. The writer can take no more."""
        self._writer.close()
        return DetailFile(pa.ipc.open_file(pa.memory_map(self._path)))


def sample_detail(
    sample_id: int, file: tuple[str, str], cells: Mapping[str, Any]
) -> tuple[SampleRef, SampleLengths]:
    """One row as the ports speak of it; `file` is (source, path)."""
    source, path = file
    spans = zip(
        cells["span_name"], cells["span_offset_bytes"], cells["span_size_bytes"], strict=True
    )
    location = SampleLocation(
        file=path,
        spans=tuple(ByteSpan(name=n, offset_bytes=o, size_bytes=s) for n, o, s in spans),
        row_group=cells["row_group"],
        row=cells["row"],
    )
    ref = SampleRef(sample_id=sample_id, source=source, key=cells["key"], location=location)
    items = tuple(
        ItemLengths(
            modality=Modality(cells["item_modality"][k]),
            encoder_tokens=cells["item_encoder_tokens"][k],
            llm_tokens=cells["item_llm_tokens"][k],
            position=cells["item_position"][k],
            shape=tuple(shape),
        )
        for k, shape in enumerate(cells["item_shape"])
    )
    lengths = SampleLengths(
        llm_tokens=cells["llm_tokens"], loss_tokens=cells["loss_tokens"], items=items
    )
    return ref, lengths
