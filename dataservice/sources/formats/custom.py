"""Files of a user's own format: the user's class says where the samples of a file lie, and what the
bytes of one are.

    indexing              locate(file) ─▶ ranges ─▶ bytes ─▶ parse(bytes) ─▶ sample
    reading, anywhere              the index's ranges ─▶ bytes
    decoding                                             bytes ─▶ parse(bytes) ─▶ sample

What reads holds credentials and runs nothing of the user's; what runs the user's code holds none.
"""

import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import index
from typing import IO, ClassVar

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.own_code import running
from dataservice.core.own_format import OwnFormat, Ranges
from dataservice.core.quoting import quoted
from dataservice.core.sample import ByteSpan, RawSample, SampleLocation, Unparsed
from dataservice.sources.filesystem import is_away
from dataservice.sources.formats.file_format import FileFormat
from dataservice.sources.formats.own_samples import OwnSamples
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.opened import OpenedSource
from dataservice.sources.storage import SourceFile

_MOST_RANGES = 1024  # of one sample


@dataclass(frozen=True, kw_only=True, slots=True)
class _Code:
    """The user's own, in a process that may run it."""

    name: str
    reads: OwnFormat
    samples: OwnSamples


class Custom(FileFormat):
    """All files at the source's URL. They are scanned where the code of the format may run, and
    read anywhere."""

    suffixes: ClassVar[tuple[str, ...]] = ("",)

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All samples of a file. Raises SourceError where the user's code fails over the file, or
        locates what is not in it."""
        name, behind = posixpath.basename(file.path), 0
        with self._storage.open(file.path) as whole, self._storage.open(file.path) as stream:
            for number, ranges in enumerate(self._located(whole, file)):
                spans = self._spans(ranges, file, f"sample {number}")
                behind = max(behind, *(span.offset_bytes + span.size_bytes for span in spans))
                yield self._scanned(f"{name}:{number}", file, spans, stream, behind)

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """The bytes of one sample's ranges, unparsed."""
        self._check_size(location.spans)
        parts = tuple(self._storage.read_spans(location.file, location.spans))
        return self._unparsed(key, parts)

    def _scanned(
        self,
        key: str,
        file: SourceFile,
        spans: Sequence[ByteSpan],
        stream: IO[bytes],
        behind_bytes: int,
    ) -> ScannedSample:
        raw: RawSample | SampleError
        unparsed = None
        try:
            self._check_size(spans)
            with self._storage.translate(file.path, "be read"):
                parts = tuple(_read(stream, span) for span in spans)
            unparsed = self._unparsed(key, parts)
            key, raw = self._code.samples.keyed(unparsed)
        except SampleError as error:
            raw = error
        return ScannedSample(
            key=key,
            location=SampleLocation(file=file.path, spans=tuple(spans)),
            raw=raw,
            behind_bytes=behind_bytes,
            unparsed=unparsed,
        )

    def _unparsed(self, key: str, parts: tuple[bytes, ...]) -> RawSample:
        return RawSample(key=key, record={}, unparsed=Unparsed(source=self._spec.name, parts=parts))

    @cached_property
    def _code(self) -> "_Code":
        """Made once for all files. Raises SourceError in processes that may not run it."""
        code = self._spec.code if isinstance(self._spec, OpenedSource) else None
        if code is None or code.make is None:
            raise SourceError(
                f"{self._owner} has a format of its own, whose code does not run here. Index the "
                "job with the service's config."
            )
        reads = code.make()
        samples = OwnSamples(self._spec, code.name, reads, self._limits)
        return _Code(name=code.name, reads=reads, samples=samples)

    def _located(self, whole: IO[bytes], file: SourceFile) -> Iterator[Ranges]:
        code = self._code
        try:
            with running(code.name):
                for ranges in code.reads.locate(whole):
                    yield _listed(ranges)
        except SampleError as error:
            self._require_read(error, file)
            raise SourceError(f"{self._owner}: {file.path}: {error}") from error

    def _require_read(self, failure: SampleError, file: SourceFile) -> None:
        """Raises SourceError where the user's code failed because the file could not be read:
        storage that is away damages no file."""
        error: BaseException | None = failure
        while error is not None and not isinstance(error, SourceError) and not is_away(error):
            error = error.__cause__ or error.__context__
        if error is not None:
            with self._storage.translate(file.path, "be read"):
                raise error

    def _spans(self, ranges: Ranges, file: SourceFile, what: str) -> list[ByteSpan]:
        """One sample's ranges. Raises SourceError where the file has none such."""
        try:
            pairs = [(index(offset), index(size)) for offset, size in ranges]
        except (TypeError, ValueError):
            pairs = []
        lies = all(min(pair) >= 0 and sum(pair) <= file.size_bytes for pair in pairs)
        if not lies or not 1 <= len(pairs) <= _MOST_RANGES:
            raise SourceError(
                f"{self._owner}: {file.path}: its code locates {what} at {quoted(ranges, 80)}; the "
                f"file has {file.size_bytes:,} bytes. locate gives a list of (offset, size) for "
                f"each sample, from 1 to {_MOST_RANGES:,} of them."
            )
        return [
            ByteSpan(name=f"part {place}", offset_bytes=offset, size_bytes=size)
            for place, (offset, size) in enumerate(pairs)
        ]


def _listed(ranges: Ranges) -> Ranges:
    """The ranges, as far as they are looked at, where the user's code makes them one by one."""
    return [*islice(ranges, _MOST_RANGES + 1)] if isinstance(ranges, Iterator) else ranges


def _read(stream: IO[bytes], span: ByteSpan) -> bytes:
    stream.seek(span.offset_bytes)
    return stream.read(span.size_bytes)
