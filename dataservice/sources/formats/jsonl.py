"""JSONL: one record a line, naming its media by paths relative to the file's folder."""

import posixpath
from collections.abc import Iterator, Mapping
from typing import IO, ClassVar

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ByteSpan, MediaBlob, RawSample, SampleLocation
from dataservice.sources.formats.content import KINDS, parse_record, record_key
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.storage import SourceFile, Storage

_SKIPPED_BYTES = 2**20


class Jsonl:
    """Uncompressed `.jsonl` files. Blank lines are skipped."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        self._owner = f"source {spec.name!r}"
        self._storage = storage
        self._limits = limits

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All lines of a file. Raises SourceError when it is not made of lines of JSON."""
        name = posixpath.basename(file.path)
        with self._storage.open(file.path) as stream:
            self._refuse_other_kinds(stream, file)
            for number, span, line in self._lines(stream):
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
        self._limits.check("max_record_bytes", span.size_bytes, f"{span.name}: bytes")
        (line,) = self._storage.read_spans(location.file, (span,))
        record = parse_record(line, f"{span.name} of {location.file}")
        return RawSample(key=key, record=record, media=self._media(record, location.file))

    def _lines(self, stream: IO[bytes]) -> Iterator[tuple[int, ByteSpan, bytes]]:
        """(line number from 1, span, bytes) of every line that is not blank. A line above the
        limit is passed over; its bytes are only its beginning."""
        most = self._limits.max_record_bytes
        offset = number = 0
        while line := stream.readline(most + 1):
            number += 1
            size = len(line)
            if size > most and not line.endswith(b"\n"):
                size += _rest_of_line(stream)
            if line.strip():
                span = ByteSpan(name=f"line {number}", offset_bytes=offset, size_bytes=size)
                yield number, span, line
            offset += size

    def _scanned(
        self, file: SourceFile, fallback_key: str, span: ByteSpan, line: bytes
    ) -> tuple[str, RawSample | SampleError]:
        key = fallback_key
        try:
            what = f"{span.name} of {file.path}"
            self._limits.check("max_record_bytes", span.size_bytes, f"{what}: bytes")
            record = parse_record(line, what)
            key = record_key(record, fallback_key)
            media = self._media(record, file.path)
        except SampleError as error:
            return key, error
        return key, RawSample(key=key, record=record, media=media)

    def _media(self, record: Mapping[str, object], file: str) -> tuple[MediaBlob, ...]:
        named = [(kind, name) for kind in KINDS for name in _names(record, kind)]
        self._limits.check("max_media_items", len(named), "the record: media files")
        blobs, size_bytes = [], 0
        for kind, name in named:
            data = self._storage.read_beside(file, name, self._limits)
            size_bytes += len(data)
            self._limits.check("max_sample_bytes", size_bytes, "the sample: bytes of its media")
            blobs.append(MediaBlob(kind=kind, name=name, data=data))
        return tuple(blobs)

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


def _rest_of_line(stream: IO[bytes]) -> int:
    """Reads to the end of the line, keeping nothing; its size in bytes."""
    size = 0
    while piece := stream.readline(_SKIPPED_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size


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
