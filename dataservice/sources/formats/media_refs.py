"""The files that a record names: by paths, as `data:` URIs or as base64, in columns or in the
parts of its messages.

    {"image": "a.jpg"}   {"images": ["a.jpg", null]}                    a key of the record
    {"type": "image", "image": "a.jpg"}                                 parts, as Qwen writes them
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}           OpenAI
    {"type": "input_audio", "input_audio": {"data": "UklGR…", "format": "wav"}}      OpenAI
"""

import base64
import binascii
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from dataservice.core.errors import SampleError
from dataservice.core.job import MEDIA_KINDS, SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.quoting import cut, quoted
from dataservice.core.sample import PART_KINDS, MediaBlob, MediaKind
from dataservice.sources.formats.content import require_path
from dataservice.sources.formats.layout import value_at
from dataservice.sources.formats.media_names import held_kind

_TURNS = ("messages", "conversations")
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

    Raises SampleError where a value can be no file.
    """
    found = []
    in_parts = list(refs_in_parts(laid))
    for kind in MEDIA_KINDS:
        columns = _columns(spec, kind)
        named = [ref for column in columns for ref in _in_column(record, column, kind)]
        found += named or [ref for ref in in_parts if ref.kind == kind]
    return found


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
    for key in _TURNS:
        turns = record.get(key)
        for turn in turns if isinstance(turns, list) else ():
            content = turn.get("content") if isinstance(turn, Mapping) else None
            for part in content if isinstance(content, list) else ():
                kind = PART_KINDS.get(str(part.get("type"))) if isinstance(part, Mapping) else None
                if kind is not None and (value := _of_part(part, kind)) is not None:
                    where = f"a part of type {part['type']!r} in {key}"
                    yield media_ref(kind, value, key=key, where=where)


def _of_part(part: Mapping[str, object], kind: MediaKind) -> object:
    value = next((v for f in (str(part["type"]), kind, *_PART_FIELDS) if (v := part.get(f))), None)
    if isinstance(value, Mapping):
        value = next((held for field in _PART_FIELDS if (held := value.get(field))), None)
    return value


def without_held(record: Mapping[str, object], refs: list[MediaRef]) -> dict[str, object]:
    """The record without the files that it holds itself, which its media are."""
    held = {ref.key for ref in refs if ref.is_held}
    kept = {key: value for key, value in record.items() if key not in held or key in _TURNS}
    for key in held & set(_TURNS):
        kept[key] = [_emptied(turn) for turn in _listed(record[key])]
    return kept


def _emptied(turn: object) -> object:
    if not isinstance(turn, Mapping) or not isinstance(turn.get("content"), list):
        return turn
    parts = [
        {"type": part["type"]}
        if isinstance(part, Mapping) and str(part.get("type")) in PART_KINDS
        else part
        for part in turn["content"]
    ]
    return {**turn, "content": parts}


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
