"""Is a part of an index what this service writes?

An index is a file of the job's, and what it says of a sample is believed: the planner sums its
lengths, and a worker allocates its shapes when it masks it. So it is looked at once, when it
is opened: before it is unfolded, and column by column.
"""

from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dataservice.core.errors import SourceError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable, Modality
from dataservice.sources.formats.parquet_footer import read_footer
from dataservice.sources.formats.parquet_pages import column_pages, require_allowed
from dataservice.sources.index_part import ROWS_PER_GROUP, SCHEMA

_ITEM_LISTS = ("item_modality", "item_encoder_tokens", "item_llm_tokens", "item_position")
_SPAN_LISTS = ("span_name", "span_offset_bytes", "span_size_bytes")


def require_bounded(stream: IO[bytes], limits: DecodeLimits) -> None:
    """Raises ValueError unless a part is a Parquet file with row groups and pages of bounded
    size. Reads headers only."""
    for number, group in enumerate(read_footer(stream)):
        if group.rows > ROWS_PER_GROUP:
            raise ValueError(f"row group {number} has {group.rows:,} rows")
        for column in group.columns:
            what = f"column {column.leaf.path!r} of row group {number}"
            try:
                require_allowed(column_pages(stream, column), limits, what)
            except SourceError as error:
                raise ValueError(str(error)) from error


def require_schema(found: pa.Schema) -> None:
    """Raises ValueError unless a part has the columns of an index."""
    for field in SCHEMA:
        place = found.get_field_index(field.name)
        if place < 0 or not _alike(found.field(place).type, field.type):
            raise ValueError(f"it has no column {field.name!r} of {field.type}")


def require_sound(table: pa.Table, lengths: LengthTable, limits: DecodeLimits) -> None:
    """Raises ValueError for a row that no index of ours has. O(rows + items), vectorised."""
    for name in table.schema.names:
        if table[name].null_count:
            raise ValueError(f"column {name!r} has empty cells")
    for lists in ((*_ITEM_LISTS, "item_shape"), _SPAN_LISTS):
        counts = [_counts(table[name]) for name in lists]
        alike = all(np.array_equal(counts[0], each) for each in counts)
        _require(alike, f"lists that differ in length: {', '.join(lists)}")
    tokens, loss = lengths.llm_tokens.astype(np.int64), lengths.loss_tokens
    _require((tokens >= 1) & (tokens <= limits.max_llm_tokens), "llm_tokens out of range")
    _require((loss >= 0) & (loss <= tokens), "loss_tokens out of range")
    _require(np.isin(lengths.item_modality, [int(m) for m in Modality]), "an unknown modality")
    _require(lengths.item_encoder_tokens >= 1, "encoder_tokens out of range")
    _require_places(lengths, tokens)
    _require_shapes(table, lengths, limits)
    for name in ("span_offset_bytes", "span_size_bytes"):
        _require(_flat(table[name]) >= 0, f"{name} below 0")


def _require_places(lengths: LengthTable, tokens: NDArray[np.int64]) -> None:
    """Items lie inside their sample, and together take no more than its tokens."""
    items = lengths.item_llm_tokens.astype(np.int64)
    places = lengths.item_position.astype(np.int64)
    within = np.repeat(tokens, np.diff(lengths.item_offsets))
    _require((items >= 1) & (places >= 0) & (places + items <= within), "items out of their sample")
    ends = np.concatenate([[0], np.cumsum(items)])[lengths.item_offsets]
    _require(np.diff(ends) <= tokens, "more tokens of items than of the sample")


def _require_shapes(table: pa.Table, lengths: LengthTable, limits: DecodeLimits) -> None:
    """[frames, height, width, 3] for vision and [samples] for audio, within the limit a sample."""
    is_vision = lengths.item_modality == int(Modality.VISION)
    shapes = pc.list_flatten(table["item_shape"])
    sizes = _flat(table["item_shape"], levels=2).astype(np.float64)
    counts = _counts(shapes)
    _require(counts == np.where(is_vision, 4, 1), "shapes of another rank")
    _require(sizes >= 0, "shapes out of range")
    starts = np.cumsum(counts) - counts
    _require(sizes[starts[is_vision] + 3] == 3, "pictures without 3 channels")
    item_bytes = np.where(is_vision, 1.0, 4.0)
    if len(starts):
        item_bytes = item_bytes * np.multiply.reduceat(sizes, starts)
    sums = np.concatenate([[0.0], np.cumsum(item_bytes)])[lengths.item_offsets]
    _require(
        np.diff(sums) <= limits.max_decoded_bytes,
        f"a sample of more than max_decoded_bytes, {limits.max_decoded_bytes:,}",
    )


def _require(holds: "NDArray[np.bool_] | bool", otherwise: str) -> None:
    if not np.all(holds):
        raise ValueError(f"it has {otherwise}")


def _counts(column: Any) -> NDArray[np.int64]:
    """Lengths of the lists of a column, int64[rows]."""
    return np.asarray(pc.list_value_length(column).to_numpy(), dtype=np.int64)


def _flat(column: Any, levels: int = 1) -> NDArray[np.int64]:
    """Items of the lists of a column, int64[items]."""
    for _ in range(levels):
        column = pc.list_flatten(column)
    return np.asarray(column.to_numpy(), dtype=np.int64)


def _alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    """The same type; the names of list items are the writer's."""
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        return _alike(found.value_type, wanted.value_type)
    return bool(found.equals(wanted))
