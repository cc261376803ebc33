"""Checks that a sample has all the media that its record names.

A record may name media under keys that no format reads (`img`, `audio_filepath`), or name files
that the sample does not have. Its text would then be trained without them, so the sample is
refused, with the key in the message. A key that describes a medium of the sample (its `url`,
`image_path`, `image_width`) is metadata.
"""

import posixpath
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from dataservice.core.errors import SampleError
from dataservice.core.job import SourceSpec
from dataservice.core.quoting import quoted
from dataservice.core.sample import MediaBlob, MediaKind
from dataservice.sources.formats.layout import TURNS
from dataservice.sources.formats.media_names import (
    default_kind,
    files_in,
    held_kind,
    mentioned_kind,
    naming_kind,
    path_kind,
)

# In Hugging Face's folders of images and sounds, `metadata.jsonl` names a file for each record.
_FOLDER_KEY = "file_name"


def require_all_media(
    spec: SourceSpec,
    record: Mapping[str, object],
    media: Sequence[MediaBlob],
    *,
    file: str,
    unnamed: bool = False,
) -> None:
    """`record` is the record without the keys already read; `unnamed` says that the media were not
    read from the record, so the record may also name each of them.

    Raises:
        SampleError: media are missing; the message names the key and the remedy.
    """
    files = Counter(blob.kind for blob in media)
    spare = Counter(files) if unnamed else Counter[MediaKind]()
    for key, value in _entries(record):
        kind = _named_kind(key, value, file) if key not in spec.ignore else None
        if kind is None or kind in spec.media_columns:
            continue
        lost = not files[kind]
        if naming_kind(key) == kind:
            spare[kind] -= files_in(value)
            lost |= spare[kind] < 0
        if lost:
            raise _lost(key, value, kind, files[kind])


def _entries(record: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Keys and values of the record and of its turns."""
    yield from record.items()
    for key in TURNS:
        turns = record.get(key)
        for turn in turns if isinstance(turns, list | tuple) else ():
            if isinstance(turn, Mapping):
                yield from ((str(k), v) for k, v in turn.items())


def _named_kind(key: str, value: object, file: str) -> MediaKind | None:
    """Kind of the media that a value names, or None when it names none."""
    if (kind := default_kind(key)) is not None:
        return kind if value and isinstance(value, str | list | tuple | Mapping) else None
    if (kind := held_kind(value)) is not None:
        return kind
    if (kind := mentioned_kind(key)) is not None:
        return kind if files_in(value) else None
    of_folder = posixpath.basename(file).startswith("metadata.") and key == _FOLDER_KEY
    return path_kind(value) if of_folder and isinstance(value, str) else None


def _lost(key: str, value: object, kind: MediaKind, files: int) -> SampleError:
    return SampleError(
        f"key {quoted(key)} names {kind} {quoted(value, 80)}, which is not read: the sample has "
        f"{files} {kind} file{'s' * (files != 1)}. Put its path under {kind!r} or {kind + 's'!r} "
        f"(in a tar, its file beside the record), or write ignore: [{quoted(key, 60)}] in the "
        "source if it is no part of the sample."
    )
