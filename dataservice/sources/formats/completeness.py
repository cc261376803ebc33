"""Checks that a sample has all the media that its record names.

A record may name media under keys that no format reads (`img`, `audio_filepath`, `media`, `image`
in an object), or name files that the sample does not have. Its text would then be trained without
them, so the sample is refused, with the key in the message. So is one that says where in a
recording or clip it begins and ends, which would be trained whole. A key that describes a medium of
the sample (its `url`, `image_path`, `image_width`) is metadata. Any other key that names a file of
a kind that the sample lacks (`filename`, `src`) may be metadata as well, and gets a warning.
"""

import logging
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
    filed_kind,
    files_in,
    first_path_kind,
    held_kind,
    mentioned_kind,
    naming_kind,
    path_kind,
)

log = logging.getLogger(__name__)

# In Hugging Face's folders of images and sounds, `metadata.jsonl` names a file for each record.
_FOLDER_KEY = "file_name"
# Texts that end as the name of a file does are texts, and a sample's name is its name.
_TEXTS = frozenset(
    {"text", "caption", "question", "problem", "answer", "system", "tools", *TURNS}
    | {"id", "key", "__key__"}
)
_MOST_SAID = 8  # keys of a source, behind which a record may have a key for every file
# Keys that say together where in a file a sample lies.
_SEGMENTS = (("start", "end"), ("start_time", "end_time"), ("begin", "end"), ("offset", "duration"))


class Completeness:
    """Of one source: refuses samples whose record names media that they lack, and says of its keys,
    once each, that they name files which nobody reads."""

    def __init__(self, spec: SourceSpec) -> None:
        texts = {column.split(".")[0] for column in spec.columns.of_records.values()}
        self._spec = spec
        self._read = _TEXTS | texts | set(spec.ignore)
        self._said: set[str] = set()

    def require(
        self,
        record: Mapping[str, object],
        media: Sequence[MediaBlob],
        *,
        file: str,
        unnamed: bool = False,
    ) -> None:
        """`record` is the record without the keys already read; `unnamed` says that the media were
        not read from the record, so the record may also name each of them.

        Raises:
            SampleError: media are missing, or a part of one is meant; the message names the key and
                the remedy.
        """
        spec = self._spec
        _refuse_segment(spec, record, media)
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
                raise _lost(key, value, kind, files[kind], column=key in record and not unnamed)
        for key, value in record.items():
            if key not in spec.ignore and key not in TURNS:
                _refuse_inner(spec, key, value, files, column=not unnamed)
        for key, value in record.items():
            known = key in self._read or key in self._said
            if not known and len(self._said) < _MOST_SAID:
                self._tell_unread(key, value, files, file, column=not unnamed)

    def _tell_unread(
        self, key: str, value: object, files: Counter[MediaKind], file: str, *, column: bool
    ) -> None:
        """Log a warning where a key names a file of a kind that a complete sample lacks."""
        kind = first_path_kind(value)
        if kind is None or files[kind] or kind in self._spec.media_columns:
            return
        self._said.add(key)
        log.warning(
            "source %r: %s: key %s names %s %s, which is not read, and its sample has no %s. "
            "%s, or write ignore: [%s] in the source if that is right",
            *(self._spec.name, file, quoted(key), kind, quoted(value, 80), kind),
            *(_remedy(key, kind, column=column), quoted(key, 60)),
        )


def _refuse_inner(
    spec: SourceSpec, key: str, value: object, files: Counter[MediaKind], *, column: bool
) -> None:
    """An object in a record, or a list of some, under this key: its `image` is what the sample
    lacks, unless the job file says that it is not."""
    for each in value if isinstance(value, list | tuple) else (value,):
        for inner, named in each.items() if isinstance(each, Mapping) else ():
            kind, path = default_kind(str(inner)), f"{key}.{inner}"
            if kind is None or kind in spec.media_columns or path in spec.ignore:
                continue
            if not files[kind] and files_in(named):
                raise _lost(path, named, kind, 0, column=column and each is value)


def _refuse_segment(
    spec: SourceSpec, record: Mapping[str, object], media: Sequence[MediaBlob]
) -> None:
    if not any(blob.kind in ("audio", "video") for blob in media):
        return
    for keys in _SEGMENTS:
        values = [record.get(key) for key in keys]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
        if numbers and not set(keys) & set(spec.ignore) and (keys[0] != "offset" or values[0]):
            raise SampleError(
                f"the record has {keys[0]} {values[0]} and {keys[1]} {values[1]}, as of a part of "
                "a longer recording or clip, and its file would be trained whole. Cut the file, "
                f"or write ignore: [{', '.join(keys)}] in the source if all of it is meant."
            )


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
    if (kind := filed_kind(key, value)) is not None:
        return kind
    of_folder = posixpath.basename(file).startswith("metadata.") and key == _FOLDER_KEY
    return path_kind(value) if of_folder and isinstance(value, str) else None


def _lost(key: str, value: object, kind: MediaKind, files: int, *, column: bool) -> SampleError:
    """`column`: whether the job file may say that the key is the column of this kind."""
    return SampleError(
        f"key {quoted(key)} names {kind} {quoted(value, 80)}, which is not read: the sample has "
        f"{files} {kind} file{'s' * (files != 1)}. {_remedy(key, kind, column=column)}, or write "
        f"ignore: [{quoted(key, 60)}] in the source if it is no part of the sample."
    )


def _remedy(key: str, kind: MediaKind, *, column: bool) -> str:
    """How the files that a key names are read."""
    columns = f"Write columns: {{{kind}: {quoted(key, 60)}}} in the source, or put"
    return (
        f"{columns if column else 'Put'} its path under {kind!r} or {kind + 's'!r} (in a tar, its "
        "file beside the record)"
    )
