"""Reads one sample's bytes: what a worker needs of this room."""

import threading
from collections.abc import Sequence

from dataservice.core.errors import SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import RawSample, SampleRef
from dataservice.sources.formats.protocol import Format
from dataservice.sources.formats.registry import open_format


class SourceReader:
    """The port SampleReader over the sources of one job. Safe for use from several threads;
    a source is opened when first read."""

    def __init__(self, specs: Sequence[SourceSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._formats: dict[str, Format] = {}
        self._lock = threading.Lock()

    def read(self, ref: SampleRef) -> RawSample:
        """Raises SampleError when this sample, SourceError when the source, is unreadable."""
        return self._format(ref.source).read(ref.key, ref.location)

    def _format(self, source: str) -> Format:
        with self._lock:
            if source not in self._formats:
                if source not in self._specs:
                    raise SourceError(
                        f"sample of source {source!r}, but this reader has only "
                        f"{', '.join(map(repr, self._specs))}. Use the reader of the same job."
                    )
                self._formats[source] = open_format(self._specs[source])
            return self._formats[source]
