"""Checks that lengths are such as an index of ours has: compiled, as all of an index are checked
before its job is open. The rules are those of one sample and of one item, for whoever goes over
them."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import register_jitable
from numpy.typing import NDArray

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable, Modality
from dataservice.sources.kernels import kernel

Number = int | np.integer[Any]

SOUND, ITEMS, TOGETHER = 0, 1, 2
_TOKENS, _LOSS, _MODALITY, _ENCODER, _FRAMES, _PLACE = range(3, 9)
_WRONG = {
    ITEMS: "columns that speak of different items",
    TOGETHER: "more tokens of items than of the sample",
    _TOKENS: "llm_tokens out of range",
    _LOSS: "loss_tokens out of range",
    _MODALITY: "an unknown modality",
    _ENCODER: "encoder_tokens out of range",
    _FRAMES: "frames out of range",
    _PLACE: "items out of their sample",
}
_FIRST_MODALITY, _LAST_MODALITY = int(min(Modality)), int(max(Modality))
_NO_FRAMES = np.zeros(0, np.int32)


def require_sound_lengths(
    lengths: LengthTable, limits: DecodeLimits, rows: range | None = None
) -> None:
    """Raises ValueError when lengths, or those of some neighbouring `rows`, could not be in an
    index of ours. O(rows + items), some nanoseconds each; other threads run meanwhile."""
    frames = lengths.item_frames
    rows = range(len(lengths)) if rows is None else rows
    require_none_wrong(
        _first_wrong(
            rows.start,
            rows.stop,
            lengths.llm_tokens,
            lengths.loss_tokens,
            lengths.item_offsets,
            lengths.item_modality,
            lengths.item_encoder_tokens,
            lengths.item_llm_tokens,
            lengths.item_position,
            _NO_FRAMES if frames is None else frames,
            limits.max_llm_tokens,
        )
    )


def require_none_wrong(wrong: int) -> None:
    """Raises ValueError in words for what a kernel found."""
    if wrong != SOUND:
        raise ValueError(f"it has {_WRONG[wrong]}")


@register_jitable
def wrong_sample(tokens: Number, loss: Number, most_tokens: Number) -> int:
    """What is wrong with a sample by itself."""
    if not 1 <= tokens <= most_tokens:
        return _TOKENS
    return SOUND if 0 <= loss <= tokens else _LOSS


@register_jitable
def wrong_item(
    modality: Number,
    encoder_tokens: Number,
    own: Number,
    place: Number,
    frames: Number,
    tokens: Number,
) -> int:
    """What is wrong with an item of a sample of so many tokens."""
    if not _FIRST_MODALITY <= modality <= _LAST_MODALITY:
        return _MODALITY
    if encoder_tokens < 1:
        return _ENCODER
    if frames < 0:
        return _FRAMES
    return SOUND if own >= 1 and place >= 0 and place + own <= tokens else _PLACE


def _column(number: Any) -> Any:
    return types.Array(number, 1, "A", readonly=True)  # it may be a field of records


@kernel(
    (
        *(types.int64,) * 2,
        *(_column(types.int32),) * 2,
        _column(types.int64),
        _column(types.int8),
        *(_column(types.int32),) * 4,
        types.int64,
    )
)
def _first_wrong(
    begin: int,
    end: int,
    llm_tokens: NDArray[np.int32],
    loss_tokens: NDArray[np.int32],
    item_offsets: NDArray[np.int64],
    item_modality: NDArray[np.int8],
    item_encoder_tokens: NDArray[np.int32],
    item_llm_tokens: NDArray[np.int32],
    item_position: NDArray[np.int32],
    item_frames: NDArray[np.int32],
    most_tokens: int,
) -> int:
    """What is wrong with the first of these samples that is not sound. Nothing outside of the
    columns is read, whatever they say."""
    rows, items = llm_tokens.size, item_modality.size
    if item_offsets.size != rows + 1 or item_offsets[0] != 0 or item_offsets[rows] != items:
        return ITEMS
    for row in range(begin, min(end, rows)):
        tokens, first, last = np.int64(llm_tokens[row]), item_offsets[row], item_offsets[row + 1]
        wrong = wrong_sample(tokens, np.int64(loss_tokens[row]), most_tokens)
        if wrong != SOUND:
            return wrong
        if not 0 <= first <= last <= items:
            return ITEMS
        left = tokens
        for k in range(np.uint64(first), np.uint64(last)):
            own, frames = np.int64(item_llm_tokens[k]), np.int64(0)
            if item_frames.size:
                frames = np.int64(item_frames[k])
            wrong = wrong_item(
                item_modality[k],
                item_encoder_tokens[k],
                own,
                np.int64(item_position[k]),
                frames,
                tokens,
            )
            if wrong != SOUND:
                return wrong
            left -= own
        if left < 0:
            return TOGETHER
    return SOUND
