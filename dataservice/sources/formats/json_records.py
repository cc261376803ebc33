"""Records of JSON in the middle of a file, as samples: what JSONL and JSON arrays share."""

from collections.abc import Iterable, Iterator

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ByteSpan, RawSample, SampleLocation
from dataservice.sources.formats.completeness import Completeness
from dataservice.sources.formats.content import parse_record, record_key
from dataservice.sources.formats.file_format import FileFormat
from dataservice.sources.formats.layout import laid_out, loss_weight_of
from dataservice.sources.formats.media_refs import media_keys, read_refs, refs_in, without_held
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.signatures import signature_format
from dataservice.sources.storage import SourceFile, Storage

_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
_WIDE = (b"\xff\xfe", b"\xfe\xff")


class JsonRecords(FileFormat):
    """The records of one source, whose media are files that they name."""

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        super().__init__(spec, storage, limits)
        self._completeness = Completeness(spec)

    def require_plain(self, head: bytes, file: SourceFile) -> None:
        """Raises SourceError where a file begins as a compressed one does, as UTF-16, or as one
        of another format."""
        if head.startswith(_COMPRESSED):
            raise SourceError(
                f"{self._owner}: {file.path} is compressed; samples are read from the middle of "
                "the file, which needs an uncompressed one. Decompress it."
            )
        if head.startswith(_WIDE):
            raise SourceError(f"{self._owner}: {file.path} is UTF-16. Write it in UTF-8.")
        found = signature_format(head)
        if found not in (None, "json", "jsonl"):
            raise SourceError(
                f"{self._owner}: {file.path} is no JSON: it begins as files of {found} do. Write "
                f"format: {found} in the source."
            )

    def scanned(
        self, file: SourceFile, pieces: Iterable[tuple[str, ByteSpan, bytes]]
    ) -> Iterator[ScannedSample]:
        """A sample for each (key where the record has none, span, bytes). Bytes of a span above the
        limit may be its beginning alone."""
        for fallback_key, span, data in pieces:
            key, raw = self._scanned(file, fallback_key, span, data)
            yield ScannedSample(
                key=key,
                location=SampleLocation(file=file.path, spans=(span,)),
                raw=raw,
                behind_bytes=span.offset_bytes + span.size_bytes,
            )

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample from the span of its record."""
        (span,) = location.spans
        self._limits.check("max_record_bytes", span.size_bytes, f"{span.name}: bytes")
        (data,) = self._storage.read_spans(location.file, (span,))
        record = parse_record(data, f"{span.name} of {location.file}")
        return self._sample(key, record, location.file)

    def _scanned(
        self, file: SourceFile, fallback_key: str, span: ByteSpan, data: bytes
    ) -> tuple[str, RawSample | SampleError]:
        key = fallback_key
        try:
            what = f"{span.name} of {file.path}"
            self._limits.check("max_record_bytes", span.size_bytes, f"{what}: bytes")
            record = parse_record(data, what)
            key = record_key(record, fallback_key)
            return key, self._sample(key, record, file.path)
        except SampleError as error:
            return key, error

    def _sample(self, key: str, record: dict[str, object], file: str) -> RawSample:
        for name in self._spec.ignore:
            record.pop(name, None)
        laid = laid_out(record, self._spec)
        refs = refs_in(record, laid, self._spec)
        media = read_refs(refs, file, self._storage, self._limits)
        read = media_keys(self._spec)
        unread = {name: value for name, value in record.items() if name not in read}
        self._completeness.require(unread, media, file=file)
        return RawSample(
            key=key,
            record=without_held(laid, refs),
            media=media,
            placeholders=self._spec.placeholders,
            loss_weight=loss_weight_of(record, self._spec),
        )
