"""Hands an opened index from the process that read it to the process that plans with it.

    size │ header (JSON) │ llm_tokens │ loss_tokens │ item_offsets │ …      a file without a name
    locations, keys, shapes                                                the DetailFile

An index is a user's file, so it is parsed in a process that can crash without harm. The receiving
process parses no Parquet: it maps numbers of known types and checks that they agree. The process
that wrote both files must have ended by then: if a mapped file shrinks, the process that reads it
crashes.

Both files are on disk (in `TMPDIR`), so that no sample takes memory for as long as its job is
registered: the system keeps the pages that steps draw from while it has room for them. Nothing that
has been checked stays mapped in.
"""

import json
import mmap
import os
import struct
import tempfile
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.catalog import CatalogParts, IndexedCatalog, IndexIdentity
from dataservice.sources.detail_file import DetailFile
from dataservice.sources.manifest import LongSamples
from dataservice.sources.ranges import SourceRanges
from dataservice.sources.soundness import require_sound_lengths

COLUMNS: dict[str, np.dtype[Any]] = {
    "llm_tokens": np.dtype(np.int32),
    "loss_tokens": np.dtype(np.int32),
    "item_offsets": np.dtype(np.int64),
    "item_modality": np.dtype(np.int8),
    "item_encoder_tokens": np.dtype(np.int32),
    "item_llm_tokens": np.dtype(np.int32),
    "item_position": np.dtype(np.int32),
    "item_frames": np.dtype(np.int32),
}
_SIZE = struct.Struct("<Q")
_ALIGNMENT_BYTES = 64
ROWS_CHECKED_AT_ONCE = 100_000


def hand_over(catalog: IndexedCatalog) -> tuple[int, int]:
    """Descriptors of a file with the lengths, which the caller closes, and of the details, which
    the catalog keeps. Raises OSError when the file cannot be written."""
    parts = catalog.parts
    columns = [getattr(parts.lengths, name) for name in COLUMNS]
    header = {
        "identity": [parts.identity.fingerprint, parts.identity.places],
        "fingerprints": parts.fingerprints,
        "verified": parts.verified,
        "long": {source: asdict(long) for source, long in parts.long.items()},
        "sources": list(zip(parts.sources.names, parts.sources.sizes, strict=True)),
        "files": parts.files,
        "file_rows": parts.file_rows,
        "counts": [len(column) for column in columns],
    }
    text = json.dumps(header).encode()
    with tempfile.TemporaryFile(prefix="dataservice-") as stream:
        stream.write(_SIZE.pack(len(text)) + text)
        for column in columns:
            stream.write(bytes(-stream.tell() % _ALIGNMENT_BYTES))
            stream.write(np.ascontiguousarray(column).data)
        stream.flush()
        return os.dup(stream.fileno()), parts.details.descriptor


def take_over(lengths: int, details: int, limits: DecodeLimits) -> IndexedCatalog:
    """The catalog behind both descriptors; this function closes them.

    Raises:
        ValueError: they hold no catalog, or one whose numbers contradict each other.
    """
    try:
        taken = DetailFile(details)
        taken.require_whole()
        with open(lengths, "rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
        header, columns = _read(memoryview(mapped))
        parts = CatalogParts(
            sources=SourceRanges.of(*zip(*header["sources"], strict=True)),
            identity=IndexIdentity(*map(str, header["identity"])),
            fingerprints=tuple(map(str, header["fingerprints"])),
            verified=tuple(map(str, header["verified"])),
            long={str(name): LongSamples.read(long) for name, long in dict(header["long"]).items()},
            files=tuple((str(source), str(path)) for source, path in header["files"]),
            file_rows=tuple(int(rows) for rows in header["file_rows"]),
            lengths=LengthTable(**columns),
            details=taken,
        )
    except (OSError, pa.ArrowException, KeyError, TypeError, struct.error) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    _require_agreeing(parts)
    for first in range(0, len(parts.lengths), ROWS_CHECKED_AT_ONCE):
        require_sound_lengths(_some(parts.lengths, first), limits)
    mapped.madvise(mmap.MADV_DONTNEED)  # mapped in to be checked; a step reads a few of them again
    return IndexedCatalog(parts)


def _some(lengths: LengthTable, first: int) -> LengthTable:
    """The next lengths to be checked: what checking needs for each sample is many times these."""
    rows = slice(first, first + ROWS_CHECKED_AT_ONCE)
    offsets = lengths.item_offsets[first : first + ROWS_CHECKED_AT_ONCE + 1]
    items = slice(*offsets[[0, -1]].tolist())
    columns = {
        name: getattr(lengths, name)[items if name.startswith("item_") else rows]
        for name in COLUMNS
    }
    return LengthTable(**{**columns, "item_offsets": offsets - offsets[0]})


def _read(memory: memoryview) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    (size_bytes,) = _SIZE.unpack_from(memory)
    at = _SIZE.size + size_bytes
    header = json.loads(bytes(memory[_SIZE.size : at]))
    columns = {}
    for (name, kind), count in zip(COLUMNS.items(), header["counts"], strict=True):
        at += -at % _ALIGNMENT_BYTES
        columns[name] = np.frombuffer(memory, dtype=kind, count=int(count), offset=at)
        at += columns[name].nbytes
    return header, columns


def _require_agreeing(parts: CatalogParts) -> None:
    """Raises ValueError unless all parts describe the same samples and items."""
    lengths, samples = parts.lengths, len(parts.lengths)
    offsets = lengths.item_offsets
    items = {
        len(getattr(lengths, name))
        for name in COLUMNS
        if name.startswith("item_") and name != "item_offsets"
    }
    agreeing = (
        len(lengths.loss_tokens) == samples
        and len(offsets) == samples + 1
        and offsets[0] == 0
        and bool(np.all(offsets[1:] >= offsets[:-1]))
        and items == {int(offsets[-1])}
        and len(parts.details) == samples == sum(parts.sources.sizes) == sum(parts.file_rows)
        and len(parts.fingerprints) == len(parts.sources.names)
        and len(parts.files) == len(parts.file_rows)
        and min((*parts.sources.sizes, *parts.file_rows, 0)) == 0
    )
    if not agreeing:
        raise ValueError("its columns speak of different samples")
