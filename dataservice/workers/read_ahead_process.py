"""The worker's side of the process that reads ahead for all its decoders.

Contract.
  Success    `read` gives each sample's bytes. Several threads may call at once.
  Failure    What the process cannot read is left to the slot of the sample, which finds the reason.
             So is all that is under way when the process dies; the next call starts another.
  Outage     Samples whose storage does not answer are away. One that has not answered after
             `timeout_s` is, too, and the process is ended, for a thread of it may hang.
  Closing    calls in progress give nothing; the next ones raise WorkerLostError.
"""

import logging
import math
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from dataservice.core.credentials import credentials_of
from dataservice.core.sample import SampleRef
from dataservice.core.visible import visible
from dataservice.workers.decoder_messages import (
    Answer,
    AnswerReader,
    Kind,
    ProtocolError,
    plain_bytes,
    plain_ref,
    send_hello,
)
from dataservice.workers.decoders import REASON_LIMIT, ReadOutcome
from dataservice.workers.kept_files import CacheSpec
from dataservice.workers.nursery import ForkedProcess, Nursery
from dataservice.workers.read_sample import RawBytes, ReadSample
from dataservice.workers.reading_process import READ_OF

log = logging.getLogger(__name__)

_KINDS = Kind.INLINE, Kind.MEMORY, Kind.BAD, Kind.AWAY


@dataclass(kw_only=True, slots=True, eq=False)
class _Request:
    outcomes: list[ReadOutcome]
    left: set[int]
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(kw_only=True, slots=True, eq=False)
class _Life:
    """One process from its start to its end. `requests` are under way, by number."""

    process: ForkedProcess
    answers: AnswerReader
    asks: socket.socket
    requests: dict[int, _Request] = field(default_factory=dict)


class ReadAheadProcess:
    """Starts the process when it is first needed."""

    def __init__(
        self,
        nursery: Nursery,
        *,
        threads: int,
        timeout_s: float,
        ranges: CacheSpec | None = None,
    ) -> None:
        self._ranges = ranges
        self._nursery = nursery
        self._threads = threads
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._life: _Life | None = None
        self._asked = 0

    def read(self, pipeline: str, refs: Sequence[SampleRef]) -> list[ReadOutcome]:
        """Read these samples of one source."""
        request = _Request(outcomes=[ReadOutcome()] * len(refs), left=set(range(len(refs))))
        with self._lock:
            life = self._life = self._life or self._started()
            self._asked += 1
            number = self._asked
            life.requests[number] = request
            plain = {"number": number, "pipeline": pipeline, "refs": [*map(plain_ref, refs)]}
            try:
                life.asks.sendall(plain_bytes(plain))
            except OSError:
                life.process.kill()  # whoever takes its answers sees to it
        if not request.done.wait(self._timeout_s):
            reason = f"its storage has not answered within decode_timeout_s, {self._timeout_s:g} s"
            for place in tuple(request.left):
                request.outcomes[place] = ReadOutcome(away=reason, read_s=self._timeout_s)
            log.warning("reading ahead: %s; the process is replaced", reason)
            with self._lock:
                # Else it is being ended, and its descriptor may be another's by now.
                if self._life is life:
                    life.process.kill()
        return request.outcomes

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._life is not None:
                self._life.process.kill()

    def _started(self) -> _Life:
        process = self._nursery.fork()
        asks = process.orders.dup()
        asks.settimeout(self._timeout_s)
        answers = AnswerReader(sock=process.orders, left_s=math.inf)
        life = _Life(process=process, answers=answers, asks=asks)
        try:
            credentials = credentials_of(os.environ)
            send_hello(asks, credentials=credentials, ahead=self._threads, ranges=self._ranges)
        except OSError:
            process.kill()
        threading.Thread(target=self._take, args=(life,), name="reads", daemon=True).start()
        return life

    def _take(self, life: _Life) -> None:
        """Take the answers of a process until it ends."""
        try:
            while True:
                self._took(life, life.answers.read(_KINDS))
        except (OSError, ProtocolError) as error:
            with self._lock:
                self._life = None if self._life is life else self._life
                lost, life.requests = life.requests, {}
            ending = self._nursery.end(life.process)
            life.answers.close()
            life.asks.close()
            log.warning("the process that reads ahead: %r; it %s", error, ending)
            for request in lost.values():
                request.done.set()

    def _took(self, life: _Life, answer: Answer) -> None:
        read = ReadSample(
            RawBytes(data=answer.payload[READ_OF.size :], descriptor=answer.descriptor)
        )
        if len(answer.payload) < READ_OF.size:
            raise ProtocolError("an answer to no request")
        number, place = READ_OF.unpack_from(answer.payload)
        request = life.requests.get(number)
        if request is None or place not in request.left:
            raise ProtocolError(f"an answer to request {number}, sample {place}")
        request.outcomes[place] = _outcome(answer, read)
        request.left.remove(place)
        if not request.left:
            del life.requests[number]
            request.done.set()


def _outcome(answer: Answer, read: ReadSample) -> ReadOutcome:
    read_s = answer.read_s if answer.read_s >= 0 else 0.0
    if answer.kind is Kind.AWAY:
        said = answer.payload[READ_OF.size :].decode(errors="replace")
        away = visible(said, REASON_LIMIT) or "unknown"
        return ReadOutcome(away=away, read_s=read_s, kept=answer.kept)
    given = None if answer.kind is Kind.BAD else read
    return ReadOutcome(read=given, read_s=read_s, kept=answer.kept)
