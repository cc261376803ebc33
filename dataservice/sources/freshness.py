"""Does an index still describe its source, its processor and its tokenizer?

File names and sizes must be those that were indexed. Times and entity tags may differ: files that
were touched, copied or moved to another storage hold the same bytes. Files whose times differ are
read again, and their samples are compared with the index's digests; the caller remembers which
files have been compared.
"""

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dataservice.core.errors import IndexStaleError, SampleError, SourceError, StorageAwayError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.sources.checksum import sample_checks
from dataservice.sources.detail_file import rows_of
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index_folder import IndexFolder
from dataservice.sources.manifest import AGAIN, IndexedFile, Manifest, PartRecord, Recipe
from dataservice.sources.part_reader import read_part
from dataservice.sources.roots import Roots
from dataservice.sources.storage import SourceFile

_SHOWN_NAMES = 5
_SHOWN_KEYS = 3
_READ_ROWS = 256
# The cost of changed content, for each remedy.
_EITHER = (
    "Restore what was indexed, and index, job and checkpoints fit as they are. Or bring the index "
    f"up to date, {AGAIN} (files that are unchanged are kept): that makes other data of it, so "
    "that a job registered over it must be deleted and submitted again, and its checkpoints no "
    "longer fit."
)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Samples of one file that are not what was indexed."""

    name: str
    rows: int
    count: int
    keys: tuple[str, ...]
    unreadable: str = ""  # why the first of them cannot be read

    def __str__(self) -> str:
        more = f" and {self.count - len(self.keys)} more" if self.count > len(self.keys) else ""
        named = f"{', '.join(self.keys)}{more}"
        because = f", for example: {self.unreadable}" if self.unreadable else ""
        return f"{self.name}: {self.count} of its {self.rows} samples differ ({named}{because})"


def require_current(
    spec: SourceSpec,
    manifest: Manifest,
    folder: IndexFolder,
    measurer_fingerprint: str,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
    roots: Roots | None = None,
    verified: Collection[str] = (),
) -> tuple[Mapping[str, SourceFile], str]:
    """(The source's files by their names in the index; a token to keep in `verified`, so that these
    very files are not compared again, or "" when none had to be compared).

    Reads the files whose times differ from the index's. Raises IndexStaleError when something
    changed, which it names; SourceError when the source is missing or its storage unavailable.
    """
    wanted = Recipe.of(spec, measurer_fingerprint)
    present = {file.name: file for file in list_files(spec)}
    changes = [*_recipe_changes(manifest.recipe, wanted), *_file_changes(manifest, present)]
    if changes:
        raise IndexStaleError(
            f"the index of source {spec.name!r} is stale: {'; '.join(changes)}. {_EITHER}"
        )
    elsewhere = manifest.recipe.media_root != wanted.media_root
    suspects = [
        (part, present[part.file.name])
        for part in manifest.parts
        if elsewhere or IndexedFile.of(present[part.file.name]) != part.file
    ]
    if not suspects:
        return present, ""
    token = _token(spec, suspects)
    if token not in verified:
        require_same_content(spec, folder, suspects, limits=limits, roots=roots)
    return present, token


def _token(spec: SourceSpec, files: Sequence[tuple[PartRecord, SourceFile]]) -> str:
    """A digest of these files as they are now, and of what the index says they hold."""
    said = [
        (part.identity, part.places, file.name, file.size_bytes, file.version)
        for part, file in files
    ]
    return hashlib.blake2b(repr((spec.name, said)).encode(), digest_size=16).hexdigest()


def require_same_content(
    spec: SourceSpec,
    folder: IndexFolder,
    files: Sequence[tuple[PartRecord, SourceFile]],
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
    roots: Roots | None = None,
) -> None:
    """Reads every sample of these files and compares it with the index's digest. Takes the time to
    read the files, and the memory of a few samples.

    Raises:
        IndexStaleError: samples differ; the message names them.
        SourceError: the storage is unavailable.
    """
    size_bytes = sum(file.size_bytes for _, file in files)
    log.info(
        "source %r: %d of its files have other times than when they were indexed; comparing "
        "%.1f MB with the index",
        spec.name,
        len(files),
        size_bytes / 1e6,
    )
    differences = []
    for part, file in files:
        found = difference(spec, folder, part, file, limits=limits, roots=roots)
        if found is not None:
            differences.append(found)
        if len(differences) == _SHOWN_NAMES:
            break
    if differences:
        raise IndexStaleError(
            f"source {spec.name!r} has files of the size that was indexed and of other content: "
            f"{'; '.join(map(str, differences))}. {_EITHER}"
        )
    log.info(
        "source %r: %d files compared, the same samples; %s saves comparing them again",
        spec.name,
        len(files),
        AGAIN,
    )


def difference(
    spec: SourceSpec,
    folder: IndexFolder,
    part: PartRecord,
    file: SourceFile,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
    roots: Roots | None = None,
) -> Difference | None:
    """How the samples of one file differ from those of its part; None when they are the same."""
    opened = open_format(spec, limits, roots)
    count, unreadable = 0, ""
    digest = b""  # of the newest sample that was read; the pieces of a document follow one another
    keys: list[str] = []
    for table, _ in read_part(folder, part, limits):
        for batch in table.to_batches(max_chunksize=_READ_ROWS):
            places = range(batch.num_rows)
            contents = batch.column("content").to_pylist()
            rows = rows_of(batch, places, [(spec.name, file.path)] * len(places))
            for (ref, _), content in zip(rows, contents, strict=True):
                try:
                    if ref.location.piece < 2:
                        raw = opened.read(ref.key_in_source, ref.location)
                        digest = sample_checks(raw)[1]
                except StorageAwayError:
                    raise
                except (SampleError, SourceError) as error:
                    digest, unreadable = b"", unreadable or str(error)
                same = digest == content
                count += not same
                if not same and len(keys) < _SHOWN_KEYS:
                    keys.append(ref.key)
    if not count:
        return None
    return Difference(
        name=file.name, rows=part.rows, count=count, keys=tuple(keys), unreadable=unreadable
    )


def _recipe_changes(indexed: Recipe, wanted: Recipe) -> list[str]:
    changes = []
    if indexed.format != wanted.format:
        changes.append(f"its format was {indexed.format!r}, the job says {wanted.format!r}")
    for name in ("columns", "image_column", "ignore", "placeholders"):
        before, now = getattr(indexed, name), getattr(wanted, name)
        if before != now:
            changes.append(f"its {name} was {before!r}, the job says {now!r}")
    if indexed.measurer != wanted.measurer:
        changes.append(
            "the processor, the chat template, the service's limits or the tokenizer differs "
            "(fingerprint "
            f"{indexed.measurer[:12]!r} in the index, {wanted.measurer[:12]!r} in the job)"
        )
    return changes


def _file_changes(manifest: Manifest, present: Mapping[str, SourceFile]) -> list[str]:
    before = {part.file.name: part.file for part in manifest.parts}
    left_out = {file.name for file in manifest.left_out}
    groups = {
        "added, whose samples would change the order": [
            name for name in present if name not in before and name not in left_out
        ],
        "removed or renamed": [name for name in before if name not in present],
        "of another size": [
            name
            for name, file in present.items()
            if name in before and before[name].size_bytes != file.size_bytes
        ],
    }
    return [
        f"{len(names)} file{'s' * (len(names) > 1)} {what}: {_some(names)}"
        for what, names in groups.items()
        if names
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(sorted(names)[:_SHOWN_NAMES]) + more
