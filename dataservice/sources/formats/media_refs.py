"""The files that a record names: by paths, as `data:` URIs or as base64, in columns or in the
parts of its messages.

    {"image": "a.jpg"}   {"images": ["a.jpg", null]}                    a key of the record
    {"type": "image", "image": "a.jpg"}                                 parts, as Qwen writes them
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}           OpenAI
    {"type": "input_audio", "input_audio": {"data": "UklGR…", "format": "wav"}}      OpenAI
"""

import base64
import binascii
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from dataservice.core.errors import SampleError
from dataservice.core.job import MEDIA_KINDS, SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import cut, quoted
from dataservice.core.sample import PART_KINDS, PART_OPTIONS, MediaBlob, MediaKind
from dataservice.sources.formats.content import require_path
from dataservice.sources.formats.layout import TURNS, value_at, with_parts
from dataservice.sources.formats.media_names import held_kind

_PART_FIELDS = ("url", "path", "base64", "data")
_FILE_SCHEME = "file://"
_WEB_SCHEMES = ("http://", "https://")


class MediaFiles(Protocol):
    """Where the files lie that records name."""

    def read_beside(self, path: str, relative: str, limits: DecodeLimits) -> bytes:
        """The file that a record of `path` names. Raises SampleError where there is none."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaRef:
    """A file that a record names: its path, or the file itself in base64. `key` is the record's
    key; `where` says in words where the record names it."""

    kind: MediaKind
    value: str
    key: str
    where: str

    @property
    def is_held(self) -> bool:
        """Whether the record holds the file itself."""
        return _holds(self.value)


def media_ref(kind: MediaKind, value: object, *, key: str, where: str) -> MediaRef:
    """What a value names. Raises SampleError where it can be no file."""
    held = isinstance(value, str) and _holds(value)
    named = str(value) if held else require_path(value, where)
    return MediaRef(kind=kind, value=named, key=key, where=where)


def _holds(value: str) -> bool:
    return value.startswith("data:") or held_kind(value) is not None


def refs_in(
    record: Mapping[str, object], laid: Mapping[str, object], spec: SourceSpec
) -> list[MediaRef]:
    """Images, then clips, then recordings; each kind in the order of the record's columns, or of
    the parts of its messages, as they are laid out, where no column has files of this kind.

    Raises SampleError where a value can be no file, or parts name other files than the columns do,
    or in another order.
    """
    found = []
    in_parts = list(refs_in_parts(laid))
    for kind in MEDIA_KINDS:
        columns = _columns(spec, kind)
        named = [ref for column in columns for ref in _in_column(record, column, kind)]
        of_parts = [ref for ref in in_parts if ref.kind == kind]
        if named and of_parts and list(map(_file, named)) != list(map(_file, of_parts)):
            raise SampleError(
                f"{named[0].where} names {kind} {quoted(list(map(_file, named)), 80)}, and "
                f"{of_parts[0].where} and others {quoted(list(map(_file, of_parts)), 80)}: it is "
                f"unclear which belong where. Write ignore: [{quoted(named[0].key, 60)}] in the "
                "source to read those of the parts, or take them out of the parts."
            )
        found += named or of_parts
    return found


def _file(ref: MediaRef) -> str:
    """What tells a file from others of the record."""
    if ref.is_held:
        return ref.value
    return posixpath.normpath(ref.value.removeprefix(_FILE_SCHEME))


def media_keys(spec: SourceSpec) -> set[str]:
    """The keys of a record under which `refs_in` looks for files."""
    return {column.split(".")[0] for kind in MEDIA_KINDS for column in _columns(spec, kind)}


def _columns(spec: SourceSpec, kind: MediaKind) -> tuple[str, ...]:
    return spec.media_columns.get(kind, (kind, f"{kind}s"))


def _in_column(record: Mapping[str, object], column: str, kind: MediaKind) -> Iterator[MediaRef]:
    value = value_at(record, column)
    for item in value if isinstance(value, list) else [value]:
        if item is not None:
            yield media_ref(kind, item, key=column.split(".")[0], where=f"key {column!r}")


def refs_in_parts(record: Mapping[str, object]) -> Iterator[MediaRef]:
    """The files that parts of messages name, in their order; a part may be a mere placeholder."""
    for kind, part, key in _media_parts(record):
        if (value := _of_part(part, kind)) is not None:
            where = f"a part of type {part['type']!r} in {key}"
            yield media_ref(kind, value, key=key, where=where)


def _media_parts(
    record: Mapping[str, object],
) -> Iterator[tuple[MediaKind, Mapping[str, object], str]]:
    """The parts of messages that stand for media, with their kind and the record's key."""
    for key in TURNS:
        for turn in _listed(record.get(key)):
            content = turn.get("content") if isinstance(turn, Mapping) else None
            for part in _listed(content):
                kind = PART_KINDS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
                if kind is not None:
                    yield kind, cast("Mapping[str, object]", part), key


def _of_part(part: Mapping[str, object], kind: MediaKind) -> object:
    value = next((v for f in (str(part["type"]), kind, *_PART_FIELDS) if (v := part.get(f))), None)
    if isinstance(value, Mapping):
        value = next((held for field in _PART_FIELDS if (held := value.get(field))), None)
    return value


def in_named_order(
    media: Sequence[MediaBlob], record: Mapping[str, object]
) -> tuple[MediaBlob, ...]:
    """Images, then clips, then recordings; each kind in the order in which the record, or the parts
    of its messages, name just these files, else in the order given."""
    found: list[MediaBlob] = []
    for kind in MEDIA_KINDS:
        blobs = [blob for blob in media if blob.kind == kind]
        found += blobs if len(blobs) < 2 else _as_named(blobs, kind, record)
    return tuple(found)


def _as_named(
    blobs: list[MediaBlob], kind: MediaKind, record: Mapping[str, object]
) -> list[MediaBlob]:
    places = {posixpath.basename(blob.name): place for place, blob in enumerate(blobs)}
    of_parts = [_of_part(part, kind) for of, part, _ in _media_parts(record) if of == kind]
    for names in (_names(of_parts), _names(record.get(f"{kind}s"))):
        if sorted(names) == sorted(places) and len(places) == len(blobs):
            return [blobs[places[name]] for name in names]
    return blobs


def _names(value: object) -> list[str]:
    return [posixpath.basename(each) for each in _listed(value) if isinstance(each, str)]


def without_held(record: Mapping[str, object], refs: list[MediaRef]) -> dict[str, object]:
    """The record without the files that it holds itself, which its media are."""
    held = {ref.key for ref in refs if ref.is_held}
    kept = {key: value for key, value in record.items() if key not in held or key in TURNS}
    for key in held & set(TURNS):
        kept[key] = [with_parts(turn, _emptied) for turn in _listed(record[key])]
    return kept


def _emptied(part: Mapping[str, object]) -> Mapping[str, object]:
    if str(part.get("type")) not in PART_KINDS:
        return part
    return {key: value for key, value in part.items() if key == "type" or key in PART_OPTIONS}


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def read_refs(
    refs: list[MediaRef], file: str, storage: MediaFiles, limits: DecodeLimits
) -> tuple[MediaBlob, ...]:
    """The files that a record of `file` names. Raises SampleError where one cannot be read, or they
    are more or larger than the limits."""
    limits.check("max_media_items", len(refs), "the record: media files")
    blobs, size_bytes = [], 0
    for ref in refs:
        blobs.append(read_ref(ref, file, storage, limits))
        size_bytes += len(blobs[-1].data)
        limits.check("max_sample_bytes", size_bytes, "the sample: bytes of its media")
    return tuple(blobs)


def read_ref(ref: MediaRef, file: str, storage: MediaFiles, limits: DecodeLimits) -> MediaBlob:
    """The file that a record of `file` names. Raises SampleError where it cannot be read."""
    if ref.is_held:
        return MediaBlob(kind=ref.kind, name=cut(ref.value, 40), data=_decoded(ref))
    path = ref.value.removeprefix(_FILE_SCHEME)
    if path.startswith(_WEB_SCHEMES):
        raise SampleError(
            f"{ref.where} names {quoted(ref.value, 80)}, which is not fetched: what a web address "
            "holds may change. Download the file, and store its path, beside the records or under "
            "the source's media_root."
        )
    return MediaBlob(kind=ref.kind, name=cut(path), data=storage.read_beside(file, path, limits))


def _decoded(ref: MediaRef) -> bytes:
    head, comma, body = ref.value.rpartition(",")
    if comma and not head.endswith(";base64"):
        raise SampleError(
            f"{ref.where} holds {quoted(ref.value, 40)}, a data URI that is not base64. Write "
            "data:image/png;base64,… instead."
        )
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SampleError(
            f"{ref.where} holds {quoted(ref.value, 40)}, which is not base64 ({error}). Write the "
            "file's bytes in base64, or its path."
        ) from error
