"""Assembles decoded samples into a padded pack, and cuts the pack into its members' parts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.array_bytes import bytes_of
from dataservice.core.crc32 import crc32
from dataservice.core.errors import RESTORE, SampleError
from dataservice.core.layout import member_rows, padded_tokens, sample_starts
from dataservice.core.orders import PackOrder, PackSample, UnitRange
from dataservice.core.sample import DecodedSample, ItemArray, ItemLengths, Modality, SampleLengths
from dataservice.workers.sample_digest import sample_digests

IGNORED_LABEL = -100
SEQUENCE_ARRAYS = 3  # input_ids, labels, position_ids
ITEM_DTYPES: dict[Modality, np.dtype[Any]] = {
    Modality.VISION: np.dtype(np.uint8),
    Modality.AUDIO: np.dtype(np.float32),
}

SequencePart = dict[str, NDArray[np.int32]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AssembledPack:
    """A pack ready to be served.

    `members[cp_rank]` holds `input_ids`, `labels`, `position_ids`, int32[padded tokens / degree]
    each; `items` are the encoder items of its samples, in sequence order, and `item_crc32s` the
    CRC-32 of each one's bytes. `sample_digests` has 8 bytes per sample, a digest of everything that
    is served of it.
    """

    members: tuple[SequencePart, ...]
    items: tuple[ItemArray, ...]
    item_crc32s: tuple[int, ...]
    sample_digests: bytes

    @property
    def size_bytes(self) -> int:
        """Memory held by the arrays."""
        sequences = sum(array.nbytes for member in self.members for array in member.values())
        return sequences + sum(item.nbytes for item in self.items)


def planned_bytes(order: PackOrder) -> int:
    """Bytes that the pack will take once it is assembled. O(samples)."""
    tokens = np.array([sample.lengths.llm_tokens for sample in order.samples], dtype=np.int64)
    sequences = SEQUENCE_ARRAYS * 4 * int(padded_tokens(tokens, order.degree).sum())
    return sequences + sum(
        ITEM_DTYPES[item.modality].itemsize * math.prod(item.shape)
        for sample in order.samples
        for item in sample.lengths.items
    )


def assemble(
    samples: Sequence[PackSample],
    decoded: Sequence[DecodedSample],
    *,
    degree: int,
    pad_token_id: int,
) -> AssembledPack:
    """Concatenate decoded samples, pad each for the group, and cut the members' parts.

    `decoded[i]` has the planned shape of `samples[i]`. Positions restart with each sample;
    padding is `pad_token_id` with label -100. O(bytes): each is read once, for the checksum that is
    in its sample's digest and in the header of its part.
    """
    tokens = np.array([sample.lengths.llm_tokens for sample in samples], dtype=np.int64)
    padded = padded_tokens(tokens, degree)
    starts = sample_starts(padded)
    input_ids = np.full(starts[-1], pad_token_id, dtype=np.int32)
    labels = np.full(starts[-1], IGNORED_LABEL, dtype=np.int32)
    for start, length, sample in zip(starts[:-1], tokens, decoded, strict=True):
        input_ids[start : start + length] = sample.input_ids
        labels[start : start + length] = sample.labels
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], padded)
    whole = {
        "input_ids": input_ids,
        "labels": labels,
        "position_ids": positions.astype(np.int32),
    }
    items = tuple(item for sample in decoded for item in sample.items)
    item_crc32s = tuple(crc32(bytes_of(item)) for item in items)
    return AssembledPack(
        members=tuple(_member(whole, padded, degree, cp_rank) for cp_rank in range(degree)),
        items=items,
        item_crc32s=item_crc32s,
        sample_digests=sample_digests(
            whole, starts, decoded, item_crc32s, pad_token_id=pad_token_id
        ),
    )


def _member(
    whole: SequencePart, padded: NDArray[np.int64], degree: int, cp_rank: int
) -> SequencePart:
    if degree == 1:
        return whole
    rows = member_rows(padded, degree, cp_rank)
    return {name: array[rows] for name, array in whole.items()}


def masked_sample(planned: SampleLengths, pad_token_id: int) -> DecodedSample:
    """The replacement for a bad sample: its planned shape, with nothing to learn from it."""
    return DecodedSample(
        input_ids=np.full(planned.llm_tokens, pad_token_id, dtype=np.int32),
        labels=np.full(planned.llm_tokens, IGNORED_LABEL, dtype=np.int32),
        items=tuple(np.zeros(item.shape, ITEM_DTYPES[item.modality]) for item in planned.items),
    )


def holds_range(item: ItemArray, units: UnitRange) -> bool:
    """Whether an item falls into these units."""
    return 0 <= units.first < units.stop <= units.of and len(item) % units.of == 0


def in_range(item: ItemArray, units: UnitRange) -> ItemArray:
    """The frames of these units of an item, without a copy."""
    frames = len(item) // units.of
    return item[units.first * frames : units.stop * frames]


def check_planned_shape(decoded: DecodedSample, planned: SampleLengths) -> None:
    """Raises SampleError unless the sample has its planned shape."""
    for name, array in (("input_ids", decoded.input_ids), ("labels", decoded.labels)):
        _check_array(name, array, (planned.llm_tokens,), np.dtype(np.int32))
    if len(decoded.items) != len(planned.items):
        raise SampleError(
            f"decoded to {len(decoded.items)} media items where {len(planned.items)} were "
            f"planned: the source changed since it was indexed. {RESTORE}"
        )
    for place, (item, lengths) in enumerate(zip(decoded.items, planned.items, strict=True)):
        _check_item(place, item, lengths)


def _check_item(place: int, item: ItemArray, lengths: ItemLengths) -> None:
    _check_array(f"media item {place}", item, lengths.shape, ITEM_DTYPES[lengths.modality])


def _check_array(
    name: str,
    array: NDArray[np.int32] | ItemArray,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise SampleError(
            f"{name} decoded to {array.dtype}{list(array.shape)} where {dtype}{list(shape)} was "
            f"planned: the source changed since it was indexed. {RESTORE}"
        )
