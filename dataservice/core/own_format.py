"""Formats of files that a user's own class reads."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Protocol

Ranges = Sequence[tuple[int, int]]
"""Byte ranges of a file, as (offset, size)."""


class OwnFormat(Protocol):
    """A class of the user's own, made with the `options` of the job.

    `version`, where the class has one, says that its results changed; otherwise the source of its
    module does.
    """

    def locate(self, file: IO[bytes]) -> Iterable[Ranges]:
        """Where the samples of a file lie, in their order: of each the byte ranges that it is made
        of. The file is open, at its beginning."""
        ...

    def parse(self, parts: Sequence[bytes]) -> Mapping[str, object]:
        """The sample that these ranges hold, as a row of a table: media as the bytes of their
        files, or lists of these; all else as JSON has it. Raises SampleError with the reason why
        it cannot be used. Safe for use from several threads."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatCode:
    """The code of a source's own format. `digest` changes when its results do; `make` makes it, in
    processes that may run it, and is None in others."""

    name: str
    digest: str
    make: Callable[[], OwnFormat] | None = None


FormatCodes = Mapping[str, FormatCode]
"""The code of those sources that have a format of their own, by source."""
