"""An index's description of itself: its files, how they were read and measured, and what was left
out.

There are three kinds of JSON record. A *part record* stands in the footer of each part, and tells a
restarted run which files are done; the *manifest* is the sum of all part records, but for the
samples that they left out, which are *lines* of a file beside it: of a large index they can be
millions, and who opens it wants none of them. Files are named relative to the source, so that
nothing here depends on where the corpus lies.
"""

import hashlib
import json
import posixpath
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from dataservice.core.errors import IndexStaleError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import RawSample
from dataservice.sources.index_folder import MANIFEST, IndexFolder
from dataservice.sources.opened import OpenedSource
from dataservice.sources.storage import SourceFile, static_prefix

# Version 2 added each sample's checksum. Version 3 added its digest, what is known of its items
# besides their lengths, and names that do not depend on where a source lies. Version 4 digests by
# BLAKE3.
INDEX_VERSION = 4

AGAIN = "`dataservice index JOB.yaml`"
"""The command that writes an index; of the same files it makes the same one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSample:
    """A sample that cannot be used: the index lists it, and no batch contains it."""

    file: str
    key: str
    reason: str

    def to_line(self) -> bytes:
        """The form that LEFT_OUT has a sample in."""
        return f"{json.dumps(asdict(self))}\n".encode()

    @staticmethod
    def from_lines(lines: Iterable[bytes], where: str) -> "Iterator[SkippedSample]":
        """Read such lines. Raises IndexStaleError where one is damaged."""
        for number, line in enumerate(lines, start=1):
            try:
                yield SkippedSample(**json.loads(line))
            except (ValueError, TypeError, RecursionError) as error:
                raise IndexStaleError(
                    f"{where}:{number} is damaged ({type(error).__name__}: {error}). Write it "
                    f"again: {AGAIN}; the same files give the same index."
                ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedFile:
    """A file of a source as it was when indexed, by its name in the source."""

    name: str
    size_bytes: int
    version: str

    @staticmethod
    def of(file: SourceFile) -> "IndexedFile":
        """A file as it is listed now."""
        return IndexedFile(name=file.name, size_bytes=file.size_bytes, version=file.version)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOutFile:
    """A damaged file that the user chose to leave out of the index, and what is wrong with it."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaCounts:
    """Number of media files in usable samples."""

    images: int = 0
    clips: int = 0
    recordings: int = 0

    def with_sample(self, raw: RawSample) -> "MediaCounts":
        """These counts plus a sample's."""
        if not raw.media:
            return self
        kinds = Counter(blob.kind for blob in raw.media)
        return self + MediaCounts(
            images=kinds["image"], clips=kinds["video"], recordings=kinds["audio"]
        )

    def __add__(self, other: "MediaCounts") -> "MediaCounts":
        return MediaCounts(
            images=self.images + other.images,
            clips=self.clips + other.clips,
            recordings=self.recordings + other.recordings,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LongSamples:
    """What became of samples of more tokens than the pipeline's `longer_than`: so many were
    `left_out`, the longest of `longest_tokens`, and so many `documents` were cut into `pieces`,
    which are rows of the index."""

    left_out: int = 0
    longest_tokens: int = 0
    documents: int = 0
    pieces: int = 0

    def __add__(self, other: "LongSamples") -> "LongSamples":
        return LongSamples(
            left_out=self.left_out + other.left_out,
            longest_tokens=max(self.longest_tokens, other.longest_tokens),
            documents=self.documents + other.documents,
            pieces=self.pieces + other.pieces,
        )

    @staticmethod
    def read(fields: Mapping[str, Any]) -> "LongSamples":
        """Read the form that JSON has. Raises ValueError or TypeError where it is another."""
        return LongSamples(**{name: int(count) for name, count in dict(fields).items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Everything besides the file itself that a part depends on. `media_root` is relative to the
    source."""

    format: str
    image_column: str
    ignore: str
    placeholders: str
    media_root: str
    measurer: str
    columns: str = ""
    version: int = INDEX_VERSION

    @staticmethod
    def of(spec: SourceSpec, measurer_fingerprint: str) -> "Recipe":
        """The recipe that a job asks for."""
        root = spec.media_root
        code = spec.code if isinstance(spec, OpenedSource) else None
        return Recipe(
            format=f"{code.name} {code.digest[:16]}" if code else spec.format,
            image_column=spec.image_column,
            ignore=", ".join(sorted(set(spec.ignore))),
            placeholders=spec.placeholders,
            media_root=posixpath.relpath(root, static_prefix(spec.url) or ".") if root else "",
            measurer=measurer_fingerprint,
            columns=str(spec.columns),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """One indexed file. `identity` is a digest of its samples' contents, `places` of their
    locations in the file."""

    recipe: Recipe
    file: IndexedFile
    rows: int
    identity: str
    places: str
    media: MediaCounts = field(default_factory=MediaCounts)
    skipped: tuple[SkippedSample, ...] = ()
    long: LongSamples = field(default_factory=LongSamples)

    def to_json(self) -> str:
        """The form stored in a part's footer."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> "PartRecord":
        """Read `to_json`'s form. Raises ValueError, TypeError, KeyError or RecursionError when
        `text` is not in that form."""
        fields = json.loads(text)
        return PartRecord(
            recipe=Recipe(**fields["recipe"]),
            file=IndexedFile(**fields["file"]),
            rows=int(fields["rows"]),
            identity=str(fields["identity"]),
            places=str(fields["places"]),
            media=MediaCounts(**fields["media"]),
            skipped=tuple(SkippedSample(**s) for s in fields["skipped"]),
            long=LongSamples.read(fields.get("long", {})),  # absent in parts of older releases
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One indexed source; `parts` in the order of its files, which is the order of sample ids.
    Those of a manifest that was read tell of no `skipped` samples: LEFT_OUT does."""

    source: str
    recipe: Recipe
    parts: tuple[PartRecord, ...]
    left_out: tuple[LeftOutFile, ...] = ()

    @property
    def rows(self) -> int:
        """Number of samples that can be drawn."""
        return sum(part.rows for part in self.parts)

    @property
    def long(self) -> LongSamples:
        """What became of the samples that were too long."""
        return sum((part.long for part in self.parts), LongSamples())

    @property
    def fingerprint(self) -> str:
        """The identity of what a job draws from this source: names, contents and lengths. It does
        not depend on where or when the files were written."""
        decides = [
            self.source,
            self.recipe.format,
            self.recipe.image_column,
            self.recipe.measurer,
            [(part.file.name, part.rows, part.identity) for part in self.parts],
            [file.name for file in self.left_out],
        ]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    @property
    def places(self) -> str:
        """Digest of where in its files each sample lies."""
        return hashlib.sha256(json.dumps([p.places for p in self.parts]).encode()).hexdigest()

    def to_json(self) -> str:
        """The form stored as manifest.json."""
        return json.dumps(
            {
                "version": INDEX_VERSION,
                "source": self.source,
                "fingerprint": self.fingerprint,
                "recipe": asdict(self.recipe),
                "rows": self.rows,
                "files": [_file_fields(part) for part in self.parts],
                "left_out_files": [asdict(file) for file in self.left_out],
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str | bytes, where: str) -> "Manifest":
        """Read `to_json`'s form. Raises IndexStaleError when the file is damaged or of another
        version."""
        try:
            fields = json.loads(text)
            version = fields["version"]
            if version == INDEX_VERSION:
                return _manifest(fields)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise IndexStaleError(
                f"{where} is damaged ({type(error).__name__}: {error}). Write it again: {AGAIN}; "
                "the same files give the same index, and checkpoints fit it."
            ) from error
        raise IndexStaleError(
            f"{where} has index version {version!r}; this release reads version {INDEX_VERSION}. "
            f"Write it again: {AGAIN}. The order of samples differs between index versions: jobs "
            "registered over the old index, and their checkpoints, go on only with the release "
            "that made them; here, delete such a job and submit it again, and it begins anew."
        )


def _file_fields(part: PartRecord) -> dict[str, Any]:
    return {
        **asdict(part.file),
        "rows": part.rows,
        "identity": part.identity,
        "places": part.places,
        "media": asdict(part.media),
        "long": asdict(part.long),
    }


def _manifest(fields: dict[str, Any]) -> Manifest:
    recipe = Recipe(**fields["recipe"])
    parts = []
    for entry in fields["files"]:
        file = IndexedFile(
            name=str(entry["name"]),
            size_bytes=int(entry["size_bytes"]),
            version=str(entry["version"]),
        )
        parts.append(
            PartRecord(
                recipe=recipe,
                file=file,
                rows=int(entry["rows"]),
                identity=str(entry["identity"]),
                places=str(entry["places"]),
                media=MediaCounts(**entry["media"]),
                long=LongSamples.read(entry.get("long", {})),  # absent in indexes of older releases
            )
        )
    left_out = tuple(LeftOutFile(**entry) for entry in fields["left_out_files"])
    return Manifest(
        source=str(fields["source"]), recipe=recipe, parts=tuple(parts), left_out=left_out
    )


def read_manifest(folder: IndexFolder) -> Manifest:
    """The manifest of a complete index. Raises IndexStaleError where there is none."""
    text = folder.read(MANIFEST)
    if text is None:
        raise IndexStaleError(
            f"source {folder.source!r} has no complete index at {folder.path}. Write it: {AGAIN} "
            "(an interrupted run is taken up where it ended; the same files give the same index, "
            "and checkpoints fit it)."
        )
    return Manifest.from_json(text, f"{folder.path}/{MANIFEST}")
