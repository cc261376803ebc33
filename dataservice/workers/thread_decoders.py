"""Decoders in threads of this process: for tests, and for decoders that cannot be pickled.

A codec that hangs keeps its slot for ever here, and one that crashes takes the worker along;
a service decodes in processes (see process_decoders.py).
"""

from collections.abc import Sequence

from dataservice.core.errors import SpecError
from dataservice.core.orders import PackSample
from dataservice.workers.decoders import Decoders, SampleOutcome, read_and_decode
from dataservice.workers.pipelines import PipelineCache, PipelineFactory


class ThreadDecoders(Decoders):
    """Decodes in the threads that call. Readers and decoders are shared by all of them."""

    def __init__(self, factory: PipelineFactory, *, slots: int) -> None:
        """Raises SpecError when there is no slot."""
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
        """Nothing to do: what runs, runs out."""


def require_slots(slots: int) -> None:
    """Raises SpecError unless there is at least one."""
    if slots < 1:
        raise SpecError(f"a worker has {slots} decoding slots; give it at least 1.")
