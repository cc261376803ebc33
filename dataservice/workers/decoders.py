"""The port through which a worker decodes samples, and the code that both its kinds share."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from dataservice.core.errors import SampleError, SourceError, StorageAwayError
from dataservice.core.orders import PackSample
from dataservice.core.sample import DecodedSample, ItemArray, RawSample, SampleRef
from dataservice.core.visible import visible, visible_traceback
from dataservice.workers.byte_cache import NOTHING_KEPT, KeptReads
from dataservice.workers.pack import check_planned_shape
from dataservice.workers.read_sample import RawBytes, ReadSample, raw_of
from dataservice.workers.sample_pipelines import Pipeline

log = logging.getLogger(__name__)

READS = 32  # requests to read ahead that are under way at once
REASON_LIMIT = 1000  # characters of a bad sample's reason that are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutcome:
    """A sample in its planned shape; or `sample` is None, and `reason` says why. One whose storage
    is `away` is not bad: it may be read later."""

    sample: DecodedSample | None
    reason: str = ""
    seconds: float
    """Seconds spent reading and decoding, failed tries included."""
    read_s: float = 0.0
    """Seconds of the last try spent reading."""
    cpu_s: float = 0.0
    """CPU seconds of the last try. The rest of its time was spent waiting for storage or a CPU."""
    read_cpu_s: float = 0.0
    """CPU seconds of the last try's reading."""
    read_bytes: int = 0
    """Size of the sample in storage, as far as its location tells; 0 when it could not be read."""
    away: bool = False
    reused: bool = False
    """Whether it had been decoded before, and was found."""
    ahead_s: float = 0.0
    """Seconds that reading it ahead took, in no slot."""
    kept: KeptReads = NOTHING_KEPT
    """What of its bytes was found on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadOutcome:
    """A sample as it was read; or None where its slot is to read it, or where its storage is away,
    for the reason `away`. `read_s` is its part of the seconds that the request took."""

    read: ReadSample | None = None
    away: str = ""
    read_s: float = 0.0
    kept: KeptReads = NOTHING_KEPT


class Decoders(Protocol):
    """Decodes samples on a number of slots, and reads others ahead meanwhile. Every method blocks.
    At most `slots` threads may call at once, and `reads` others `read`."""

    @property
    def slots(self) -> int:
        """How many samples are decoded at once."""
        ...

    @property
    def reads(self) -> int:
        """How many requests to read ahead may be under way at once."""
        ...

    def far_sources(self, pipeline: str) -> Collection[str]:
        """The sources that lie on other machines, which are read ahead."""
        ...

    def start(self) -> None:
        """Make ready. Raises WorkerLostError when decoding cannot start on this machine."""
        ...

    def open(self, pipeline: str) -> int:
        """Build this pipeline, once; its pad token. Raises what building it raises."""
        ...

    def read(self, pipeline: str, refs: Sequence[SampleRef]) -> list[ReadOutcome]:
        """Read these samples of one source, on no slot. Raises WorkerLostError when nothing can be
        read here any more."""
        ...

    def decode(
        self,
        pipeline: str,
        samples: Sequence[PackSample],
        reads: Sequence[ReadSample | None] = (),
    ) -> list[SampleOutcome]:
        """Decode these samples one after another on one slot, of which `reads` has those that were
        read ahead. A failing sample affects only its own outcome. Raises what building the
        pipeline raises, and WorkerLostError when nothing can be decoded here any more."""
        ...

    def close(self) -> None:
        """Stop decoding; calls in progress raise WorkerLostError or finish."""
        ...


def read_and_decode(
    pipeline: Pipeline,
    sample: PackSample,
    read: RawBytes | None = None,
    *,
    places: Sequence[ItemArray] = (),
    cpu_clock: Callable[[], float] = time.thread_time,
) -> SampleOutcome:
    """Read one sample, unless it was read already, and decode it in this thread, whose CPU time
    `cpu_clock` gives. Its items may lie in `places`, where there are some. Never raises."""
    started_s, cpu_started_s = time.perf_counter(), cpu_clock()
    read_s: float | None = None
    read_cpu_s = 0.0
    read_bytes = 0
    decoded, reason, away = None, "", False
    try:
        raw = pipeline.reader.read(sample.ref) if read is None else raw_of(read)
        read_s, read_cpu_s = time.perf_counter() - started_s, cpu_clock() - cpu_started_s
        read_bytes = _stored_bytes(sample.ref, raw)
        decoded = pipeline.decoder.decode(raw, sample.lengths, sample.epoch, places)
        check_planned_shape(decoded, sample.lengths)
    except (SampleError, SourceError) as error:
        reason, away = str(error) or type(error).__name__, isinstance(error, StorageAwayError)
    except MemoryError as error:
        reason = (
            f"decoding ran out of memory: {error}. Leave the sample out, make it smaller, or "
            "raise decode_memory_bytes."
        )
    except Exception as error:  # a codec's surprise is this sample's fault, not the pack's
        reason = f"reading or decoding failed unexpectedly: {type(error).__name__}: {error}"
        # Written out here: a decoder process has no log of its own to keep it in bounds.
        about = visible(f"{sample.ref.key} of {sample.ref.source}", REASON_LIMIT)
        log.warning("sample %s\n%s", about, visible_traceback(error))
    seconds, cpu_s = time.perf_counter() - started_s, cpu_clock() - cpu_started_s
    return SampleOutcome(
        sample=None if reason else decoded,
        reason=visible(reason, REASON_LIMIT),
        seconds=seconds,
        read_s=seconds if read_s is None else read_s,
        cpu_s=cpu_s,
        read_cpu_s=cpu_s if read_s is None else read_cpu_s,
        read_bytes=read_bytes,
        away=away,
    )


def _stored_bytes(ref: SampleRef, raw: RawSample) -> int:
    """Bytes read from storage: the sample's spans, or its media where those lie in files of their
    own or in columns."""
    text = sum(span.size_bytes for span in ref.location.spans) or len(repr(raw.record))
    return max(text, sum(len(blob.data) for blob in raw.media))
