"""One part of an index: the samples of one source file as Parquet, one row a sample."""

import base64
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from dataservice.core.errors import SampleError, SampleTooLongError, ServiceError
from dataservice.core.ports import SampleMeasurer
from dataservice.core.sample import RawSample, SampleLengths, piece_key
from dataservice.sources.checksum import CONTENT_BYTES, sample_checks
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.length_columns import lengths_of
from dataservice.sources.manifest import (
    IndexedFile,
    LongSamples,
    MediaCounts,
    PartRecord,
    Recipe,
    SkippedSample,
)
from dataservice.sources.packed_lengths import pack_lengths
from dataservice.sources.rows_digest import LOSS_WEIGHT, RowsDigest
from dataservice.sources.storage import SourceFile

Made = TypeVar("Made")

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
    "piece",
    "crc32",
    "item_shape",
)
# What is known of an item besides its lengths; empty when it is unknown. Later releases fill more.
ITEM_NOTES = ("item_kind", "item_grid", "item_seconds_per_patch", "item_key_frames_s")
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
        ("content", pa.binary(CONTENT_BYTES)),
        ("item_kind", pa.list_(pa.int8())),
        ("item_grid", pa.list_(pa.list_(pa.int32()))),
        ("item_seconds_per_patch", pa.list_(pa.float64())),
        ("item_key_frames_s", pa.list_(pa.list_(pa.float64()))),
        ("piece", pa.int32()),  # of a document that was cut, from 1; empty elsewhere
        (LOSS_WEIGHT, pa.float64()),  # the record's own; empty where it is 1
    ]
)
# Columns that parts of older releases lack, with what an empty cell means.
ADDED_COLUMNS = {"piece": 0, LOSS_WEIGHT: 1.0}
PACKED = "lengths"
"""A column with one cell a row group, in its first row: all lengths of the group, packed. It says
nothing that other columns do not, and parts of older releases lack it."""
_RECORD_KEY = b"dataservice.part"
ROWS_PER_GROUP = 16_384
_ITEMS_PER_GROUP = 2**18
_LONGEST_REASON = 1000
# From this number of skipped samples in one file on, reasons are cut short: the part's footer holds
# them.
_MANY_SKIPPED = 10_000
_SHORT_REASON = 100
_COUNT_EVERY_ROWS = 64
_PLAIN_RECORD_BYTES = 2**20  # larger ones are compressed
_MOST_RECORD_BYTES = 2**29  # of three million samples that were left out
_COMPRESSED = b"zlib:"


class PartWriter:
    """Writes the rows of a part, row group by row group."""

    def __init__(self, stream: IO[bytes]) -> None:
        leaves = [_leaf(field) for field in SCHEMA]
        options: dict[str, Any] = {
            "compression": {**dict.fromkeys(leaves, "zstd"), PACKED: "none"},
            "use_dictionary": leaves,
        }
        schema = SCHEMA.append(pa.field(PACKED, pa.binary()))
        self._writer = pq.ParquetWriter(stream, schema, **options)
        self._digest = RowsDigest()
        self.rows = 0

    def __enter__(self) -> "PartWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.close()

    def write(self, rows: pa.Table) -> None:
        """Append a row group."""
        rows = rows.select(SCHEMA.names)
        self._digest.add(rows)
        cells = [pack_lengths(lengths_of(rows))] + [None] * (rows.num_rows - 1)
        packed = pa.array(cells[: rows.num_rows], pa.binary())
        self._writer.write_table(rows.append_column(PACKED, packed))
        self.rows += rows.num_rows

    def finish(
        self,
        *,
        recipe: Recipe,
        file: IndexedFile,
        media: MediaCounts,
        skipped: Sequence[SkippedSample],
        long: LongSamples,
    ) -> PartRecord:
        """What was written, which the part's footer says too."""
        record = PartRecord(
            recipe=recipe,
            file=file,
            rows=self.rows,
            identity=self._digest.identity,
            places=self._digest.places,
            media=media,
            skipped=tuple(skipped),
            long=long,
        )
        self._writer.add_key_value_metadata({_RECORD_KEY.decode(): _footer_text(record)})
        return record


def _leaf(field: "pa.Field[Any]") -> str:
    """The path of a field's values in Parquet."""
    path, kind = field.name, field.type
    while pa.types.is_list(kind):
        path, kind = f"{path}.list.element", kind.value_type
    return path


class Counter(Protocol):
    """Counts progress."""

    def add(self, rows: int, size_bytes: int) -> None:
        """Count `rows` more rows and `size_bytes` more bytes of source files as done."""
        ...


def write_part(
    stream: IO[bytes],
    *,
    file: SourceFile,
    samples: Iterable[ScannedSample],
    recipe: Recipe,
    measurer: SampleMeasurer,
    counter: Counter,
    most_samples: int | None = None,
    between: tuple[int, int],
) -> PartRecord:
    """Measure every sample, or the first `most_samples`, and write the part; the record lists the
    samples that cannot be measured. They lie `between` these bytes of the file.

    Memory is one row group, whatever the size of the file.
    """
    skipped: list[SkippedSample] = []
    rows: list[dict[str, Any]] = []
    media, long = MediaCounts(), LongSamples()
    items = 0
    with PartWriter(stream) as writer:

        def flush() -> None:
            nonlocal items
            writer.write(pa.Table.from_pylist(rows, schema=SCHEMA))
            items = 0
            rows.clear()

        for sample in _counted(samples, counter, most_samples, *between):
            try:
                raw = usable(sample)
                pieces = measured_pieces(raw, measurer)
                checks = sample_checks(sample.unparsed or raw)
            except SampleError as error:
                if isinstance(error, SampleTooLongError):
                    long += LongSamples(left_out=1, longest_tokens=error.tokens)
                left_out = SkippedSample(file=file.name, key=sample.key, reason=str(error))
                skipped.append(_shortened(left_out, len(skipped)))
                continue
            media = media.with_sample(raw)
            if len(pieces) > 1:
                long += LongSamples(documents=1, pieces=len(pieces))
            for piece, lengths in pieces:
                rows.append(_row(sample, piece, file, lengths, checks, raw.loss_weight))
                items += len(lengths.items)
                if len(rows) == ROWS_PER_GROUP or items >= _ITEMS_PER_GROUP:
                    flush()
        if rows or not writer.rows:
            flush()
        return writer.finish(
            recipe=recipe, file=IndexedFile.of(file), media=media, skipped=skipped, long=long
        )


def join_parts(stream: IO[bytes], pieces: Iterable[tuple[IO[bytes], PartRecord]]) -> PartRecord:
    """Write the part of a file of which each piece has one; the record is what `write_part` would
    have made of the whole. Memory is one row group."""
    media, long = MediaCounts(), LongSamples()
    skipped: list[SkippedSample] = []
    with PartWriter(stream) as writer:
        for source, record in pieces:
            with source, pq.ParquetFile(source) as part:
                for group in range(part.num_row_groups):
                    writer.write(part.read_row_group(group, use_threads=False))
            media, long = media + record.media, long + record.long
            skipped += [_shortened(each, len(skipped) + n) for n, each in enumerate(record.skipped)]
        return writer.finish(
            recipe=record.recipe, file=record.file, media=media, skipped=skipped, long=long
        )


def _shortened(skipped: SkippedSample, before: int) -> SkippedSample:
    """With as much of its reason as the footer has room for, where so many others come `before`."""
    longest = _LONGEST_REASON if before < _MANY_SKIPPED else _SHORT_REASON
    return replace(skipped, reason=skipped.reason[:longest])


def read_record(stream: IO[bytes]) -> PartRecord | None:
    """The record in a part's footer; None when the part is damaged or of another version."""
    try:
        with pq.ParquetFile(stream) as part:
            metadata = part.metadata.metadata or {}
            record = PartRecord.from_json(_record_text(metadata[_RECORD_KEY]))
            return record if record.rows == part.metadata.num_rows else None
    except (
        pa.ArrowException, OSError, ValueError, TypeError, KeyError, RecursionError, MemoryError
    ):  # fmt: skip
        return None


def _footer_text(record: PartRecord) -> str:
    """The record as a footer has room for it, which readers take only up to some 60 MB: a large one
    lists hundreds of thousands of samples that were left out for a few reasons."""
    text = record.to_json()
    if len(text) <= _PLAIN_RECORD_BYTES:
        return text
    return _COMPRESSED.decode() + base64.b64encode(zlib.compress(text.encode())).decode()


def _record_text(found: bytes) -> bytes:
    """Raises ValueError where it is damaged, or larger than any that this service writes."""
    if not found.startswith(_COMPRESSED):
        return found
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(
            base64.b64decode(found.removeprefix(_COMPRESSED), validate=True), _MOST_RECORD_BYTES
        )
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacking.eof:
        raise ValueError("it is cut short, or too large")
    return text


def usable(sample: ScannedSample) -> RawSample:
    """What was read of a sample. Raises SampleError where it could not be read."""
    if isinstance(sample.raw, SampleError):
        raise sample.raw
    return sample.raw


def measured(raw: RawSample, measurer: SampleMeasurer) -> SampleLengths:
    """A sample's lengths. Raises SampleError where it cannot be used, or has no token."""
    lengths = _without_surprise(measurer.measure, raw)
    _require_tokens(lengths)
    return lengths


def measured_pieces(
    raw: RawSample, measurer: SampleMeasurer
) -> Sequence[tuple[int, SampleLengths]]:
    """The samples that a sample as read becomes, each with its piece's number: the whole (0), or
    pieces from 1. Raises SampleError where it cannot be used, or has no token."""
    found = _without_surprise(measurer.measure_pieces, raw)
    _require_tokens(found[0])
    return list(enumerate(found, start=1 if len(found) > 1 else 0))


def _without_surprise(measure: Callable[[RawSample], Made], raw: RawSample) -> Made:
    """What measuring gives. Raises SampleError also for a surprise of a codec, a template or code
    of the user's own, as decoding masks the sample then."""
    try:
        return measure(raw)
    except (ServiceError, OSError, MemoryError):
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise SampleError(
            f"measuring it failed unexpectedly: {type(error).__name__}: {error}, at line "
            f"{frame.lineno} of {Path(frame.filename).name}. Leave it out, or mend the chat "
            "template or the code of your own that takes it."
        ) from error


def _require_tokens(lengths: SampleLengths) -> None:
    if lengths.llm_tokens < 1:
        raise SampleError("the sample is empty: it has 0 tokens. Give it text or media.")


def _row(
    sample: ScannedSample,
    piece: int,
    file: SourceFile,
    lengths: SampleLengths,
    checks: tuple[int, bytes],
    loss_weight: float,
) -> dict[str, Any]:
    location, items = sample.location, lengths.items
    crc32, content = checks
    return {
        "key": piece_key(sample.key, piece),
        "file": file.name,
        "span_name": [span.name for span in location.spans],
        "span_offset_bytes": [span.offset_bytes for span in location.spans],
        "span_size_bytes": [span.size_bytes for span in location.spans],
        "row_group": location.row_group,
        "row": location.row,
        "crc32": crc32,
        "llm_tokens": lengths.llm_tokens,
        "loss_tokens": lengths.loss_tokens,
        "item_modality": [int(item.modality) for item in items],
        "item_encoder_tokens": [item.encoder_tokens for item in items],
        "item_llm_tokens": [item.llm_tokens for item in items],
        "item_position": [item.position for item in items],
        "item_shape": [list(item.shape) for item in items],
        "content": content,
        "item_kind": [item.kind for item in items],
        "item_grid": [item.grid for item in items],
        "item_seconds_per_patch": [item.seconds_per_patch for item in items],
        "item_key_frames_s": [item.key_frames_s for item in items],
        "piece": piece or None,
        LOSS_WEIGHT: loss_weight if loss_weight != 1 else None,
    }


def _counted(
    samples: Iterable[ScannedSample],
    counter: Counter,
    most_samples: int | None,
    start_bytes: int,
    end_bytes: int,
) -> Iterator[ScannedSample]:
    """The same samples, at most `most_samples`; counts rows and bytes at intervals, and all bytes
    at their end."""
    rows, counted_bytes = 0, start_bytes
    for number, sample in enumerate(samples, start=1):
        yield sample
        rows += 1
        if number == most_samples:
            counter.add(rows, sample.behind_bytes - counted_bytes)
            return
        if rows == _COUNT_EVERY_ROWS:
            counter.add(rows, sample.behind_bytes - counted_bytes)
            rows, counted_bytes = 0, sample.behind_bytes
    counter.add(rows, end_bytes - counted_bytes)
