"""JSONL: one record per line, which names its media by paths relative to the file's folder."""

import posixpath
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import IO, ClassVar

from dataservice.core.errors import SourceError
from dataservice.core.sample import ByteSpan
from dataservice.sources.formats.json_records import JsonRecords
from dataservice.sources.formats.protocol import FilePiece, ScannedSample
from dataservice.sources.formats.signatures import FORMAT_HEAD_BYTES
from dataservice.sources.storage import SourceFile

_SKIPPED_BYTES = 2**20


class Jsonl(JsonRecords):
    """Uncompressed `.jsonl` files. Blank lines are skipped."""

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All lines of a file. Raises SourceError when the file is compressed, one JSON
        array, or of another format."""
        with self._storage.open(file.path) as stream:
            self._require_lines(stream, file)
            stream.seek(0)
            whole = FilePiece(start=0, end=sys.maxsize)  # it may have grown since it was listed
            yield from self.scanned(file, self._lines(stream, file, whole))

    def divided(self, file: SourceFile, piece_bytes: int) -> tuple[FilePiece, ...]:
        """Pieces that begin and end between lines; see Divisible."""
        with self._storage.open(file.path) as stream:
            try:
                self._require_lines(stream, file)
            except SourceError:
                return ()
            starts = [0]
            for near in range(piece_bytes, file.size_bytes, piece_bytes):
                if near > starts[-1]:
                    stream.seek(near - 1)
                    starts.append(near - 1 + _rest_of_line(stream))
        edges = [*starts, file.size_bytes]
        return tuple(
            FilePiece(start=start, end=end) for start, end in pairwise(edges) if start < end
        )

    def records_in(self, file: SourceFile, piece: FilePiece) -> int:
        """Lines of a piece, blank ones included, since they are counted in the others' names."""
        lines, left = 0, piece.end - piece.start
        with self._storage.open(file.path) as stream:
            stream.seek(piece.start)
            while left and (data := stream.read(min(left, _SKIPPED_BYTES))):
                lines += data.count(b"\n")
                left -= len(data)
        return lines

    def scan_piece(self, file: SourceFile, piece: FilePiece) -> Iterator[ScannedSample]:
        """The lines of a piece."""
        with self._storage.open(file.path) as stream:
            stream.seek(piece.start)
            yield from self.scanned(file, self._lines(stream, file, piece))

    def _require_lines(self, stream: IO[bytes], file: SourceFile) -> None:
        head = stream.read(FORMAT_HEAD_BYTES)
        self.require_plain(head, file)
        if head.lstrip().startswith(b"["):
            raise SourceError(
                f"{self._owner}: {file.path} is one JSON array, not one object a line. Write "
                "format: json in the source."
            )

    def _lines(
        self, stream: IO[bytes], file: SourceFile, piece: FilePiece
    ) -> Iterator[tuple[str, ByteSpan, bytes]]:
        """(name, span, bytes) of every line that is not blank. For a line above the limit, the
        bytes are only its beginning; the rest is skipped."""
        most, name = self._limits.max_record_bytes, posixpath.basename(file.path)
        offset, number = piece.start, piece.records_before
        while offset < piece.end and (line := stream.readline(most + 1)):
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
