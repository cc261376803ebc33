"""The port through which a worker decodes samples, and the code that both its kinds share."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.orders import PackSample
from dataservice.core.sample import DecodedSample, RawSample, SampleRef
from dataservice.core.visible import visible, visible_traceback
from dataservice.workers.pack import check_planned_shape
from dataservice.workers.sample_pipelines import Pipeline

log = logging.getLogger(__name__)

REASON_LIMIT = 1000  # characters of a bad sample's reason that are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutcome:
    """A sample in its planned shape; or `sample` is None, and `reason` says why."""

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


class Decoders(Protocol):
    """Decodes samples on a number of slots. Every method blocks. At most `slots` threads may call
    at once."""

    @property
    def slots(self) -> int:
        """How many samples are decoded at once."""
        ...

    def start(self) -> None:
        """Make ready. Raises WorkerLostError when decoding cannot start on this machine."""
        ...

    def open(self, pipeline: str) -> int:
        """Build this pipeline, once; its pad token. Raises what building it raises."""
        ...

    def decode(self, pipeline: str, samples: Sequence[PackSample]) -> list[SampleOutcome]:
        """Decode these samples one after another on one slot. A failing sample affects only its own
        outcome. Raises what building the pipeline raises, and WorkerLostError when nothing can be
        decoded here any more."""
        ...

    def close(self) -> None:
        """Stop decoding; calls in progress raise WorkerLostError or finish."""
        ...


def read_and_decode(
    pipeline: Pipeline,
    sample: PackSample,
    *,
    cpu_clock: Callable[[], float] = time.thread_time,
) -> SampleOutcome:
    """Read and decode one sample in this thread, whose CPU time `cpu_clock` gives. Never raises."""
    started_s, cpu_started_s = time.perf_counter(), cpu_clock()
    read_s: float | None = None
    read_cpu_s = 0.0
    read_bytes = 0
    decoded, reason = None, ""
    try:
        raw = pipeline.reader.read(sample.ref)
        read_s, read_cpu_s = time.perf_counter() - started_s, cpu_clock() - cpu_started_s
        read_bytes = _stored_bytes(sample.ref, raw)
        decoded = pipeline.decoder.decode(raw, sample.lengths, sample.epoch)
        check_planned_shape(decoded, sample.lengths)
    except (SampleError, SourceError) as error:
        reason = str(error) or type(error).__name__
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
    )


def _stored_bytes(ref: SampleRef, raw: RawSample) -> int:
    """Bytes read from storage: the sample's spans, or its media where those lie in files of their
    own or in columns."""
    text = sum(span.size_bytes for span in ref.location.spans) or len(repr(raw.record))
    return max(text, sum(len(blob.data) for blob in raw.media))
