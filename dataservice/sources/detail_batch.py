"""Some rows of a batch of a detail file, as the columns that steps are planned and ordered from.

Arrow makes an array of a column in the time in which numpy fetches thousands of its rows, so a
batch keeps those that it was asked for: a small step takes a few rows of some thirty columns.
"""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.core.layout import expanded
from dataservice.core.sample import ItemNotes
from dataservice.core.sample_columns import NO_CHECKSUM, SampleColumns

PLAIN_COLUMNS = ("key", "row_group", "row", "piece", "crc32", "llm_tokens", "loss_tokens")
SPAN_COLUMNS = ("span_name", "span_offset_bytes", "span_size_bytes")
ITEM_COLUMNS = ("item_modality", "item_encoder_tokens", "item_llm_tokens", "item_position")
NOTE_COLUMNS = ("item_kind", "item_grid", "item_seconds_per_patch")


class _Numbers:
    """A column of numbers, some of which may be null."""

    def __init__(self, column: Any) -> None:
        self._column = column
        self._nulls = column.null_count
        self._values = None if self._nulls else column.to_numpy()

    def at(self, places: NDArray[np.int64], null: float) -> NDArray[Any]:
        """Those at these places, and this in place of null."""
        if self._values is not None:
            values: NDArray[Any] = self._values[places]
        elif self._nulls == len(self._column):
            values = np.full(len(places), null)
        else:  # numpy has no null: nan stands for it
            values = self._column.take(places).to_numpy(zero_copy_only=False).astype(np.float64)
            values[np.isnan(values)] = null
        return values


class _Lists:
    """A column of lists: how many elements each has, and all of them end to end, from those of its
    first list on."""

    def __init__(self, lists: Any) -> None:
        self._offsets = lists.offsets.to_numpy()
        self._first = int(self._offsets[0]) if len(lists) else 0
        self.values = lists.values.slice(self._first)

    def elements(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How many elements each of these lists has, int64[rows], and the places of all of them
        among the `values`."""
        if not len(rows):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        first = self._offsets[rows].astype(np.int64)
        counts = self._offsets[rows + 1] - first
        return counts, expanded(first - self._first, counts)


class DetailBatch:
    """A batch of `rows`, and those of its columns that were looked at."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self.rows = rows
        # Two threads may make one twice, with the same result.
        self._lists: dict[str, _Lists] = {}
        self._numbers: dict[str, _Numbers] = {}
        self._elements: dict[str, _Numbers] = {}

    def lists(self, name: str) -> _Lists:
        """A column of lists; with `/` behind its name, of the lists in its lists."""
        made = self._lists.get(name)
        if made is None:
            inner = name.endswith("/")
            column = self.lists(name[:-1]).values if inner else self.rows.column(name)
            made = self._lists[name] = _Lists(column)
        return made

    def numbers(self, name: str, rows: NDArray[np.int64], *, null: float = 0) -> NDArray[Any]:
        """Numbers of a column, in these rows."""
        made = self._numbers.get(name)
        if made is None:
            made = self._numbers[name] = _Numbers(self.rows.column(name))
        return made.at(rows, null)

    def elements(self, name: str, places: NDArray[np.int64], *, null: float = 0) -> NDArray[Any]:
        """Numbers in a column of lists, at these places among its elements."""
        made = self._elements.get(name)
        if made is None:
            made = self._elements[name] = _Numbers(self.lists(name).values)
        return made.at(places, null)


class OfBatch(NamedTuple):
    """Some `rows` of a batch, as it numbers them, and their `places` among those asked for."""

    batch: DetailBatch
    rows: NDArray[np.int64]
    places: NDArray[np.int64]


def columns_of(
    batch: DetailBatch,
    rows: NDArray[np.int64],
    *,
    sample_id: NDArray[np.int64],
    file: NDArray[np.int64],
) -> tuple[SampleColumns, Any, Any]:
    """These rows of a batch, of files that are yet to be named, and apart from them their keys and
    their spans' names, which Arrow puts in order more quickly than numpy. Where the elements of
    lists lie is found once for all columns of the same lists; Arrow would take each list by
    itself."""
    spans, of_spans = batch.lists("span_name").elements(rows)
    items, of_items = batch.lists("item_shape").elements(rows)
    sides, of_sides = batch.lists("item_shape/").elements(of_items)
    columns = SampleColumns(
        files=(),
        keys=b"",
        names=b"",
        sample_id=sample_id,
        file=file,
        key_bytes=np.zeros(len(rows), np.int64),
        epoch=np.zeros(len(rows), dtype=np.int64),
        crc32=batch.numbers("crc32", rows, null=NO_CHECKSUM).astype(np.int64),
        spans=spans,
        span_name_bytes=np.zeros(len(of_spans), np.int64),
        items=items,
        sides=sides,
        side=batch.elements("item_shape/", of_sides),
        **{
            name: batch.numbers(name, rows)
            for name in PLAIN_COLUMNS
            if name not in ("key", "crc32")
        },
        **{name: batch.elements(name, of_spans) for name in SPAN_COLUMNS[1:]},
        **{name: batch.elements(name, of_items) for name in ITEM_COLUMNS},
    )
    names = batch.lists("span_name").values.take(of_spans)
    return columns, batch.rows.column("key").take(rows), names


def notes_of(batch: DetailBatch, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], ItemNotes]:
    """How many items each of these rows of a batch has, and what is known of them."""
    kind, grid, seconds = NOTE_COLUMNS
    counts, of_items = batch.lists(kind).elements(rows)
    sides, of_grids = batch.lists(f"{grid}/").elements(of_items)  # of one not known, none
    notes = ItemNotes.unknown(len(of_items))
    notes.kind[:] = batch.elements(kind, of_items, null=-1)
    notes.grid[sides > 0] = batch.elements(f"{grid}/", of_grids).reshape(-1, 4)
    notes.seconds_per_patch[:] = batch.elements(seconds, of_items, null=np.nan)
    return counts, notes


def item_values(
    batch: DetailBatch, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int8], NDArray[np.int64]]:
    """How many items each of these rows of a batch has, their modality, and the product of their
    shapes."""
    counts, of_items = batch.lists("item_shape").elements(rows)
    sides, of_sides = batch.lists("item_shape/").elements(of_items)
    side = batch.elements("item_shape/", of_sides).astype(np.int64)
    values = np.multiply.reduceat(side, np.cumsum(sides) - sides) if len(side) else side
    return counts, batch.elements("item_modality", of_items), values
