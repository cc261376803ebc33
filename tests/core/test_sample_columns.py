"""Samples as columns come back as they were, whichever are taken and in whatever order."""

import numpy as np
import pytest
from dataservice_proto.columns import Column, narrowest, packed, read, read_all

from dataservice.core.sample_columns import (
    FoundSamples,
    PackedSamples,
    SampleColumns,
    SamplesFoundOnce,
)
from tests.core.varied_samples import SAMPLES


@pytest.mark.parametrize("rows", [range(9), [], [8, 0, 3, 3], [7]])
def test_any_samples_are_taken_in_any_order(rows):
    taken = SampleColumns.of(SAMPLES).take(np.array(rows, dtype=np.int64))
    assert taken.samples() == [SAMPLES[row] for row in rows]


@pytest.mark.parametrize("start", range(10))
def test_a_cut_is_as_if_its_samples_were_taken(start):
    columns = SampleColumns.of(SAMPLES)
    for stop in range(start, 10):
        cut = columns.cut(start, stop)
        assert cut.samples() == SAMPLES[start:stop]
        assert cut.files == columns.take(np.arange(start, stop)).files


def test_the_samples_of_a_pack_become_objects_as_they_are_read():
    pack = PackedSamples(SampleColumns.of(SAMPLES), range(5, 8))
    assert list(pack) == SAMPLES[5:8]
    assert (pack[1], pack[1:], len(pack)) == (SAMPLES[6], SAMPLES[6:8], 3)


def test_samples_are_found_together_and_once_for_all_who_ask():
    asked: list[list[int]] = []
    columns = SampleColumns.of(SAMPLES)

    def find(rows):
        asked.append(rows.tolist())
        return columns.take(rows)

    found = SamplesFoundOnce(FoundSamples(find), np.array([8, 2, 2, 5]))
    assert found.cut(1, 3).samples() == [SAMPLES[2], SAMPLES[2]]
    assert found.take(np.array([3, 0])).samples() == [SAMPLES[5], SAMPLES[8]]
    assert asked == [[8, 2, 2, 5]]


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
