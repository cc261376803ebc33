"""The file of an index's lengths, in the form in which they are mapped.

    size │ counts, and where the table lies (JSON) │ llm_tokens of all │ blocks │ table of blocks

A block has the records of some neighbouring samples, see `length_records.py`. A page that is read
for the first time is a fault of some microseconds, and bytes that are written faster than the disk
takes them are waited for: so a file is small, and what a draw reads lies together.
"""

import json
import mmap
import os
import resource
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.kernels import array, helper, kernel, read_only
from dataservice.core.sample import IntArray, LengthTable
from dataservice.sources.gather import Ranges
from dataservice.sources.length_records import (
    ITEM_COLUMNS,
    KINDS,
    OF_A_SAMPLE,
    OF_AN_ITEM,
    LengthRecords,
)
from dataservice.sources.unnamed_file import unnamed_file

COLUMNS: dict[str, np.dtype[Any]] = {
    "llm_tokens": np.dtype(np.int32),
    "loss_tokens": np.dtype(np.int32),
    "item_offsets": np.dtype(np.int64),
    "item_modality": np.dtype(np.int8),
    "item_encoder_tokens": np.dtype(np.int32),
    "item_llm_tokens": np.dtype(np.int32),
    "item_position": np.dtype(np.int32),
    "item_frames": np.dtype(np.int32),
}
"""The columns of lengths that are taken."""

FORM = 2
"""Of files as this release writes them."""
_SIZE = struct.Struct("<Q")
_HEAD_BYTES = 128
_ALIGNMENT_BYTES = 64
# After a start nothing is in memory: where the first rows wait for the disk so often, the others
# are read by several threads, whose waits go on beside each other.
PROBED, COLD_FAULTS, READERS = 64, 16, 32


class Place(NamedTuple):
    """Where a block's LLM tokens go, by their row, and its records, by their first byte."""

    row: int
    start_byte: int


class LengthsFile:
    """Writes the lengths of so many `samples`, some at a time. Of them a few numbers a block stay
    in memory."""

    def __init__(self, samples: int, folder: str | None = None) -> None:
        """The file lies in `folder`, see `unnamed_file`. Raises OSError where it cannot be made."""
        self._samples = samples
        self._end_byte = _aligned(_HEAD_BYTES + samples * COLUMNS["llm_tokens"].itemsize)
        self._rows = 0
        # Of each block: its first row and byte, how many items it has, and bytes of a number.
        self._table: list[tuple[int, int, int, int]] = []
        self._descriptor = unnamed_file(folder)

    def close(self) -> None:
        """Let the file go, unless `finish` handed it on."""
        os.close(self._descriptor)

    def write(self, records: LengthRecords) -> None:
        """Append the lengths of some samples. Raises OSError where the disk is full."""
        self.put(records, self.place(records))

    def place(self, records: LengthRecords) -> Place:
        """Where these lengths belong, if all that come before them have had their places."""
        place, numbers = Place(self._rows, self._end_byte), records.numbers
        if len(records.llm_tokens):
            self._table.append((*place, records.items, numbers.itemsize))
        self._rows += len(records.llm_tokens)
        self._end_byte = _aligned(self._end_byte + numbers.nbytes)
        return place

    def put(self, records: LengthRecords, place: Place) -> None:
        """Write lengths to their place: several at once, from several threads. Raises as `write`
        does."""
        tokens = records.llm_tokens
        self._put(tokens, _HEAD_BYTES + place.row * tokens.itemsize)
        self._put(records.numbers, place.start_byte)

    def finish(self) -> int:
        """A descriptor of the file, which the caller closes. Nothing can be written after that.
        Raises ValueError where other than the stated samples were written."""
        if self._rows != self._samples:
            raise ValueError(f"it has {self._rows:,} samples in place of {self._samples:,}")
        table = np.array([*self._table, (self._rows, self._end_byte, 0, 0)], dtype=np.int64)
        self._put(table, self._end_byte)
        head = {"form": FORM, "samples": self._samples, "table": [len(table), self._end_byte]}
        text = json.dumps(head).encode().ljust(_HEAD_BYTES - _SIZE.size)
        os.pwrite(self._descriptor, _SIZE.pack(len(text)) + text, 0)
        return os.dup(self._descriptor)

    def _put(self, rows: NDArray[Any], at: int) -> None:
        data = rows.reshape(-1).view(np.uint8).data
        while data:
            written = os.pwrite(self._descriptor, data, at)
            data, at = data[written:], at + written


class MappedLengths:
    """The lengths in a file, mapped read-only. What is drawn of them is a LengthTable; nothing
    outside of the file is read, whatever it says."""

    def __init__(self, descriptor: int) -> None:
        """The descriptor stays the caller's. Raises OSError, and ValueError where it holds none of
        this release."""
        self._mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        memory = memoryview(self._mapped)
        samples, rows, at = _read_head(memory)
        self.llm_tokens: NDArray[np.int32] = np.frombuffer(
            memory, COLUMNS["llm_tokens"], samples, _HEAD_BYTES
        )
        # A copy, which stays what was checked.
        self._table = np.frombuffer(memory, np.int64, 4 * rows, at).reshape(rows, 4).copy()
        _require_within(self._table, len(self), at)
        self._numbers = {
            each: np.frombuffer(memory, kind, at // each) for each, kind in KINDS.items()
        }
        self._blocks = Ranges(np.ascontiguousarray(self._table[:, 0]))

    def __len__(self) -> int:
        return len(self.llm_tokens)

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self._table) - 1

    def records(self, block: int) -> LengthRecords:
        """Those of a block, as they are mapped."""
        first_row, start_byte, items, each_bytes = self._table[block].tolist()
        tokens = self.llm_tokens[first_row : self._table[block + 1, 0]]
        count = OF_A_SAMPLE * len(tokens) + OF_AN_ITEM * items
        start = start_byte // each_bytes
        numbers = self._numbers[each_bytes][start : start + count]
        return LengthRecords(llm_tokens=tokens, numbers=numbers, items=items)

    def take(self, rows: IntArray) -> LengthTable:
        """The lengths of the samples `rows` (int[k], repeats allowed), in that order. Raises
        IndexError where there is no such sample, or the file is damaged."""
        wanted = np.ascontiguousarray(rows, dtype=np.int64)
        if len(wanted) > PROBED and _faults(partial(self._taken, wanted[:PROBED])) > COLD_FAULTS:
            with ThreadPoolExecutor(READERS, "lengths from disk") as threads:
                list(threads.map(self._taken, np.array_split(wanted, READERS)))
        return self._taken(wanted)

    def _taken(self, wanted: NDArray[np.int64]) -> LengthTable:
        blocks, lengths = self._blocks.of(wanted), _room(len(wanted))
        mapped = (self._numbers[2], self._numbers[4], self._table), wanted, blocks
        first = np.empty(len(wanted), np.int64)
        _find_items(*mapped, first, lengths["item_offsets"])
        lengths |= _room_for_items(int(lengths["item_offsets"][-1]))
        _take(*mapped, first, *(lengths[name] for name in COLUMNS))
        return LengthTable(**lengths)

    def let_go(self) -> None:
        """Nothing stays mapped in, and no neighbours of what is read will be wanted."""
        self._mapped.madvise(mmap.MADV_DONTNEED)
        self._mapped.madvise(mmap.MADV_RANDOM)


Lengths = LengthTable | MappedLengths
"""Of all samples of an index, by row."""


def _faults(work: Callable[[], object]) -> int:
    """How often this thread waits for the disk meanwhile, for what is mapped in."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    work()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before


def _read_head(memory: memoryview) -> tuple[int, int, int]:
    """How many samples there are, how many rows the table has, and its first byte. Raises
    ValueError where another release wrote it, or it is damaged."""
    try:
        (size_bytes,) = _SIZE.unpack_from(memory)
        head = json.loads(bytes(memory[_SIZE.size : _SIZE.size + size_bytes]))
        if head["form"] != FORM:
            raise ValueError("it was written by another release")
        samples, rows, at = map(int, (head["samples"], *head["table"]))
    except (struct.error, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its head is damaged: {error}") from error
    if not (0 <= samples <= len(memory) and 1 <= rows <= len(memory) and 0 <= at <= len(memory)):
        raise ValueError("its head speaks of more than the file has")
    return samples, rows, at


def _room(samples: int) -> dict[str, Any]:
    room = {name: np.empty(samples, COLUMNS[name]) for name in ("llm_tokens", "loss_tokens")}
    return {**room, "item_offsets": np.empty(samples + 1, COLUMNS["item_offsets"])}


def _room_for_items(items: int) -> dict[str, Any]:
    return {name: np.empty(items, COLUMNS[name]) for name in ITEM_COLUMNS}


def _require_within(table: NDArray[np.int64], samples: int, end_byte: int) -> None:
    """Raises ValueError unless the blocks lie one behind the other before `end_byte`, and have
    so many samples."""
    first, start, items, each = table[:-1].T
    rows = np.diff(table[:, 0])
    widest = end_byte // min(KINDS)
    within = (
        int(table[0, 0]) == 0
        and int(table[-1, 0]) == samples
        and bool(np.isin(each, [*KINDS]).all())
        and bool(((rows > 0) & (first >= 0) & (items >= 0) & (items <= widest)).all())
        and bool(((start >= 0) & (start <= end_byte) & (start % _ALIGNMENT_BYTES == 0)).all())
    )
    if within:
        ends = start + (OF_A_SAMPLE * rows + OF_AN_ITEM * items) * each
        within = bool((ends <= end_byte).all())
    if not within:
        raise ValueError("its table speaks of other blocks than it has")


def _aligned(at: int) -> int:
    return at + -at % _ALIGNMENT_BYTES


_OUTSIDE = "lengths lie outside of their block: the file is damaged"
# The file's numbers of two and of four bytes, and its table.
_FILE = read_only(np.uint16), read_only(np.int32), array(np.int64, 2)
_WANTED = array(np.int64), array(np.int32)
_File = tuple[NDArray[np.uint16], NDArray[np.int32], NDArray[np.int64]]


@helper
def _number(file: _File, each_bytes: int, at: int) -> np.int64:
    """Number `at` of the file, in which each has so many bytes."""
    if each_bytes == 2:
        return np.int64(file[0][np.uint64(at)])
    return np.int64(file[1][np.uint64(at)])


@kernel((_FILE, *_WANTED, array(np.int64), array(np.int64)))
def _find_items(
    file: _File,
    rows: NDArray[np.int64],
    blocks: NDArray[np.int32],
    first_items: NDArray[np.int64],
    item_offsets: NDArray[np.int64],
) -> None:
    """Of each row, where its items begin in its block, and among those of all rows."""
    table = file[2]
    item_offsets[0] = 0
    for i in range(rows.size):
        block = blocks[i]
        row, samples = rows[i] - table[block, 0], table[block + 1, 0] - table[block, 0]
        each = table[block, 3]
        at = table[block, 1] // each + OF_A_SAMPLE * row
        first, behind = _number(file, each, at), table[block, 2]
        if row + 1 < samples:
            behind = _number(file, each, at + OF_A_SAMPLE)
        if not 0 <= first <= behind <= table[block, 2]:
            raise IndexError(_OUTSIDE)
        first_items[i] = first
        item_offsets[i + 1] = item_offsets[i] + (behind - first)


@kernel(
    (
        _FILE,
        *_WANTED,
        array(np.int64),
        *(array(np.int32),) * 2,
        array(np.int64),
        array(np.int8),
        *(array(np.int32),) * 4,
    )
)
def _take(
    file: _File,
    rows: NDArray[np.int64],
    blocks: NDArray[np.int32],
    first_items: NDArray[np.int64],
    llm_tokens: NDArray[np.int32],
    loss_tokens: NDArray[np.int32],
    item_offsets: NDArray[np.int64],
    modality: NDArray[np.int8],
    encoder_tokens: NDArray[np.int32],
    item_llm_tokens: NDArray[np.int32],
    position: NDArray[np.int32],
    frames: NDArray[np.int32],
) -> None:
    """The numbers of these rows, whose items were found."""
    table = file[2]
    for i in range(rows.size):
        block = blocks[i]
        row, samples = rows[i] - table[block, 0], table[block + 1, 0] - table[block, 0]
        each = table[block, 3]
        start = table[block, 1] // each
        llm_tokens[i] = _number(file, each, start + OF_A_SAMPLE * row + 1)
        loss_tokens[i] = _number(file, each, start + OF_A_SAMPLE * row + 2)
        at = start + OF_A_SAMPLE * samples + OF_AN_ITEM * first_items[i]
        for k in range(np.uint64(item_offsets[i]), np.uint64(item_offsets[i + 1])):
            modality[k] = _number(file, each, at)
            encoder_tokens[k] = _number(file, each, at + 1)
            item_llm_tokens[k] = _number(file, each, at + 2)
            position[k] = _number(file, each, at + 3)
            frames[k] = _number(file, each, at + 4)
            at += OF_AN_ITEM
