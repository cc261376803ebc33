"""Decoders in threads of this process: for tests, and for decoders that cannot be pickled.

Here a codec that hangs keeps its slot for ever, and one that crashes ends the worker; a service
therefore decodes in processes (see process_decoders.py).
"""

from collections.abc import Collection, Sequence

from dataservice.core.errors import SpecError, StorageAwayError
from dataservice.core.orders import PackSample
from dataservice.core.sample import RawSample, SampleRef
from dataservice.workers.decoders import (
    READS,
    Decoders,
    ReadOutcome,
    SampleOutcome,
)
from dataservice.workers.read_and_decode import read_and_decode
from dataservice.workers.read_sample import ReadSample, raw_bytes
from dataservice.workers.sample_pipelines import PipelineCache, PipelineFactory


class ThreadDecoders(Decoders):
    """Decodes in the calling threads, which share the readers and decoders."""

    def __init__(self, factory: PipelineFactory, *, slots: int, reads: int = READS) -> None:
        """Raises SpecError when `slots` is below 1."""
        require_slots(slots)
        self._slots = slots
        self._reads = reads
        self._far_sources = factory.far_sources
        self._pipelines = PipelineCache(factory)

    @property
    def slots(self) -> int:
        """How many samples are decoded at once."""
        return self._slots

    @property
    def reads(self) -> int:
        """How many requests to read ahead may be under way at once."""
        return self._reads

    def far_sources(self, pipeline: str) -> Collection[str]:
        """The sources that lie on other machines."""
        return self._far_sources(pipeline)

    def start(self) -> None:
        """Nothing to do."""

    def open(self, pipeline: str) -> int:
        """Build this pipeline, once; its pad token."""
        return self._pipelines.get(pipeline).decoder.pad_token_id

    def read(self, pipeline: str, refs: Sequence[SampleRef]) -> list[ReadOutcome]:
        """Read these samples in this thread."""
        results = self._pipelines.get(pipeline).reader.read_together(refs)
        return [_outcome(result) for result in results]

    def decode(
        self,
        pipeline: str,
        samples: Sequence[PackSample],
        reads: Sequence[ReadSample | None] = (),
    ) -> list[SampleOutcome]:
        """Decode these samples one after another."""
        built = self._pipelines.get(pipeline)
        given = [read.copy() if read else None for read in reads] or [None] * len(samples)
        return list(read_and_decode(built, samples, given))

    def close(self) -> None:
        """Nothing to do: calls in progress finish."""


def _outcome(result: RawSample | Exception) -> ReadOutcome:
    if isinstance(result, RawSample):
        return ReadOutcome(read=ReadSample(raw_bytes(result)))
    return ReadOutcome(away=str(result) if isinstance(result, StorageAwayError) else "")


def require_slots(slots: int) -> None:
    """Raises SpecError when `slots` is below 1."""
    if slots < 1:
        raise SpecError(f"a worker has {slots} decoding slots; give it at least 1.")
