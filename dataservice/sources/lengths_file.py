"""The file of an index's lengths: columns of plain numbers, in the form in which they are mapped.

    size │ counts and bytes of each (JSON) │ llm_tokens │ samples │ items

What a draw reads of a sample lies together, and of an item: each page that it reads for the first
time is a fault of some microseconds. Items come last, as nobody knows how many there will be.
"""

import json
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import LengthTable
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
"""The columns of lengths, as planning maps them."""

# Aligned, since numpy takes twice as long to gather numbers that are not.
OF_SAMPLES = np.dtype(
    [(name, COLUMNS[name]) for name in ("item_offsets", "loss_tokens")], align=True
)
OF_ITEMS = np.dtype(
    [(n, kind) for n, kind in COLUMNS.items() if n.startswith("item_") and n != "item_offsets"],
    align=True,
)
_SECTIONS = (COLUMNS["llm_tokens"], OF_SAMPLES, OF_ITEMS)
_SIZE = struct.Struct("<Q")
_HEAD_BYTES = 128
_ALIGNMENT_BYTES = 64
_BLOCK_ROWS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRecords:
    """The lengths of some samples as they lie in the file, but for their items, which begin at 0:
    `llm_tokens` int32[n], `samples` OF_SAMPLES[n], `items` OF_ITEMS[m]."""

    llm_tokens: NDArray[np.int32]
    samples: NDArray[Any]
    items: NDArray[Any]

    @staticmethod
    def room(samples: int, items: int) -> "LengthRecords":
        """For so many."""
        # Zeros, as what lies between aligned fields is written too: nothing else of this process.
        return LengthRecords(
            llm_tokens=np.empty(samples, _SECTIONS[0]),
            samples=np.zeros(samples, OF_SAMPLES),
            items=np.zeros(items, OF_ITEMS),
        )

    @staticmethod
    def of(lengths: LengthTable) -> "LengthRecords":
        """The same samples, with the frames of all their items."""
        records = LengthRecords.room(len(lengths), len(lengths.item_modality))
        records.llm_tokens[:] = lengths.llm_tokens
        records.samples["item_offsets"] = lengths.item_offsets[:-1]
        records.samples["loss_tokens"] = lengths.loss_tokens
        for name in OF_ITEMS.names or ():
            records.items[name] = getattr(lengths, name)
        return records


class Place(NamedTuple):
    """The rows of a file that some samples take: from this one on, and from this one of items."""

    row: int
    item: int


class LengthsFile:
    """Writes the lengths of so many `samples`, some at a time. Nothing of them stays in memory."""

    def __init__(self, samples: int, folder: str | None = None) -> None:
        """The file lies in `folder`, see `unnamed_file`. Raises OSError where it cannot be made."""
        self._samples = samples
        self._tokens_at = _HEAD_BYTES
        self._samples_at = _aligned(self._tokens_at + samples * _SECTIONS[0].itemsize)
        self._items_at = _aligned(self._samples_at + (samples + 1) * OF_SAMPLES.itemsize)
        self._rows = self._items = 0
        self._descriptor = unnamed_file(folder)

    def close(self) -> None:
        """Let the file go, unless `finish` handed it on."""
        os.close(self._descriptor)

    def write(self, records: LengthRecords) -> None:
        """Append the lengths of some samples. Raises OSError where the disk is full."""
        self.put(records, self.place(records))

    def place(self, records: LengthRecords) -> Place:
        """Where these lengths belong, if all that come before them have had their places."""
        place = Place(self._rows, self._items)
        self._rows += len(records.samples)
        self._items += len(records.items)
        return place

    def put(self, records: LengthRecords, place: Place) -> None:
        """Write lengths to their place, by which their items count from then on: several at once,
        from several threads. Raises as `write` does."""
        records.samples["item_offsets"] += place.item
        self._put(records.llm_tokens, self._tokens_at, place.row)
        self._put(records.samples, self._samples_at, place.row)
        self._put(records.items, self._items_at, place.item)

    def finish(self) -> int:
        """A descriptor of the file, which the caller closes. Nothing can be written after that.
        Raises ValueError where other than the stated samples were written."""
        if self._rows != self._samples:
            raise ValueError(f"it has {self._rows:,} samples in place of {self._samples:,}")
        end = np.zeros(1, OF_SAMPLES)
        end["item_offsets"] = self._items
        self._put(end, self._samples_at, self._rows)
        os.ftruncate(self._descriptor, self._items_at + self._items * OF_ITEMS.itemsize)
        counts = self._samples, self._samples + 1, self._items
        head = [(n, kind.itemsize) for n, kind in zip(counts, _SECTIONS, strict=True)]
        text = json.dumps(head).encode().ljust(_HEAD_BYTES - _SIZE.size)
        os.pwrite(self._descriptor, _SIZE.pack(len(text)) + text, 0)
        return os.dup(self._descriptor)

    def _put(self, rows: NDArray[Any], section_at: int, row: int) -> None:
        data, at = rows.view(np.uint8).data, section_at + row * rows.itemsize
        while data:
            written = os.pwrite(self._descriptor, data, at)
            data, at = data[written:], at + written


def write_lengths(lengths: LengthTable, folder: str | None = None) -> int:
    """A descriptor, which the caller closes, of a file of these lengths in `folder`. Raises OSError
    when it cannot be written."""
    with closing(LengthsFile(len(lengths), folder)) as file:
        for block in _blocks_of(lengths):
            file.write(LengthRecords.of(block))
        return file.finish()


def map_lengths(descriptor: int) -> tuple[LengthTable, mmap.mmap]:
    """The lengths in a file, mapped read-only, and the mapping. The descriptor stays the caller's.
    Raises OSError, ValueError, TypeError or struct.error where it holds none of this release."""
    mapped = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    memory = memoryview(mapped)
    (size_bytes,) = _SIZE.unpack_from(memory)
    at = _SIZE.size + size_bytes
    sections = []
    head = json.loads(bytes(memory[_SIZE.size : at]))
    for kind, (count, each_bytes) in zip(_SECTIONS, head, strict=True):
        if each_bytes != kind.itemsize:
            raise ValueError("it was written by another release")
        at = _aligned(at)
        sections.append(np.frombuffer(memory, dtype=kind, count=int(count), offset=at))
        at += sections[-1].nbytes
    llm_tokens, samples, items = sections
    lengths = LengthTable(
        llm_tokens=llm_tokens,
        item_offsets=samples["item_offsets"],
        loss_tokens=samples["loss_tokens"][:-1],
        **{name: items[name] for name in OF_ITEMS.names or ()},
    )
    return lengths, mapped


def _blocks_of(lengths: LengthTable) -> Iterator[LengthTable]:
    """The lengths, some samples at a time."""
    for first in range(0, len(lengths), _BLOCK_ROWS):
        rows = slice(first, first + _BLOCK_ROWS)
        offsets = lengths.item_offsets[first : first + _BLOCK_ROWS + 1]
        start, end = offsets[[0, -1]].tolist()
        columns = {
            name: getattr(lengths, name)[slice(start, end) if name.startswith("item_") else rows]
            for name in COLUMNS
        }
        yield LengthTable(**{**columns, "item_offsets": offsets - start})


def _aligned(at: int) -> int:
    return at + -at % _ALIGNMENT_BYTES
