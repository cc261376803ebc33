"""The opened index of a job, in files that are memory-mapped.

Planning reads the lengths of thousands of samples per step, so these are records of numbers (10
bytes a sample and 10 an encoder item, where all are small). Locations and shapes are needed only
for samples that are about to be read; they are copied once into an unnamed, uncompressed Arrow
file. The service keeps both for the next opening, see `index_cache.py`.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import IndexStaleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import (
    IntArray,
    ItemDetails,
    SampleLengths,
    SampleRef,
)
from dataservice.core.sample_columns import SampleColumns
from dataservice.core.sample_files import SampleFiles
from dataservice.core.split_mix import split_mix
from dataservice.sources.detail_file import DETAIL_SCHEMA, DetailTable
from dataservice.sources.freshness import require_current
from dataservice.sources.gather import Ranges
from dataservice.sources.index_folder import LENGTHS, IndexFolder, part_name
from dataservice.sources.index_rows import IndexRows
from dataservice.sources.lengths_by_id import LengthsById
from dataservice.sources.lengths_file import COLUMNS, Lengths, MappedLengths
from dataservice.sources.manifest import LongSamples, Manifest, PartRecord, read_manifest
from dataservice.sources.ranges import SourceRanges
from dataservice.sources.roots import Roots
from dataservice.sources.totals import SourceTotals

_ROWS_VERSION = 2  # of the files of checked rows: another one finds none of those that are kept


@dataclass(frozen=True, slots=True)
class IndexIdentity:
    """`fingerprint` identifies a job's samples: its order and checkpoints depend on it. `places`
    identifies their locations in their files."""

    fingerprint: str
    places: str

    @staticmethod
    def of(manifests: Sequence[Manifest]) -> "IndexIdentity":
        """The identity of all sources together, in the order of the job file."""
        return IndexIdentity(
            index_fingerprint([manifest.fingerprint for manifest in manifests]),
            _digest([manifest.places for manifest in manifests]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogHead:
    """What manifests and the listing of files say of a catalog: `fingerprints` are those of the
    sources; `files` are in the order of sample ids, with `file_rows` samples each.
    `verified` has a token for each source that was compared with its index because its files' times
    differ; the token names the files' state at that time. `long` has by source what became of
    samples that are too long. `rows_name` names the rows, once checked; where it is empty, they
    cannot be told from others."""

    sources: SourceRanges
    identity: IndexIdentity
    fingerprints: tuple[str, ...]
    files: SampleFiles
    file_rows: tuple[int, ...]
    verified: tuple[str, ...] = ()
    long: Mapping[str, LongSamples] = field(default_factory=dict)
    rows_name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CatalogParts(CatalogHead):
    """The contents of a catalog: its head and its rows."""

    lengths: Lengths
    details: DetailTable

    @staticmethod
    def of(head: CatalogHead, lengths: Lengths, details: DetailTable) -> "CatalogParts":
        """The head's samples, whose rows these are."""
        told = {each.name: getattr(head, each.name) for each in fields(CatalogHead)}
        return CatalogParts(**told, lengths=lengths, details=details)


class IndexedCatalog(LengthsById):
    """The port Catalog over indexes on disk. Safe for use from several threads."""

    def __init__(self, parts: CatalogParts) -> None:
        self.parts = parts
        self.sources = parts.sources
        self._lengths = parts.lengths
        self._file_ranges = Ranges(np.cumsum([0, *parts.file_rows], dtype=np.int64))

    @property
    def identity(self) -> IndexIdentity:
        """Identifies the samples and their locations."""
        return self.parts.identity

    @property
    def fingerprint(self) -> str:
        """Changes when a sample, a file's name, a processor or the tokenizer changes; not when
        files move or their times change."""
        return self.identity.fingerprint

    @cached_property
    def totals(self) -> tuple[SourceTotals, ...]:
        """What each source holds. O(samples) when it is first read."""
        offsets = self.sources.offsets
        return tuple(
            SourceTotals(
                fingerprint=fingerprint,
                samples=int(end - start),
                tokens=int(self.llm_tokens[start:end].sum(dtype=np.int64)),
            )
            for fingerprint, start, end in zip(
                self.parts.fingerprints, offsets[:-1], offsets[1:], strict=True
            )
        )

    @property
    def at_hand(self) -> bool:
        """Whether the details of all samples are, so that none need be fetched."""
        return self.parts.details.at_hand

    def fetch(self, sample_ids: IntArray) -> None:
        """Have the details of these samples at hand. May take seconds. Raises NotFoundError when
        an id is unknown, and what reading an index does."""
        self.sources.require(sample_ids)
        self.parts.details.fetch(sample_ids)

    def details(self, sample_ids: IntArray) -> Sequence[tuple[SampleRef, SampleLengths]]:
        """Locations and full lengths of these samples, in this order; each object is made when it
        is first read. Raises NotFoundError when an id is unknown."""
        files = self._file_numbers(sample_ids)
        return self.parts.details.take(sample_ids, files, self.parts.files)

    def columns(self, sample_ids: IntArray) -> SampleColumns:
        """The same as columns, of epoch 0. Raises NotFoundError when an id is unknown."""
        files = self._file_numbers(sample_ids)
        return self.parts.details.columns(sample_ids, files, self.parts.files)

    def find_key(self, key: str) -> int | None:
        """The id of the first sample with this key in any source, or None. O(samples)."""
        return self.parts.details.find_key(key)

    def files(self, sample_ids: IntArray) -> Sequence[str]:
        """Paths of the files that hold these samples, in this order. Raises NotFoundError when an
        id is unknown."""
        return [path for _, path in self.parts.files.only(self._file_numbers(sample_ids)).named()]

    def row_keys(self, sample_ids: IntArray) -> NDArray[np.uint32]:
        """A number for the file and row of each of these samples: uint32[n]. Raises NotFoundError
        when an id is unknown."""
        files = self._file_numbers(sample_ids)
        rows = np.asarray(sample_ids, np.int64) - self._file_ranges.starts[files]
        mixed = split_mix(self._file_salts[files] ^ rows.astype(np.uint64))
        return (mixed >> np.uint64(32)).astype(np.uint32)

    @cached_property
    def _file_salts(self) -> NDArray[np.uint64]:
        paths = self.parts.files.utf8()
        digests = (hashlib.blake2b(path, digest_size=8).digest() for path in paths)
        return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)

    def _file_numbers(self, sample_ids: IntArray) -> NDArray[np.int32]:
        self.sources.require(sample_ids)
        return self._file_ranges.of(np.ascontiguousarray(sample_ids, dtype=np.int64))

    def item_details(self, sample_ids: IntArray) -> ItemDetails:
        """What is known of these samples' encoder items besides their lengths, by sample, then in
        its order. Raises NotFoundError when an id is unknown."""
        self.sources.require(sample_ids)
        return self.parts.details.item_details(sample_ids)

    def loss_weights(self, sample_ids: IntArray) -> NDArray[np.float64]:
        """The own loss weight of each of these samples: float64[n]. Raises NotFoundError when an
        id is unknown."""
        self.sources.require(sample_ids)
        return self.parts.details.loss_weights(sample_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundIndex:
    """The indexes of a job's sources, known to describe them; their rows are not read yet."""

    head: CatalogHead
    rows: IndexRows

    def read(self, folder: str | None = None) -> IndexedCatalog:
        """Read and check all rows, several parts at once. Memory is a few row groups of each. They
        lie in `folder`, see `unnamed_file`. Raises IndexStaleError where a part is missing, damaged
        or not the manifest's."""
        descriptor, details = self.rows.read(folder)
        try:
            lengths = MappedLengths(descriptor)
        finally:
            os.close(descriptor)
        return IndexedCatalog(CatalogParts.of(self.head, lengths, details))


def find_index(
    specs: Sequence[SourceSpec],
    index_dir: str,
    measurer_fingerprint: str,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
    roots: Roots | None = None,
    verified: Collection[str] = (),
    require_rows: Callable[[Sequence[int]], None] = lambda rows: None,
) -> FoundIndex:
    """Find the indexes of a job's sources; sample ids are dense over them, in this order. The
    indexes are read only under `roots`, if given. Files whose times differ from those at indexing
    are read and compared, unless `verified`, taken from an earlier opening, has them.
    `require_rows` gets the number of rows of each source before any are read, and may raise.

    Raises:
        IndexStaleError: an index is missing, damaged, or not of these files, this processor or this
            tokenizer; the message names the source, what changed and the command to run.
        SourceError: a source itself is missing.
    """
    files, known = [], []
    parts: list[tuple[IndexFolder, PartRecord]] = []
    folders = [IndexFolder(index_dir, spec.name, roots) for spec in specs]
    manifests = [read_manifest(folder) for folder in folders]
    require_rows([manifest.rows for manifest in manifests])
    for spec, folder, manifest in zip(specs, folders, manifests, strict=True):
        present, token = require_current(
            spec, manifest, folder, measurer_fingerprint,
            limits=limits, roots=roots, verified=verified,
        )  # fmt: skip
        known.append(token)
        parts += [(folder, part) for part in manifest.parts]
        files += [(spec.name, present[part.file.name].path) for part in manifest.parts]
    head = CatalogHead(
        sources=SourceRanges.of([m.source for m in manifests], [m.rows for m in manifests]),
        identity=IndexIdentity.of(manifests),
        fingerprints=tuple(manifest.fingerprint for manifest in manifests),
        files=SampleFiles.of(files),
        file_rows=tuple(part.rows for m in manifests for part in m.parts),
        verified=tuple(filter(None, known)),
        long={m.source: m.long for m in manifests},
        rows_name=_rows_name(folders, manifests, limits),
    )
    return FoundIndex(head=head, rows=IndexRows(parts=tuple(parts), limits=limits))


def find_rows(
    sources: Sequence[str],
    index_dir: str,
    identity: IndexIdentity,
    rows_name: str,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
    roots: Roots | None = None,
) -> IndexRows:
    """The rows of an index that was found before, with this identity and this name of its rows.
    Sources are not looked at. Raises IndexStaleError where it was written again since."""
    folders = [IndexFolder(index_dir, source, roots) for source in sources]
    manifests = [read_manifest(folder) for folder in folders]
    now = IndexIdentity.of(manifests), _rows_name(folders, manifests, limits)
    if now != (identity, rows_name):
        raise IndexStaleError(
            f"the index in {index_dir} was written again while its job was being opened, or is "
            "being written. Start the trainers again once it is whole: where the index is of the "
            "same samples, checkpoints fit."
        )
    parts = [
        (folder, part) for folder, m in zip(folders, manifests, strict=True) for part in m.parts
    ]
    return IndexRows(parts=tuple(parts), limits=limits)


def _rows_name(
    folders: Sequence[IndexFolder], manifests: Sequence[Manifest], limits: DecodeLimits
) -> str:
    """A digest of all that the rows of these indexes, once checked, depend on: what the manifests
    say that they are, the parts as they lie there (not all columns are in a manifest's digests),
    the limits, and the form in which rows are kept. Empty where the storage does not tell of each
    part when it was written."""
    said: list[object] = [_ROWS_VERSION, str(DETAIL_SCHEMA), str(COLUMNS), repr(limits)]
    for folder, manifest in zip(folders, manifests, strict=True):
        try:
            there = folder.listing()
        except SourceError:  # such as of a web server
            return ""
        names = [part_name(part.file.name) for part in manifest.parts]
        if not all(there.get(name, (0, ""))[1] for name in names):
            return ""
        said += [manifest.source, manifest.fingerprint, manifest.places]
        said += [(name, there[name]) for name in (*names, LENGTHS) if name in there]
    return hashlib.sha256(repr(said).encode()).hexdigest()


def require_same_index(
    specs: Sequence[SourceSpec],
    index_dir: str,
    measurer_fingerprint: str,
    identity: IndexIdentity,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
    roots: Roots | None = None,
    verified: Collection[str] = (),
) -> tuple[str, ...]:
    """The `verified` tokens for the next call. Lists files and reads manifests; reads parts and
    files only when times differ, as `find_index` and reading what it found do.

    Raises IndexStaleError or SourceError when a catalog of this `identity` no longer describes its
    sources.
    """
    manifests, known = [], []
    for spec in specs:
        folder = IndexFolder(index_dir, spec.name, roots)
        manifest = read_manifest(folder)
        _, token = require_current(
            spec, manifest, folder, measurer_fingerprint,
            limits=limits, roots=roots, verified=verified,
        )  # fmt: skip
        manifests.append(manifest)
        known.append(token)
    found = IndexIdentity.of(manifests)
    if found.fingerprint != identity.fingerprint:
        raise IndexStaleError(
            f"the index in {index_dir} was written again after its job was registered, over other "
            "samples. Restore the sources and the index that the job was registered with, and its "
            "checkpoints fit. Or delete the job and submit it again: it then begins anew, and its "
            "checkpoints no longer fit."
        )
    if found.places != identity.places:
        raise IndexStaleError(
            f"the index in {index_dir} was written again after the job was opened: its samples "
            "are the same and lie elsewhere in their files. Start the service again, so that it "
            "opens the index anew; jobs and checkpoints fit."
        )
    return tuple(filter(None, known))


def index_fingerprint(fingerprints: Sequence[str]) -> str:
    """The fingerprint of an index over sources of these, in the order of the job file."""
    return _digest(fingerprints)


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()
