"""Hands an opened index from the process that read it to the process that plans with it.

    head (JSON)                                           what manifests and the listing say
    size │ counts (JSON) │ llm_tokens │ samples │ items   the rows' lengths
    locations, keys, shapes                               the DetailFile

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
import mmap
import os
import struct
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.catalog import CatalogHead, CatalogParts, IndexedCatalog, IndexIdentity
from dataservice.sources.detail_file import BATCH_ROWS, DetailFile
from dataservice.sources.length_spool import COLUMNS
from dataservice.sources.manifest import LongSamples
from dataservice.sources.ranges import SourceRanges
from dataservice.sources.soundness import require_sound_lengths
from dataservice.sources.unnamed_file import unnamed_file

# What a draw reads of a sample lies together, and of an item: each page that it reads for the first
# time is a fault of some microseconds.
_OF_SAMPLES = np.dtype([(name, COLUMNS[name]) for name in ("item_offsets", "loss_tokens")])
_OF_ITEMS = np.dtype(
    [(n, kind) for n, kind in COLUMNS.items() if n.startswith("item_") and n != "item_offsets"]
)
_SECTIONS = (COLUMNS["llm_tokens"], _OF_SAMPLES, _OF_ITEMS)
_SIZE = struct.Struct("<Q")
_ALIGNMENT_BYTES = 64
ROWS_CHECKED_AT_ONCE = 100_000
PLACES_LOOKED_AT = 16  # of rows that were checked before


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
        "files": head.files,
        "file_rows": head.file_rows,
        "rows_name": head.rows_name,
    }
    with os.fdopen(unnamed_file(), "w+b") as stream:
        stream.write(json.dumps(plain).encode())
        stream.flush()
        return os.dup(stream.fileno())


def hand_over(catalog: IndexedCatalog, folder: str | None = None) -> RowFiles:
    """The files of a catalog's rows: of the lengths in `folder`, see `unnamed_file`, which the
    caller closes; of the details, which the catalog keeps. Raises OSError when the file cannot be
    written."""
    lengths = catalog.parts.lengths
    counts = (len(lengths), len(lengths) + 1, len(lengths.item_modality))
    text = json.dumps(counts).encode()
    with os.fdopen(unnamed_file(folder), "w+b") as stream:
        stream.write(_SIZE.pack(len(text)) + text)
        for section, count in zip(_SECTIONS, counts, strict=True):
            stream.write(bytes(-stream.tell() % _ALIGNMENT_BYTES))
            for first in range(0, count, ROWS_CHECKED_AT_ONCE):
                stream.write(_rows(lengths, section, first).data)
        stream.flush()
        return RowFiles(lengths=os.dup(stream.fileno()), details=catalog.parts.details.descriptor)


def _rows(lengths: LengthTable, section: np.dtype[Any], first: int) -> NDArray[Any]:
    """The next rows of a section of the file; behind the last sample is the end of its items."""
    some = slice(first, first + ROWS_CHECKED_AT_ONCE)
    if section.names is None:
        return np.ascontiguousarray(lengths.llm_tokens[some], dtype=section)
    columns = {name: getattr(lengths, name)[some] for name in section.names}
    rows = np.zeros(max(map(len, columns.values())), dtype=section)
    for name, column in columns.items():
        rows[name][: len(column)] = column
    return rows


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
            files=tuple((str(source), str(path)) for source, path in head["files"]),
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
    try:
        with open(files.lengths, "rb") as stream:
            details = DetailFile(files.details)
            batches = -(-len(details) // BATCH_ROWS)
            details.require_whole(max(1, batches // PLACES_LOOKED_AT) if checked else 1)
            mapped = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
        lengths = LengthTable(**_read(memoryview(mapped)))
        parts = CatalogParts.of(head, lengths, details)
    except (OSError, pa.ArrowException, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    _require_agreeing(parts)
    blocks = -(-len(lengths) // ROWS_CHECKED_AT_ONCE)
    every = max(1, blocks // PLACES_LOOKED_AT) if checked else 1
    for block in range(0, blocks, every):
        require_sound_lengths(_some(lengths, block * ROWS_CHECKED_AT_ONCE), limits)
    mapped.madvise(mmap.MADV_DONTNEED)  # mapped in to be checked; a step reads a few of them again
    mapped.madvise(mmap.MADV_RANDOM)  # of which no neighbours are wanted
    return IndexedCatalog(parts)


def _some(lengths: LengthTable, first: int) -> LengthTable:
    """The next lengths to be checked: what checking needs for each sample is many times these.
    Raises ValueError where their items are not one behind the other."""
    rows = slice(first, first + ROWS_CHECKED_AT_ONCE)
    offsets = lengths.item_offsets[first : first + ROWS_CHECKED_AT_ONCE + 1]
    start, end = offsets[[0, -1]].tolist()
    if not (0 <= start <= end <= len(lengths.item_modality) and np.all(np.diff(offsets) >= 0)):
        raise ValueError("its columns speak of different items")
    columns = {
        name: getattr(lengths, name)[slice(start, end) if name.startswith("item_") else rows]
        for name in COLUMNS
    }
    return LengthTable(**{**columns, "item_offsets": offsets - start})


def _read(memory: memoryview) -> dict[str, NDArray[Any]]:
    (size_bytes,) = _SIZE.unpack_from(memory)
    at = _SIZE.size + size_bytes
    sections = []
    for kind, count in zip(_SECTIONS, json.loads(bytes(memory[_SIZE.size : at])), strict=True):
        at += -at % _ALIGNMENT_BYTES
        sections.append(np.frombuffer(memory, dtype=kind, count=int(count), offset=at))
        at += sections[-1].nbytes
    llm_tokens, samples, items = sections
    return {
        "llm_tokens": llm_tokens,
        "item_offsets": samples["item_offsets"],
        "loss_tokens": samples["loss_tokens"][:-1],
        **{name: items[name] for name in _OF_ITEMS.names or ()},
    }


def _require_agreeing(parts: CatalogParts) -> None:
    """Raises ValueError unless all parts describe as many samples and items. O(1) of them."""
    lengths, samples = parts.lengths, len(parts.lengths)
    offsets = lengths.item_offsets
    agreeing = (
        len(lengths.loss_tokens) == samples
        and len(offsets) == samples + 1
        and offsets[0] == 0
        and len(lengths.item_modality) == int(offsets[-1])
        and len(parts.details) == samples == sum(parts.sources.sizes) == sum(parts.file_rows)
        and len(parts.fingerprints) == len(parts.sources.names)
        and len(parts.files) == len(parts.file_rows)
        and min((*parts.sources.sizes, *parts.file_rows, 0)) == 0
    )
    if not agreeing:
        raise ValueError("its columns speak of different samples")
