"""The lengths of a row group in one cell."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ItemLengths, LengthTable, Modality, SampleLengths
from dataservice.sources.length_records import LengthRecords, require_sound_lengths
from dataservice.sources.packed_lengths import pack_lengths, unpack_lengths

MOST = 2**31 - 1
LIMITS = DecodeLimits(max_llm_tokens=MOST)
NUMBERS = st.sampled_from([1, 2, 255, 256, 65_535, 65_536, MOST])


@st.composite
def samples(draw: st.DrawFn) -> SampleLengths:
    items, place = [], draw(st.integers(0, 9))
    for own in draw(st.lists(st.integers(1, 40_000), max_size=3)):
        item = ItemLengths(
            modality=draw(st.sampled_from(Modality)),
            encoder_tokens=draw(NUMBERS),
            llm_tokens=own,
            position=place,
            shape=(draw(NUMBERS),),
        )
        items.append(item)
        place += own
    tokens = draw(NUMBERS.filter(lambda number: number >= place))
    return SampleLengths(
        llm_tokens=tokens, loss_tokens=draw(st.integers(0, tokens)), items=tuple(items)
    )


def unpacked(cell: bytes, limits: DecodeLimits = LIMITS) -> LengthRecords:
    records = unpack_lengths(memoryview(cell), limits)
    assert records is not None
    return records


@given(st.lists(samples(), max_size=6))
def test_lengths_are_unpacked_as_they_were(drawn):
    lengths = LengthTable.of(drawn)
    found, known = unpacked(pack_lengths(lengths)), LengthRecords.of(lengths)
    for section in ("llm_tokens", "numbers"):
        assert getattr(found, section).tobytes() == getattr(known, section).tobytes()


PICTURE = ItemLengths(
    modality=Modality.VISION, encoder_tokens=1024, llm_tokens=256, position=9, shape=(1, 8, 8, 3)
)
SAMPLE = SampleLengths(llm_tokens=300, loss_tokens=40, items=(PICTURE,))


def test_small_numbers_take_two_bytes():
    assert len(pack_lengths(LengthTable.of([SAMPLE] * 1000))) == 16 + 1000 * 16


@pytest.mark.parametrize(
    ("number", "value", "reason"),
    [
        (0, 0, "llm_tokens out of range"),
        (0, 301, "llm_tokens out of range"),
        (1, 301, "loss_tokens out of range"),
        (2, 2, "different items"),
        (3, 2, "an unknown modality"),
        (4, 0, "encoder_tokens out of range"),
        (5, 0, "items out of their sample"),
        (6, 45, "items out of their sample"),
    ],
)
@pytest.mark.parametrize("kind", ["<u2", "<i4"])
def test_no_lengths_are_unpacked_that_an_index_has_not(kind, number, value, reason):
    numbers = np.frombuffer(pack_lengths(LengthTable.of([SAMPLE])), "<u2", offset=16).astype(kind)
    head = struct.pack("<4I", 1, numbers.itemsize, 1, 1)
    limits = DecodeLimits(max_llm_tokens=300)
    unpacked(head + numbers.tobytes(), limits)
    numbers[number] = value
    with pytest.raises(ValueError, match=reason):
        unpacked(head + numbers.tobytes(), limits)


def test_items_of_one_sample_may_not_take_more_tokens_than_it_has():
    twice = SampleLengths(llm_tokens=300, loss_tokens=40, items=(PICTURE, PICTURE))
    lengths = LengthTable.of([twice])
    with pytest.raises(ValueError, match="more tokens of items"):
        unpacked(pack_lengths(lengths))
    with pytest.raises(ValueError, match="more tokens of items"):
        require_sound_lengths(lengths, LIMITS)


def test_a_cell_of_another_release_is_told_from_one_that_is_cut_short():
    cell = pack_lengths(LengthTable.of([SampleLengths(llm_tokens=5, loss_tokens=2)]))
    assert unpack_lengths(memoryview(b"\7" + cell[1:]), LIMITS) is None
    for size in (0, 8, len(cell) - 4):
        with pytest.raises(ValueError, match="cut short"):
            unpacked(cell[:size])
