"""JSONL: one record a line, naming its media by paths relative to the file's folder."""

import posixpath
from collections.abc import Iterator, Mapping
from typing import IO, ClassVar

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import ByteSpan, MediaBlob, RawSample, SampleLocation
from dataservice.sources.formats.content import KINDS, parse_record, record_key
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.storage import SourceFile, Storage

# A line beyond this is no record but a file of another kind; reading it whole may not end well.
MAX_LINE_BYTES = 256 * 1024 * 1024


class Jsonl:
    """Uncompressed `.jsonl` files. Blank lines are skipped."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def __init__(self, spec: SourceSpec, storage: Storage) -> None:
        self._owner = f"source {spec.name!r}"
        self._storage = storage

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All lines of a file. Raises SourceError when it is not made of lines of JSON."""
        name = posixpath.basename(file.path)
        with self._storage.open(file.path) as stream:
            self._refuse_other_kinds(stream, file)
            for number, span, line in self._lines(stream, file):
                key, raw = self._scanned(file, f"{name}:{number}", span, line)
                yield ScannedSample(
                    key=key,
                    location=SampleLocation(file=file.path, spans=(span,)),
                    raw=raw,
                    behind_bytes=span.offset_bytes + span.size_bytes,
                )

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample from the span of its line."""
        (span,) = location.spans
        (line,) = self._storage.read_spans(location.file, (span,))
        record = parse_record(line, f"{span.name} of {location.file}")
        return RawSample(key=key, record=record, media=self._media(record, location.file))

    def _lines(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[int, ByteSpan, bytes]]:
        """(line number from 1, span, bytes) of every line that is not blank."""
        offset = number = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(line) > MAX_LINE_BYTES:
                raise SourceError(
                    f"{self._owner}: line {number} of {file.path} is longer than "
                    f"{MAX_LINE_BYTES} bytes. Write one JSON object a line, and media as files."
                )
            if line.strip():
                span = ByteSpan(name=f"line {number}", offset_bytes=offset, size_bytes=len(line))
                yield number, span, line
            offset += len(line)

    def _scanned(
        self, file: SourceFile, fallback_key: str, span: ByteSpan, line: bytes
    ) -> tuple[str, RawSample | SampleError]:
        key = fallback_key
        try:
            record = parse_record(line, f"{span.name} of {file.path}")
            key = record_key(record, fallback_key)
            media = self._media(record, file.path)
        except SampleError as error:
            return key, error
        return key, RawSample(key=key, record=record, media=media)

    def _media(self, record: Mapping[str, object], file: str) -> tuple[MediaBlob, ...]:
        return tuple(
            MediaBlob(kind=kind, name=name, data=self._storage.read_beside(file, name))
            for kind in KINDS
            for name in _names(record, kind)
        )

    def _refuse_other_kinds(self, stream: IO[bytes], file: SourceFile) -> None:
        head = stream.read(64)
        stream.seek(0)
        if head.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
            raise SourceError(
                f"{self._owner}: {file.path} is compressed; samples are read from the middle of "
                "the file, which needs an uncompressed one. Decompress it."
            )
        if head.lstrip().startswith(b"["):
            raise SourceError(
                f"{self._owner}: {file.path} is one JSON array, not one object a line. Convert "
                "it: jq -c '.[]' FILE.json > FILE.jsonl"
            )


def _names(record: Mapping[str, object], kind: str) -> list[str]:
    """Media paths under `image` and `images` (or the kind in question), in that order."""
    names: list[str] = []
    for field in (kind, f"{kind}s"):
        value = record.get(field)
        values = value if isinstance(value, list) else [value] if value is not None else []
        for name in values:
            if not isinstance(name, str):
                raise SampleError(
                    f"key {field!r} holds {name!r:.80}; it must be a relative path or a list of "
                    "them."
                )
            names.append(name)
    return names
