"""Fields written as bytes are what protobuf reads and writes."""

from dataservice_proto.v1 import coordinator_pb2
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.field_bytes import (
    BYTES,
    NUMBER,
    fields,
    heads_of,
    numbers,
    texts,
    within,
)

OF_COLUMNS = heads_of(coordinator_pb2.ShardColumns, BYTES)
OF_SHARD = heads_of(coordinator_pb2.RankShard, BYTES)
NUMBERS = heads_of(coordinator_pb2.RankShard, NUMBER)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**31), 2**31 - 1))
def test_numbers_are_written_as_protobuf_reads_them(step, rank):
    written = b"".join(numbers(NUMBERS, step=step, rank=rank))
    assert coordinator_pb2.RankShard.FromString(written) == coordinator_pb2.RankShard(
        step=step, rank=rank
    )


@given(st.binary(max_size=300), st.lists(st.text(max_size=200), max_size=3))
def test_a_message_is_written_within_another(column, addresses):
    columns = fields(OF_COLUMNS, {"wave_pack": column * 60, "item_start": b"", "item_grid": column})
    parts = [*within(OF_SHARD["columns"], columns), *texts(OF_SHARD["addresses"], addresses)]
    assert coordinator_pb2.RankShard.FromString(b"".join(parts)) == coordinator_pb2.RankShard(
        columns={"wave_pack": column * 60, "item_grid": column}, addresses=addresses
    )
