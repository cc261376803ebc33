"""The columns of a detail file, read where they lie in the mapped file: rows of all of its batches
at once, in the order asked for.

    batch, row ──► offsets of its list ──► run of elements ──► numbers, lists, bytes of texts
                                                   └──► of lists in lists again

A batch of a file that Arrow wrote begins its offsets at 0, so that lists of the same sizes lie at
the same places in every column.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.sources.gather import Integers, Narrow, find_nulls, gather, open_lists

_OFFSET = np.dtype(np.int32)
_NO_NULL = -1


class Runs(NamedTuple):
    """Of each row a run of elements, in the order of the file: `length` int32[n] from place `first`
    int32[n] of its batch on, which come to place `begins` int64[n] of the `elements` in all. They
    are as deep in lists as `level` says; 0 are the rows."""

    level: int
    first: Narrow
    length: Narrow
    begins: Integers
    elements: int


class _Column(NamedTuple):
    """Where each batch's part of a column lies in the file. `offsets` int64[batches] of each level
    of lists, of which text is the innermost, as numbered there in steps of four bytes; `bases`
    int64[batches] of the `values`, which are the file as numbers of the column's type; `nulls`
    int64[batches], in bytes, of the bits of values that are not null; None where no value is."""

    offsets: tuple[Integers, ...]
    values: NDArray[Any]
    bases: Integers
    nulls: Integers | None


class DetailColumns:
    """Columns of a mapped file of batches."""

    def __init__(
        self, schema: pa.Schema, mapped: pa.Buffer, batches: Sequence[pa.RecordBatch]
    ) -> None:
        """`batches` were read from the whole file, `mapped`. Raises pa.ArrowInvalid where their
        numbers do not lie in it as they are, such as those of a compressed file."""
        self._mapped = mapped
        self._batches = batches
        self.starts = np.cumsum([0, *(b.num_rows for b in batches)], dtype=np.int64)
        self.offsets = self._as_numbers(_OFFSET)
        self.bytes = self._as_numbers(np.dtype(np.uint8))
        self.of = {field.name: self._column(field) for field in schema}

    def _as_numbers(self, kind: "np.dtype[Any]") -> NDArray[Any]:
        return np.frombuffer(memoryview(self._mapped), kind, self._mapped.size // kind.itemsize)

    def _column(self, field: "pa.Field[Any]") -> _Column:
        kind, lists = field.type, 0
        while pa.types.is_list(kind):
            kind, lists = kind.value_type, lists + 1
        text = pa.types.is_string(kind)
        values = self.bytes if text else self._as_numbers(np.dtype(kind.to_pandas_dtype()))
        # Of each level its bits and its offsets, then the bits of the values and the values.
        buffers: list[list[Any]] = [batch.column(field.name).buffers() for batch in self._batches]
        bits = [each[2 * lists] for each in buffers]
        return _Column(
            offsets=tuple(
                self._begins([each[2 * level + 1] for each in buffers], _OFFSET.itemsize)
                for level in range(lists + text)
            ),
            values=values,
            bases=self._begins([each[-1] for each in buffers], values.itemsize),
            nulls=None if text or not any(bits) else self._begins(bits, 1, none=_NO_NULL),
        )

    def _begins(self, buffers: Sequence[Any], step_bytes: int, *, none: int = 0) -> Integers:
        """Where buffers begin in the file, in steps; `none` of one that there is not."""
        begins = np.full(len(buffers), none, np.int64)
        for k, buffer in enumerate(buffers):
            if buffer is None or not buffer.size:
                continue
            begins[k], beside = divmod(buffer.address - self._mapped.address, step_bytes)
            behind = begins[k] * step_bytes + buffer.size
            if beside or begins[k] < 0 or behind > self._mapped.size:
                raise pa.ArrowInvalid("numbers do not lie in the file as they are")
        return begins


class DetailRows:
    """Some rows of the file, as they were asked for; repeats are allowed."""

    def __init__(self, columns: DetailColumns, rows: Integers) -> None:
        """Raises IndexError where there is no such row; so does all else where the file is
        damaged."""
        n, starts = len(rows), columns.starts
        if n and not 0 <= int(rows.min()) <= int(rows.max()) < starts[-1]:
            raise IndexError("a row that the file does not have")
        # Each with its place below it, which numpy sorts in half the time that `argsort` takes.
        bits = n.bit_length()
        rising = rows << bits | np.arange(n)
        rising.sort()
        begins = rising & (1 << bits) - 1
        rising >>= bits
        self._columns = columns
        self._cuts = np.searchsorted(rising, starts)
        rising -= starts[:-1].repeat(np.diff(self._cuts))
        self._rows = Runs(0, rising.astype(np.int32), np.ones(n, np.int32), begins, n)

    def opened(self, name: str, lists: Runs | None = None) -> tuple[Narrow, Runs]:
        """How many elements each of these lists of a column has, int32[lists], and the elements:
        those of the rows, or of the lists in lists that were opened before. A text is a list of
        bytes."""
        lists = lists or self._rows
        sizes = np.empty(lists.elements, np.int32)
        first, length, begins = map(np.empty_like, (lists.first, lists.length, lists.begins))
        at = self._at(self._columns.of[name].offsets[lists.level], lists)
        elements = open_lists(self._columns.offsets, *at, sizes, first, length, begins)
        return sizes, Runs(lists.level + 1, first, length, begins, elements)

    def numbers(self, name: str, runs: Runs | None = None, *, null: float = 0) -> NDArray[Any]:
        """The rows' numbers in a column, or those in a column of lists, end to end; and this in
        place of null. Those without a sign come as int64."""
        runs, of = runs or self._rows, self._columns.of[name]
        kind = np.int64 if of.values.dtype == np.uint32 else of.values.dtype
        values = np.empty(runs.elements, kind)
        gather(of.values, *self._at(of.bases, runs), values)
        if of.nulls is not None:
            absent = np.empty(len(values), np.bool_)
            find_nulls(self._columns.bytes, *self._at(of.nulls, runs), absent)
            values[absent] = null
        return values

    def text(self, name: str, runs: Runs) -> bytes:
        """Texts in a column, end to end."""
        return self.numbers(name, runs).tobytes()

    def _at(
        self, bases: Integers, runs: Runs
    ) -> tuple[Integers, Integers, Narrow, Narrow, Integers]:
        return bases, self._cuts, runs.first, runs.length, runs.begins
