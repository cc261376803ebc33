"""What an index says of itself: which files, read how, measured by what, and what was skipped.

Two records in JSON. A *part record* lies in the footer of each part and lets an interrupted
run see which files are done; the *manifest* is the sum of all part records.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from dataservice.core.errors import IndexStaleError
from dataservice.core.job import SourceSpec
from dataservice.sources.storage import SourceFile

# Version 2 added each sample's checksum.
INDEX_VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSample:
    """A sample that cannot be used: it is listed in the index, and in no batch."""

    file: str
    key: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """All that decides a part besides the file itself."""

    format: str
    image_column: str
    media_root: str
    measurer: str
    version: int = INDEX_VERSION

    @staticmethod
    def of(spec: SourceSpec, measurer_fingerprint: str) -> "Recipe":
        """The recipe that a job asks for."""
        return Recipe(
            format=spec.format,
            image_column=spec.image_column,
            media_root=spec.media_root,
            measurer=measurer_fingerprint,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRecord:
    """One indexed file."""

    recipe: Recipe
    file: SourceFile
    rows: int
    skipped: tuple[SkippedSample, ...] = ()

    def to_json(self) -> str:
        """The form stored in a part's footer."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str | bytes) -> "PartRecord":
        """Raises ValueError, TypeError, KeyError or RecursionError when it is none."""
        fields = json.loads(text)
        return PartRecord(
            recipe=Recipe(**fields["recipe"]),
            file=SourceFile(**fields["file"]),
            rows=int(fields["rows"]),
            skipped=tuple(SkippedSample(**s) for s in fields["skipped"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One indexed source; `parts` in the order of its files, which is the order of sample ids."""

    source: str
    recipe: Recipe
    parts: tuple[PartRecord, ...]

    @property
    def rows(self) -> int:
        """Samples that can be drawn."""
        return sum(part.rows for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides which samples there are and how long they are."""
        parts = [(asdict(part.file), part.rows, len(part.skipped)) for part in self.parts]
        text = json.dumps([asdict(self.recipe), parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """The form stored as manifest.json."""
        skipped = [asdict(s) for part in self.parts for s in part.skipped]
        return json.dumps(
            {
                "version": INDEX_VERSION,
                "source": self.source,
                "fingerprint": self.fingerprint,
                "recipe": asdict(self.recipe),
                "rows": self.rows,
                "files": [{**asdict(part.file), "rows": part.rows} for part in self.parts],
                "skipped": skipped,
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str | bytes, where: str) -> "Manifest":
        """Read `to_json`'s form. Raises IndexStaleError on another version or a damaged file."""
        try:
            fields = json.loads(text)
            version = fields["version"]
            if version == INDEX_VERSION:
                return _manifest(fields)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise IndexStaleError(
                f"{where} is damaged ({type(error).__name__}: {error}). Write it again: "
                "`dataservice index JOB.yaml`."
            ) from error
        raise IndexStaleError(
            f"{where} has index version {version!r}; this release reads version {INDEX_VERSION}. "
            "Write it again: `dataservice index JOB.yaml`."
        )


def _manifest(fields: dict[str, Any]) -> Manifest:
    recipe = Recipe(**fields["recipe"])
    skipped: dict[str, list[SkippedSample]] = {}
    for entry in fields["skipped"]:
        skipped.setdefault(entry["file"], []).append(SkippedSample(**entry))
    parts = []
    for entry in fields["files"]:
        rows = int(entry.pop("rows"))
        file = SourceFile(**entry)
        listed = tuple(skipped.get(file.path, ()))
        parts.append(PartRecord(recipe=recipe, file=file, rows=rows, skipped=listed))
    return Manifest(source=str(fields["source"]), recipe=recipe, parts=tuple(parts))
