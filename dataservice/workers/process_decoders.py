"""Decoders in processes of their own, one per slot: a crashing codec never takes the worker down.

Contract.
  A sample that is not done after `timeout_s`, reading included, is masked and its process is
           killed. Building the pipeline has a separate limit of the same length.
  A process that dies is replaced. Its current sample is tried once more in the new process, and
           masked when that process dies too; the samples behind it continue there. Samples of one
           order are read and tokenised before the first is decoded: where the process dies before
           that is done, each is tried by itself, and its time limit begins anew.
  A process that is ended from outside says nothing of its sample: one that is killed by hand or for
           want of memory, stopped, or gone with its nursery, which takes all decoders along. Its
           sample is masked when that has happened five times over it.
  A pipeline that kills its process twice while it is built has its samples masked too.
  A process that ran one team's own code never decodes for another, nor for jobs without such code.
           It has no credentials and opens no storage: a second process, which runs no such code,
           reads for it, and ends with it.
  Losing   WorkerLostError when no process can be started any more: the worker cannot decode.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

from dataservice.core.credentials import credentials_of
from dataservice.core.errors import SpecError
from dataservice.core.orders import PackSample
from dataservice.core.sample import DecodedSample, SampleLengths, SampleRef
from dataservice.core.visible import visible
from dataservice.workers.byte_cache import KeptReads
from dataservice.workers.decoder_messages import (
    Answer,
    AnswerReader,
    Kind,
    ProtocolError,
    refused,
    send_hello,
    send_order,
)
from dataservice.workers.decoder_process import DecoderProgram
from dataservice.workers.decoders import (
    READS,
    REASON_LIMIT,
    Decoders,
    ReadOutcome,
    SampleOutcome,
)
from dataservice.workers.kept_files import CacheSpec
from dataservice.workers.nursery import ForkedProcess, Nursery, NurseryProcess
from dataservice.workers.read_ahead_process import ReadAheadProcess
from dataservice.workers.read_sample import RawBytes, ReadSample
from dataservice.workers.reading_process import READER_GONE
from dataservice.workers.recycled_memory import Handed, ReadMemory
from dataservice.workers.sample_memory import sample_bytes, sample_of_bytes, sample_of_memory
from dataservice.workers.sample_pipelines import PIPELINES_KEPT, PipelineFactory
from dataservice.workers.thread_decoders import require_slots

log = logging.getLogger(__name__)

DECODE_TIMEOUT_S = 60.0
MOST_READ_BYTES = 2**40
_BUILDING = Kind.BUILT, Kind.REFUSED
TRIES = 2  # how often a sample whose process dies is tried
TRIES_FROM_OUTSIDE = 5  # where the process was ended from outside
REMEDY = (
    "Leave the sample out, make it smaller, or raise the service's limits; the worker's log "
    "says more."
)


class ProcessDecoders(Decoders):
    """Decodes in child processes. Use it from `slots` threads at most."""

    def __init__(
        self,
        factory: PipelineFactory,
        *,
        slots: int,
        reads: int = READS,
        timeout_s: float = DECODE_TIMEOUT_S,
        memory_bytes: int | None = None,
        cache: CacheSpec | None = None,
        ranges: CacheSpec | None = None,
        nursery: NurseryProcess | None = None,
    ) -> None:
        """The factory is pickled; nothing runs before `start`. `nursery` forks the processes, and
        may be another's too. Raises SpecError when `slots` is below 1."""
        require_slots(slots)
        self._far_sources = lru_cache(PIPELINES_KEPT)(factory.far_sources)
        self._code_owner = lru_cache(PIPELINES_KEPT)(factory.code_owner)
        self._nursery = Nursery(
            DecoderProgram(factory), name="decoder", memory_bytes=memory_bytes, process=nursery
        )
        self._reads = reads
        self._ahead = ReadAheadProcess(
            self._nursery, threads=reads, timeout_s=timeout_s, ranges=ranges
        )
        self._slots = [_Slot(self._nursery, timeout_s, cache, ranges) for _ in range(slots)]
        self._idle = list(self._slots)
        self._freed = threading.Condition()

    @property
    def slots(self) -> int:
        """How many samples are decoded at once."""
        return len(self._slots)

    @property
    def reads(self) -> int:
        """How many requests to read ahead may be under way at once."""
        return self._reads

    def far_sources(self, pipeline: str) -> Collection[str]:
        """The sources that lie on other machines."""
        return self._far_sources(pipeline)

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the decoders that are alive now."""
        return [slot.process_id for slot in self._slots if slot.process_id is not None]

    def start(self) -> None:
        """Start all processes."""
        self._nursery.start()
        for slot in self._slots:
            slot.ready(None)

    def open(self, pipeline: str) -> int:
        """Build this pipeline in one process; its pad token."""
        with self._slot_for(pipeline) as slot:
            return slot.open(pipeline)

    def read(self, pipeline: str, refs: Sequence[SampleRef]) -> list[ReadOutcome]:
        """Read these samples in the process that reads ahead."""
        return self._ahead.read(pipeline, refs)

    def decode(
        self,
        pipeline: str,
        samples: Sequence[PackSample],
        reads: Sequence[ReadSample | None] = (),
    ) -> list[SampleOutcome]:
        """Decode these samples one after another in one process."""
        given = [read.bytes if read else None for read in reads] or [None] * len(samples)
        with self._slot_for(pipeline) as slot:
            return slot.decode(pipeline, samples, given)

    def close(self) -> None:
        """Kill all processes; calls in progress raise WorkerLostError."""
        self._nursery.refuse()
        self._ahead.close()
        for slot in self._slots:
            slot.kill()
        with self._freed:
            idle, self._idle = self._idle, []
        for slot in idle:
            slot.drop()
        self._nursery.close()
        with self._freed:
            self._idle += idle  # whoever comes now is told that the nursery is closed
            self._freed.notify_all()

    @contextmanager
    def _slot_for(self, pipeline: str) -> Iterator["_Slot"]:
        """An idle slot, whose process may run this pipeline's code."""
        owner = self._code_owner(pipeline)
        with self._freed:
            self._freed.wait_for(lambda: self._idle)
            # The last used has most likely built the pipeline; any other process must be replaced.
            mine = [slot for slot in self._idle if slot.owner == owner]
            slot = (mine or self._idle)[-1]
            self._idle.remove(slot)
        try:
            slot.ready(owner)
            yield slot
        finally:
            with self._freed:
                self._idle.append(slot)
                self._freed.notify()


class _Slot:
    """A slot's process, replaced when it ends. Used by one thread at a time, except for `kill`."""

    def __init__(
        self,
        nursery: Nursery,
        timeout_s: float,
        cache: CacheSpec | None,
        ranges: CacheSpec | None,
    ) -> None:
        self._nursery = nursery
        self._cache = cache
        self._ranges = ranges
        self._timeout_s = timeout_s
        self._process: ForkedProcess | None = None
        self._answers: AnswerReader | None = None
        self._memory = ReadMemory()
        self._reading: ForkedProcess | None = None
        self._reads: AnswerReader | None = None
        self._reads_for = ""
        self._begun = False
        self._lock = threading.Lock()
        self.owner: str | None = None
        """The team whose own code the process runs."""

    @property
    def process_id(self) -> int | None:
        process = self._process
        return process.process_id if process is not None else None

    def ready(self, owner: str | None) -> AnswerReader:
        """Start a process if none is alive that may run code of this owner; its answers."""
        family = [each for each in (self._process, self._reading) if each is not None]
        other = self.owner != owner or self._answers is None  # or a start that failed half-way
        if any(each.ended for each in family) or (family and other):
            self.drop()
        self.owner = owner
        if self._answers is None:
            self._answers = self._started() if owner is None else self._started_with_reader()
        return self._answers

    def _started(self) -> AnswerReader:
        """A process that reads and decodes."""
        process = self._nursery.fork()
        with self._lock:
            self._process = process
        with suppress(OSError):  # one that has died is found out by the order
            credentials = credentials_of(os.environ)
            send_hello(
                process.orders, credentials=credentials, cache=self._cache, ranges=self._ranges
            )
        return AnswerReader(sock=process.orders)

    def _started_with_reader(self) -> AnswerReader:
        """A process that decodes, and one that reads for it."""
        reading = self._nursery.fork()
        with self._lock:
            self._reading = reading
        self._reads, self._reads_for = AnswerReader(sock=reading.orders), ""
        process = self._nursery.fork()
        with self._lock:
            self._process = process
        its_end, other_end = socket.socketpair()
        with its_end, other_end, suppress(OSError):
            credentials = credentials_of(os.environ)
            send_hello(
                reading.orders,
                credentials=credentials,
                link=its_end,
                reads=True,
                ranges=self._ranges,
            )
            send_hello(process.orders, credentials=None, link=other_end)
        return AnswerReader(sock=process.orders)

    def drop(self) -> str:
        """End the process, if there is one, and its reader; how it ended, in words."""
        with self._lock:
            process, self._process = self._process, None
            reading, self._reading = self._reading, None
        for answers in (self._answers, self._reads):
            if answers is not None:
                answers.close()
        self._answers = self._reads = None
        self._memory = ReadMemory()
        ending = self._nursery.end(process) if process is not None else ""
        if reading is None:
            return ending
        read_ending = self._nursery.end(reading)
        return read_ending if ending.endswith(f"status {READER_GONE}") else ending

    def kill(self) -> None:
        """Kill the process; a thread that waits for it gets an error."""
        with self._lock:
            for process in (self._process, self._reading):
                if process is not None:
                    process.kill()

    # ---- orders --------------------------------------------------------------------------

    def open(self, pipeline: str) -> int:
        """The pipeline's pad token. Raises what building it raises."""
        tries = _Tries()
        while True:
            try:
                return _pad_token(next(self._order(pipeline, ())))
            except (OSError, ProtocolError) as error:
                what = self._end_of(error, tries)
                if tries.over:
                    raise SpecError(
                        f"the job's pipeline cannot be built: {what}. Look at its tokenizer, "
                        "template and processors, or raise decode_timeout_s."
                    ) from error

    def decode(
        self, pipeline: str, samples: Sequence[PackSample], reads: Sequence[RawBytes | None]
    ) -> list[SampleOutcome]:
        """An outcome for each sample; `reads` has those that were read ahead."""
        outcomes: list[SampleOutcome] = []
        tries, lost_s, alone = _Tries(), 0.0, False
        while (done := len(outcomes)) < len(samples):
            began_s = time.monotonic()
            now = slice(done, done + 1 if alone else None)
            try:
                for answer in self._order(pipeline, samples[now], reads[now]):
                    took_s = min(answer.seconds, time.monotonic() - began_s)
                    planned = samples[len(outcomes)].lengths
                    outcomes.append(
                        outcome_of(answer, planned, self._memory, seconds=lost_s + took_s)
                    )
                    tries, lost_s, began_s = _Tries(), 0.0, time.monotonic()
            except (OSError, ProtocolError) as error:
                if not (self._begun or alone or len(samples) - done == 1):
                    self._end_of(error, _Tries())
                    alone = True  # one by one, each tells whether it was its fault
                    continue
                what = self._end_of(error, tries)
                lost_s += time.monotonic() - began_s
                if not tries.over:
                    continue
                reason = f"{what}. {REMEDY}"
                outcomes.append(SampleOutcome(sample=None, reason=reason, seconds=lost_s))
                tries, lost_s = _Tries(), 0.0
        return outcomes

    def _order(
        self,
        pipeline: str,
        samples: Sequence[PackSample],
        reads: Sequence[RawBytes | None] = (),
    ) -> Iterator[Answer]:
        """Send an order and give the answer of each sample; with no samples, the pipeline's
        answer."""
        self._begun = False
        answers = self.ready(self.owner)
        self._have_read_for(pipeline)
        answers.sock.settimeout(self._timeout_s)
        returned = self._memory.returned()
        send_order(
            answers.sock, pipeline, samples, reads=reads, free=returned.free, gone=returned.gone
        )
        answer = self._next(answers, tuple(Kind) if samples else _BUILDING)
        if answer.kind is Kind.BUILT and samples:
            answer = self._next(answers)
        if answer.kind is Kind.REFUSED:
            raise refused(answer, "the job's pipeline")
        if answer.kind is Kind.BEGUN and len(samples) > 1:
            self._begun = True
            answer = self._next(answers)
        yield answer
        for _ in samples[1:]:
            yield self._next(answers)

    def _have_read_for(self, pipeline: str) -> None:
        """Have the reader, where there is one, read the sources of this pipeline. Raises what
        opening them raises."""
        if self._reads is None or self._reads_for == pipeline:
            return
        self._reads.sock.settimeout(self._timeout_s)
        send_order(self._reads.sock, pipeline, ())
        answer = self._next(self._reads, _BUILDING)
        if answer.kind is Kind.REFUSED:
            raise refused(answer, "the job's pipeline")
        self._reads_for = pipeline

    def _next(self, answers: AnswerReader, kinds: tuple[Kind, ...] = tuple(Kind)) -> Answer:
        answers.left_s = self._timeout_s
        return answers.read(kinds)

    def _end_of(self, error: Exception, tries: "_Tries") -> str:
        """End the process that failed; the reason. `tries` learns whose fault it was."""
        process = self._process or self._reading
        if process is None:
            raise AssertionError("an order fails on a process") from error
        late = isinstance(error, TimeoutError)
        stopped = late and _is_stopped(process.process_id)
        ending = self.drop()
        log.warning("decoder %d: %s; it %s", process.process_id, repr(error), ending)
        if late and not stopped:
            tries.deaths = TRIES  # it would take as long again
            limit = f"decode_timeout_s, {self._timeout_s:g} s"
            return f"reading and decoding took longer than {limit}, and was stopped"
        if stopped:
            ending = "was stopped from outside"
        elif process.orphaned:
            ending = "ended with the process that forks decoders"
        elif isinstance(error, ProtocolError):
            ending = f"answered with {error}"
        if stopped or process.orphaned or "SIGKILL" in ending:
            tries.from_outside += 1
            return f"the decoder process {ending}, at the last of {TRIES_FROM_OUTSIDE} tries"
        tries.deaths += 1
        return f"the decoder process {ending}, at the last of {TRIES} tries"


@dataclass(slots=True)
class _Tries:
    """How many processes have died over one sample, and how many were ended from outside."""

    deaths: int = 0
    from_outside: int = 0

    @property
    def over(self) -> bool:
        return self.deaths >= TRIES or self.from_outside >= TRIES_FROM_OUTSIDE


def outcome_of(
    answer: Answer, planned: SampleLengths, memory: ReadMemory, *, seconds: float
) -> SampleOutcome:
    """The outcome that a decoder's answer tells, after `seconds`; closes its descriptor. Raises
    ProtocolError when the answer does not fit what was planned."""
    if answer.kind in (Kind.BAD, Kind.AWAY):
        reason = visible(answer.payload.decode(errors="replace"), REASON_LIMIT) or "unknown"
        away = answer.kind is Kind.AWAY
        return SampleOutcome(sample=None, reason=reason, away=away, **_took(answer, seconds))
    try:
        sample = _sample(answer, planned, memory)  # whatever else is wrong
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    return SampleOutcome(sample=sample, **_took(answer, seconds))


def _sample(answer: Answer, planned: SampleLengths, memory: ReadMemory) -> DecodedSample:
    """Raises ValueError when the answer does not fit what was planned."""
    if answer.kind is Kind.MEMORY:
        return sample_of_memory(answer.descriptor, planned)
    if answer.kind in (Kind.FILLED, Kind.NEW):
        digits = answer.payload[:18]
        handed = Handed(int(digits) if digits.isdigit() else -1, answer.descriptor)
        return memory.sample(handed, planned)
    if answer.kind is Kind.INLINE and len(answer.payload) == sample_bytes(planned):
        return sample_of_bytes(answer.payload, planned)
    raise ValueError(f"an answer {answer.kind.name} of {len(answer.payload)} bytes")


class _Took(TypedDict):
    seconds: float
    read_s: float
    cpu_s: float
    read_cpu_s: float
    read_bytes: int
    reused: bool
    kept: KeptReads


def _took(answer: Answer, seconds: float) -> _Took:
    """Raises ProtocolError when the answer's times make no sense."""
    times = seconds, answer.read_s, answer.cpu_s, answer.read_cpu_s
    if not all(each >= 0 for each in times):
        raise ProtocolError(f"an answer after {answer.seconds} s, {answer.read_s} s of reading")
    # Answers are not believed, and parallel threads can use more CPU seconds than have passed.
    read_s, cpu_s = min(answer.read_s, seconds), min(answer.cpu_s, seconds)
    return _Took(
        seconds=seconds,
        read_s=read_s,
        cpu_s=cpu_s,
        read_cpu_s=min(answer.read_cpu_s, read_s, cpu_s),
        read_bytes=min(answer.read_bytes, MOST_READ_BYTES),
        reused=answer.reused,
        kept=answer.kept,
    )


def _pad_token(answer: Answer) -> int:
    try:
        return int(answer.payload)
    except ValueError as error:
        raise ProtocolError("a pad token that is no number") from error


def _is_stopped(process_id: int) -> bool:
    """Whether SIGSTOP or a debugger has stopped the process. Only we reap it, so its number cannot
    have been reused."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "Tt"
