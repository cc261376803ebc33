"""Reads one sample's bytes: the only part of this room that a worker uses."""

import threading
from collections.abc import Sequence
from dataclasses import replace

from dataservice.core.errors import RESTORE, SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import RangeCache, SampleReader
from dataservice.core.sample import RawSample, SampleRef
from dataservice.sources.checksum import sample_crc32
from dataservice.sources.formats.protocol import Format
from dataservice.sources.formats.registry import open_format
from dataservice.sources.roots import Roots


class SourceReader(SampleReader):
    """The port SampleReader over the sources of one job. Safe for use from several threads; each
    source is opened when first read."""

    def __init__(
        self,
        specs: Sequence[SourceSpec],
        *,
        limits: DecodeLimits = DEFAULT_LIMITS,
        roots: Roots | None = None,
        ranges: RangeCache | None = None,
    ) -> None:
        """Reads only under `roots`, if given; what lies on other machines is kept in `ranges`."""
        self._ranges = ranges
        self._specs = {spec.name: spec for spec in specs}
        self._limits = limits
        self._roots = roots
        self._formats: dict[str, Format] = {}
        self._lock = threading.Lock()

    def read(self, ref: SampleRef) -> RawSample:
        """One sample's bytes; of a piece of a document those of the whole. Raises SampleError when
        this sample is unreadable or its bytes are no longer those that were indexed, SourceError
        when its source is unreadable."""
        try:
            return self._read(ref)
        except SampleError:
            # A file that was exchanged while it was read may be kept under its earlier version.
            if self._ranges is None:
                raise
            with self._ranges.anew():
                return self._read(ref)

    def _read(self, ref: SampleRef) -> RawSample:
        raw = self._format(ref.source).read(ref.key_in_source, ref.location)
        if ref.crc32 is not None and (found := sample_crc32(raw)) != ref.crc32:
            raise SampleError(
                f"the bytes of sample {ref.key!r} in {ref.location.file}, or of a file that it "
                f"names, changed since indexing: their checksum is {found:08x}, the index says "
                f"{ref.crc32:08x}. {RESTORE}"
            )
        piece = ref.location.piece
        return replace(raw, key=ref.key, piece=piece) if piece else raw

    def read_together(self, refs: Sequence[SampleRef]) -> Sequence[RawSample | Exception]:
        """Samples of one source, each as `read` gives it or the error that it raises. The byte
        ranges of several are fetched at once, before their sizes are checked."""
        if len(refs) == 1:
            return super().read_together(refs)
        try:
            with self._format(refs[0].source).fetching([ref.location for ref in refs]):
                return super().read_together(refs)
        except SourceError as error:
            return [error] * len(refs)

    def _format(self, source: str) -> Format:
        with self._lock:
            if source not in self._formats:
                if source not in self._specs:
                    raise SourceError(
                        f"sample of source {source!r}, but this reader has only "
                        f"{', '.join(map(repr, self._specs))}. Use the reader of the same job."
                    )
                self._formats[source] = open_format(
                    self._specs[source], self._limits, self._roots, self._ranges
                )
            return self._formats[source]
