"""What the formats share: kinds of media by extension, order of names, JSON records."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import cast

from dataservice.core.errors import SampleError
from dataservice.core.sample import MediaBlob, MediaKind

KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")

_EXTENSIONS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("jpg", "jpeg", "png", "webp", "gif"),
    "video": ("mp4", "webm", "mkv"),
    "audio": ("wav", "flac", "mp3", "ogg"),
}
_KIND_OF = {name: kind for kind, names in _EXTENSIONS.items() for name in names}
_KEY_FIELDS = ("id", "key", "__key__")
_LONGEST_KEY = 512


def media_kind(name: str) -> MediaKind | None:
    """Kind of a media file by its extension, or None when it is no media file we read."""
    return _KIND_OF.get(extension(name))


def extension(name: str) -> str:
    """The part behind the last dot, in lower case."""
    return name.rpartition(".")[2].lower()


def natural_order(name: str) -> list[tuple[int, int, str]]:
    """Sort key under which `2.jpg` comes before `10.jpg`."""
    pieces = re.split(r"([0-9]+)", name)
    return [(0, int(p), p) if p.isdecimal() and p.isascii() else (1, 0, p) for p in pieces if p]


def in_reference_order(media: Iterable[MediaBlob]) -> tuple[MediaBlob, ...]:
    """Images, then videos, then audio; each kind in the order given."""
    return tuple(sorted(media, key=lambda blob: KINDS.index(blob.kind)))


def parse_json(data: bytes | str, what: str) -> object:
    """Any JSON value. Raises SampleError."""
    try:
        return cast(object, json.loads(data))
    except (ValueError, RecursionError) as error:
        raise SampleError(f"{what} is not valid JSON ({error}). Write JSON in UTF-8.") from error


def parse_record(data: bytes | str, what: str) -> dict[str, object]:
    """A JSON object. Raises SampleError saying what `what` is instead."""
    record = parse_json(data, what)
    if not isinstance(record, dict):
        raise SampleError(
            f"{what} holds a JSON {type(record).__name__}; a sample must be one JSON object."
        )
    return record


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8. JSON may hold halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def record_key(record: Mapping[str, object], fallback: str) -> str:
    """The record's own id where it has one that can be written and is not a text in itself."""
    for field in _KEY_FIELDS:
        value = record.get(field)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
            key = str(value)
            if len(key) <= _LONGEST_KEY and is_text(key):
                return key
    return fallback
