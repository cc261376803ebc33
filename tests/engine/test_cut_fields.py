"""Columns of all messages cut at once are what each message alone would be written as."""

import numpy as np
import pytest
from dataservice_proto.v1 import coordinator_pb2
from hypothesis import given
from hypothesis import strategies as st

from dataservice.engine.cut_fields import cut_fields

NAMES = ("wave_pack", "item_start", "receive_source")  # tags of one byte and of two
FIELDS = coordinator_pb2.ShardColumns.DESCRIPTOR.fields_by_name
NUMBERS = [FIELDS[name].number for name in NAMES]


def begins_of(column: tuple[bytes, ...]) -> np.ndarray:
    return np.cumsum([0, *map(len, column)])


@given(
    st.lists(st.tuples(*[st.binary(max_size=400)] * len(NAMES)), min_size=1, max_size=5),
    st.integers(0, 4),
)
def test_columns_of_some_messages_are_cut_and_written_at_once(rows, first):
    columns = [b"".join(column) for column in zip(*rows, strict=True)]
    begins = [begins_of(column)[min(first, len(rows) - 1) :] for column in zip(*rows, strict=True)]
    written = cut_fields(NUMBERS, columns, begins)
    assert [coordinator_pb2.ShardColumns.FromString(each) for each in written] == [
        coordinator_pb2.ShardColumns(**dict(zip(NAMES, row, strict=True)))
        for row in rows[min(first, len(rows) - 1) :]
    ]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_383, 16_384, 2**21, 2**21 + 1])
def test_lengths_of_any_number_of_bytes_are_written(size):
    column = (bytes(range(256)) * (size // 256 + 1))[:size]
    written = cut_fields(NUMBERS[:1], [column + b"?"], [np.array([0, size, size + 1])])
    assert [coordinator_pb2.ShardColumns.FromString(each).wave_pack for each in written] == [
        column,
        b"?",
    ]


def test_messages_without_columns_are_empty():
    assert cut_fields(NUMBERS, [b""] * 3, [np.zeros(3, np.int64)] * 3) == [b"", b""]
