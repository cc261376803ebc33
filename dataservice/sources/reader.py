"""Reads one sample's bytes: what a worker needs of this room."""

import threading
from collections.abc import Sequence

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import RawSample, SampleRef
from dataservice.sources.checksum import sample_crc32
from dataservice.sources.formats.protocol import Format
from dataservice.sources.formats.registry import open_format
from dataservice.sources.roots import Roots


class SourceReader:
    """The port SampleReader over the sources of one job. Safe for use from several threads;
    a source is opened when first read."""

    def __init__(
        self,
        specs: Sequence[SourceSpec],
        *,
        limits: DecodeLimits = DEFAULT_LIMITS,
        roots: Roots | None = None,
    ) -> None:
        """Reads under `roots` only, where given."""
        self._specs = {spec.name: spec for spec in specs}
        self._limits = limits
        self._roots = roots
        self._formats: dict[str, Format] = {}
        self._lock = threading.Lock()

    def read(self, ref: SampleRef) -> RawSample:
        """Raises SampleError when this sample, SourceError when the source, is unreadable;
        SampleError too when its bytes are no longer those that were indexed."""
        raw = self._format(ref.source).read(ref.key, ref.location)
        if ref.crc32 is not None and (found := sample_crc32(raw)) != ref.crc32:
            raise SampleError(
                f"the bytes of sample {ref.key!r} in {ref.location.file} changed since indexing: "
                f"their checksum is {found:08x}, the index says {ref.crc32:08x}. Restore the "
                "file, or index the source again."
            )
        return raw

    def _format(self, source: str) -> Format:
        with self._lock:
            if source not in self._formats:
                if source not in self._specs:
                    raise SourceError(
                        f"sample of source {source!r}, but this reader has only "
                        f"{', '.join(map(repr, self._specs))}. Use the reader of the same job."
                    )
                self._formats[source] = open_format(self._specs[source], self._limits, self._roots)
            return self._formats[source]
