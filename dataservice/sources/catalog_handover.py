"""Hands an opened index from the process that read it to the process that plans with it.

    head (JSON)                 what manifests and the listing say
    lengths                     of all rows, see lengths_file.py
    locations, keys, shapes     the DetailFile; of a large index later, see late_details.py

An index is a user's file, so it is parsed in a process that can crash without harm. The receiving
process parses no Parquet: it maps numbers of known types and checks that they agree. The process
that wrote the files must have ended by then: if a mapped file shrinks, the process that reads it
crashes.

All are on disk and without a name, so that no sample takes memory for as long as its job is
registered: the system keeps the pages that steps draw from while it has room for them. Nothing that
has been checked stays mapped in. What was checked may be kept under a name, see `index_cache.py`:
of rows that are taken over from there, some places are looked at, and not all of them.
"""

import json
import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import pyarrow as pa

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import IntArray
from dataservice.core.sample_files import SampleFiles
from dataservice.sources.catalog import CatalogHead, CatalogParts, IndexedCatalog, IndexIdentity
from dataservice.sources.detail_file import BATCH_ROWS, DetailFile, DetailTable
from dataservice.sources.late_details import LateDetails
from dataservice.sources.lengths_file import Lengths, MappedLengths
from dataservice.sources.manifest import LongSamples
from dataservice.sources.ranges import SourceRanges
from dataservice.sources.unnamed_file import unnamed_file

PLACES_LOOKED_AT = 16  # of rows that were checked before
_CHECKED_BLOCKS = 10  # at once
_CHECKERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFiles:
    """Descriptors of the files of a catalog's rows."""

    lengths: int
    details: int

    def copied(self) -> "RowFiles":
        """Descriptors of the same files, to be closed on their own."""
        return RowFiles(lengths=os.dup(self.lengths), details=os.dup(self.details))

    def close(self) -> None:
        """Close both."""
        os.close(self.lengths)
        os.close(self.details)


def hand_over_head(head: CatalogHead) -> int:
    """A descriptor, which the caller closes, of a file with the head. Raises OSError."""
    plain = {
        "identity": [head.identity.fingerprint, head.identity.places],
        "fingerprints": head.fingerprints,
        "verified": head.verified,
        "long": {source: asdict(long) for source, long in head.long.items()},
        "sources": list(zip(head.sources.names, head.sources.sizes, strict=True)),
        "files": head.files.named(),
        "file_rows": head.file_rows,
        "rows_name": head.rows_name,
    }
    with os.fdopen(unnamed_file(), "w+b") as stream:
        stream.write(json.dumps(plain).encode())
        stream.flush()
        return os.dup(stream.fileno())


def take_over_head(descriptor: int) -> CatalogHead:
    """The head behind a descriptor; this function closes it. Raises ValueError where it is none."""
    try:
        with open(descriptor, "rb") as stream:
            stream.seek(0)
            head = json.loads(stream.read())
        return CatalogHead(
            sources=SourceRanges.of(*zip(*head["sources"], strict=True)),
            identity=IndexIdentity(*map(str, head["identity"])),
            fingerprints=tuple(map(str, head["fingerprints"])),
            verified=tuple(map(str, head["verified"])),
            long={str(name): LongSamples.read(long) for name, long in dict(head["long"]).items()},
            files=SampleFiles.of([(str(source), str(path)) for source, path in head["files"]]),
            file_rows=tuple(int(rows) for rows in head["file_rows"]),
            rows_name=str(head["rows_name"]),
        )
    except (OSError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def take_over(
    head: CatalogHead, files: RowFiles, limits: DecodeLimits, *, checked: bool = False
) -> IndexedCatalog:
    """The catalog of these rows; this function closes their files. `checked` says that they were
    taken over before, and have not been in other hands since: they are looked at here and there.

    Raises:
        ValueError: they hold no catalog, or one whose numbers contradict each other.
    """
    with _in_words():
        with open(files.lengths, "rb") as stream:
            details = DetailFile(files.details)
            batches = -(-len(details) // BATCH_ROWS)
            details.require_whole(max(1, batches // PLACES_LOOKED_AT) if checked else 1)
            lengths = MappedLengths(stream.fileno())
        parts = _agreeing(head, lengths, details)
    _require_sound(lengths, limits, PLACES_LOOKED_AT if checked else None)
    lengths.let_go()
    return IndexedCatalog(parts)


def take_over_lengths(
    head: CatalogHead, descriptor: int, limits: DecodeLimits, fetch: Callable[[IntArray], int]
) -> IndexedCatalog:
    """The catalog of these lengths, whose descriptor stays the caller's; their details come late.

    Args:
        fetch: gives a descriptor of the DetailFile of these samples, in this order.

    Raises:
        ValueError: they hold no lengths of this head, or such as contradict each other.
    """
    with _in_words():
        lengths = MappedLengths(descriptor)
        parts = _agreeing(head, lengths, LateDetails(lengths, fetch))
    _require_sound(lengths, limits)
    lengths.let_go()
    return IndexedCatalog(parts)


def take_over_details(catalog: IndexedCatalog, descriptor: int) -> None:
    """Give a catalog, whose details come late, those of all its samples; this function closes the
    descriptor. Raises ValueError where they are not whole."""
    late = catalog.parts.details
    assert isinstance(late, LateDetails), "the details of others do not come late"
    with _in_words():
        details = DetailFile(descriptor)
        if len(details) != len(late):
            raise ValueError("its columns speak of different samples")
        details.require_whole()
    late.complete(details)


def _require_sound(lengths: MappedLengths, limits: DecodeLimits, places: int | None = None) -> None:
    """Raises ValueError unless all lengths are sound, or those at so many `places`."""
    starts = range(0, lengths.blocks, _CHECKED_BLOCKS)
    every = 1 if places is None else max(1, len(starts) // places)

    def check(first: int) -> None:
        for block in range(first, min(first + _CHECKED_BLOCKS, lengths.blocks)):
            lengths.records(block).require_sound(limits)

    with ThreadPoolExecutor(_CHECKERS) as checkers:
        for _ in checkers.map(check, starts[::every]):
            pass


@contextmanager
def _in_words() -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _agreeing(head: CatalogHead, lengths: Lengths, details: DetailTable) -> CatalogParts:
    """The parts of a catalog. Raises ValueError unless all describe as many samples.
    O(1) of them."""
    parts, samples = CatalogParts.of(head, lengths, details), len(lengths)
    agreeing = (
        len(parts.details) == samples == sum(parts.sources.sizes) == sum(parts.file_rows)
        and len(parts.fingerprints) == len(parts.sources.names)
        and len(parts.files) == len(parts.file_rows)
        and min((*parts.sources.sizes, *parts.file_rows, 0)) == 0
    )
    if not agreeing:
        raise ValueError("its columns speak of different samples")
    return parts
