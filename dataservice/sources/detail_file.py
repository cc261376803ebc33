"""Locations, shapes, grids and loss weights of samples, in an Arrow file that is memory-mapped and
not loaded."""

import os
import weakref
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
    ItemLengths,
    ItemNotes,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.sample_columns import NO_CHECKSUM, SampleColumns
from dataservice.sources.index_part import DETAIL_COLUMNS, LENGTH_COLUMNS, SCHEMA
from dataservice.sources.rows_digest import LOSS_WEIGHT
from dataservice.sources.unnamed_file import unnamed_file

NOTE_COLUMNS = ("item_kind", "item_grid", "item_seconds_per_patch")
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
PLAIN_COLUMNS = ("key", "row_group", "row", "piece", "crc32", "llm_tokens", "loss_tokens")
SPAN_COLUMNS = ("span_name", "span_offset_bytes", "span_size_bytes")
ITEM_COLUMNS = ("item_modality", "item_encoder_tokens", "item_llm_tokens", "item_position")


class DetailFile:
    """Rows by number. Rows are fetched batch by batch: fetching from a whole Arrow table at once
    would first copy its string columns into one piece."""

    def __init__(self, descriptor: int) -> None:
        """The file behind a descriptor, which this object now owns. Raises pa.ArrowException when
        it is no detail file."""
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._batches = list(_batches(descriptor))
        self._starts = np.cumsum([0, *(b.num_rows for b in self._batches)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def require_whole(self, every: int = 1) -> None:
        """Raises pa.ArrowException when a list or a string reaches beyond its column, a modality is
        unknown or a loss weight out of range. Reads the whole file, or one batch of `every` so
        many, through a mapping of its own: what is mapped in stays resident until it is
        unmapped."""
        for batch in islice(_batches(self.descriptor), 0, None, every):
            batch.validate(full=True)
            kinds = pc.list_flatten(batch.column("item_modality")).to_numpy(zero_copy_only=False)
            weights = batch.column(LOSS_WEIGHT).to_numpy(zero_copy_only=False)
            weighed = (weights >= 0) & (weights <= MAX_LOSS_WEIGHT)
            if not (np.isin(kinds, _MODALITIES).all() and weighed.all()):
                raise pa.ArrowInvalid("an unknown modality, or a loss weight out of range")

    def find_key(self, key: str) -> int | None:
        """The row of the first sample with this key, or None."""
        for start, batch in zip(self._starts.tolist(), self._batches, strict=False):
            place = pc.index(batch.column("key"), pa.scalar(key, pa.string())).as_py()
            if place >= 0:
                return int(start + place)
        return None

    def take(
        self, sample_ids: IntArray, file_of: IntArray, files: Sequence[tuple[str, str]]
    ) -> "Details":
        """These samples, whose ids are rows, in this order; repeats are allowed.
        `files[file_of[i]]` is the (source, path) of the i-th."""
        rows = np.asarray(sample_ids, dtype=np.int64)
        taken = self._take(rows, _ROW_COLUMNS)
        return Details(rows, taken, np.asarray(file_of, dtype=np.int64), files)

    def columns(
        self, sample_ids: IntArray, file_of: IntArray, files: Sequence[tuple[str, str]]
    ) -> SampleColumns:
        """The same as `take` as columns, of epoch 0."""
        rows = np.asarray(sample_ids, dtype=np.int64)
        table = self._take(rows, _ROW_COLUMNS).combine_chunks()
        batches = table.to_batches()
        if not batches:
            return SampleColumns.of([])
        (batch,) = batches
        keys, key_bytes = _text(batch.column("key"))
        names, name_bytes = _text(pc.list_flatten(batch.column("span_name")))
        shapes = pc.list_flatten(batch.column("item_shape"))
        numbers = {
            name: pc.list_flatten(batch.column(name)).to_numpy(zero_copy_only=False)
            for name in (*SPAN_COLUMNS[1:], *ITEM_COLUMNS)
        }
        plain = {
            name: batch.column(name).to_numpy(zero_copy_only=False)
            for name in PLAIN_COLUMNS
            if name not in ("key", "crc32")
        }
        checksums = batch.column("crc32").cast(pa.int64()).fill_null(NO_CHECKSUM)
        return SampleColumns(
            files=files,
            keys=keys,
            names=names,
            sample_id=rows,
            file=np.asarray(file_of, dtype=np.int64),
            key_bytes=key_bytes,
            epoch=np.zeros(len(rows), dtype=np.int64),
            crc32=checksums.to_numpy(zero_copy_only=False),
            spans=_counts(batch.column("span_name")),
            span_name_bytes=name_bytes,
            items=_counts(batch.column("item_shape")),
            sides=_counts(shapes),
            side=pc.list_flatten(shapes).to_numpy(zero_copy_only=False),
            **plain,
            **numbers,
        )

    def item_notes(self, sample_ids: IntArray) -> ItemNotes:
        """What is known of the items of these samples, by sample, then in its order."""
        taken = self._take(np.asarray(sample_ids, dtype=np.int64), NOTE_COLUMNS)
        kinds, grids, spans = (
            pc.list_flatten(taken.column(name).combine_chunks()) for name in NOTE_COLUMNS
        )
        notes = ItemNotes.unknown(len(kinds))
        notes.kind[:] = kinds.fill_null(-1).to_numpy(zero_copy_only=False)
        given = grids.is_valid().to_numpy(zero_copy_only=False)
        notes.grid[given] = pc.list_flatten(grids).to_numpy(zero_copy_only=False).reshape(-1, 4)
        notes.seconds_per_patch[:] = spans.to_numpy(zero_copy_only=False)  # nan where it is null
        return notes

    def loss_weights(self, sample_ids: IntArray) -> NDArray[np.float64]:
        """The own loss weight of each of these samples: float64[n]."""
        taken = self._take(np.asarray(sample_ids, dtype=np.int64), [LOSS_WEIGHT])
        return np.asarray(taken.column(LOSS_WEIGHT).to_numpy(), dtype=np.float64)

    def _take(self, rows: NDArray[np.int64], columns: Sequence[str]) -> pa.Table:
        schema = pa.schema([DETAIL_SCHEMA.field(name) for name in columns])
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


def _batches(descriptor: int) -> Iterator[pa.RecordBatch]:
    """The batches of a detail file, mapped and not read. Raises pa.ArrowException when it is
    none."""
    # Through the descriptor, since the file no longer has a name.
    reader = pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{descriptor}"))
    if not reader.schema.equals(DETAIL_SCHEMA):
        raise pa.ArrowInvalid(f"columns {reader.schema.names} in place of {DETAIL_SCHEMA.names}")
    for number in range(reader.num_record_batches):
        yield reader.get_batch(number)


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
        files: Sequence[tuple[str, str]],
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
        files = [self._files[number] for number in self._file_of[own].tolist()]
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
        rows = sum(map(len, self._waiting))
        if rows >= BATCH_ROWS or sum(each.nbytes for each in self._waiting) >= _BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            joined = pa.concat_tables(self._waiting).combine_chunks()
            self._waiting.clear()
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


def _counts(lists: "pa.Array[Any]") -> NDArray[np.int64]:
    counts: NDArray[np.int64] = pc.list_value_length(lists).to_numpy().astype(np.int64)
    return counts


def _text(column: "pa.Array[Any]") -> tuple[bytes, NDArray[np.int64]]:
    """Strings end to end, and how many bytes each has."""
    _, places, text = column.buffers()
    assert places is not None, "a column of strings has their offsets"
    offsets = np.frombuffer(memoryview(places), np.int32)[column.offset :][: len(column) + 1]
    joined = b"" if text is None else memoryview(text)[offsets[0] : offsets[-1]].tobytes()
    return joined, np.diff(offsets).astype(np.int64)


def _flat(batch: pa.RecordBatch, column: str) -> list[Any]:
    """The elements of a column of lists, concatenated."""
    return pc.list_flatten(batch.column(column)).to_pylist()


def _cuts(lists: "pa.Array[Any]") -> list[slice]:
    """The slice of each list's elements among the concatenated elements."""
    lengths = pc.list_value_length(lists).to_numpy()
    ends = np.cumsum(lengths, dtype=np.int64)
    return list(map(slice, (ends - lengths).tolist(), ends.tolist()))
