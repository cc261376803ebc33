"""Samples of one order, read and decoded step by step, in a decoder's process or thread.

    read all ──► begin all: headers, texts, tokens ──► media of each in turn ──► its outcome

Each step finds its code and tables in the processor's caches, which the media of a sample, and the
tokens of a text, have emptied. A sample alone takes the same steps.

Contract. Raises nothing: a sample that fails affects only its own outcome. One that finds no memory
beside the others is tried again when those before it are done.
"""

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dataservice.core.errors import SampleError, SourceError, StorageAwayError, caught, uncaught
from dataservice.core.orders import PackSample
from dataservice.core.ports import Finish, SampleDecoder, ToDecode
from dataservice.core.sample import DecodedSample, ItemArray, RawSample, SampleRef
from dataservice.core.visible import visible, visible_traceback
from dataservice.workers.decoders import REASON_LIMIT, SampleOutcome
from dataservice.workers.pack import check_planned_shape
from dataservice.workers.read_sample import RawBytes, raw_of
from dataservice.workers.sample_pipelines import Pipeline

log = logging.getLogger(__name__)

Clock = Callable[[], float]
Places = Callable[[PackSample], Sequence[ItemArray]]


def nowhere(_sample: PackSample) -> Sequence[ItemArray]:
    """No places for a sample's items."""
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    """What reading a sample took, and the bytes that it gave, 0 where it failed; `waited`, whether
    it ever gave up its processor to wait for storage."""

    seconds: float
    cpu_s: float
    size_bytes: int
    waited: bool

    @property
    def read_s(self) -> float:
        """Seconds without those in which only a processor was wanting: they are no fault of the
        storage, and reading ahead would not save them."""
        return self.seconds if self.waited else min(self.seconds, self.cpu_s)


def read_and_decode(
    pipeline: Pipeline,
    samples: Sequence[PackSample],
    reads: Sequence[RawBytes | None] = (),
    *,
    places: Places = nowhere,
    begun: Callable[[], None] = lambda: None,
    cpu_clock: Clock = time.thread_time,
) -> Iterator[SampleOutcome]:
    """The outcome of each sample, read here unless it was read already; `cpu_clock` gives the CPU
    time of whatever decodes. When all are begun, `begun` is called; then the items of each may lie
    in the `places` that are asked for it."""
    given = reads or [None] * len(samples)
    both = [_read(pipeline, *of, cpu_clock) for of in zip(samples, given, strict=True)]
    began_s, cpu_began_s = time.perf_counter(), cpu_clock()
    finishes = _begin_all(pipeline.decoder, samples, [raw for raw, _ in both])
    readings = [reading for _, reading in both]
    del both  # a sample's bytes need not stay in memory once it is finished
    share_s = (time.perf_counter() - began_s) / max(1, len(samples))
    cpu_share_s = (cpu_clock() - cpu_began_s) / max(1, len(samples))
    begun()
    for sample, reading, read in zip(samples, readings, given, strict=True):
        began_s, cpu_began_s = time.perf_counter(), cpu_clock()
        result = caught(_finished, sample, finishes.popleft(), places)
        if isinstance(result, MemoryError) and len(samples) > 1 and read is None:
            yield from read_and_decode(pipeline, [sample], places=places, cpu_clock=cpu_clock)
            continue
        seconds = reading.seconds + share_s + time.perf_counter() - began_s
        cpu_s = reading.cpu_s + cpu_share_s + cpu_clock() - cpu_began_s
        yield _outcome(sample, reading, result, seconds, cpu_s)


def _read(
    pipeline: Pipeline, sample: PackSample, read: RawBytes | None, cpu_clock: Clock
) -> tuple[RawSample | Exception, _Reading]:
    began_s, cpu_began_s, waits_before = time.perf_counter(), cpu_clock(), _waits()
    raw = caught(pipeline.reader.read, sample.ref) if read is None else caught(raw_of, read)
    return raw, _Reading(
        seconds=time.perf_counter() - began_s,
        cpu_s=cpu_clock() - cpu_began_s,
        size_bytes=0 if isinstance(raw, Exception) else _stored_bytes(sample.ref, raw),
        waited=_waits() > waits_before,
    )


def _waits() -> int:
    """How often this thread has waited for anything but a processor."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def _begin_all(
    decoder: SampleDecoder, samples: Sequence[PackSample], raws: Sequence[RawSample | Exception]
) -> deque[Finish | Exception]:
    """What finishes each sample; the error of one that was not read."""
    both = zip(samples, raws, strict=True)
    read = [ToDecode(raw, s.lengths, s.epoch) for s, raw in both if isinstance(raw, RawSample)]
    begun = iter(_begin(decoder, read))
    return deque(raw if isinstance(raw, Exception) else next(begun) for raw in raws)


def _begin(decoder: SampleDecoder, read: Sequence[ToDecode]) -> list[Finish | Exception]:
    begun = caught(decoder.begin, read)
    if not isinstance(begun, Exception):
        return [*begun]
    if len(read) == 1:
        return [begun]
    return [finish for one in read for finish in _begin(decoder, [one])]


def _finished(sample: PackSample, finish: Finish | Exception, places: Places) -> DecodedSample:
    decoded = uncaught(finish)(places(sample))
    check_planned_shape(decoded, sample.lengths)
    return decoded


def _outcome(
    sample: PackSample,
    reading: _Reading,
    result: DecodedSample | Exception,
    seconds: float,
    cpu_s: float,
) -> SampleOutcome:
    decoded, reason = (
        (None, _reason(sample, result)) if isinstance(result, Exception) else (result, "")
    )
    return SampleOutcome(
        sample=decoded,
        reason=visible(reason, REASON_LIMIT),
        seconds=seconds,
        read_s=reading.read_s if reading.size_bytes else seconds,
        cpu_s=cpu_s,
        read_cpu_s=reading.cpu_s if reading.size_bytes else cpu_s,
        read_bytes=reading.size_bytes,
        away=isinstance(result, StorageAwayError),
    )


def _reason(sample: PackSample, error: Exception) -> str:
    if isinstance(error, SampleError | SourceError):
        return str(error) or type(error).__name__
    if isinstance(error, MemoryError):
        return (
            f"decoding ran out of memory: {error}. Leave the sample out, make it smaller, or "
            "raise decode_memory_bytes."
        )
    # Anything else is a codec's surprise: this sample's fault, not the pack's. Written out here: a
    # decoder process has no log of its own to keep it in bounds.
    about = visible(f"{sample.ref.key} of {sample.ref.source}", REASON_LIMIT)
    log.warning("sample %s\n%s", about, visible_traceback(error))
    return f"reading or decoding failed unexpectedly: {type(error).__name__}: {error}"


def _stored_bytes(ref: SampleRef, raw: RawSample) -> int:
    """Bytes read from storage: the sample's spans, or its media where those lie in files of their
    own or in columns."""
    text = sum(span.size_bytes for span in ref.location.spans) or len(repr(raw.record))
    return max(text, sum(len(blob.data) for blob in raw.media))
