"""Reads samples for a decoder that runs a team's own code, in a process that does not run it.

    worker ──pipeline──► reading process ◄──which sample── decoder: the team's code, no credentials
                           credentials    ───its bytes───►

The reading process opens the storage of the pipeline that the worker named last, and of no other;
what the decoder may ask for is a place in its sources, under the roots of each. Requests are plain
data; a sample comes back as the descriptor of a memory file, or as an error.

Contract.
  Success    the decoder has the sample as it was read.
  Failure    it has the error that reading raised. Where the reading process is gone, it ends with
             status READER_GONE, and the worker starts both again.
"""

import json
import math
import os
import select
import socket
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import NoReturn

from dataservice.core.errors import SampleError
from dataservice.core.ports import SampleReader
from dataservice.core.sample import MediaBlob, RawSample, SampleRef, Unparsed
from dataservice.workers.decoder_messages import (
    Answer,
    AnswerReader,
    Kind,
    ProtocolError,
    plain_bytes,
    plain_ref,
    read_order,
    read_plain,
    ref_of_plain,
    refusal,
    refused,
    send_answer,
)
from dataservice.workers.sample_memory import write_memory
from dataservice.workers.sample_pipelines import PIPELINES_KEPT

READER_GONE = 75  # the exit status of a decoder whose reading process has ended
_LENGTH = struct.Struct("<Q")


def serve_reads(
    orders: socket.socket, link: socket.socket, reader_for: Callable[[str], SampleReader]
) -> None:
    """Read what the decoder at the other end of `link` asks for, with the reader of the pipeline
    that the worker named last in `orders`, until either is gone."""
    readers = lru_cache(PIPELINES_KEPT)(reader_for)
    reader: SampleReader | None = None
    while True:
        ready, _, _ = select.select([orders, link], [], [])
        if orders in ready:
            order = read_order(orders)
            if order is None:
                return
            try:
                reader = readers(order.pipeline)
            except Exception as error:
                send_answer(orders, refusal(error))
            else:
                send_answer(orders, Answer(kind=Kind.BUILT))
        elif reader is not None:
            try:
                ref = ref_of_plain(read_plain(link)["ref"])
            except OSError:
                return
            _send_sample(link, reader, ref)


def _send_sample(link: socket.socket, reader: SampleReader, ref: SampleRef) -> None:
    try:
        memory = _memory_of(reader.read(ref))
    except MemoryError as error:
        reason = f"reading ran out of memory: {error}. Raise decode_memory_bytes."
        send_answer(link, refusal(SampleError(reason)))
    except Exception as error:
        send_answer(link, refusal(error))
    else:
        send_answer(link, Answer(kind=Kind.MEMORY, descriptor=memory))
        os.close(memory)


class ReaderAway:
    """The port SampleReader, by the reading process at the other end of a link."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._answers = AnswerReader(sock=link, left_s=math.inf)  # the worker keeps the time

    def read(self, ref: SampleRef) -> RawSample:
        """One sample's bytes. Raises what reading raised."""
        try:
            self._link.settimeout(None)
            self._link.sendall(plain_bytes({"ref": plain_ref(ref)}))
            answer = self._answers.read((Kind.MEMORY, Kind.REFUSED))
        except (OSError, ProtocolError):
            _end()
        if answer.kind is Kind.REFUSED:
            raise refused(answer, "the sample")
        return _sample_of(answer.descriptor)


def _end() -> NoReturn:
    os._exit(READER_GONE)


def _memory_of(raw: RawSample) -> int:
    """The descriptor of a memory file: the length of a JSON object, that object, the files and the
    parts of a format of the user's own."""
    unparsed = raw.unparsed
    head = json.dumps(
        {
            "key": raw.key,
            "record": raw.record,
            "placeholders": raw.placeholders,
            "piece": raw.piece,
            "loss_weight": raw.loss_weight,
            "media": [(blob.kind, blob.name, len(blob.data)) for blob in raw.media],
            "unparsed": unparsed and (unparsed.source, [len(part) for part in unparsed.parts]),
        }
    ).encode()
    buffers = [_LENGTH.pack(len(head)), head, *(blob.data for blob in raw.media)]
    buffers += unparsed.parts if unparsed else ()
    return write_memory([*buffers], sum(map(len, buffers)))


def _sample_of(descriptor: int) -> RawSample:
    """The sample in a memory file, whose descriptor is closed."""
    with open(descriptor, "rb") as stream:
        (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
        plain = json.loads(stream.read(length))
        media = tuple(
            MediaBlob(kind=kind, name=name, data=stream.read(size_bytes))
            for kind, name, size_bytes in plain.pop("media")
        )
        parts = plain.pop("unparsed")
        unparsed = parts and Unparsed(source=parts[0], parts=tuple(map(stream.read, parts[1])))
    return RawSample(**plain, media=media, unparsed=unparsed)
