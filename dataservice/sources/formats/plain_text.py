"""Plain text: each file is one document."""

import posixpath
from collections.abc import Iterator
from typing import ClassVar

from dataservice.core.errors import SampleError
from dataservice.core.quoting import quoted
from dataservice.core.sample import ByteSpan, RawSample, SampleLocation
from dataservice.sources.formats.content import utf8_text
from dataservice.sources.formats.file_format import FileFormat
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.storage import SourceFile


class PlainText(FileFormat):
    """Files of UTF-8 text."""

    suffixes: ClassVar[tuple[str, ...]] = (".txt", ".md")

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """The one document of a file, named as the file is."""
        key = posixpath.basename(file.path)
        whole = ByteSpan(name="text", offset_bytes=0, size_bytes=file.size_bytes)
        location = SampleLocation(file=file.path, spans=(whole,))
        raw: RawSample | SampleError
        try:
            raw = self.read(key, location)
        except SampleError as error:
            raw = error
        yield ScannedSample(key=key, location=location, raw=raw, behind_bytes=file.size_bytes)

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """The document. Raises SampleError where it is not UTF-8, or above `max_text_bytes`."""
        (span,) = location.spans
        self._limits.check("max_text_bytes", span.size_bytes, f"file {quoted(key)}: bytes")
        (data,) = self._storage.read_spans(location.file, (span,))
        text = utf8_text(data, f"file {quoted(key)}")
        return RawSample(
            key=key, record={"text": text}, media=(), placeholders=self._spec.placeholders
        )
