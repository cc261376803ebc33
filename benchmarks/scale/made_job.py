"""A job of made-up lengths over a real index: the columns of the catalog are those of an index on
disk, its files are of no bytes."""

from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from benchmarks import workloads
from dataservice.core.job import BatchSize, JobRecord
from dataservice.core.job_setup import JobSetup
from dataservice.core.plan_options import PlanOptions
from dataservice.core.sample import LengthTable, Modality
from dataservice.core.sample_files import SampleFiles
from dataservice.sources.catalog import CatalogParts, IndexedCatalog, IndexIdentity
from dataservice.sources.catalog_handover import RowFiles
from dataservice.sources.detail_file import DetailFile, DetailWriter
from dataservice.sources.index_part import ROWS_PER_GROUP, SCHEMA
from dataservice.sources.length_records import LengthRecords
from dataservice.sources.lengths_file import Lengths, LengthsFile
from dataservice.sources.mixture import Mixture
from dataservice.sources.ranges import SourceRanges
from dataservice.sources.rows_digest import LOSS_WEIGHT

JOB = "scale"
SOURCE = "pictures"
ROWS_A_FILE = 10_000
TILE_PX = 448
MEMORY_TOKENS = 8192
FOR_EVER = 1_000_000  # epochs

_lists: Any = pa.ListArray.from_arrays


def made_setup(
    samples: int,
    batch: int,
    *,
    memory_tokens: int = MEMORY_TOKENS,
    rows_a_file: int = ROWS_A_FILE,
) -> JobSetup:
    """A job that draws `batch` of these samples a step: InternVL-like pictures with their text."""
    catalog = made_catalog(samples, rows_a_file=rows_a_file)
    return JobSetup(
        record=JobRecord(name=JOB, spec_json=f'{{"job": "{JOB}"}}', index_fingerprint="made"),
        stream=Mixture(catalog.sizes, [1.0], seed=0, epochs=FOR_EVER, names=(SOURCE,)),
        catalog=catalog,
        batch=BatchSize(samples=batch),
        options=PlanOptions(memory_tokens=memory_tokens),
        pipeline='{"text": {"tokenizer": "made"}}',
        ready_steps=2,
        unit_frames=1,
    )


def made_catalog(
    samples: int, *, text: bool = False, rows_a_file: int = ROWS_A_FILE
) -> IndexedCatalog:
    """The catalog of one source: one picture a sample, its tiles as frames, or the same lengths as
    `text` alone."""
    workload = workloads.vlm_sft(samples)
    lengths = workloads.step_samples(workload).lengths
    if text:
        none = np.zeros(0, np.int32)
        lengths = type(lengths)(
            llm_tokens=lengths.llm_tokens,
            loss_tokens=lengths.loss_tokens,
            item_offsets=np.zeros(samples + 1, np.int64),
            item_modality=none.astype(np.int8),
            item_encoder_tokens=none,
            item_llm_tokens=none,
            item_position=none,
            item_frames=none,
        )
    files = -(-samples // rows_a_file)
    rows = np.diff(np.minimum(np.arange(files + 1) * rows_a_file, samples))
    return IndexedCatalog(
        CatalogParts(
            sources=SourceRanges.of([SOURCE], [samples]),
            identity=IndexIdentity(fingerprint="made", places="made"),
            fingerprints=("made",),
            files=SampleFiles.of([(SOURCE, f"/data/{SOURCE}/{k:05d}.tar") for k in range(files)]),
            file_rows=tuple(rows.tolist()),
            lengths=lengths,
            details=_details(lengths),
        )
    )


def _details(lengths: LengthTable) -> DetailFile:
    """Locations and shapes: two members of a tar, a picture of some tiles."""
    n, m = len(lengths), len(lengths.item_modality)
    members = pa.array(np.arange(n + 1, dtype=np.int32) * 2)
    items = pa.array(lengths.item_offsets.astype(np.int32))
    frames = np.zeros(m, np.int32) if lengths.item_frames is None else lengths.item_frames
    sides = np.stack([frames, *np.full((2, m), TILE_PX), np.full(m, 3)], axis=1)
    grids = np.stack([frames, *np.full((2, m), 32), np.full(m, 2)], axis=1)
    offset_bytes = np.arange(2 * n, dtype=np.int64) * 65_536
    names = pa.DictionaryArray.from_arrays(np.tile([0, 1], n), ["json", "jpg"])
    keys = np.char.mod("%09d", np.arange(n))
    columns = {
        "key": pa.array(keys),
        "span_name": _lists(members, names.cast(pa.string())),
        "span_offset_bytes": _lists(members, pa.array(offset_bytes)),
        "span_size_bytes": _lists(members, pa.array(offset_bytes % 60_000 + 900)),
        "row_group": pa.array(np.full(n, -1, np.int32)),
        "row": pa.array(np.full(n, -1, np.int32)),
        "piece": pa.array(np.zeros(n, np.int32)),
        "crc32": pa.array(np.arange(n, dtype=np.uint32)),
        "llm_tokens": pa.array(lengths.llm_tokens),
        "loss_tokens": pa.array(lengths.loss_tokens),
        "item_modality": _listed(items, lengths.item_modality),
        "item_encoder_tokens": _listed(items, lengths.item_encoder_tokens),
        "item_llm_tokens": _listed(items, lengths.item_llm_tokens),
        "item_position": _listed(items, lengths.item_position),
        "item_shape": _lists(items, _fours(sides)),
        "item_kind": _listed(items, np.full(m, int(Modality.VISION), np.int8)),
        "item_grid": _lists(items, _fours(grids)),
        "item_seconds_per_patch": _listed(items, np.full(m, np.nan)),
        LOSS_WEIGHT: pa.array(np.ones(n)),
    }
    schema = pa.schema([SCHEMA.field(name) for name in columns])
    with DetailWriter() as writer:
        writer.write(pa.table(columns, schema=schema))
        return writer.finish()


def _listed(offsets: Any, values: NDArray[Any]) -> Any:
    return _lists(offsets, pa.array(values))


def _fours(rows: NDArray[Any]) -> Any:
    offsets = pa.array(np.arange(len(rows) + 1, dtype=np.int32) * 4)
    return _lists(offsets, pa.array(rows.astype(np.int32).ravel()))


def hand_over(catalog: IndexedCatalog, folder: str | None = None) -> RowFiles:
    """The files of a catalog's rows, as the process that reads an index hands them over: of the
    lengths in `folder`, see `unnamed_file`, which the caller closes; of the details, which the
    catalog keeps. Raises OSError when the file cannot be written."""
    details = catalog.parts.details
    assert isinstance(details, DetailFile), "they have all been read"
    lengths = write_lengths(catalog.parts.lengths, folder)
    return RowFiles(lengths=lengths, details=details.descriptor)


def write_lengths(lengths: Lengths, folder: str | None = None) -> int:
    """A descriptor, which the caller closes, of a file of these lengths in `folder`. Raises OSError
    when it cannot be written."""
    with closing(LengthsFile(len(lengths), folder)) as file:
        for first in range(0, len(lengths), ROWS_PER_GROUP):
            rows = np.arange(first, min(first + ROWS_PER_GROUP, len(lengths)))
            file.write(LengthRecords.of(lengths.take(rows)))
        return file.finish()
