"""Locations and shapes of all samples, in an Arrow file that is mapped and not loaded."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

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
_BLOCK_ROWS = 256
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
        self, sample_ids: IntArray, file_of: IntArray, files: Sequence[tuple[str, str]]
    ) -> "Details":
        """These samples, whose ids are rows, in this order; repeats are allowed.
        `files[file_of[i]]` is the (source, path) of the i-th."""
        rows = np.asarray(sample_ids, dtype=np.int64)
        taken = self._take(rows, _SCHEMA.names)
        return Details(rows, taken, np.asarray(file_of, dtype=np.int64), files)

    def decoded_values(self, sample_ids: IntArray) -> dict[Modality, int]:
        """How many values the encoder items of these samples decode to."""
        rows = np.asarray(sample_ids, dtype=np.int64)
        taken = self._take(rows, ["item_shape", "item_modality"])
        shapes = pc.list_flatten(taken.column("item_shape").combine_chunks())
        modality = pc.list_flatten(taken.column("item_modality").combine_chunks()).to_numpy()
        dimensions = pc.list_value_length(shapes).to_numpy()
        sides = pc.list_flatten(shapes).to_numpy().astype(np.int64)
        starts = np.cumsum(dimensions, dtype=np.int64) - dimensions
        values = np.multiply.reduceat(sides, starts) if len(starts) else sides
        return {kind: int(values[modality == kind].sum()) for kind in Modality}

    def _take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([_SCHEMA.field(name) for name in columns])
        if not len(rows):
            return schema.empty_table()
        batch_of = np.searchsorted(self._starts, rows, side="right") - 1
        by_batch = np.argsort(batch_of, kind="stable")
        numbers, firsts = np.unique(batch_of[by_batch], return_index=True)
        taken = [
            self._batches[number]
            .select(columns)
            .take(pa.array(rows[places] - self._starts[number]))
            for number, places in zip(numbers, np.split(by_batch, firsts[1:]), strict=True)
        ]
        table = pa.Table.from_batches(taken, schema)
        if len(taken) < 2:
            return table
        place = np.empty_like(by_batch)
        place[by_batch] = np.arange(len(rows))
        return table.combine_chunks().take(place)


class Details(Sequence[tuple[SampleRef, SampleLengths]]):
    """Samples of one step, as columns. The objects of a row are made with those of its
    neighbours, when one of them is first looked at: a step has 100,000 samples and more, and
    whoever plans it need not wait for all of them."""

    def __init__(
        self,
        sample_ids: NDArray[np.int64],
        columns: pa.Table,
        file_of: NDArray[np.int64],
        files: Sequence[tuple[str, str]],
    ) -> None:
        self._sample_ids = sample_ids
        self._columns = columns.combine_chunks()
        self._file_of = file_of
        self._files = files
        self._blocks: dict[int, list[tuple[SampleRef, SampleLengths]]] = {}

    def __len__(self) -> int:
        return len(self._sample_ids)

    @overload
    def __getitem__(self, place: int) -> tuple[SampleRef, SampleLengths]: ...
    @overload
    def __getitem__(self, place: slice) -> list[tuple[SampleRef, SampleLengths]]: ...
    def __getitem__(
        self, place: int | slice
    ) -> tuple[SampleRef, SampleLengths] | list[tuple[SampleRef, SampleLengths]]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        row = range(len(self))[place]
        number, within = divmod(row, _BLOCK_ROWS)
        block = self._blocks.get(number)
        if block is None:  # made twice if two threads ask at once, and the same
            block = self._blocks[number] = self._made(number * _BLOCK_ROWS)
        return block[within]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _made(self, start: int) -> list[tuple[SampleRef, SampleLengths]]:
        own = slice(start, start + _BLOCK_ROWS)
        (batch,) = self._columns.slice(start, _BLOCK_ROWS).to_batches()
        files = [self._files[number] for number in self._file_of[own].tolist()]
        return list(_details(batch, self._sample_ids[own].tolist(), files))


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
    """Rows as the ports speak of them. Column by column: a dict for each row would take most of
    the time."""
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
