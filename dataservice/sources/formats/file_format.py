"""What all formats begin with: the source, its storage, and the files with their suffixes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ByteSpan, SampleLocation
from dataservice.sources.storage import SourceFile, Storage


class FileFormat:
    """The files of one source, of which a format has its own way to read samples."""

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        self._spec = spec
        self._owner = f"source {spec.name!r}"
        self._storage = storage
        self._limits = limits

    def files(self) -> tuple[SourceFile, ...]:
        """The files at the source's URL; of a folder, those with a suffix of this format."""
        return self._storage.files(self.suffixes)

    def fetching(self, locations: Sequence[SampleLocation]) -> AbstractContextManager[None]:
        """See Format."""
        return self._storage.fetching([(at.file, at.spans) for at in locations])

    def _check_size(self, spans: Sequence[ByteSpan]) -> None:
        """Raises SampleError where a sample is larger than the limits allow."""
        size_bytes = sum(span.size_bytes for span in spans)
        self._limits.check("max_sample_bytes", size_bytes, "the sample: bytes")
