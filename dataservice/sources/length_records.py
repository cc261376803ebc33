"""The lengths of some neighbouring samples as records: what a draw reads of a sample, or of an
item, lies together.

    numbers:  first item, LLM tokens, loss tokens │ of each sample
              modality, encoder tokens, LLM tokens, position, frames │ of each item

Numbers have two bytes where all of them fit, and four elsewhere. LLM tokens stand in a column too,
which is handed out whole: that makes 10 bytes a sample of text, 20 a picture. Records are checked
by compiled rules, as all of an index are before its job is open.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.kernels import array, helper, kernel, read_only
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable, Modality

Number = int | np.integer[Any]

KINDS: dict[int, Any] = {2: np.dtype("<u2"), 4: np.dtype("<i4")}
"""Of numbers, by their bytes."""
ITEM_COLUMNS = ("item_modality", "item_encoder_tokens", "item_llm_tokens", "item_position",
                "item_frames")  # fmt: skip
# Of a sample, as a record and as columns, whose third is how many items it has; and of an item.
OF_A_SAMPLE, OF_AN_ITEM = 3, len(ITEM_COLUMNS)
_MOST_NARROW = 2**16 - 1

_SOUND, _ITEMS, _TOGETHER, _TOKENS, _LOSS, _MODALITY, _ENCODER, _FRAMES, _PLACE = range(9)
_WRONG = {
    _ITEMS: "columns that speak of different items",
    _TOGETHER: "more tokens of items than of the sample",
    _TOKENS: "llm_tokens out of range",
    _LOSS: "loss_tokens out of range",
    _MODALITY: "an unknown modality",
    _ENCODER: "encoder_tokens out of range",
    _FRAMES: "frames out of range",
    _PLACE: "items out of their sample",
}
_FIRST_MODALITY, _LAST_MODALITY = int(min(Modality)), int(max(Modality))


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRecords:
    """The lengths of n samples with m `items` in all: `llm_tokens` int32[n]; `numbers` [3 n + 5 m]
    of one of KINDS, in which items count from 0."""

    llm_tokens: NDArray[np.int32]
    numbers: NDArray[Any]
    items: int

    @staticmethod
    def of(lengths: LengthTable) -> "LengthRecords":
        """The same samples. Raises ValueError where the columns speak of different items."""
        columns = columns_of(lengths)
        samples, items = len(lengths), len(lengths.item_modality)
        counts = columns[OF_A_SAMPLE - 1]
        alike = (
            len(lengths.loss_tokens) == len(counts) == samples
            and all(len(column) == items for column in columns[OF_A_SAMPLE:])
            and int(lengths.item_offsets[0]) == 0 <= int(counts.min(initial=0))
            and int(counts.max(initial=0)) <= items
        )
        _require(_SOUND if alike else _ITEMS)
        return LengthRecords.of_columns(end_to_end(columns), samples, items)

    @staticmethod
    def of_columns(numbers: NDArray[Any], samples: int, items: int) -> "LengthRecords":
        """The same samples, of the columns of `columns_of` end to end, of one of KINDS. Raises
        ValueError where these speak of different items."""
        fits = numbers.itemsize == 2 and items <= _MOST_NARROW
        records = LengthRecords(
            llm_tokens=np.empty(samples, np.int32),
            numbers=np.empty(OF_A_SAMPLE * samples + OF_AN_ITEM * items, KINDS[2 if fits else 4]),
            items=items,
        )
        _require(_lay_out(numbers, items, records.llm_tokens, records.numbers))
        return records

    def require_sound(self, limits: DecodeLimits) -> None:
        """Raises ValueError when they could not be in an index of ours. O(samples + items), some
        nanoseconds each; other threads run meanwhile."""
        _require(_first_wrong(self.llm_tokens, self.numbers, self.items, limits.max_llm_tokens))


def require_sound_lengths(lengths: LengthTable, limits: DecodeLimits) -> None:
    """Raises as `LengthRecords.require_sound` does."""
    LengthRecords.of(lengths).require_sound(limits)


def columns_of(lengths: LengthTable) -> list[NDArray[Any]]:
    """The numbers of these lengths as whole columns: those of samples, then those of items. Frames
    that are unknown are 0."""
    columns = [lengths.llm_tokens, lengths.loss_tokens, np.diff(lengths.item_offsets)]
    unknown = np.zeros(len(lengths.item_modality), np.int32)
    columns += [getattr(lengths, name) for name in ITEM_COLUMNS[:-1]]
    return [*columns, unknown if lengths.item_frames is None else lengths.item_frames]


def end_to_end(columns: list[NDArray[Any]]) -> NDArray[Any]:
    """All these numbers, of the smallest of KINDS in which they fit."""
    fit = all(
        int(column.min(initial=0)) >= 0 and int(column.max(initial=0)) <= _MOST_NARROW
        for column in columns
    )
    kind = KINDS[2 if fit else 4]
    return np.concatenate([column.astype(kind) for column in columns])


def _require(wrong: int) -> None:
    if wrong != _SOUND:
        raise ValueError(f"it has {_WRONG[wrong]}")


_TOKENS_OUT = array(np.int32)
_TOKENS_IN = read_only(np.int32)


@kernel(
    (read_only(np.uint16), np.int64, _TOKENS_OUT, array(np.uint16)),
    (read_only(np.uint16), np.int64, _TOKENS_OUT, array(np.int32)),
    (read_only(np.int32), np.int64, _TOKENS_OUT, array(np.int32)),
)
def _lay_out(
    columns: NDArray[Any], items: int, llm_tokens: NDArray[np.int32], numbers: NDArray[Any]
) -> int:
    """Fills the records by columns end to end. Returns what is wrong with their counts of items."""
    samples, behind = llm_tokens.size, np.int64(0)
    for row in range(samples):
        llm_tokens[row] = columns[row]
        at = OF_A_SAMPLE * row
        numbers[at] = behind
        numbers[at + 1] = columns[row]
        numbers[at + 2] = columns[samples + row]
        count = np.int64(columns[2 * samples + row])
        behind += count
        if count < 0 or behind > items:
            return _ITEMS
    for k in range(items):
        at = OF_A_SAMPLE * samples + OF_AN_ITEM * k
        for field in range(OF_AN_ITEM):
            numbers[at + field] = columns[OF_A_SAMPLE * samples + field * items + k]
    return _SOUND if behind == items else _ITEMS


@helper
def _wrong_item(
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
    return _SOUND if own >= 1 and place >= 0 and place + own <= tokens else _PLACE


@kernel(
    (_TOKENS_IN, read_only(np.uint16), np.int64, np.int64),
    (_TOKENS_IN, read_only(np.int32), np.int64, np.int64),
)
def _first_wrong(
    llm_tokens: NDArray[np.int32], numbers: NDArray[Any], items: int, most_tokens: int
) -> int:
    """What is wrong with the first of these samples that is not sound. Nothing outside of the
    columns is read, whatever they say."""
    rows = llm_tokens.size
    if numbers.size != OF_A_SAMPLE * rows + OF_AN_ITEM * items or (items and not rows):
        return _ITEMS
    first = np.int64(0)
    for row in range(rows):
        here = OF_A_SAMPLE * row
        tokens, loss = np.int64(llm_tokens[row]), np.int64(numbers[here + 2])
        if not 1 <= tokens <= most_tokens or numbers[here + 1] != tokens:
            return _TOKENS
        if not 0 <= loss <= tokens:
            return _LOSS
        last = np.int64(numbers[here + OF_A_SAMPLE]) if row + 1 < rows else np.int64(items)
        if np.int64(numbers[here]) != first or not first <= last <= items:
            return _ITEMS
        left = tokens
        for k in range(np.uint64(first), np.uint64(last)):
            at = np.uint64(OF_A_SAMPLE * rows + OF_AN_ITEM * k)
            own = np.int64(numbers[at + np.uint64(2)])
            wrong = _wrong_item(
                np.int64(numbers[at]),
                np.int64(numbers[at + np.uint64(1)]),
                own,
                np.int64(numbers[at + np.uint64(3)]),
                np.int64(numbers[at + np.uint64(4)]),
                tokens,
            )
            if wrong != _SOUND:
                return wrong
            left -= own
        if left < 0:
            return _TOGETHER
        first = last
    return _SOUND
