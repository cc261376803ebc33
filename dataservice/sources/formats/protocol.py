"""The interface of every format: scan one file in order, and read one sample at any place."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dataservice.core.errors import SampleError
from dataservice.core.sample import RawSample, SampleLocation
from dataservice.sources.storage import SourceFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ScannedSample:
    """One sample found while scanning a file.

    `raw` is the sample, or the error why it cannot be read; `behind_bytes` is the number of bytes
    of the file scanned so far; `unparsed` is what `Format.read` gives in the place of `raw`, in
    formats whose code is the user's own.
    """

    key: str
    location: SampleLocation
    raw: RawSample | SampleError
    behind_bytes: int
    unparsed: RawSample | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePiece:
    """Bytes `start` to `end` of a file, which begin with a record and end behind one;
    `records_before` lie before them."""

    start: int
    end: int
    records_before: int = 0


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

    def fetching(self, locations: Sequence[SampleLocation]) -> AbstractContextManager[None]:
        """Within this, `read` of these samples in this thread finds their byte ranges fetched
        together, as far as they could be."""
        ...


@runtime_checkable
class Divisible(Protocol):
    """A format whose files can be divided at records, so that several processes scan one file."""

    def divided(self, file: SourceFile, piece_bytes: int) -> tuple[FilePiece, ...]:
        """The file as pieces of about this size, in order, whose `records_before` are not known
        yet; the empty tuple where `scan` would refuse the whole file. Raises SourceError when it
        cannot be read."""
        ...

    def records_in(self, file: SourceFile, piece: FilePiece) -> int:
        """Number of records of a piece. Raises SourceError when it cannot be read."""
        ...

    def scan_piece(self, file: SourceFile, piece: FilePiece) -> Iterator[ScannedSample]:
        """The samples of a piece, as `scan` gives them. Raises SourceError when the file is
        damaged."""
        ...
