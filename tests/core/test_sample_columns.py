"""Samples as columns come back as they were, whichever are taken and in whatever order."""

import numpy as np
import pytest
from dataservice_proto.columns import Column, narrowest, packed, read, read_all

from dataservice.core.orders import PackSample
from dataservice.core.sample import (
    ByteSpan,
    ItemLengths,
    Modality,
    SampleLengths,
    SampleLocation,
    SampleRef,
)
from dataservice.core.sample_columns import PackedSamples, SampleColumns, columns_of_packs


def sample(n: int) -> PackSample:
    """The n-th of a kind: n % 3 spans, n % 4 items, every other without a checksum."""
    items = tuple(
        ItemLengths(
            modality=Modality(k % 2),
            encoder_tokens=100 * k,
            llm_tokens=k,
            position=n,
            shape=(1, 2, 3, 3) if k % 2 == 0 else (16_000 * (n + 1),),
        )
        for k in range(n % 4)
    )
    spans = tuple(
        ByteSpan(name=f"ä{k}", offset_bytes=2**40 + k, size_bytes=n) for k in range(n % 3)
    )
    location = SampleLocation(file=f"f{n % 2}", spans=spans, row_group=n - 1, row=n, piece=n % 2)
    return PackSample(
        ref=SampleRef(
            sample_id=2**40 + n,
            source=f"s{n % 2}",
            key="ключ" * n,
            location=location,
            crc32=2**32 - 1 if n % 2 else None,
        ),
        lengths=SampleLengths(llm_tokens=n, loss_tokens=n // 2, items=items),
        epoch=n,
    )


SAMPLES = [sample(n) for n in range(9)]


@pytest.mark.parametrize("rows", [range(9), [], [8, 0, 3, 3], [7]])
def test_any_samples_are_taken_in_any_order(rows):
    taken = SampleColumns.of(SAMPLES).take(np.array(rows, dtype=np.int64))
    assert taken.samples() == [SAMPLES[row] for row in rows]


def test_packs_of_one_step_are_joined_without_their_objects():
    columns = SampleColumns.of(SAMPLES)
    packs = [PackedSamples(columns, range(5, 8)), PackedSamples(columns, range(2))]
    assert columns_of_packs(packs).samples() == [*SAMPLES[5:8], *SAMPLES[:2]]
    assert list(packs[0]) == SAMPLES[5:8]
    assert (packs[0][1], packs[0][1:], len(packs[0])) == (SAMPLES[6], SAMPLES[6:8], 3)
    assert columns_of_packs([SAMPLES[:2], SAMPLES[4:5]]).samples() == [*SAMPLES[:2], SAMPLES[4]]


@pytest.mark.parametrize(
    ("values", "width"), [([0, -128], 1), ([128], 2), ([-32_769], 4), ([2**31], 8), ([], 1)]
)
def test_a_column_is_as_narrow_as_its_numbers_allow(values, width):
    numbers = np.array(values, dtype=np.int64)
    assert narrowest(numbers) == f"<i{width}"
    data = packed(numbers)
    assert len(data) == width * len(values)
    assert read(data, len(values), Column("n", "rows")).tolist() == values


def test_a_column_of_another_length_is_refused():
    with pytest.raises(ValueError, match="column n has 3 bytes for 2 rows"):
        read(b"\0\0\0", 2, Column("n", "rows"))


TABLE = (Column("counts", "groups"), Column("n", "counts"))


def test_a_column_has_as_many_rows_as_another_counts():
    columns = {"counts": packed([2, 0, 1]), "n": packed([7, 8, 9])}
    assert read_all(TABLE, columns, {"groups": 3})["n"].tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    "counts",
    [[2, -1], [-1, 2], [2**62] * 4, [2**63 - 1, -(2**63), 3]],  # the sums of the last overflow
)
def test_numbers_that_count_no_rows_are_refused(counts):
    columns = {"counts": packed(counts), "n": packed([7, 8])}
    with pytest.raises(ValueError, match="column counts counts from"):
        read_all(TABLE, columns, {"groups": len(counts)})


def test_what_is_absent_counts_no_rows_where_that_is_foreseen():
    table = (Column("counts", "groups", absent=True), Column("n", "counts"))
    columns = {"counts": packed([-1, 2]), "n": packed([7, 8])}
    assert read_all(table, columns, {"groups": 2})["n"].tolist() == [7, 8]
    with pytest.raises(ValueError, match="column counts counts from -2 to 2 rows"):
        read_all(table, columns | {"counts": packed([-2, 2])}, {"groups": 2})
