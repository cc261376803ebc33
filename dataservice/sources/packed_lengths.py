"""The lengths of a row group of an index's part, packed into one cell of it.

    form │ bytes of a number │ samples │ items │ one column behind the other

Arrow takes ten times as long to read the same numbers as columns of lists. A number has two bytes
where all of the cell fit: of pictures, 16 bytes a sample in all.
"""

import struct
from typing import Any

import numpy as np
from numba import from_dtype, types
from numpy.typing import NDArray

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.kernels import kernel
from dataservice.sources.lengths_file import OF_ITEMS, OF_SAMPLES, LengthRecords
from dataservice.sources.sound_lengths import (
    ITEMS,
    SOUND,
    TOGETHER,
    require_none_wrong,
    wrong_item,
    wrong_sample,
)

FORM = 1
"""Of cells as this release packs them."""
_HEAD = struct.Struct("<4I")
_OF_A_SAMPLE = 3  # llm_tokens, loss_tokens, how many items
_OF_AN_ITEM = ("item_modality", "item_encoder_tokens", "item_llm_tokens", "item_position",
               "item_frames")  # fmt: skip
_KINDS: dict[int, Any] = {2: np.dtype("<u2"), 4: np.dtype("<i4")}


def pack_lengths(lengths: LengthTable) -> bytes:
    """These lengths, with the frames of all their items, none of them negative."""
    columns = columns_of(lengths)
    largest = max(int(column.max(initial=0)) for column in columns)
    kind = _KINDS[2 if largest < 2**16 else 4]
    head = _HEAD.pack(FORM, kind.itemsize, len(lengths), len(lengths.item_modality))
    numbers = b"".join([column.astype(kind).tobytes() for column in columns])
    return head + numbers + b"\0" * (-len(numbers) % 4)


def columns_of(lengths: LengthTable) -> list[NDArray[Any]]:
    """What is packed of these lengths, as whole columns: those of samples, then those of items."""
    columns = [lengths.llm_tokens, lengths.loss_tokens, np.diff(lengths.item_offsets)]
    return columns + [np.asarray(getattr(lengths, name)) for name in _OF_AN_ITEM]


def packed_columns(cell: bytes) -> list[NDArray[Any]]:
    """The same of what a cell packs. Raises ValueError where it is damaged, or another release
    packed it."""
    found = _numbers(memoryview(cell))
    if found is None:
        raise ValueError("a cell of lengths that another release packed")
    samples, items, numbers = found
    counts = [samples] * _OF_A_SAMPLE + [items] * len(_OF_AN_ITEM)
    return np.split(numbers, np.cumsum(counts)[:-1])


def _numbers(cell: memoryview) -> tuple[int, int, NDArray[Any]] | None:
    """How many samples and items a cell packs, and its columns end to end. None and raises as
    `unpack_lengths`."""
    if len(cell) < _HEAD.size:
        raise ValueError("a cell of lengths that is cut short")
    form, each_bytes, samples, items = _HEAD.unpack_from(cell)
    if form != FORM:
        return None
    count = _OF_A_SAMPLE * samples + len(_OF_AN_ITEM) * items
    if each_bytes not in _KINDS or _HEAD.size + count * each_bytes > len(cell):
        raise ValueError("a cell of lengths that is cut short")
    return samples, items, np.frombuffer(cell, _KINDS[each_bytes], count, _HEAD.size)


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
    records = LengthRecords.room(samples, items)
    require_none_wrong(
        _unpack(
            np.require(numbers, requirements="A"),
            limits.max_llm_tokens,
            records.llm_tokens,
            records.samples,
            records.items,
        )
    )
    return records


def _signature(number: Any) -> tuple[Any, ...]:
    numbers = types.Array(number, 1, "C", readonly=True)
    samples, items = (types.Array(from_dtype(kind), 1, "C") for kind in (OF_SAMPLES, OF_ITEMS))
    return numbers, types.int64, types.int32[::1], samples, items


@kernel(_signature(types.uint16), _signature(types.int32))
def _unpack(
    numbers: NDArray[Any],
    most_tokens: int,
    llm_tokens: NDArray[np.int32],
    of_samples: Any,
    of_items: Any,
) -> int:
    """Fills the records. Returns what is wrong with the first sample that is not sound."""
    samples, items = llm_tokens.size, of_items.size
    encoder = _OF_A_SAMPLE * samples + items  # after the modalities
    behind = np.int64(0)
    for row in range(samples):
        tokens, loss = np.int64(numbers[row]), np.int64(numbers[samples + row])
        wrong = wrong_sample(tokens, loss, most_tokens)
        if wrong != SOUND:
            return wrong
        llm_tokens[row] = tokens
        of_samples[row].item_offsets = behind
        of_samples[row].loss_tokens = loss
        last = behind + np.int64(numbers[2 * samples + row])
        if not behind <= last <= items:
            return ITEMS
        left = tokens
        for k in range(np.uint64(behind), np.uint64(last)):
            modality, encoder_tokens = numbers[encoder - items + k], numbers[encoder + k]
            own = np.int64(numbers[encoder + items + k])
            place = np.int64(numbers[encoder + 2 * items + k])
            frames = numbers[encoder + 3 * items + k]
            wrong = wrong_item(modality, encoder_tokens, own, place, frames, tokens)
            if wrong != SOUND:
                return wrong
            left -= own
            item = of_items[k]
            item.item_modality = modality
            item.item_encoder_tokens = encoder_tokens
            item.item_llm_tokens = own
            item.item_position = place
            item.item_frames = frames
        if left < 0:
            return TOGETHER
        behind = last
    return SOUND if behind == items else ITEMS
