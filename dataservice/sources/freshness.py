"""Does an index still describe its source, its processor and its tokenizer?"""

from collections.abc import Sequence

from dataservice.core.errors import IndexStaleError
from dataservice.core.job import SourceSpec
from dataservice.sources.formats.registry import list_files
from dataservice.sources.manifest import Manifest, Recipe
from dataservice.sources.storage import SourceFile

_SHOWN_NAMES = 5


def require_current(spec: SourceSpec, manifest: Manifest, measurer_fingerprint: str) -> None:
    """Raises IndexStaleError saying what changed; SourceError when the source is missing."""
    changes = [
        *_recipe_changes(manifest.recipe, Recipe.of(spec, measurer_fingerprint)),
        *_file_changes([part.file for part in manifest.parts], list_files(spec)),
    ]
    if changes:
        raise IndexStaleError(
            f"the index of source {spec.name!r} is stale: {'; '.join(changes)}. Bring it up to "
            "date: `dataservice index JOB.yaml` (files that are unchanged are kept)."
        )


def _recipe_changes(indexed: Recipe, wanted: Recipe) -> list[str]:
    changes = []
    if indexed.format != wanted.format:
        changes.append(f"its format was {indexed.format!r}, the job says {wanted.format!r}")
    if indexed.image_column != wanted.image_column:
        changes.append(
            f"its image_column was {indexed.image_column!r}, the job says {wanted.image_column!r}"
        )
    if indexed.media_root != wanted.media_root:
        changes.append(
            f"its media_root was {indexed.media_root!r}, the job says {wanted.media_root!r}"
        )
    if indexed.measurer != wanted.measurer:
        changes.append(
            "the processor, the chat template, the service's limits or the tokenizer differs "
            "(fingerprint "
            f"{indexed.measurer[:12]!r} in the index, {wanted.measurer[:12]!r} in the job)"
        )
    return changes


def _file_changes(indexed: Sequence[SourceFile], present: Sequence[SourceFile]) -> list[str]:
    before = {file.path: file for file in indexed}
    after = {file.path: file for file in present}
    groups = {
        "added": [path for path in after if path not in before],
        "removed": [path for path in before if path not in after],
        "changed": [path for path in after if before.get(path, after[path]) != after[path]],
    }
    return [
        f"{len(paths)} file{'s' * (len(paths) > 1)} {what}: {_some(paths)}"
        for what, paths in groups.items()
        if paths
    ]


def _some(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _SHOWN_NAMES} more" if len(paths) > _SHOWN_NAMES else ""
    return ", ".join(sorted(paths)[:_SHOWN_NAMES]) + more
