"""A worker's messages, with their bytes left where gRPC put them.

Protobuf would copy a message's bytes when it parses it, and once more when they are asked for. A
message of bytes alone is their field's tag, their length and they themselves, so what is behind the
length is viewed instead: the one copy of a byte is into the buffer of its part.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import grpc
from dataservice_proto.v1 import worker_pb2

_FIELD = worker_pb2.FetchChunk.DESCRIPTOR.fields_by_name["data"].number
_TAG = _FIELD << 3 | 2  # a field of a length and as many bytes
_FETCH = f"/{worker_pb2.DESCRIPTOR.services_by_name['Worker'].full_name}/Fetch"
_MOST_LENGTH_BYTES = 10

Content = worker_pb2.PartHeader | memoryview


class Stream(Protocol):
    """A call under way: its headers and views of bytes, in order."""

    def __iter__(self) -> Iterator[Content]: ...
    def cancel(self) -> object: ...


class GrpcStream(Stream, Protocol):
    """What its answer says beside them, once the first has come."""

    def initial_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...


def open_stream(
    channel: grpc.Channel,
    request: worker_pb2.FetchRequest,
    metadata: Sequence[tuple[str, str]] = (),
) -> GrpcStream:
    """Begin to stream a ticket's parts."""
    fetch = channel.unary_stream(
        _FETCH,
        request_serializer=worker_pb2.FetchRequest.SerializeToString,
        response_deserializer=content_of,
    )
    stream: GrpcStream = fetch(request, metadata=tuple(metadata))
    return stream


def content_of(message: bytes) -> Content:
    """The header, or a view of the bytes, of a serialised FetchChunk. Raises protobuf's DecodeError
    where it is none."""
    if message[:1] == bytes([_TAG]):
        start, length = _length(message)
        if start and start + length == len(message):
            return memoryview(message)[start:]
    chunk = worker_pb2.FetchChunk.FromString(message)
    return chunk.header if chunk.WhichOneof("content") == "header" else memoryview(chunk.data)


def _length(message: bytes) -> tuple[int, int]:
    """Where the bytes behind the tag begin, and their number; (0, 0) where no length is there."""
    length = 0
    for place, byte in enumerate(message[1 : 1 + _MOST_LENGTH_BYTES]):
        length |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return place + 2, length
    return 0, 0
