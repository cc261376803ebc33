"""One part of an index: the samples of one source file as Parquet, one row a sample."""

from collections.abc import Iterable, Iterator
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from dataservice.core.errors import SampleError
from dataservice.core.ports import SampleMeasurer
from dataservice.core.sample import RawSample, SampleLengths, SampleLocation
from dataservice.sources.checksum import sample_crc32
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.manifest import PartRecord, Recipe, SkippedSample
from dataservice.sources.storage import SourceFile

LENGTH_COLUMNS = (
    "llm_tokens",
    "loss_tokens",
    "item_modality",
    "item_encoder_tokens",
    "item_llm_tokens",
    "item_position",
)
DETAIL_COLUMNS = (
    "key",
    "span_name",
    "span_offset_bytes",
    "span_size_bytes",
    "row_group",
    "row",
    "crc32",
    "item_shape",
)
SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("file", pa.dictionary(pa.int32(), pa.string())),
        ("span_name", pa.list_(pa.string())),
        ("span_offset_bytes", pa.list_(pa.int64())),
        ("span_size_bytes", pa.list_(pa.int64())),
        ("row_group", pa.int32()),
        ("row", pa.int32()),
        ("crc32", pa.uint32()),
        ("llm_tokens", pa.int32()),
        ("loss_tokens", pa.int32()),
        ("item_modality", pa.list_(pa.int8())),
        ("item_encoder_tokens", pa.list_(pa.int32())),
        ("item_llm_tokens", pa.list_(pa.int32())),
        ("item_position", pa.list_(pa.int32())),
        ("item_shape", pa.list_(pa.list_(pa.int32()))),
    ]
)
_RECORD_KEY = b"dataservice.part"
ROWS_PER_GROUP = 16_384
_ITEMS_PER_GROUP = 2**18
_LONGEST_REASON = 1000
# Of so many in one file the reasons are cut short: they are kept in the part's footer.
_MANY_SKIPPED = 10_000
_SHORT_REASON = 100
_COUNT_EVERY_ROWS = 64


class Counter(Protocol):
    """Where progress is counted up."""

    def add(self, rows: int, size_bytes: int) -> None:
        """This many more rows and bytes of source files are done."""
        ...


def write_part(
    stream: IO[bytes],
    *,
    file: SourceFile,
    samples: Iterable[ScannedSample],
    recipe: Recipe,
    measurer: SampleMeasurer,
    counter: Counter,
) -> PartRecord:
    """Measure every sample and write the part; what cannot be measured is listed in the record.

    Memory is one row group, whatever the size of the file.
    """
    skipped: list[SkippedSample] = []
    rows: list[dict[str, Any]] = []
    written = items = 0
    with pq.ParquetWriter(stream, SCHEMA, compression="zstd") as writer:
        for sample in _counted(samples, file, counter):
            try:
                raw = _usable(sample)
                rows.append(_row(sample, _measured(raw, measurer), sample_crc32(raw)))
                items += len(rows[-1]["item_shape"])
            except SampleError as error:
                longest = _LONGEST_REASON if len(skipped) < _MANY_SKIPPED else _SHORT_REASON
                reason = str(error)[:longest]
                skipped.append(SkippedSample(file=file.path, key=sample.key, reason=reason))
            if len(rows) == ROWS_PER_GROUP or items >= _ITEMS_PER_GROUP:
                writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                written += len(rows)
                rows.clear()
                items = 0
        if rows or not written:
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
        record = PartRecord(
            recipe=recipe, file=file, rows=written + len(rows), skipped=tuple(skipped)
        )
        writer.add_key_value_metadata({_RECORD_KEY.decode(): record.to_json()})
    return record


def read_record(stream: IO[bytes]) -> PartRecord | None:
    """The record in a part's footer, or None when the part is damaged or of another version."""
    try:
        with pq.ParquetFile(stream) as part:
            metadata = part.metadata.metadata or {}
            record = PartRecord.from_json(metadata[_RECORD_KEY])
            return record if record.rows == part.metadata.num_rows else None
    except (pa.ArrowException, OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _usable(sample: ScannedSample) -> RawSample:
    if isinstance(sample.raw, SampleError):
        raise sample.raw
    return sample.raw


def _measured(raw: RawSample, measurer: SampleMeasurer) -> SampleLengths:
    lengths = measurer.measure(raw)
    if lengths.llm_tokens < 1:
        raise SampleError("the sample is empty: it has 0 tokens. Give it text or media.")
    return lengths


def _row(sample: ScannedSample, lengths: SampleLengths, crc32: int) -> dict[str, Any]:
    location: SampleLocation = sample.location
    return {
        "key": sample.key,
        "file": location.file,
        "span_name": [span.name for span in location.spans],
        "span_offset_bytes": [span.offset_bytes for span in location.spans],
        "span_size_bytes": [span.size_bytes for span in location.spans],
        "row_group": location.row_group,
        "row": location.row,
        "crc32": crc32,
        "llm_tokens": lengths.llm_tokens,
        "loss_tokens": lengths.loss_tokens,
        "item_modality": [int(item.modality) for item in lengths.items],
        "item_encoder_tokens": [item.encoder_tokens for item in lengths.items],
        "item_llm_tokens": [item.llm_tokens for item in lengths.items],
        "item_position": [item.position for item in lengths.items],
        "item_shape": [list(item.shape) for item in lengths.items],
    }


def _counted(
    samples: Iterable[ScannedSample], file: SourceFile, counter: Counter
) -> Iterator[ScannedSample]:
    """The same samples; counts rows and bytes now and then, and the whole file at the end."""
    rows = counted_bytes = 0
    for sample in samples:
        yield sample
        rows += 1
        if rows == _COUNT_EVERY_ROWS:
            counter.add(rows, sample.behind_bytes - counted_bytes)
            rows, counted_bytes = 0, sample.behind_bytes
    counter.add(rows, file.size_bytes - counted_bytes)
