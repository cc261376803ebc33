"""What the indexes of sources hold in all, as their manifests and parts say.

Apart from the catalog, whose kernels take longer to load than a small source to index.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataservice.core.job import SourceSpec
from dataservice.sources.index_folder import IndexFolder
from dataservice.sources.manifest import read_manifest
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
