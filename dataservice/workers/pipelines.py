"""One reader and one decoder for each distinct pipeline, built when first asked for."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from dataservice.core.ports import SampleDecoder, SampleReader

# A pipeline holds a tokenizer and open files; a worker that serves many jobs in turn
# forgets the ones it has not used for longest.
PIPELINES_KEPT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """How one job's samples are read and decoded. Both are called from several threads."""

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
    """Least recently used pipelines, each built once.

    Success: all who ask while it is built get the same one. Failure: all who wait get the
    error, and the next to ask builds again. Cancellation stops only the one who waits.
    """

    def __init__(self, factory: PipelineFactory, threads: Executor) -> None:
        self._factory = factory
        self._threads = threads
        self._built: dict[str, asyncio.Future[Pipeline]] = {}

    async def get(self, pipeline: str) -> Pipeline:
        """The pipeline of this JSON. Raises what building it raises."""
        future = self._built.pop(pipeline, None)
        if future is None:
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._threads, self._factory.build, pipeline)
            # Read the error even if all who wait are gone, or asyncio reports it as lost.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._built[pipeline] = future
        if len(self._built) > PIPELINES_KEPT:
            del self._built[next(iter(self._built))]
        try:
            return await asyncio.shield(future)
        except Exception:
            if self._built.get(pipeline) is future:
                del self._built[pipeline]
            raise
