"""The lengths of a row group of an index's part, packed into one cell of it.

    form │ bytes of each column's numbers │ rows │ items │ columns, each from a multiple of 4 bytes

Arrow takes ten times as long to read the same numbers as columns of lists. A column's numbers have
as many bytes as its largest needs: of pictures, 13 bytes a sample in all.
"""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import LengthTable

_FORM = 1
_OF_ROWS = ("llm_tokens", "loss_tokens", "items")
_OF_ITEMS = (
    "item_modality",
    "item_encoder_tokens",
    "item_llm_tokens",
    "item_position",
    "item_frames",
)
_COLUMNS = (*_OF_ROWS, *_OF_ITEMS)
_HEAD = struct.Struct(f"<I{len(_COLUMNS)}B2I")
_KINDS: dict[int, Any] = {1: np.uint8, 2: np.dtype("<u2"), 4: np.dtype("<i4")}
_ALIGNMENT_BYTES = 4


def pack_lengths(lengths: LengthTable) -> bytes:
    """These lengths, with the frames of all their items, none of them negative."""
    columns = [_numbers(lengths, name) for name in _COLUMNS]
    narrow = [column.astype(_KINDS[_bytes_of(column)]) for column in columns]
    widths = [column.itemsize for column in narrow]
    head = _HEAD.pack(_FORM, *widths, len(lengths), len(lengths.item_modality))
    return b"".join(map(_padded, (head, *(column.tobytes() for column in narrow))))


def unpack_lengths(cell: memoryview) -> LengthTable | None:
    """What was packed; None where another release packed it. Raises ValueError where `cell` is
    damaged; the numbers themselves are not checked, nor that items add up."""
    if len(cell) < _HEAD.size:
        raise ValueError("a cell of lengths that is cut short")
    form, *widths, rows, items = _HEAD.unpack_from(cell)
    if form != _FORM:
        return None
    counts = [rows] * len(_OF_ROWS) + [items] * len(_OF_ITEMS)
    columns: dict[str, NDArray[Any]] = {}
    at = _aligned(_HEAD.size)
    for name, width, count in zip(_COLUMNS, widths, counts, strict=True):
        if width not in _KINDS or at + width * count > len(cell):
            raise ValueError("a cell of lengths that is cut short")
        columns[name] = np.frombuffer(cell, dtype=_KINDS[width], count=count, offset=at)
        at += _aligned(width * count)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(columns.pop("items").astype(np.int64), out=offsets[1:])
    modality = columns.pop("item_modality").astype(np.int8)
    wide = {name: column.astype(np.int32) for name, column in columns.items()}
    return LengthTable(item_offsets=offsets, item_modality=modality, **wide)


def _numbers(lengths: LengthTable, name: str) -> NDArray[Any]:
    column = np.diff(lengths.item_offsets) if name == "items" else getattr(lengths, name)
    return np.asarray(column)


def _bytes_of(column: NDArray[Any]) -> int:
    largest = int(column.max(initial=0))
    return 1 if largest < 2**8 else 2 if largest < 2**16 else 4


def _padded(data: bytes) -> bytes:
    return data.ljust(_aligned(len(data)), b"\0")


def _aligned(size: int) -> int:
    return size + -size % _ALIGNMENT_BYTES
