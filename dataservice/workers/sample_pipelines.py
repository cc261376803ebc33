"""One reader and one decoder for each distinct pipeline, built when first needed."""

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from dataservice.core.ports import SampleDecoder, SampleReader

# A pipeline holds a tokenizer and open files: when a process serves many jobs in turn, the least
# recently used pipelines are dropped.
PIPELINES_KEPT = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A job's pipeline: its reader and its decoder."""

    reader: SampleReader
    decoder: SampleDecoder


def _nobody(pipeline: str) -> None:
    return None


def _none(pipeline: str) -> Collection[str]:
    return ()


def _no_matter(environment: Mapping[str, str] | None) -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineFactory:
    """Builds reader and decoder from a job's pipeline JSON. `reader_for` also takes `ranges_of`,
    which gives the bytes that this machine keeps for a team, where some are kept. `code_owner`
    names the team whose own code a pipeline runs, None where it runs none: such code shares no
    process with others, and none with its reader. `far_sources` names the sources that lie on other
    machines, and are read ahead. `identity` names what decides to what a pipeline decodes a sample,
    and the team that it is of. `hold_credentials` has a process open storage with those of these
    variables of an environment, or with None without any."""

    reader_for: Callable[..., SampleReader]
    decoder_for: Callable[[str], SampleDecoder]
    code_owner: Callable[[str], str | None] = _nobody
    far_sources: Callable[[str], Collection[str]] = _none
    identity: Callable[[str], str] = str
    hold_credentials: Callable[[Mapping[str, str] | None], None] = _no_matter

    def build(self, pipeline: str) -> Pipeline:
        """Reader and decoder. Slow: it may load a tokenizer."""
        return Pipeline(reader=self.reader_for(pipeline), decoder=self.decoder_for(pipeline))


class PipelineCache:
    """A least-recently-used cache of pipelines, each built once, by the first thread that asks for
    it.

    Success: all threads that ask while a pipeline is built get the same one. Failure: all waiting
    threads get the error, and the next call builds again.
    """

    def __init__(self, factory: PipelineFactory) -> None:
        self._factory = factory
        self._built: dict[str, Future[Pipeline]] = {}
        self._lock = threading.Lock()

    def __contains__(self, pipeline: str) -> bool:
        return pipeline in self._built

    def get(self, pipeline: str) -> Pipeline:
        """The pipeline of this JSON. Raises any error of building it."""
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
