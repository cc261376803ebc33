"""WebDataset: a tar whose neighbouring members of one key are one sample.

The key is the member's name up to the first dot of its last path component; what follows is
the suffix (`0.jpg`, `json`). Members are read in place and never extracted, so their names
are only names: links are refused and `../` means nothing.

A member is media by its suffix (`jpg`, `image`) or, under any other suffix, by its first bytes.
Besides media, text and JSON, a few suffixes are known to be notes (`cls`, `md5`). The contents of
members with other suffixes are not trained, and one warning per source says so.
"""

import logging
import re
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, ClassVar, cast

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import cut, quoted
from dataservice.core.sample import ByteSpan, MediaBlob, MediaKind, RawSample, SampleLocation
from dataservice.sources.formats.completeness import Completeness
from dataservice.sources.formats.content import (
    natural_order,
    parse_record,
    utf8_text,
)
from dataservice.sources.formats.energon import train_shards
from dataservice.sources.formats.file_format import FileFormat
from dataservice.sources.formats.layout import laid_out, loss_weight_of
from dataservice.sources.formats.listing import listed_files
from dataservice.sources.formats.media_names import extension, media_kind
from dataservice.sources.formats.media_refs import in_named_order
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.signatures import HEAD_BYTES, signature_kind
from dataservice.sources.storage import SourceFile, Storage

_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_META = re.compile(r"__[^/]*__/")  # WebDataset stores its own notes in such folders
_TEXTS = frozenset({"txt", "text", "transcript"})
_JSONS = frozenset({"json", "jsn"})
# Labels, counts and checksums, which WebDataset's own writers put beside a sample.
_NOTES = frozenset(
    {"cls", "cls2", "class", "count", "index", "inx", "id", "key", "md5", "sha256", "license"}
)
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_TAIL_BYTES = 64 * 1024
_MOST_GLOBALS = 1024
_MOST_READS_AT_END = 64
_SAID_SUFFIXES = 8
# Errors other than its own that tarfile raises for damaged headers.
_DAMAGE = (tarfile.TarError, ValueError, ArithmeticError, LookupError, EOFError, RecursionError)


log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Group:
    """The members of one key, in the order of the file."""

    key: str
    spans: list[ByteSpan] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    size_bytes: int = 0
    problem: str = ""


class _Halves:
    """Keys of samples that have only media, and of those that have only text, by their hashes: in a
    tar whose members are not in the order of their keys, one sample is taken for two."""

    def __init__(self) -> None:
        self._seen: tuple[set[int], set[int]] = (set(), set())

    def other_was_seen(self, group: _Group) -> bool:
        """Whether the tar had what this group lacks of its sample; the group is seen from now
        on."""
        texts = sum(extension(span.name) in _TEXTS | _JSONS for span in group.spans)
        if not group.spans or 0 < texts < len(group.spans):
            return False
        key, mine = hash(group.key), int(texts > 0)
        self._seen[mine].add(key)
        return key in self._seen[1 - mine]


class _HeaderStream:
    """The stream from which `tarfile` reads headers; the file itself states their sizes.

    A header may claim a name of gigabytes, and some headers are read until their end, which a
    truncated file does not have.
    """

    def __init__(self, stream: IO[bytes], limits: DecodeLimits) -> None:
        self._stream = stream
        self._most_bytes = limits.max_header_bytes
        self._reads_at_end = 0
        self.seek = stream.seek
        self.tell = stream.tell

    def read(self, size: int = -1) -> bytes:
        """Raises tarfile.ReadError when a header is above the limit, or reaches beyond the file's
        end."""
        if not 0 <= size <= self._most_bytes + tarfile.BLOCKSIZE:
            raise tarfile.ReadError(
                f"a header of {size:,} bytes; the limit max_header_bytes is {self._most_bytes:,}"
            )
        data = self._stream.read(size)
        self._reads_at_end += not data and size > 0
        if self._reads_at_end > _MOST_READS_AT_END:
            raise tarfile.ReadError("a header that does not end")
        return data


class WebDatasetTar(FileFormat):
    """Uncompressed tars; compressed ones have no random access and are refused."""

    suffixes: ClassVar[tuple[str, ...]] = (".tar",)

    def __init__(self, spec: SourceSpec, storage: Storage, limits: DecodeLimits) -> None:
        super().__init__(spec, storage, limits)
        self._ignored = {suffix.lower().lstrip(".") for suffix in spec.ignore}
        self._said: set[str] = set()
        self._completeness = Completeness(spec)

    def files(self) -> tuple[SourceFile, ...]:
        """The tars at the source's URL. Of a folder that Energon prepared, those of its split
        train."""
        return listed_files(
            self._storage,
            self._storage.files(self.suffixes),
            self._owner,
            list_names=(".nv-meta/split.yaml", ".nv-meta/split.json"),
            names_in=train_shards,
        )

    def scan(self, file: SourceFile) -> Iterator[ScannedSample]:
        """All samples of a tar. Raises SourceError when it is compressed, truncated or damaged."""
        with self._storage.open(file.path) as stream:
            self._refuse_compressed(stream, file)
            group: _Group | None = None
            halves = _Halves()
            unread: Counter[str] = Counter()
            behind_bytes = 0
            for member in self._members(stream, file):
                name = split_name(member.name)
                if name is None:
                    if (lost := self._without_key(member, stream)) is not None:
                        yield self._scanned(lost, file, behind_bytes)
                    continue
                if group is None or group.key != name[0]:
                    yield from self._ended(group, halves, file, behind_bytes)
                    group = _Group(key=name[0])
                if self._is_wanted(member, name[1], stream, unread):
                    self._add(group, member, stream)
                behind_bytes = member.offset_data + member.size
            yield from self._ended(group, halves, file, behind_bytes)
            self._say_unread(unread, file)

    def read(self, key: str, location: SampleLocation) -> RawSample:
        """One sample from its members' byte ranges."""
        size_bytes = sum(span.size_bytes for span in location.spans)
        self._check_sample_size(len(location.spans), size_bytes)
        blobs = self._storage.read_spans(location.file, location.spans)
        return self._assemble(key, location.file, location.spans, blobs)

    def _ended(
        self, group: _Group | None, halves: _Halves, file: SourceFile, behind_bytes: int
    ) -> Iterator[ScannedSample]:
        """The sample of a group, behind which another key or the tar's end comes; none where none
        of its members is read. Raises SourceError where the rest of the sample is elsewhere."""
        if group is None or not (group.spans or group.problem):
            return
        if halves.other_was_seen(group):
            raise SourceError(
                f"{self._owner}: {file.path} has the text of key {quoted(group.key)} and its media "
                "at two places, and would train the text without them. Write the members of each "
                "key as neighbours, as `tar --sort=name` does."
            )
        yield self._scanned(group, file, behind_bytes)

    def _scanned(self, group: _Group, file: SourceFile, behind_bytes: int) -> ScannedSample:
        raw: RawSample | SampleError
        try:
            if group.problem:
                raise SampleError(group.problem)
            raw = self._assemble(group.key, file.path, group.spans, group.blobs)
        except SampleError as error:
            raw = error
        return ScannedSample(
            key=group.key,
            location=SampleLocation(file=file.path, spans=tuple(group.spans)),
            raw=raw,
            behind_bytes=behind_bytes,
        )

    def _assemble(
        self, key: str, file: str, spans: Sequence[ByteSpan], blobs: Sequence[bytes]
    ) -> RawSample:
        """Makes a sample of members: JSON objects merged over a text, media in natural order or as
        the record names them."""
        members = sorted(
            ((span.name, blob) for span, blob in zip(spans, blobs, strict=True)),
            key=lambda member: natural_order(member[0]),
        )
        texts: dict[str, str] = {}
        record: dict[str, object] = {}
        media: list[MediaBlob] = []
        for name, blob in members:
            kind = media_kind(name)
            if kind is None and extension(name) in _JSONS:
                record |= parse_record(blob, f"member {quoted(name)}")
            elif kind is None and extension(name) in _TEXTS:
                texts[name] = utf8_text(blob, f"member {quoted(name)}")
            elif (kind := kind or signature_kind(blob[:HEAD_BYTES])) is not None:
                media.append(MediaBlob(kind=kind, name=cut(name), data=blob))
        if len(texts) > 1:
            raise SampleError(
                f"the sample has {len(texts)} texts, {quoted(sorted(texts))}, and trains one. Name "
                "the suffixes of the others under ignore in the source; if they are of several "
                "samples, rename the members: a key ends at the first dot of its name."
            )
        for ignored in self._spec.ignore:
            record.pop(ignored, None)
        for name, text in texts.items():
            _refuse_other_text(record, name, text)
            record.setdefault("text", text)
        self._completeness.require(record, media, file=file, unnamed=True)
        laid = laid_out(record, self._spec)
        return RawSample(
            key=key,
            record=laid,
            media=in_named_order(media, laid),
            placeholders=self._spec.placeholders,
            loss_weight=loss_weight_of(record, self._spec),
        )

    # ---- which members are part of a sample ------------------------------------------------

    def _is_wanted(
        self, member: tarfile.TarInfo, suffix: str, stream: IO[bytes], unread: Counter[str]
    ) -> bool:
        """Whether a member is read; members of unknown suffixes are counted in `unread`."""
        last = extension(member.name)
        if suffix.lower() in self._ignored or last in self._ignored:
            return False
        if media_kind(member.name) is not None or last in _TEXTS | _JSONS:
            return True
        if last in _NOTES:
            return False
        if _head_kind(member, stream) is not None:
            return True
        unread[last] += 1
        return False

    def _without_key(self, member: tarfile.TarInfo, stream: IO[bytes]) -> _Group | None:
        """A group with an error when a member is media but belongs to no sample; otherwise None."""
        if _META.match(member.name) or (kind := _head_kind(member, stream)) is None:
            return None
        problem = (
            f"member {quoted(member.name)} is {kind} by its first bytes and belongs to no sample: "
            "its name has no suffix, or begins with a dot. Name it as KEY.jpg or the like."
        )
        return _Group(key=cut(member.name), problem=problem)

    def _say_unread(self, unread: Counter[str], file: SourceFile) -> None:
        new = [suffix for suffix in sorted(unread) if suffix not in self._said]
        self._said.update(new)
        for suffix in new[:_SAID_SUFFIXES]:
            log.warning(
                "%s: %s: %s members ending in .%s are not read: they are no media, text or JSON. "
                "If that is right, write ignore: [%s] in the source",
                *(self._owner, file.path, f"{unread[suffix]:,}", cut(suffix, 40), cut(suffix, 40)),
            )
        if len(new) > _SAID_SUFFIXES:
            log.warning("%s: and %s other suffixes", self._owner, f"{len(new) - _SAID_SUFFIXES:,}")

    def _add(self, group: _Group, member: tarfile.TarInfo, stream: IO[bytes]) -> None:
        if group.problem:
            return
        if not member.isreg() or member.issparse():
            group.problem = (
                f"member {quoted(member.name)} is a link, a sparse file or a special file; only "
                "plain files are read. Write the tar again with `tar --dereference`."
            )
            return
        if member.name in group.names:
            group.problem = (
                f"member {quoted(member.name)} occurs twice in its sample. Keep one of the two."
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
        is_record = extension(span.name) in _TEXTS | _JSONS
        named = "max_record_bytes" if is_record else "max_media_bytes"
        self._limits.check(named, span.size_bytes, f"member {quoted(span.name)}: bytes")

    def _members(self, stream: IO[bytes], file: SourceFile) -> Iterator[tarfile.TarInfo]:
        """Members that lie wholly in the file. Raises SourceError when the archive does not end as
        a tar must."""
        try:
            headers = cast(IO[bytes], _HeaderStream(stream, self._limits))
            # Names that are not UTF-8 stay readable, and can be written to the index.
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


def _refuse_other_text(record: dict[str, object], name: str, text: str) -> None:
    """Raises SampleError where the JSON beside a text has another: one of them would go unread."""
    for key in ("text", "caption"):
        other = record.get(key)
        if isinstance(other, str) and other.strip() != text.strip():
            raise SampleError(
                f"member {quoted(name)} has the text {quoted(text, 40)}, and {key} of its JSON is "
                f"{quoted(other, 40)}; the sample trains one. Write ignore: [{extension(name)}] or "
                f"ignore: [{key}] in the source, for the one to leave out."
            )


def split_name(name: str) -> tuple[str, str] | None:
    """(key, suffix) of a member's name by WebDataset's rule; None for names without a suffix, dot
    files and WebDataset's own notes."""
    match = _NAME.fullmatch(name)
    if match is None or _META.match(name):
        return None
    return match.group(1), match.group(2)


def _head_kind(member: tarfile.TarInfo, stream: IO[bytes]) -> MediaKind | None:
    """Kind of a plain member by its first bytes."""
    if not member.isreg() or member.issparse():
        return None
    stream.seek(member.offset_data)
    return signature_kind(stream.read(min(HEAD_BYTES, member.size)))
