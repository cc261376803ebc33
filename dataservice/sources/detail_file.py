"""Locations and shapes of all samples, in an Arrow file that is mapped and not loaded."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
_MODALITIES = tuple(Modality)
PLAIN_COLUMNS = ("key", "row_group", "row", "crc32", "llm_tokens", "loss_tokens")
SPAN_COLUMNS = ("span_name", "span_offset_bytes", "span_size_bytes")
ITEM_COLUMNS = ("item_modality", "item_encoder_tokens", "item_llm_tokens", "item_position")


class DetailFile:
    """Rows by number. Rows are fetched batch by batch: taking from a whole Arrow table at once
    would first copy its string columns into one piece."""

    def __init__(self, reader: pa.ipc.RecordBatchFileReader) -> None:
        self._batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
        self._starts = np.cumsum([0, *(b.num_rows for b in self._batches)], dtype=np.int64)

    def take(
        self, sample_ids: IntArray, files: Sequence[tuple[str, str]]
    ) -> list[tuple[SampleRef, SampleLengths]]:
        """These samples, whose ids are rows, in this order; repeats are allowed. `files[i]` is
        the (source, path) of the i-th."""
        rows = np.asarray(sample_ids, dtype=np.int64)
        batch_of = np.searchsorted(self._starts, rows, side="right") - 1
        out: dict[int, tuple[SampleRef, SampleLengths]] = {}
        for number in np.unique(batch_of):
            places = np.flatnonzero(batch_of == number)
            taken = self._batches[number].take(pa.array(rows[places] - self._starts[number]))
            of_places = [files[place] for place in places.tolist()]
            details = _details(taken, rows[places].tolist(), of_places)
            out.update(zip(places.tolist(), details, strict=True))
        return [out[place] for place in range(len(rows))]


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


def _details(
    batch: pa.RecordBatch, sample_ids: Sequence[int], files: Sequence[tuple[str, str]]
) -> Iterator[tuple[SampleRef, SampleLengths]]:
    """Rows as the ports speak of them. Column by column: a step has 100,000 samples and more,
    and a dict for each would take most of the time."""
    spans = [
        ByteSpan(name=name, offset_bytes=offset_bytes, size_bytes=size_bytes)
        for name, offset_bytes, size_bytes in zip(
            *(_flat(batch, column) for column in SPAN_COLUMNS), strict=True
        )
    ]
    shapes = pc.list_flatten(batch.column("item_shape"))
    sides = pc.list_flatten(shapes).to_pylist()
    items = [
        ItemLengths(
            modality=_MODALITIES[modality],
            encoder_tokens=encoder_tokens,
            llm_tokens=llm_tokens,
            position=position,
            shape=tuple(sides[of_item]),
        )
        for modality, encoder_tokens, llm_tokens, position, of_item in zip(
            *(_flat(batch, column) for column in ITEM_COLUMNS), _cuts(shapes), strict=True
        )
    ]
    plain = [batch.column(name).to_pylist() for name in PLAIN_COLUMNS]
    cuts = [_cuts(batch.column(name)) for name in ("span_name", "item_shape")]
    places = zip(sample_ids, files, *cuts, *plain, strict=True)
    for sample_id, (source, path), own_spans, own_items, *cells in places:
        key, row_group, row, crc32, llm_tokens, loss_tokens = cells
        location = SampleLocation(
            file=path, spans=tuple(spans[own_spans]), row_group=row_group, row=row
        )
        yield (
            SampleRef(sample_id=sample_id, source=source, key=key, location=location, crc32=crc32),
            SampleLengths(
                llm_tokens=llm_tokens, loss_tokens=loss_tokens, items=tuple(items[own_items])
            ),
        )


def _flat(batch: pa.RecordBatch, column: str) -> list[Any]:
    """The elements of a column of lists, end to end."""
    return pc.list_flatten(batch.column(column)).to_pylist()


def _cuts(lists: "pa.Array[Any]") -> list[slice]:
    """Where the elements of each list are among all of them."""
    lengths = pc.list_value_length(lists).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    return list(map(slice, (ends - lengths).tolist(), ends.tolist()))
