"""A part as it is sent: one header, then the tensors' bytes in bounded chunks."""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from dataservice_proto.v1 import worker_pb2
from numpy.typing import NDArray

# gRPC's default limit, so that a peer needs no special options.
MESSAGE_LIMIT_BYTES = 4 * 2**20
# Well below the limit: over loopback, chunks of 1 MiB were about twice as fast as full messages,
# because sending and receiving overlap.
CHUNK_BYTES = 2**20

Tensor = NDArray[np.int32] | NDArray[np.uint8] | NDArray[np.float32]


def part_header(part: int, tensors: Sequence[tuple[str, Tensor]]) -> worker_pb2.PartHeader:
    """Names, types and shapes of a part's tensors, and the checksum of all their bytes.

    Reads every byte, which takes about 1 s per GB.
    """
    size_bytes, crc32 = 0, 0
    for _, tensor in tensors:
        view = _bytes_of(tensor)
        size_bytes += len(view)
        crc32 = zlib.crc32(view, crc32)
    return worker_pb2.PartHeader(
        part=part,
        tensors=[
            worker_pb2.TensorHeader(
                name=name, dtype=tensor.dtype.newbyteorder("<").str, shape=tensor.shape
            )
            for name, tensor in tensors
        ],
        size_bytes=size_bytes,
        crc32=crc32,
    )


def part_chunks(tensors: Sequence[tuple[str, Tensor]], limit_bytes: int) -> Iterator[bytes]:
    """The tensors' bytes joined end to end, in chunks of `limit_bytes`; the last may be shorter.
    Each byte is copied once."""
    pending: list[memoryview] = []
    room_bytes = limit_bytes
    for _, tensor in tensors:
        view = _bytes_of(tensor)
        while len(view):
            pending.append(view[:room_bytes])
            view = view[room_bytes:]
            room_bytes -= len(pending[-1])
            if room_bytes == 0:
                yield b"".join(pending)
                pending, room_bytes = [], limit_bytes
    if pending:
        yield b"".join(pending)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The array's bytes, little-endian and contiguous; without a copy if they already are."""
    flat = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data
