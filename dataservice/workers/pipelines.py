"""One reader and one decoder for each distinct pipeline, built when first asked for."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from dataservice.core.ports import SampleDecoder, SampleReader

# A pipeline holds a tokenizer and open files; who serves many jobs in turn forgets the ones
# that were not used for longest.
PIPELINES_KEPT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """How one job's samples are read and decoded."""

    reader: SampleReader
    decoder: SampleDecoder


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineFactory:
    """Builds the two halves from a job's pipeline JSON."""

    reader_for: Callable[[str], SampleReader]
    decoder_for: Callable[[str], SampleDecoder]

    def build(self, pipeline: str) -> Pipeline:
        """Both halves. Slow: it may load a tokenizer."""
        return Pipeline(reader=self.reader_for(pipeline), decoder=self.decoder_for(pipeline))


class PipelineCache:
    """Least recently used pipelines, each built once, by whichever thread asks first.

    Success: all who ask while it is built get the same one. Failure: all who wait get the
    error, and the next to ask builds again.
    """

    def __init__(self, factory: PipelineFactory) -> None:
        self._factory = factory
        self._built: dict[str, Future[Pipeline]] = {}
        self._lock = threading.Lock()

    def __contains__(self, pipeline: str) -> bool:
        return pipeline in self._built

    def get(self, pipeline: str) -> Pipeline:
        """The pipeline of this JSON. Raises what building it raises."""
        with self._lock:
            future = self._built.pop(pipeline, None)
            mine = future is None
            self._built[pipeline] = future = future or Future()
            if len(self._built) > PIPELINES_KEPT:
                del self._built[next(iter(self._built))]
        if mine:
            self._build(pipeline, future)
        return future.result()

    def _build(self, pipeline: str, future: Future[Pipeline]) -> None:
        try:
            future.set_result(self._factory.build(pipeline))
        except BaseException as error:
            with self._lock:
                if self._built.get(pipeline) is future:
                    del self._built[pipeline]
            future.set_exception(error)
