"""The opened index of a job: lengths in memory, locations on disk.

Planning asks for the lengths of thousands of samples a step, so these are numpy columns
(about 8 bytes a sample and 13 an encoder item). Locations and shapes are wanted only for
samples that are about to be read; they are copied once into an uncompressed Arrow file
without a name (`TMPDIR` decides where) and memory-mapped from there.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataservice.core.errors import IndexStaleError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import IntArray, LengthTable, Modality, SampleLengths, SampleRef
from dataservice.sources.detail_file import DetailFile, DetailWriter
from dataservice.sources.freshness import require_current
from dataservice.sources.index_folder import MANIFEST, IndexFolder, part_name
from dataservice.sources.index_part import DETAIL_COLUMNS, LENGTH_COLUMNS
from dataservice.sources.length_columns import concatenate, lengths_of
from dataservice.sources.lengths_by_id import LengthsById
from dataservice.sources.manifest import Manifest
from dataservice.sources.ranges import SourceRanges
from dataservice.sources.roots import Roots
from dataservice.sources.soundness import require_bounded, require_schema, require_sound


class IndexedCatalog(LengthsById):
    """The port Catalog over indexes on disk. Safe for use from several threads."""

    def __init__(
        self, manifests: Sequence[Manifest], lengths: LengthTable, details: DetailFile
    ) -> None:
        self.sources = SourceRanges.of(
            [m.source for m in manifests], [manifest.rows for manifest in manifests]
        )
        self._fingerprint = _fingerprint(manifests)
        self._files = tuple((m.source, part.file.path) for m in manifests for part in m.parts)
        rows = [part.rows for manifest in manifests for part in manifest.parts]
        self._file_starts = np.cumsum([0, *rows], dtype=np.int64)
        self._lengths = lengths
        self._details = details

    @property
    def fingerprint(self) -> str:
        """Changes whenever a source, a processor or the tokenizer does."""
        return self._fingerprint

    def details(self, sample_ids: IntArray) -> Sequence[tuple[SampleRef, SampleLengths]]:
        """Locations and full lengths of these samples, in this order, each made when it is
        looked at. Raises NotFoundError."""
        self.sources.require(sample_ids)
        files = np.searchsorted(self._file_starts, sample_ids, side="right") - 1
        return self._details.take(sample_ids, files, self._files)

    def decoded_values(self, sample_ids: IntArray) -> Mapping[Modality, int]:
        """How many values these samples' encoder items decode to. Raises NotFoundError."""
        self.sources.require(sample_ids)
        return self._details.decoded_values(sample_ids)


def open_catalog(
    specs: Sequence[SourceSpec],
    index_dir: str,
    measurer_fingerprint: str,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
    roots: Roots | None = None,
) -> IndexedCatalog:
    """Open the indexes of a job's sources; sample ids are dense over them, in this order. The
    indexes are read under `roots` only, where given.

    Raises:
        IndexStaleError: an index is missing, damaged, or not of these files, this processor
            or this tokenizer; says which source, what changed and what to run.
        SourceError: a source itself is missing.
    """
    manifests, tables = [], []
    with DetailWriter() as writer:
        for spec in specs:
            folder = IndexFolder(index_dir, spec.name, roots)
            manifest = _manifest(spec, folder)
            require_current(spec, manifest, measurer_fingerprint)
            for part in manifest.parts:
                name = part_name(part.file.path)
                for table, lengths in _read_part(folder, spec, name, part.rows, limits):
                    tables.append(lengths)
                    writer.write(table)
            manifests.append(manifest)
        details = writer.finish()
    return IndexedCatalog(manifests, concatenate(tables), details)


def require_same_index(
    specs: Sequence[SourceSpec], index_dir: str, measurer_fingerprint: str, fingerprint: str
) -> None:
    """Raises IndexStaleError or SourceError once a catalog of this `fingerprint` no longer
    describes its sources. Lists files and reads manifests, no parts."""
    manifests = []
    for spec in specs:
        manifest = _manifest(spec, IndexFolder(index_dir, spec.name))
        require_current(spec, manifest, measurer_fingerprint)
        manifests.append(manifest)
    if _fingerprint(manifests) != fingerprint:
        raise IndexStaleError(
            f"the index in {index_dir} was written again after its job was registered, over other "
            "samples. Delete the job and submit it again, or restore the old sources and index."
        )


def _fingerprint(manifests: Sequence[Manifest]) -> str:
    names = [(manifest.source, manifest.fingerprint) for manifest in manifests]
    return hashlib.sha256(repr(names).encode()).hexdigest()


def _manifest(spec: SourceSpec, folder: IndexFolder) -> Manifest:
    text = folder.read(MANIFEST)
    if text is None:
        raise IndexStaleError(
            f"source {spec.name!r} has no complete index at {folder.path}. Write it: `dataservice "
            "index JOB.yaml` (an interrupted run is taken up where it ended)."
        )
    return Manifest.from_json(text, f"{folder.path}/{MANIFEST}")


def _read_part(
    folder: IndexFolder, spec: SourceSpec, name: str, rows: int, limits: DecodeLimits
) -> Iterator[tuple[pa.Table, LengthTable]]:
    """The columns of a part, one row group at a time, and of these the lengths."""
    found = 0
    try:
        with folder.open(name) as stream:
            require_bounded(stream, limits)
            part = pq.ParquetFile(stream)
            require_schema(part.schema_arrow)
            for group in range(part.num_row_groups):
                table = part.read_row_group(group, columns=[*LENGTH_COLUMNS, *DETAIL_COLUMNS])
                lengths = lengths_of(table)
                require_sound(table, lengths, limits)
                found += table.num_rows
                yield table, lengths
    except (OSError, ValueError, pa.ArrowException) as error:
        raise IndexStaleError(
            f"index of source {spec.name!r}: {folder.path}/{name} is missing or damaged "
            f"({error}). Write it again: `dataservice index JOB.yaml`."
        ) from error
    if found != rows:
        raise IndexStaleError(
            f"index of source {spec.name!r}: {folder.path}/{name} has {found} rows, its "
            f"manifest says {rows}. Write it again: `dataservice index JOB.yaml`."
        )
