"""The lengths of a row group of an index's part, packed into one cell of it.

    form │ bytes of a number │ samples │ items │ one column behind the other

Arrow takes ten times as long to read the same numbers as columns of lists. A number has two bytes
where all of the cell fit: of pictures, 16 bytes a sample in all.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.length_records import (
    KINDS,
    OF_A_SAMPLE,
    OF_AN_ITEM,
    LengthRecords,
    columns_of,
    end_to_end,
)

FORM = 1
"""Of cells as this release packs them."""
_HEAD = struct.Struct("<4I")


def pack_lengths(lengths: LengthTable) -> bytes:
    """These lengths, with the frames of all their items, none of them negative."""
    numbers = end_to_end(columns_of(lengths))
    head = _HEAD.pack(FORM, numbers.itemsize, len(lengths), len(lengths.item_modality))
    return head + numbers.tobytes() + b"\0" * (-numbers.nbytes % 4)


def packed_columns(cell: bytes) -> list[NDArray[Any]]:
    """What `columns_of` gives, of a cell. Raises ValueError where it is damaged, or another release
    packed it."""
    found = _numbers(memoryview(cell))
    if found is None:
        raise ValueError("a cell of lengths that another release packed")
    samples, items, numbers = found
    counts = [samples] * OF_A_SAMPLE + [items] * OF_AN_ITEM
    return np.split(numbers, np.cumsum(counts)[:-1])


def _numbers(cell: memoryview) -> tuple[int, int, NDArray[Any]] | None:
    """How many samples and items a cell packs, and its columns end to end. None and raises as
    `unpack_lengths`."""
    if len(cell) < _HEAD.size:
        raise ValueError("a cell of lengths that is cut short")
    form, each_bytes, samples, items = _HEAD.unpack_from(cell)
    if form != FORM:
        return None
    count = OF_A_SAMPLE * samples + OF_AN_ITEM * items
    if each_bytes not in KINDS or _HEAD.size + count * each_bytes > len(cell):
        raise ValueError("a cell of lengths that is cut short")
    return samples, items, np.frombuffer(cell, KINDS[each_bytes], count, _HEAD.size)


def is_known(cell: bytes) -> bool:
    """Whether it is packed as this release packs lengths."""
    return len(cell) >= _HEAD.size and _HEAD.unpack_from(cell)[0] == FORM


def unpack_lengths(cell: memoryview, limits: DecodeLimits) -> LengthRecords | None:
    """What was packed, checked; None where another release packed it. Raises ValueError where the
    cell is damaged, or the lengths could not be in an index of ours."""
    found = _numbers(cell)
    if found is None:
        return None
    samples, items, numbers = found
    aligned = np.require(numbers, requirements="A")
    records = LengthRecords.of_columns(aligned, samples, items)
    records.require_sound(limits)
    return records
