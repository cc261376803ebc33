import zlib

import numpy as np
from dataservice_proto.v1 import worker_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from dataservice.serving.parts import CHUNK_BYTES, part_chunks, part_header

tensors = st.lists(
    arrays.arrays(
        st.sampled_from([np.dtype("<i4"), np.dtype("|u1"), np.dtype("<f4")]),
        arrays.array_shapes(max_dims=3, min_side=0, max_side=6),
    ).map(lambda array: ("item", array)),
    max_size=5,
)


@settings(deadline=None)
@given(tensors=tensors, limit=st.sampled_from([1, 7, 64, 300]))
def test_the_chunks_are_the_tensors_bytes_end_to_end(tensors, limit):
    header = part_header(3, tensors)
    messages = list(part_chunks(tensors, limit))
    chunks = [worker_pb2.FetchChunk.FromString(message).data for message in messages]
    assert messages == [worker_pb2.FetchChunk(data=data).SerializeToString() for data in chunks]
    whole = b"".join(chunks)
    assert whole == b"".join(array.tobytes() for _, array in tensors)
    assert (header.part, header.size_bytes, header.crc32) == (3, len(whole), zlib.crc32(whole))
    assert [tuple(each.shape) for each in header.tensors] == [array.shape for _, array in tensors]
    assert all(len(chunk) == limit for chunk in chunks[:-1])
    assert all(0 < len(chunk) <= limit for chunk in chunks)


def test_big_endian_and_strided_arrays_arrive_little_endian_and_whole():
    array = np.arange(12, dtype=">i4").reshape(3, 4)[:, ::2]
    header = part_header(0, [("labels", array)])
    (message,) = part_chunks([("labels", array)], 1000)
    data = worker_pb2.FetchChunk.FromString(message).data
    assert header.tensors[0].dtype == "<i4"
    np.testing.assert_array_equal(np.frombuffer(data, "<i4").reshape(3, 2), array)


def test_a_full_chunk_fits_a_message():
    chunk = worker_pb2.FetchChunk(data=bytes(CHUNK_BYTES))
    assert chunk.ByteSize() <= 4 * 2**20
