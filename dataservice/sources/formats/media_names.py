"""Recognises media by names: suffixes of files, columns, keys of records and their values."""

import base64
import binascii
import re
from collections.abc import Mapping

from dataservice.core.job import MEDIA_KINDS
from dataservice.core.sample import MediaKind
from dataservice.sources.formats.signatures import HEAD_BYTES, signature_kind

KINDS = MEDIA_KINDS

_SUFFIXES: Mapping[MediaKind, str] = {
    "image": "jpg jpeg jpe jfif png webp gif bmp dib tif tiff avif jp2 j2k jpx jxl heic heif",
    "video": "mp4 m4v mov webm mkv avi mpg mpeg flv wmv 3gp ogv m2ts",
    "audio": "wav flac mp3 ogg oga opus m4a aac wma aif aiff amr caf",
}
_PLAIN_WORDS: Mapping[MediaKind, str] = {
    "image": "image images img imgs picture pictures pic pics photo photos",
    "video": "video videos",
    "audio": "audio audios",
}
# Weaker words: a name with one of them counts only if its value names a file.
_LOOSE_WORDS: Mapping[MediaKind, str] = {
    "image": "frame frames screenshot screenshots thumbnail thumbnails scan scans",
    "video": "clip clips movie movies",
    "audio": "sound sounds speech recording recordings voice",
}
# Names of these words alone count where their value names a file, as `file_path` and `media`.
_FILE_WORDS = frozenset(
    {"file", "files", "path", "paths", "filepath", "filepaths", "media", "medias"}
    | {"visual", "visuals", "attachment", "attachments"}
)
# Of members of archives alone, where a suffix is no word of a key. Codecs read some of them, and
# the others are refused for what they are.
_RARE_SUFFIXES: Mapping[MediaKind, str] = {
    "image": "ppm pgm pbm pnm tga ico pcx dds qoi psd exr jpf",
    "video": "mts vob m1v m2v asf",
    "audio": "mp2 ac3 au mka weba",
}
# Beside a word for media, these say that the value is the file itself: `image_bytes`,
# `raw_audio_data`.
_HOLDERS = frozenset(
    {"bytes", "data", "content", "contents", "raw", "binary", "file", "encoded", "buffer", "blob"}
)
_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+(?![a-z])")
_DATA_URI = re.compile(r"data:(image|video|audio)/")
_ENCODED = re.compile(r"[A-Za-z0-9+/]{88}")  # the length of 66 bytes in base64
_LONGEST_PATH = 4096
_FILE_FIELDS = ("bytes", "path", "url", "uri", "src", "file", "array")


def _kinds(*tables: Mapping[MediaKind, str]) -> dict[str, MediaKind]:
    return {word: kind for table in tables for kind in KINDS for word in table[kind].split()}


_KIND_OF_SUFFIX = _kinds(_SUFFIXES)
_KIND_OF_MEMBER = _kinds(_SUFFIXES, _PLAIN_WORDS)
_KIND_OF_RARE_SUFFIX = _kinds(_RARE_SUFFIXES)
_KIND_OF_LOOSE_WORD = _kinds(_SUFFIXES, _PLAIN_WORDS, _LOOSE_WORDS)
_KIND_OF_DEFAULT: Mapping[str, MediaKind] = {
    name: kind for kind in KINDS for name in (kind, f"{kind}s")
}


def extension(name: str) -> str:
    """The part after the last dot, in lower case."""
    return name.rpartition(".")[2].lower()


def media_kind(name: str) -> MediaKind | None:
    """Kind of an archive's member by its suffix (`.jpg`, `.image`); None for any other suffix."""
    suffix = extension(name)
    return _KIND_OF_MEMBER.get(suffix) or _KIND_OF_RARE_SUFFIX.get(suffix)


def default_kind(name: str) -> MediaKind | None:
    """Kind of a key under which records hold paths: `image`, `images`, `video` …"""
    return _KIND_OF_DEFAULT.get(name)


def holding_kind(name: str) -> MediaKind | None:
    """Kind of a column of bytes, by its name alone: `jpg`, `image_2`, `audio_bytes`; None for
    `image_hash`, whose bytes may be anything."""
    words = _words(name)
    kinds = [_KIND_OF_MEMBER[word] for word in words if word in _KIND_OF_MEMBER]
    others = {word for word in words if word not in _KIND_OF_MEMBER}
    return kinds[0] if kinds and others <= _HOLDERS else None


def naming_kind(name: str) -> MediaKind | None:
    """Kind of a key that is a word for media, possibly numbered: `img`, `photo`, `image_2`."""
    words = _words(name)
    return _KIND_OF_MEMBER.get(words[0]) if len(words) == 1 else None


def mentioned_kind(name: str) -> MediaKind | None:
    """Kind of the first word for media in a name: `image_path`, `local_audio`, `wavFile`."""
    return next((kind for w in _words(name) if (kind := _KIND_OF_LOOSE_WORD.get(w))), None)


def filed_kind(name: str, value: object) -> MediaKind | None:
    """Kind of the first file of media that a key's value names, where the key says that it names
    files, of whatever kind: `file_path`, `media`, `attachments`."""
    kind = first_path_kind(value)  # most values name none, which is quick to tell
    words = _words(name) if kind is not None else []
    return kind if words and _FILE_WORDS.issuperset(words) else None


def first_path_kind(value: object) -> MediaKind | None:
    """Kind of the first file that a record's value names, by its suffix; None where it names
    none."""
    if isinstance(value, str):
        return path_kind(value) if _is_path(value) else None
    if isinstance(value, Mapping):
        value = [value.get(field) for field in _FILE_FIELDS]
    inner = value if isinstance(value, list | tuple) else ()
    return next((kind for each in inner if (kind := first_path_kind(each))), None)


def files_in(value: object) -> int:
    """Number of files that a record's value names or holds: paths and URLs with a suffix of media,
    `data:` URIs, media in base64, objects with bytes or a path, and lists of these."""
    if isinstance(value, list | tuple):
        return sum(files_in(item) for item in value)
    if isinstance(value, Mapping):
        return int(any(value.get(field) for field in _FILE_FIELDS))
    return int(isinstance(value, str) and (_is_path(value) or held_kind(value) is not None))


def held_kind(value: object) -> MediaKind | None:
    """Kind of the file that a string contains: a `data:` URI, or base64 of recognised first
    bytes."""
    if not isinstance(value, str):
        return None
    if match := _DATA_URI.match(value):
        return next(kind for kind in KINDS if kind == match[1])
    if _ENCODED.match(value) is None:
        return None
    try:
        return signature_kind(base64.b64decode(value[:88])[:HEAD_BYTES])
    except binascii.Error:
        return None


def path_kind(path: str) -> MediaKind | None:
    """Kind of a media file by its name."""
    return _KIND_OF_SUFFIX.get(extension(path.partition("?")[0]))


def _is_path(value: str) -> bool:
    return len(value) <= _LONGEST_PATH and "\n" not in value and path_kind(value) is not None


def _words(name: str) -> list[str]:
    """The words of a name, in lower case and without trailing counters: `image2` becomes `image`,
    `mp4` stays."""
    words = [word.lower() for word in _WORD.findall(name[:_LONGEST_PATH])]
    plain = [w if w in _KIND_OF_LOOSE_WORD else w.rstrip("0123456789") for w in words]
    return [word for word in plain if word]
