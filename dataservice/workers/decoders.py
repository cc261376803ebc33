"""What decodes samples for a worker: the port, and what both kinds behind it share."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.orders import PackSample
from dataservice.core.sample import DecodedSample, RawSample, SampleRef
from dataservice.workers.pack import check_planned_shape
from dataservice.workers.pipelines import Pipeline

logger = logging.getLogger(__name__)

REASON_LIMIT = 1000  # characters of a bad sample's reason that are kept


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutcome:
    """A sample in its planned shape, or `sample` None and the `reason` why there is none."""

    sample: DecodedSample | None
    reason: str = ""
    seconds: float
    """Reading and decoding took so long, failed tries included."""
    read_s: float = 0.0
    """Of them, reading; of the last try."""
    read_bytes: int = 0
    """As stored, as far as its place in its source tells; 0 when it could not be read."""


class Decoders(Protocol):
    """Decodes samples on a number of slots. Every method blocks, and may be called from as many
    threads at once as there are slots."""

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
        """Decode these samples one after another on one slot. Whatever a sample does spoils its
        own outcome alone. Raises what building the pipeline raises, and WorkerLostError when
        nothing can be decoded here any more."""
        ...

    def close(self) -> None:
        """End what runs; calls that are under way raise WorkerLostError or run out."""
        ...


def read_and_decode(pipeline: Pipeline, sample: PackSample) -> SampleOutcome:
    """One sample, in this thread. Does not raise."""
    started_s = time.perf_counter()
    read_s: float | None = None
    read_bytes = 0
    decoded, reason = None, ""
    try:
        raw = pipeline.reader.read(sample.ref)
        read_s, read_bytes = time.perf_counter() - started_s, _stored_bytes(sample.ref, raw)
        decoded = pipeline.decoder.decode(raw, sample.lengths)
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
        logger.warning("sample %s of %s", sample.ref.key, sample.ref.source, exc_info=True)
    seconds = time.perf_counter() - started_s
    return SampleOutcome(
        sample=None if reason else decoded,
        reason=reason[:REASON_LIMIT],
        seconds=seconds,
        read_s=seconds if read_s is None else read_s,
        read_bytes=read_bytes,
    )


def _stored_bytes(ref: SampleRef, raw: RawSample) -> int:
    """What was read: the spans of a sample, or its media where they lie in files of their own or
    in columns."""
    text = sum(span.size_bytes for span in ref.location.spans) or len(repr(raw.record))
    return max(text, sum(len(blob.data) for blob in raw.media))
