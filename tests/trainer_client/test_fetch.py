"""A ticket's stream, message by message: what is taken for a part and what is not."""

import zlib

import numpy as np
import pytest
import torch
from dataservice_proto.v1 import worker_pb2
from hypothesis import given
from hypothesis import strategies as st

from trainer_client import CorruptPart
from trainer_client.fetch import Part, PartId, receive

DTYPES = {"<i4": torch.int32, "<f4": torch.float32, "|u1": torch.uint8}


def spec(pack=0, items=(0,)):
    return PartId(pack, -1, tuple(items))


def messages(part, arrays, *, chunk_bytes=1000, **changes):
    raw = b"".join(a.tobytes() for a in arrays)
    header = worker_pb2.PartHeader(
        part=part,
        size_bytes=len(raw),
        crc32=zlib.crc32(raw),
        tensors=[
            worker_pb2.TensorHeader(name="item", dtype=a.dtype.str, shape=a.shape) for a in arrays
        ],
    )
    for name, value in changes.items():
        setattr(header, name, value)
    yield worker_pb2.FetchChunk(header=header)
    for start in range(0, len(raw), chunk_bytes):
        yield worker_pb2.FetchChunk(data=raw[start : start + chunk_bytes])


def parts_of(stream, specs):
    return [part for part in receive(stream, specs) if isinstance(part, Part)]


@given(
    st.lists(
        st.lists(
            st.tuples(
                st.sampled_from(["<i4", "<f4", "|u1"]), st.lists(st.integers(0, 5), max_size=4)
            ),
            max_size=4,
        ),
        max_size=4,
    ),
    st.integers(1, 64),
)
def test_tensors_arrive_as_they_were_sent_whatever_the_chunks(parts, chunk_bytes):
    rng = np.random.default_rng(0)
    sent = [
        [rng.integers(0, 100, size=shape).astype(np.dtype(dtype)) for dtype, shape in part]
        for part in parts
    ]
    specs = [spec(pack, items=range(max(1, len(arrays)))) for pack, arrays in enumerate(sent)]
    stream = [m for n, a in enumerate(sent) for m in messages(n, a, chunk_bytes=chunk_bytes)]
    came = parts_of(stream, specs)
    assert [part.id for part in came] == specs
    for arrays, part in zip(sent, came, strict=True):
        for array, (_, tensor) in zip(arrays, part.tensors, strict=True):
            assert tensor.dtype == DTYPES[array.dtype.str]
            assert tuple(tensor.shape) == array.shape
            np.testing.assert_array_equal(tensor, array)


def test_the_tensors_of_a_part_share_the_buffer_that_the_bytes_arrived_in():
    (part,) = parts_of(messages(0, [np.arange(6, dtype=np.int32)] * 3), [spec()])
    buffers = {tensor.untyped_storage().data_ptr() for _, tensor in part.tensors}
    assert len(buffers) == 1


@pytest.mark.parametrize(
    ("stream", "complaint"),
    [
        (messages(1, [np.zeros(3, "i4")]), "the header of part 1 came where part 0 of 1"),
        (messages(0, [np.zeros(3, "i4")], crc32=1), "crc32"),
        (messages(0, [np.zeros(3, "i4")], size_bytes=13), "announces 13 bytes"),
        (messages(0, [np.zeros(3, "f8")]), "dtype '<f8'"),
        ([worker_pb2.FetchChunk(data=b"x")], "before a header"),
        ([], "ended after 0 of 1 parts"),
        (list(messages(0, [np.zeros(3, "i4")]))[:1], "ended after 0 of 1 parts"),
        ([*messages(0, [np.zeros(3, "i4")]), worker_pb2.FetchChunk(data=b"x")], "before a header"),
        (
            [*list(messages(0, [np.zeros(3, "i4")]))[:1], worker_pb2.FetchChunk(data=b"x" * 13)],
            "13 bytes came, the header announces 12",
        ),
    ],
)
def test_a_stream_that_does_not_follow_its_ticket_is_refused(stream, complaint):
    with pytest.raises(CorruptPart, match=complaint):
        parts_of(stream, [spec()])


def test_a_part_is_called_by_its_pack_and_place():
    assert str(PartId(3, 1, ())) == "sequence 1 of pack 3"
    assert str(PartId(3, -1, (0, 2))) == "items [0, 2] of pack 3"
