"""Gathers rows of many batches from one mapped file: compiled, since numpy would go over the rows
some four times for each column, and once more to bring those of several batches in order.

Rows are n runs of neighbours, in the order of the file, where the processor fetches what comes next
before it is asked to. Batch b of a column begins at `bases[b]` of the file's `values`, as far as it
is mapped as numbers of one type, and the runs from `cuts[b]` to `cuts[b + 1]` are its own, each of
`length[i]` values from its `first[i]` on, which go to place `begins[i]` and behind it. Whatever a
damaged file says, nothing outside of it is read: that raises IndexError.

Places are unsigned once they are known not to be negative: numpy's meaning of negative ones would
double the time.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.kernels import array, kernel, read_only

Integers = NDArray[np.int64]
Narrow = NDArray[np.int32]

_BLOCKS = 8  # for each range
_OUTSIDE = "rows of a file lie outside it: it is damaged"
_INTEGERS, _NARROW = array(np.int64), array(np.int32)
_RUNS = _INTEGERS, _INTEGERS, _NARROW, _NARROW, _INTEGERS


@kernel((_INTEGERS, _NARROW, np.int64, _INTEGERS, _NARROW))
def _find(
    starts: Integers,
    table: Narrow,
    shift: int,
    places: Integers,
    found: Narrow,
) -> None:
    """As `Ranges.of`: `table` has the range of the first place of each block of 2**shift, and
    that of the first behind them."""
    for i in range(places.size):
        place = places[i]
        if place < 0 or place >= starts[-1]:
            raise IndexError("a place outside of all ranges")
        block = place >> shift
        low, high = table[block], table[block + 1]
        while low < high:
            middle = (low + high + 1) >> 1
            if starts[middle] <= place:
                low = middle
            else:
                high = middle - 1
        found[i] = low


@kernel((read_only(np.int32), *_RUNS, _NARROW, _NARROW, _NARROW, _INTEGERS))
def open_lists(
    offsets: Narrow,
    bases: Integers,
    cuts: Integers,
    first: Narrow,
    length: Narrow,
    begins: Integers,
    sizes: Narrow,
    inner_first: Narrow,
    inner_length: Narrow,
    inner_begins: Integers,
) -> int:
    """How many elements each list of runs of lists has, and the runs of those elements: lists lie
    end to end, so those of a run have one. Returns how many elements there are in all."""
    for b in range(bases.size):
        for i in range(cuts[b], cuts[b + 1]):
            start, lists, k = bases[b] + first[i], np.int64(length[i]), begins[i]
            if lists == 0:
                inner_first[i] = inner_length[i] = 0
                continue
            if lists < 0 or start < 0 or start + lists >= offsets.size or k + lists > sizes.size:
                raise IndexError(_OUTSIDE)
            before = inner_first[i] = offsets[np.uint64(start)]
            if before < 0:
                raise IndexError(_OUTSIDE)
            for j in range(lists):
                behind = offsets[np.uint64(start + j + 1)]
                if behind < before:
                    raise IndexError(_OUTSIDE)
                sizes[np.uint64(k + j)] = behind - before
                before = behind
            inner_length[i] = before - inner_first[i]
    starts = np.empty(sizes.size + 1, np.int64)  # of each list's elements, as they were asked for
    starts[0] = total = 0
    for k in range(sizes.size):
        total += sizes[k]
        starts[k + 1] = total
    for i in range(begins.size):
        inner_begins[i] = starts[np.uint64(begins[i])]
    return total


@kernel(
    (read_only(np.uint8), *_RUNS, array(np.uint8)),
    (read_only(np.int8), *_RUNS, array(np.int8)),
    (read_only(np.int32), *_RUNS, _NARROW),
    (read_only(np.uint32), *_RUNS, _INTEGERS),
    (read_only(np.int64), *_RUNS, _INTEGERS),
    (read_only(np.float64), *_RUNS, array(np.float64)),
)
def gather(
    values: NDArray[Any],
    bases: Integers,
    cuts: Integers,
    first: Narrow,
    length: Narrow,
    begins: Integers,
    gathered: NDArray[Any],
) -> None:
    """The values of all runs, each where it belongs."""
    for b in range(bases.size):
        for i in range(cuts[b], cuts[b + 1]):
            start, run, k = bases[b] + first[i], length[i], begins[i]
            if run < 0 or start < 0 or start + run > values.size or k + run > gathered.size:
                raise IndexError(_OUTSIDE)
            for j in range(run):
                gathered[np.uint64(k + j)] = values[np.uint64(start + j)]


@kernel((read_only(np.uint8), *_RUNS, array(np.bool_)))
def find_nulls(
    bits: NDArray[np.uint8],
    bases: Integers,
    cuts: Integers,
    first: Narrow,
    length: Narrow,
    begins: Integers,
    absent: NDArray[np.bool_],
) -> None:
    """Which values of all runs are null, by the bits of those that are not: least bit first, from
    byte `bases[b]` on; below 0 where a batch has no null and no bits."""
    for b in range(bases.size):
        base = bases[b]
        for i in range(cuts[b], cuts[b + 1]):
            start, run, k = np.int64(first[i]), length[i], begins[i]
            if run < 0 or start < 0 or k + run > absent.size:
                raise IndexError(_OUTSIDE)
            if base >= 0 and base + (start + run + 7) // 8 > bits.size:
                raise IndexError(_OUTSIDE)
            for j in range(run):
                at = start + j
                known = base < 0 or bits[np.uint64(base + (at >> 3))] >> (at & 7) & 1
                absent[np.uint64(k + j)] = not known


@kernel((_NARROW, _NARROW, _INTEGERS))
def multiply(sizes: Narrow, values: Narrow, products: Integers) -> None:
    """The product of each list, of `sizes[i]` values end to end; of none, 1."""
    k = 0
    for i in range(sizes.size):
        if sizes[i] < 0 or k + sizes[i] > values.size:
            raise IndexError(_OUTSIDE)
        product = 1
        for j in range(k, k + sizes[i]):
            product *= values[j]
        products[i] = product
        k += sizes[i]


class Ranges:
    """Neighbouring ranges of rows: k of them, of `starts` int64[k + 1]; any may be empty."""

    def __init__(self, starts: Integers) -> None:
        self.starts = starts
        # So many blocks that most hold rows of one range, which then is found without a search.
        blocks = _BLOCKS * len(starts)
        self._shift = max(0, (int(starts[-1]) // blocks).bit_length())
        firsts = np.arange((int(starts[-1]) >> self._shift) + 2) << self._shift
        self._table = (np.searchsorted(starts[:-1], firsts, side="right") - 1).astype(np.int32)

    def of(self, rows: Integers) -> Narrow:
        """The range of each of these rows, int32[n]. Raises IndexError where none has it."""
        found = np.empty(len(rows), np.int32)
        _find(self.starts, self._table, self._shift, rows, found)
        return found
