"""Locations, shapes, grids and loss weights of samples, in an Arrow file that is memory-mapped and
not loaded."""

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from types import TracebackType
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dataservice.core.sample import (
    MAX_LOSS_WEIGHT,
    ByteSpan,
    IntArray,
    ItemDetails,
    ItemLengths,
    ItemNotes,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.sample_columns import NO_CHECKSUM, SampleColumns
from dataservice.core.sample_files import SampleFiles
from dataservice.sources.detail_columns import DetailColumns, DetailRows
from dataservice.sources.gather import multiply
from dataservice.sources.index_part import DETAIL_COLUMNS, LENGTH_COLUMNS, SCHEMA
from dataservice.sources.rows_digest import LOSS_WEIGHT
from dataservice.sources.unnamed_file import unnamed_file

PLAIN_COLUMNS = ("key", "row_group", "row", "piece", "crc32", "llm_tokens", "loss_tokens")
SPAN_COLUMNS = ("span_name", "span_offset_bytes", "span_size_bytes")
ITEM_COLUMNS = ("item_modality", "item_encoder_tokens", "item_llm_tokens", "item_position")
NOTE_COLUMNS = ("item_kind", "item_grid", "item_seconds_per_patch")
_PLAIN_NUMBERS = tuple(name for name in PLAIN_COLUMNS if name not in ("key", "crc32"))
_ROW_COLUMNS = (*DETAIL_COLUMNS, *LENGTH_COLUMNS)
DETAIL_SCHEMA = pa.schema(
    [SCHEMA.field(name) for name in (*_ROW_COLUMNS, *NOTE_COLUMNS, LOSS_WEIGHT)]
)
# About how many rows a batch of the file has: of a step's samples, those of each batch are fetched
# together. And rows that are turned into objects at once.
BATCH_ROWS = 262_144
_BATCH_BYTES = 2**28  # that wait in memory to become a batch
BLOCK_ROWS = 256
_MODALITIES = tuple(Modality)
_OF_NOTHING = DetailColumns(DETAIL_SCHEMA, pa.py_buffer(b""), [])


class DetailTable(ABC):
    """Rows by number: what is asked of them, wherever they lie."""

    at_hand = True
    """Whether all rows can be read at once."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def fetch(self, sample_ids: IntArray) -> None:
        """Have these rows at hand. May take seconds."""

    @abstractmethod
    def holding(self, rows: NDArray[np.int64]) -> "tuple[DetailFile, NDArray[np.int64]]":
        """A file that has these rows, of which there are some, and their numbers there. Rows that
        are not at hand are fetched."""

    @abstractmethod
    def find_key(self, key: str) -> int | None:
        """The row of the first sample with this key, or None."""

    def rows(self, rows: NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        """These columns of these rows, in this order; repeats are allowed."""
        if not len(rows):
            return pa.schema([DETAIL_SCHEMA.field(name) for name in columns]).empty_table()
        held, own = self.holding(rows)
        return held.rows(own, columns)

    def take(self, sample_ids: IntArray, file_of: IntArray, files: SampleFiles) -> "Details":
        """These samples, whose ids are rows, in this order; repeats are allowed.
        `files[file_of[i]]` is the (source, path) of the i-th."""
        rows = np.asarray(sample_ids, dtype=np.int64)
        taken = self.rows(rows, _ROW_COLUMNS)
        return Details(rows, taken, np.asarray(file_of, dtype=np.int64), files)

    def columns(self, sample_ids: IntArray, file_of: IntArray, files: SampleFiles) -> SampleColumns:
        """The same as `take` as columns, of epoch 0. Where the elements of lists lie is found once
        for all columns of the same lists."""
        of = self._looked_up(sample_ids)
        key_bytes, of_keys = of.opened("key")
        spans, of_spans = of.opened("span_name")
        name_bytes, of_names = of.opened("span_name", of_spans)
        items, of_items = of.opened("item_shape")
        sides, of_sides = of.opened("item_shape", of_items)
        return SampleColumns(
            files=files,
            keys=of.text("key", of_keys),
            names=of.text("span_name", of_names),
            sample_id=np.asarray(sample_ids, dtype=np.int64),
            file=np.asarray(file_of),
            key_bytes=key_bytes,
            epoch=np.zeros(len(sample_ids), np.int64),
            crc32=of.numbers("crc32", null=NO_CHECKSUM),
            spans=spans,
            span_name_bytes=name_bytes,
            items=items,
            sides=sides,
            side=of.numbers("item_shape", of_sides),
            **{name: of.numbers(name) for name in _PLAIN_NUMBERS},
            **{name: of.numbers(name, of_spans) for name in SPAN_COLUMNS[1:]},
            **{name: of.numbers(name, of_items) for name in ITEM_COLUMNS},
        )

    def item_details(self, sample_ids: IntArray) -> ItemDetails:
        """What is known of these samples' items besides their lengths, by sample, then in its
        order."""
        of = self._looked_up(sample_ids)
        _, of_items = of.opened("item_shape")
        sides, of_sides = of.opened("item_shape", of_items)
        values = np.empty(len(sides), np.int64)
        multiply(sides, of.numbers("item_shape", of_sides), values)
        of_grid, of_grids = of.opened("item_grid", of_items)  # of one not known, none
        grid = known = of.numbers("item_grid", of_grids).reshape(-1, 4)
        if len(known) < len(sides):
            grid = np.zeros((len(sides), 4), np.int32)
            grid[of_grid > 0] = known
        return ItemDetails(
            modality=of.numbers("item_modality", of_items),
            values=values,
            notes=ItemNotes(
                kind=of.numbers("item_kind", of_items, null=-1),
                grid=grid,
                seconds_per_patch=of.numbers("item_seconds_per_patch", of_items, null=np.nan),
            ),
        )

    def loss_weights(self, sample_ids: IntArray) -> NDArray[np.float64]:
        """The own loss weight of each of these samples: float64[n]."""
        return self._looked_up(sample_ids).numbers(LOSS_WEIGHT, null=np.nan)

    def _looked_up(self, sample_ids: IntArray) -> DetailRows:
        rows = np.ascontiguousarray(sample_ids, dtype=np.int64)
        if not len(rows):
            return DetailRows(_OF_NOTHING, rows)
        held, own = self.holding(rows)
        return DetailRows(held.mapped, own)


class DetailFile(DetailTable):
    """Rows by number. Rows are fetched batch by batch: fetching from a whole Arrow table at once
    would first copy its string columns into one piece."""

    def __init__(self, descriptor: int) -> None:
        """The file behind a descriptor, which this object now owns. Raises pa.ArrowException when
        it is no detail file."""
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        mapped, batches = _mapped(descriptor)
        self._batches = list(batches)
        mapped.seek(0)
        whole = mapped.read_buffer()
        self.mapped = DetailColumns(DETAIL_SCHEMA, whole, self._batches)

    def __len__(self) -> int:
        return int(self.mapped.starts[-1])

    def fetch(self, sample_ids: IntArray) -> None:
        """All rows are at hand."""

    def require_whole(self, every: int = 1) -> None:
        """Raises pa.ArrowException when a list or a string reaches beyond its column, a modality is
        unknown or a loss weight out of range. Reads the whole file, or one batch of `every` so
        many, through a mapping of its own: what is mapped in stays resident until it is
        unmapped."""
        for batch in islice(_mapped(self.descriptor)[1], 0, None, every):
            batch.validate(full=True)
            kinds = pc.list_flatten(batch.column("item_modality")).to_numpy(zero_copy_only=False)
            weights = batch.column(LOSS_WEIGHT).to_numpy(zero_copy_only=False)
            weighed = (weights >= 0) & (weights <= MAX_LOSS_WEIGHT)
            if not (np.isin(kinds, _MODALITIES).all() and weighed.all()):
                raise pa.ArrowInvalid("an unknown modality, or a loss weight out of range")

    def find_key(self, key: str) -> int | None:
        """The row of the first sample with this key, or None."""
        for start, batch in zip(self.mapped.starts.tolist(), self._batches, strict=False):
            place = pc.index(batch.column("key"), pa.scalar(key, pa.string())).as_py()
            if place >= 0:
                return int(start + place)
        return None

    def holding(self, rows: NDArray[np.int64]) -> "tuple[DetailFile, NDArray[np.int64]]":
        """This file and these rows."""
        return self, rows

    def rows(self, rows: NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        """These columns of these rows, in this order; repeats are allowed. Rows are fetched batch
        by batch: fetching from a whole Arrow table at once would first copy its string columns into
        one piece."""
        schema = pa.schema([DETAIL_SCHEMA.field(name) for name in columns])
        if not len(rows):
            return schema.empty_table()
        starts = self.mapped.starts
        batch_of = np.searchsorted(starts, rows, side="right") - 1
        order = np.argsort(batch_of, kind="stable")
        ends = np.cumsum(np.bincount(batch_of, minlength=len(self._batches))).tolist()
        taken = [
            batch.select(columns).take(rows[order[begin:end]] - start)
            for batch, start, begin, end in zip(
                self._batches, starts.tolist(), [0, *ends], ends, strict=False
            )
            if end > begin
        ]
        table = pa.Table.from_batches(taken, schema)
        if len(taken) < 2:
            return table
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        return table.combine_chunks().take(place)


def _mapped(descriptor: int) -> tuple[pa.MemoryMappedFile, Iterator[pa.RecordBatch]]:
    """A detail file and its batches, mapped and not read. Raises pa.ArrowException when it is
    none."""
    # Through the descriptor, since the file no longer has a name.
    mapped = pa.memory_map(f"/proc/self/fd/{descriptor}")
    reader = pa.ipc.open_file(mapped)
    if not reader.schema.equals(DETAIL_SCHEMA):
        raise pa.ArrowInvalid(f"columns {reader.schema.names} in place of {DETAIL_SCHEMA.names}")
    return mapped, map(reader.get_batch, range(reader.num_record_batches))


class Details(Sequence[tuple[SampleRef, SampleLengths]]):
    """Samples of one step, as columns. When a row is looked at, the objects of that row and its
    neighbours are made, and kept until another neighbourhood is needed: a step can have more than
    100,000 samples, planning need not wait for all of them, and as objects they take ten times the
    memory of the columns."""

    def __init__(
        self,
        sample_ids: NDArray[np.int64],
        columns: pa.Table,
        file_of: NDArray[np.int64],
        files: SampleFiles,
    ) -> None:
        self._sample_ids = sample_ids
        self._columns = columns.combine_chunks()
        self._file_of = file_of
        self._files = files
        self._newest: tuple[int, list[tuple[SampleRef, SampleLengths]]] = (-1, [])

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
        number, within = divmod(row, BLOCK_ROWS)
        newest, block = self._newest
        if number != newest:  # two threads may make it twice, with the same result
            block = self._made(number * BLOCK_ROWS)
            self._newest = number, block
        return block[within]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def _made(self, start: int) -> list[tuple[SampleRef, SampleLengths]]:
        own = slice(start, start + BLOCK_ROWS)
        (batch,) = self._columns.slice(start, BLOCK_ROWS).to_batches()
        files = self._files.only(self._file_of[own]).named()
        return list(rows_of(batch, self._sample_ids[own].tolist(), files))


class DetailWriter:
    """Collects parts into a temporary file that lives as long as its DetailFile."""

    def __init__(self, folder: str | None = None) -> None:
        """The file lies in `folder`, see `unnamed_file`."""
        self._folder = folder

    def __enter__(self) -> "DetailWriter":
        self._descriptor = unnamed_file(self._folder)
        self._writer = pa.ipc.new_file(f"/proc/self/fd/{self._descriptor}", DETAIL_SCHEMA)
        self._waiting: list[pa.Table] = []
        self._rows = self._bytes = 0  # that wait
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()
        os.close(self._descriptor)

    def write(self, table: pa.Table) -> None:
        """Append the rows of one part, or of some of its groups."""
        self._waiting.append(table.select(DETAIL_SCHEMA.names))
        self._rows += len(table)
        self._bytes += self._waiting[-1].nbytes
        if self._rows >= BATCH_ROWS or self._bytes >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            joined = pa.concat_tables(self._waiting).combine_chunks()
            self._waiting.clear()
            self._rows = self._bytes = 0
            self._writer.write_table(joined, max_chunksize=BATCH_ROWS)

    def finish(self) -> DetailFile:
        """Map the written file. Nothing can be written after that."""
        self._flush()
        self._writer.close()
        return DetailFile(os.dup(self._descriptor))


def rows_of(
    batch: pa.RecordBatch, sample_ids: Sequence[int], files: Sequence[tuple[str, str]]
) -> Iterator[tuple[SampleRef, SampleLengths]]:
    """Rows of an index as the ports' objects; `files[i]` is the (source, path) of the i-th.
    Converts column by column: making a dict for each row would take most of the time."""
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
        key, row_group, row, piece, crc32, llm_tokens, loss_tokens = cells
        location = SampleLocation(
            file=path, spans=tuple(spans[own_spans]), row_group=row_group, row=row, piece=piece
        )
        yield (
            SampleRef(sample_id=sample_id, source=source, key=key, location=location, crc32=crc32),
            SampleLengths(
                llm_tokens=llm_tokens, loss_tokens=loss_tokens, items=tuple(items[own_items])
            ),
        )


def _flat(batch: pa.RecordBatch, column: str) -> list[Any]:
    """The elements of a column of lists, concatenated."""
    return pc.list_flatten(batch.column(column)).to_pylist()


def _cuts(lists: "pa.Array[Any]") -> list[slice]:
    """The slice of each list's elements among the concatenated elements."""
    lengths = pc.list_value_length(lists).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    return list(map(slice, (ends - lengths).tolist(), ends.tolist()))
