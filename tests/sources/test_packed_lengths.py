"""The lengths of a row group in one cell."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.sample import ItemLengths, LengthTable, Modality, SampleLengths
from dataservice.sources.lengths_file import COLUMNS
from dataservice.sources.packed_lengths import pack_lengths, unpack_lengths

NUMBERS = st.sampled_from([1, 2, 255, 256, 65_535, 65_536, 2**31 - 1])
ITEMS = st.builds(
    ItemLengths,
    modality=st.sampled_from(Modality),
    encoder_tokens=NUMBERS,
    llm_tokens=NUMBERS,
    position=NUMBERS,
    shape=st.tuples(NUMBERS),
)
SAMPLES = st.builds(
    SampleLengths,
    llm_tokens=NUMBERS,
    loss_tokens=NUMBERS,
    items=st.lists(ITEMS, max_size=3).map(tuple),
)


@given(st.lists(SAMPLES, max_size=6))
def test_lengths_are_unpacked_as_they_were(samples):
    lengths = LengthTable.of(samples)
    found = unpack_lengths(memoryview(pack_lengths(lengths)))
    assert found is not None
    for name, kind in COLUMNS.items():
        assert getattr(found, name).dtype == kind
        np.testing.assert_array_equal(getattr(found, name), getattr(lengths, name))


def test_small_numbers_take_few_bytes():
    picture = ItemLengths(
        modality=Modality.VISION,
        encoder_tokens=1024,
        llm_tokens=256,
        position=9,
        shape=(1, 8, 8, 3),
    )
    sample = SampleLengths(llm_tokens=300, loss_tokens=40, items=(picture,))
    assert len(pack_lengths(LengthTable.of([sample] * 1000))) < 12_100


def test_a_cell_of_another_release_is_told_from_one_that_is_cut_short():
    cell = pack_lengths(LengthTable.of([SampleLengths(llm_tokens=5, loss_tokens=2)]))
    assert unpack_lengths(memoryview(b"\7" + cell[1:])) is None
    for size in (0, 8, len(cell) - 1):
        with pytest.raises(ValueError, match="cut short"):
            unpack_lengths(memoryview(cell)[:size])
