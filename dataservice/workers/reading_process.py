"""Processes that read samples, and run no team's own code.

One of each worker reads ahead, many samples at once, for all its decoders (see read_ahead.py):

    worker ──which samples──► reading process: storage
           ◄──their bytes───

It is never what a sample is masked for: what it cannot read, a decoder reads again in its slot.

Another reads for each decoder that runs a team's own code, what was not read ahead:

    worker ──pipeline──► reading process ◄──which sample── decoder: the team's code, no credentials
                           credentials    ───its bytes───►

That reading process opens the storage of the pipeline that the worker named last, and of no other;
what the decoder may ask for is a place in its sources, under the roots of each. Requests are plain
data; a sample comes back as the descriptor of a memory file, or as an error.

Contract of the latter.
  Success    the decoder has the sample as it was read.
  Failure    it has the error that reading raised. Where the reading process is gone, it ends with
             status READER_GONE, and the worker starts both again.
"""

import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

from dataservice.core.errors import SampleError, StorageAwayError
from dataservice.core.ports import SampleReader
from dataservice.core.sample import RawSample, SampleRef
from dataservice.workers.byte_cache import KeptReads
from dataservice.workers.decoder_messages import (
    MESSAGE_LIMIT,
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
from dataservice.workers.read_sample import RawBytes, raw_bytes, raw_of
from dataservice.workers.sample_pipelines import PIPELINES_KEPT

READER_GONE = 75  # the exit status of a decoder whose reading process has ended
READ_OF = struct.Struct("<QI")
"""What an answer to a request to read ahead begins with: the number of the request, and the place
of the sample among those that it names."""
TABLE_THREADS = 4
"""Threads that read rows of tables: each row group is read by one of them, which keeps it."""


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
        read = raw_bytes(reader.read(ref))
    except MemoryError as error:
        reason = f"reading ran out of memory: {error}. Raise decode_memory_bytes."
        send_answer(link, refusal(SampleError(reason)))
    except Exception as error:
        send_answer(link, refusal(error))
    else:
        _send_read(link, read)


def _send_read(sock: socket.socket, read: RawBytes, of: bytes = b"", **took: Any) -> None:
    """Send a sample's bytes behind `of`, and close its descriptor."""
    if read.descriptor < 0:
        send_answer(sock, Answer(kind=Kind.INLINE, payload=of + read.data, **took))
        return
    try:
        answer = Answer(kind=Kind.MEMORY, payload=of, descriptor=read.descriptor, **took)
        send_answer(sock, answer)
    finally:
        os.close(read.descriptor)


class ReaderAway(SampleReader):
    """The port SampleReader, by the reading process at the other end of a link."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._answers = AnswerReader(sock=link, left_s=math.inf)  # the worker keeps the time

    def read(self, ref: SampleRef) -> RawSample:
        """One sample's bytes. Raises what reading raised."""
        try:
            self._link.settimeout(None)
            self._link.sendall(plain_bytes({"ref": plain_ref(ref)}))
            answer = self._answers.read((Kind.INLINE, Kind.MEMORY, Kind.REFUSED))
        except (OSError, ProtocolError):
            _end()
        if answer.kind is Kind.REFUSED:
            raise refused(answer, "the sample")
        return raw_of(RawBytes(data=answer.payload, descriptor=answer.descriptor))


def _end() -> NoReturn:
    os._exit(READER_GONE)


# ---- reading ahead ------------------------------------------------------------------------


def serve_reads_ahead(
    orders: socket.socket,
    reader_for: Callable[[str], SampleReader],
    threads: int,
    kept: Callable[[], KeptReads] = KeptReads,
) -> None:
    """Read what the worker asks for, in this many threads, until it closes the socket. Samples are
    answered one by one, in any order; `kept` counts what this thread found on this machine since
    it was asked last."""
    reading = _ReadingAhead(orders, reader_for, threads, kept)
    while True:
        try:
            request = read_plain(orders)
        except OSError:
            return
        reading.begin(request)


class _ReadingAhead:
    def __init__(
        self,
        orders: socket.socket,
        reader_for: Callable[[str], SampleReader],
        threads: int,
        kept: Callable[[], KeptReads],
    ) -> None:
        self._orders = orders
        self._kept = kept
        self._sending = threading.Lock()
        self._reader_for = lru_cache(PIPELINES_KEPT)(reader_for)
        self._opening = threading.Lock()
        self._spans = ThreadPoolExecutor(threads)
        self._tables = [ThreadPoolExecutor(1) for _ in range(TABLE_THREADS)]

    def begin(self, request: dict[str, Any]) -> None:
        """Begin to read what a request names: samples of one source."""
        refs = [ref_of_plain(plain) for plain in request["refs"]]
        at = refs[0].location
        # A thread keeps the last row group that it has read.
        table = self._tables[hash((at.file, at.row_group)) % TABLE_THREADS]
        threads = self._spans if at.spans else table
        threads.submit(self._read, request["number"], request["pipeline"], refs)

    def _read(self, number: int, pipeline: str, refs: Sequence[SampleRef]) -> None:
        began_s, cpu_began_s = time.perf_counter(), time.thread_time()
        try:
            with self._opening:  # once for all threads
                reader = self._reader_for(pipeline)
            results = reader.read_together(refs)
        except Exception as error:
            results = [error] * len(refs)
        took: dict[str, Any] = {
            "read_s": (time.perf_counter() - began_s) / len(refs),
            "read_cpu_s": (time.thread_time() - cpu_began_s) / len(refs),
        }
        took["kept"] = self._kept()
        for place, result in enumerate(results):
            self._answer(READ_OF.pack(number, place), result, took)
            took["kept"] = KeptReads()  # of all, and counted with the first

    def _answer(self, of: bytes, result: RawSample | Exception, took: dict[str, Any]) -> None:
        answer, read = Answer(kind=Kind.BAD, payload=of, **took), None
        if isinstance(result, StorageAwayError):
            reason = str(result).encode(errors="replace")[:MESSAGE_LIMIT]
            answer = Answer(kind=Kind.AWAY, payload=of + reason, **took)
        elif isinstance(result, RawSample):
            # Else the slot finds out what is wrong.
            with suppress(OSError, MemoryError, ValueError, TypeError):
                read = raw_bytes(result)
        # Where the worker is gone, the other thread finds out.
        with suppress(OSError), self._sending:
            if read is None:
                send_answer(self._orders, answer)
            else:
                _send_read(self._orders, read, of, **took)
