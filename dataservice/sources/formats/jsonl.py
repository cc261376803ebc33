"""JSONL: one record per line, which names its media by paths relative to the file's folder."""

import posixpath
from collections.abc import Iterator
from typing import IO, ClassVar

from dataservice.core.errors import SourceError
from dataservice.core.sample import ByteSpan
from dataservice.sources.formats.json_records import JsonRecords
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.storage import SourceFile

_SKIPPED_BYTES = 2**20


class Jsonl(JsonRecords):
    """Uncompressed `.jsonl` files. Blank lines are skipped."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All lines of a file. Raises SourceError when the file is compressed or one JSON array."""
        with self._storage.open(file.path) as stream:
            head = stream.read(64)
            stream.seek(0)
            self.require_plain(head, file)
            if head.lstrip().startswith(b"["):
                raise SourceError(
                    f"{self._owner}: {file.path} is one JSON array, not one object a line. Write "
                    "format: json in the source."
                )
            yield from self.scanned(file, self._lines(stream, file))

    def _lines(self, stream: IO[bytes], file: SourceFile) -> Iterator[tuple[str, ByteSpan, bytes]]:
        """(name, span, bytes) of every line that is not blank. For a line above the limit, the
        bytes are only its beginning; the rest is skipped."""
        most, name = self._limits.max_record_bytes, posixpath.basename(file.path)
        offset = number = 0
        while line := stream.readline(most + 1):
            number += 1
            size = len(line)
            if size > most and not line.endswith(b"\n"):
                size += _rest_of_line(stream)
            if line.strip():
                span = ByteSpan(name=f"line {number}", offset_bytes=offset, size_bytes=size)
                yield f"{name}:{number}", span, line
            offset += size


def _rest_of_line(stream: IO[bytes]) -> int:
    """Skip to the end of the line; returns the number of bytes skipped."""
    size = 0
    while piece := stream.readline(_SKIPPED_BYTES):
        size += len(piece)
        if piece.endswith(b"\n"):
            break
    return size
