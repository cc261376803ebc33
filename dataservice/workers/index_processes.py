"""A worker's processes that read and measure files for an index, at the lowest priority.

    order ──fork──▶ process: one errand ──how far it is, parts of an index──▶ answers

Contract.
  Success    the answers come as they are made, and end with the last. The process has ended.
  Failure    the error that the process raised; WorkerLostError where it died, which costs this
             errand alone; SourceError where it is not heard of for `silent_s`.
  Leaving    a caller that stops taking answers ends the process.
  Closing    ends every process; calls in progress raise WorkerLostError.

A process that runs a team's own code is given no credentials.
"""

import asyncio
import json
import os
import threading
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from dataservice.core.credentials import credentials_of
from dataservice.core.errors import ServiceError, SourceError, WorkerLostError
from dataservice.core.index_orders import (
    IndexAnswer,
    IndexOrder,
    IndexProgress,
    IndexResult,
    index_places,
)
from dataservice.workers.decoder_messages import (
    Answer,
    AnswerReader,
    Kind,
    ProtocolError,
    plain_bytes,
    refused,
)
from dataservice.workers.nursery import ForkedProcess, Nursery, NurseryProcess
from dataservice.workers.nursery_program import Program

Result = TypeVar("Result")

# A sample of video takes a request or two; a file's last row group may be large.
SILENT_S = 600.0
SEND_LIMIT_S = 60.0
CHUNK_BYTES = 2**20
_KINDS = Kind.INLINE, Kind.MEMORY, Kind.BAD, Kind.REFUSED, Kind.DONE


class IndexProcesses:
    """The port IndexHost, by processes that run `program`, each forked by `nursery`, which may be
    another's too. Made anywhere, used on one event loop. Nothing is started before the first
    errand."""

    def __init__(
        self,
        program: Program,
        *,
        slots: int,
        code_owner: Callable[[str], str | None],
        memory_bytes: int | None = None,
        silent_s: float = SILENT_S,
        nursery: NurseryProcess | None = None,
    ) -> None:
        self._nursery = Nursery(program, name="indexer", memory_bytes=memory_bytes, process=nursery)
        self._code_owner = code_owner
        self._silent_s = silent_s
        places = index_places(slots)
        self._free = asyncio.Semaphore(places)
        self._calls: set[_Call] = set()
        self._closed = False
        self._threads = ThreadPoolExecutor(2 * places, thread_name_prefix="index")

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the errands under way."""
        return [call.process.process_id for call in tuple(self._calls)]

    async def index(self, order: IndexOrder) -> AsyncGenerator[IndexAnswer, None]:
        """Carry out an errand when there is a place."""
        async with self._free:
            call = await self._begin(order)
            try:
                while (answer := await self._run(call.next)) is not None:
                    yield answer
                    while chunk := await self._run(call.chunk):
                        yield chunk
            finally:
                call.kill()  # whichever thread waits for it comes back
                self._threads.submit(self._ended, call)

    def close(self) -> None:
        """End every process. Nothing begins any more."""
        self._closed = True
        for call in tuple(self._calls):
            call.kill()
        self._nursery.refuse()
        self._threads.submit(self._nursery.close)

    async def _run(self, work: Callable[[], Result]) -> Result:
        self._require_open()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _begin(self, order: IndexOrder) -> "_Call":
        self._require_open()
        beginning = self._threads.submit(self._begun, order)
        try:
            return await asyncio.wrap_future(beginning)
        except asyncio.CancelledError:
            beginning.add_done_callback(self._left)  # a thread cannot be stopped
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise WorkerLostError("the worker is ending.")

    def _begun(self, order: IndexOrder) -> "_Call":
        self._require_open()
        own_code = self._code_owner(order.pipeline) is not None  # before a process waits: it raises
        process = self._nursery.fork()
        plain = {
            "pipeline": order.pipeline,
            "errand": order.errand,
            "credentials": None if own_code else credentials_of(os.environ),
        }
        call = _Call(process, self._nursery, self._silent_s)
        self._calls.add(call)
        try:
            process.orders.settimeout(SEND_LIMIT_S)
            process.orders.sendall(plain_bytes(plain))
        except OSError as error:
            self._calls.discard(call)
            raise call.lost(error) from error
        return call

    def _left(self, beginning: "Future[_Call]") -> None:
        """End what has begun for nobody."""
        if not beginning.cancelled() and beginning.exception() is None:
            self._ended(beginning.result())

    def _ended(self, call: "_Call") -> None:
        call.close()
        self._calls.discard(call)


@dataclass(slots=True, eq=False)
class _Call:
    """One errand under way. `next` and `chunk` block, and are called by one thread at a time;
    `close` waits for it."""

    process: ForkedProcess
    nursery: Nursery
    silent_s: float
    answers: AnswerReader = field(init=False)
    descriptor: int = -1
    at: int = 0
    ended: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    ending: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.answers = AnswerReader(sock=self.process.orders)

    def next(self) -> IndexAnswer | None:
        """The next answer but for the bytes that follow a result; None behind the last."""
        with self.lock:
            try:
                self.answers.left_s = self.silent_s
                return self._taken(self.answers.read(_KINDS))
            except TimeoutError as error:
                self._end()
                raise SourceError(
                    f"the process that indexes has said nothing for {self.silent_s:g} s, and was "
                    "ended. Look at the storage of the source, and at the job's tokenizer and "
                    "chat template."
                ) from error
            except (OSError, ProtocolError) as error:
                raise self.lost(error) from error

    def chunk(self) -> bytes:
        """The next bytes of a result; none behind its end."""
        with self.lock:
            if self.descriptor < 0:
                return b""
            data = os.pread(self.descriptor, CHUNK_BYTES, self.at)
            self.at += len(data)
            if not data:
                self._forget()
            return data

    def lost(self, error: Exception) -> ServiceError:
        """What to raise where the process has died."""
        ending = self._end()
        return WorkerLostError(
            f"the process that indexes {ending}: {error}. If it wanted for memory, the operator "
            "may raise decode_memory_bytes; the worker's log says more."
        )

    def kill(self) -> None:
        """Have the process end, without waiting for it, or for the thread that reads from it."""
        with self.ending:
            if not self.ended:  # else its descriptor may be another's by now
                self.process.kill()

    def close(self) -> None:
        """End the process, if it has not ended."""
        self.kill()
        with self.lock:
            self._end()

    def _taken(self, answer: Answer) -> IndexAnswer | None:
        self._forget()
        self.descriptor, self.at = answer.descriptor, 0
        if answer.kind is Kind.REFUSED:
            raise refused(answer, "the source")
        if answer.kind is Kind.DONE:
            return None
        try:
            told = json.loads(answer.payload)
            if answer.kind is Kind.INLINE:
                rows, size_bytes = map(int, told)
                return IndexProgress(rows=rows, size_bytes=size_bytes)
            place, damage = int(told[0]), str(told[1])
        except (ValueError, TypeError, IndexError) as error:
            raise ProtocolError(f"an answer that says nothing: {error}") from error
        size_bytes = os.fstat(self.descriptor).st_size if self.descriptor >= 0 else 0
        return IndexResult(place=place, size_bytes=size_bytes, damage=damage)

    def _forget(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _end(self) -> str:
        with self.ending:
            if self.ended:
                return "has ended"
            self.ended = True
        self._forget()
        self.answers.close()
        return self.nursery.end(self.process)
