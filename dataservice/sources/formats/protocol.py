"""The interface of every format: scan one file in order, and read one sample at any place."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from dataservice.core.errors import SampleError
from dataservice.core.sample import RawSample, SampleLocation
from dataservice.sources.storage import SourceFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedSample:
    """One sample found while scanning a file.

    `raw` is the sample, or the error why it cannot be read; `behind_bytes` is the number of bytes
    of the file scanned so far.
    """

    key: str
    location: SampleLocation
    raw: RawSample | SampleError
    behind_bytes: int


class Format(Protocol):
    """The files of one source. Safe for use from several threads."""

    def files(self) -> tuple[SourceFile, ...]:
        """The source's files, sorted by name. Raises SourceError when one is missing."""
        ...

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All samples of a file, in its order. Raises SourceError when the file is damaged."""
        ...

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample. Raises SampleError when the sample cannot be read, SourceError when its file
        cannot."""
        ...
