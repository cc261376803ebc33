"""Decoders in threads of this process: for tests, and for decoders that cannot be pickled.

Here a codec that hangs keeps its slot for ever, and one that crashes ends the worker; a service
therefore decodes in processes (see process_decoders.py).
"""

from collections.abc import Sequence

from dataservice.core.errors import SpecError
from dataservice.core.orders import PackSample
from dataservice.workers.decoders import Decoders, SampleOutcome, read_and_decode
from dataservice.workers.sample_pipelines import PipelineCache, PipelineFactory


class ThreadDecoders(Decoders):
    """Decodes in the calling threads, which share the readers and decoders."""

    def __init__(self, factory: PipelineFactory, *, slots: int) -> None:
        """Raises SpecError when `slots` is below 1."""
        require_slots(slots)
        self._slots = slots
        self._pipelines = PipelineCache(factory)

    @property
    def slots(self) -> int:
        """How many samples are decoded at once."""
        return self._slots

    def start(self) -> None:
        """Nothing to do."""

    def open(self, pipeline: str) -> int:
        """Build this pipeline, once; its pad token."""
        return self._pipelines.get(pipeline).decoder.pad_token_id

    def decode(self, pipeline: str, samples: Sequence[PackSample]) -> list[SampleOutcome]:
        """Decode these samples one after another."""
        built = self._pipelines.get(pipeline)
        return [read_and_decode(built, sample) for sample in samples]

    def close(self) -> None:
        """Nothing to do: calls in progress finish."""


def require_slots(slots: int) -> None:
    """Raises SpecError when `slots` is below 1."""
    if slots < 1:
        raise SpecError(f"a worker has {slots} decoding slots; give it at least 1.")
