"""What the indexes of sources hold in all, as their manifests and parts say.

Apart from the catalog, whose kernels take longer to load than a small source to index.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataservice.core.errors import IndexStaleError
from dataservice.core.job import SourceSpec
from dataservice.sources.index_folder import MANIFEST, IndexFolder
from dataservice.sources.manifest import AGAIN, Manifest
from dataservice.sources.part_reader import read_numbers
from dataservice.sources.roots import Roots


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTotals:
    """What the index of one source holds: its fingerprint, its samples and their LLM tokens."""

    fingerprint: str
    samples: int
    tokens: int


def read_totals(
    specs: Sequence[SourceSpec], index_dir: str, *, roots: Roots | None = None
) -> tuple[SourceTotals, ...]:
    """What each source's index holds as it was written, whether or not it still describes the
    source. Reads one number of each sample. Raises IndexStaleError where an index is missing or
    damaged."""
    totals = []
    for spec in specs:
        folder = IndexFolder(index_dir, spec.name, roots)
        manifest = read_manifest(folder)
        parts = (read_numbers(folder, part, "llm_tokens") for part in manifest.parts)
        totals.append(
            SourceTotals(
                fingerprint=manifest.fingerprint,
                samples=manifest.rows,
                tokens=sum(int(tokens.sum(dtype=np.int64)) for part in parts for (tokens,) in part),
            )
        )
    return tuple(totals)


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
