"""JSON arrays: one file that is a list of records, as LLaVA and ShareGPT data are published."""

import codecs
import json
import posixpath
import re
from collections.abc import Iterator
from typing import IO, ClassVar

from dataservice.core.errors import SourceError
from dataservice.core.sample import ByteSpan
from dataservice.sources.formats.json_records import JsonRecords
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.signatures import FORMAT_HEAD_BYTES
from dataservice.sources.storage import SourceFile

_CHUNK_BYTES = 2**20
_SPACE = re.compile(r"[ \t\n\r]*")


class JsonArray(JsonRecords):
    """Uncompressed `.json` files, each one array of objects. Each object is read again by where its
    bytes lie."""

    suffixes: ClassVar[tuple[str, ...]] = (".json",)

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All objects of a file. Raises SourceError when it is no array of objects, or damaged."""
        name = posixpath.basename(file.path)
        with self._storage.open(file.path) as stream:
            self.require_plain(stream.read(FORMAT_HEAD_BYTES), file)
            stream.seek(0)
            text = _Text(stream, f"{self._owner}: {file.path}", self._limits.max_record_bytes)
            yield from self.scanned(file, text.elements(name))


class _Text:
    """The file as far as it is read, one character a byte: everything that JSON is made of is
    ASCII, and no byte of a longer UTF-8 character is."""

    def __init__(self, stream: IO[bytes], owner: str, most_bytes: int) -> None:
        self._stream = stream
        self._owner = owner
        self._most = most_bytes
        self._text = ""
        self._begin = 0  # of the text in the file
        self._at = 0  # in the text

    def elements(self, name: str) -> Iterator[tuple[str, ByteSpan, bytes]]:
        """(name, span, bytes) of each object of the array. Memory is that of the largest."""
        if self._next() == codecs.BOM_UTF8[:1].decode("latin-1"):
            self._at += len(codecs.BOM_UTF8)
        if self._next() != "[":
            raise self._error("is not one array of objects, [{…}, {…}]")
        self._at += 1
        number = 0
        while (mark := self._next()) != "]" or number:
            if number:
                if mark not in (",", "]"):
                    raise self._error(f"has no comma behind element {number - 1}")
                self._at += 1
                if mark == "]":
                    break
                mark = self._next()
            if mark != "{":
                raise self._error(f"holds something else than an object as element {number}")
            end = self._end()
            span = ByteSpan(
                name=f"element {number}",
                offset_bytes=self._begin + self._at,
                size_bytes=end - self._at,
            )
            yield f"{name}:{number}", span, self._text[self._at : end].encode("latin-1")
            self._at = end
            number += 1
        else:
            self._at += 1
        if self._next():
            raise self._error("goes on behind its array")

    def _next(self) -> str:
        """The next character that is not white space; empty at the end of the file."""
        while True:
            match = _SPACE.match(self._text, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _end(self) -> int:
        """Where the object that begins here ends."""
        decoder = json.JSONDecoder(strict=False)
        while True:
            try:
                return decoder.raw_decode(self._text, self._at)[1]
            except RecursionError:
                raise self._error("holds an object that nests too deep") from None
            except ValueError as error:
                if len(self._text) - self._at > self._most:
                    raise self._error(
                        f"holds an object of more than max_record_bytes = {self._most:,} bytes, or "
                        f"a damaged one ({error})"
                    ) from error
                if not self._more():
                    raise self._error(f"is damaged or truncated ({error})") from error

    def _more(self) -> bool:
        """Read on, twice as far each time that one object needs it; False at the end."""
        rest = self._text[self._at :]
        data = self._stream.read(max(_CHUNK_BYTES, len(rest)))
        self._begin += self._at
        self._text, self._at = rest + data.decode("latin-1"), 0
        return bool(data)

    def _error(self, problem: str) -> SourceError:
        return SourceError(
            f"{self._owner} {problem}, from byte {self._begin + self._at:,} on. Write one JSON "
            "array of objects, or one object a line with format: jsonl."
        )
