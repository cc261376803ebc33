"""WebDataset: a tar whose neighbouring members of one key are one sample.

The key is the member's name up to the first dot of its last path component; what follows is
the suffix (`0.jpg`, `json`). Members are read in place and never extracted, so their names
are only names: links are refused and `../` means nothing.
"""

import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, ClassVar, cast

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import ByteSpan, MediaBlob, RawSample, SampleLocation
from dataservice.sources.formats.content import (
    extension,
    in_reference_order,
    media_kind,
    natural_order,
    parse_record,
)
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.storage import SourceFile, Storage

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_META = re.compile(r"__[^/]*__/")  # WebDataset keeps its own notes in such folders
_TEXT_EXTENSIONS = ("txt", "json")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_TAIL_BYTES = 64 * 1024
_MOST_GLOBALS = 1024
_MOST_READS_AT_END = 64
# tarfile lets these through from damaged headers, besides its own errors.
_DAMAGE = (tarfile.TarError, ValueError, ArithmeticError, LookupError, EOFError, RecursionError)


@dataclass(slots=True)
class _Group:
    """Members of one key, as they come."""

    key: str
    spans: list[ByteSpan] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    size_bytes: int = 0
    problem: str = ""


class _HeaderStream:
    """A tar as `tarfile` sees it: it reads headers, whose sizes the file itself states.

    A long name may claim to have gigabytes, and some headers are read until they end, which in
    a cut file they never do.
    """

    def __init__(self, stream: IO[bytes], limits: DecodeLimits) -> None:
        self._stream = stream
        self._most_bytes = limits.max_header_bytes
        self._reads_at_end = 0
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size: int = -1) -> bytes:
        """Raises tarfile.ReadError for a header above the limit, or behind the file's end."""
        if not 0 <= size <= self._most_bytes + tarfile.BLOCKSIZE:
            raise tarfile.ReadError(
                f"a header of {size:,} bytes; the limit max_header_bytes is {self._most_bytes:,}"
            )
        data = self._stream.read(size)
        self._reads_at_end += not data and size > 0
        if self._reads_at_end > _MOST_READS_AT_END:
            raise tarfile.ReadError("a header that does not end")
        return data


class WebDatasetTar:
    """Uncompressed tars; compressed ones have no random access and are refused."""

    suffixes: ClassVar[tuple[str, ...]] = (".tar",)

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        self._owner = f"source {spec.name!r}"
        self._storage = storage
        self._limits = limits

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All samples of a tar. Raises SourceError when it is compressed, cut or damaged."""
        with self._storage.open(file.path) as stream:
            self._refuse_compressed(stream, file)
            group: _Group | None = None
            behind_bytes = 0
            for member in self._members(stream, file):
                name = split_name(member.name)
                if name is None:
                    continue
                if group is None or group.key != name[0]:
                    if group is not None and (group.spans or group.problem):
                        yield self._scanned(group, file, behind_bytes)
                    group = _Group(key=name[0])
                self._add(group, member, stream)
                behind_bytes = member.offset_data + member.size
            if group is not None and (group.spans or group.problem):
                yield self._scanned(group, file, behind_bytes)

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample from its members' byte ranges."""
        size_bytes = sum(span.size_bytes for span in location.spans)
        self._check_sample_size(len(location.spans), size_bytes)
        blobs = self._storage.read_spans(location.file, location.spans)
        return _assemble(key, location.spans, blobs)

    def _scanned(self, group: _Group, file: SourceFile, behind_bytes: int) -> ScannedSample:
        raw: RawSample | SampleError
        try:
            if group.problem:
                raise SampleError(group.problem)
            raw = _assemble(group.key, group.spans, group.blobs)
        except SampleError as error:
            raw = error
        return ScannedSample(
            key=group.key,
            location=SampleLocation(file=file.path, spans=tuple(group.spans)),
            raw=raw,
            behind_bytes=behind_bytes,
        )

    def _add(self, group: _Group, member: tarfile.TarInfo, stream: IO[bytes]) -> None:
        if media_kind(member.name) is None and extension(member.name) not in _TEXT_EXTENSIONS:
            return
        if group.problem:
            return
        if not member.isreg() or member.issparse():
            group.problem = (
                f"member {member.name!r} is a link, a sparse file or a special file; only plain "
                "files are read. Write the tar again with `tar --dereference`."
            )
            return
        if member.name in group.names:
            group.problem = (
                f"member {member.name!r} occurs twice in its sample. Keep one of the two."
            )
            return
        span = ByteSpan(name=member.name, offset_bytes=member.offset_data, size_bytes=member.size)
        group.size_bytes += span.size_bytes
        try:
            self._check_member_size(span)
            self._check_sample_size(len(group.spans) + 1, group.size_bytes)
        except SampleError as error:
            group.problem = str(error)
            group.blobs.clear()
            return
        stream.seek(span.offset_bytes)
        group.names.add(span.name)
        group.spans.append(span)
        group.blobs.append(stream.read(span.size_bytes))

    def _check_sample_size(self, members: int, size_bytes: int) -> None:
        self._limits.check("max_media_items", members, "the sample: its members")
        self._limits.check("max_sample_bytes", size_bytes, "the sample: bytes")

    def _check_member_size(self, span: ByteSpan) -> None:
        named = "max_media_bytes" if media_kind(span.name) else "max_record_bytes"
        self._limits.check(named, span.size_bytes, f"member {span.name!r}: bytes")

    def _members(self, stream: IO[bytes], file: SourceFile) -> Iterator[tarfile.TarInfo]:
        """Members that lie wholly in the file; checks that the archive ends as it should."""
        try:
            headers = cast(IO[bytes], _HeaderStream(stream, self._limits))
            # Names that are no UTF-8 stay readable, and can be written down.
            with tarfile.open(
                fileobj=headers, mode="r:", encoding="utf-8", errors="backslashreplace"
            ) as tar:
                start = -1
                while (member := tar.next()) is not None:
                    tar.members.clear()  # type: ignore[attr-defined]  # it keeps every member
                    self._check_member(member, file, previous_start=start)
                    if len(tar.pax_headers) > _MOST_GLOBALS:
                        raise tarfile.ReadError(f"more than {_MOST_GLOBALS} global headers")
                    start = member.offset
                    if not member.isdir():
                        yield member
                end = tar.offset
        except _DAMAGE as error:
            raise SourceError(
                f"{self._owner}: {file.path} ({file.size_bytes} bytes) is no tar, or a "
                f"truncated one: {error}. Copy the file again, or correct the source's format."
            ) from error
        stream.seek(end)
        tail = stream.read(_TAIL_BYTES)
        if not tail:
            raise SourceError(
                f"{self._owner}: {file.path} is truncated: it ends at byte {end} without the "
                "end mark of a tar. Copy the file again; if its writer left the mark out, "
                "append 1024 zero bytes."
            )
        if tail.strip(b"\0"):
            raise SourceError(
                f"{self._owner}: {file.path} is damaged at byte {end}: neither a member nor the "
                "end mark, or more data behind that. Copy the file again; tars joined with cat "
                "must be kept as separate files."
            )

    def _check_member(
        self, member: tarfile.TarInfo, file: SourceFile, *, previous_start: int
    ) -> None:
        end = member.offset_data + member.size
        if member.size < 0 or member.offset <= previous_start:
            raise SourceError(
                f"{self._owner}: {file.path} is damaged at byte {member.offset}: member "
                f"{member.name!r} claims {member.size} bytes. Copy the file again."
            )
        if member.isreg() and not member.issparse() and end > file.size_bytes:
            raise SourceError(
                f"{self._owner}: {file.path} is truncated: member {member.name!r} needs bytes "
                f"up to {end}, the file has {file.size_bytes}. Copy the file again."
            )

    def _refuse_compressed(self, stream: IO[bytes], file: SourceFile) -> None:
        head = stream.read(8)
        stream.seek(0)
        for magic, name in _COMPRESSED.items():
            if head.startswith(magic):
                raise SourceError(
                    f"{self._owner}: {file.path} is compressed with {name}; samples are read "
                    "from the middle of a tar, which needs an uncompressed one. Decompress it "
                    "(media inside is compressed already)."
                )


def split_name(name: str) -> tuple[str, str] | None:
    """(key, suffix) of a member's name under WebDataset's rule; None for names without a
    suffix, dot files and WebDataset's own notes."""
    match = _NAME.fullmatch(name)
    if match is None or _META.match(name):
        return None
    return match.group(1), match.group(2)


def _assemble(key: str, spans: Sequence[ByteSpan], blobs: Sequence[bytes]) -> RawSample:
    """Members to a sample: JSON objects merged over a `text` member, media by natural order."""
    members = sorted(
        ((span.name, blob) for span, blob in zip(spans, blobs, strict=True)),
        key=lambda member: natural_order(member[0]),
    )
    record: dict[str, object] = {}
    media: list[MediaBlob] = []
    for name, blob in members:
        kind = media_kind(name)
        if kind is not None:
            media.append(MediaBlob(kind=kind, name=name, data=blob))
        elif extension(name) == "json":
            record |= parse_record(blob, f"member {name!r}")
        else:
            record.setdefault("text", _text(name, blob))
    return RawSample(key=key, record=record, media=in_reference_order(media))


def _text(name: str, blob: bytes) -> str:
    try:
        return blob.decode()
    except UnicodeDecodeError as error:
        raise SampleError(
            f"member {name!r} is not UTF-8 text ({error}). Write it in UTF-8."
        ) from error
