"""What every format does: walk one file in order, and read one sample anywhere."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

from dataservice.core.errors import SampleError
from dataservice.core.sample import RawSample, SampleLocation
from dataservice.sources.storage import SourceFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedSample:
    """One sample met while walking a file.

    `raw` is what was read, or why this one sample cannot be; `behind_bytes` is how much of the
    file lies behind the walk.
    """

    key: str
    location: SampleLocation
    raw: RawSample | SampleError
    behind_bytes: int


class Format(Protocol):
    """The files of one source. Safe for use from several threads."""

    suffixes: ClassVar[tuple[str, ...]]

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All samples of a file, in its order. Raises SourceError when the file is damaged."""
        ...

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample. Raises SampleError for this sample, SourceError for its file."""
        ...
