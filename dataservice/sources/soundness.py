"""Checks that a part of an index is one that this service could have written.

An index is a user's file, and the service relies on it: the planner sums its lengths, and a worker
allocates a sample's shapes when it masks the sample. So a part is checked when it is opened: its
sizes before it is decompressed, then its values column by column.
"""

from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dataservice.core.errors import SourceError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MAX_LOSS_WEIGHT, ItemKind, LengthTable, Modality
from dataservice.sources.formats.parquet_footer import read_footer
from dataservice.sources.formats.parquet_pages import column_pages, require_allowed
from dataservice.sources.index_part import (
    ADDED_COLUMNS,
    ITEM_NOTES,
    PACKED,
    ROWS_PER_GROUP,
    SCHEMA,
)
from dataservice.sources.length_records import require_sound_lengths
from dataservice.sources.rows_digest import LOSS_WEIGHT

_ITEM_LISTS = ("item_modality", "item_encoder_tokens", "item_llm_tokens", "item_position")
_SPAN_LISTS = ("span_name", "span_offset_bytes", "span_size_bytes")


def require_bounded(stream: IO[bytes], limits: DecodeLimits) -> None:
    """Raises ValueError unless a part is a Parquet file whose row groups and pages have bounded
    sizes. Reads headers only."""
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
    """Raises ValueError unless a part has the columns of an index. A part of an older release may
    lack those that were added since."""
    for field in SCHEMA:
        place = found.get_field_index(field.name)
        if place < 0 and field.name in ADDED_COLUMNS:
            continue
        if place < 0 or not _alike(found.field(place).type, field.type):
            raise ValueError(f"it has no column {field.name!r} of {field.type}")
    place = found.get_field_index(PACKED)
    if place >= 0 and found.field(place).type != pa.binary():
        raise ValueError(f"its column {PACKED!r} is of {found.field(place).type}, not binary")


def require_sound(table: pa.Table, lengths: LengthTable, limits: DecodeLimits) -> None:
    """Raises ValueError when a row could not be in an index of ours. O(rows + items),
    vectorised."""
    require_listed_alike(table)
    require_sound_lengths(lengths, limits)
    _require_shapes(table, lengths, limits)
    _require_notes(table, lengths, limits)
    _require_pieces(table)
    own: Any = table[LOSS_WEIGHT]
    weights = _floats(pc.fill_null(own, 1.0), levels=0)
    _require((weights >= 0) & (weights <= MAX_LOSS_WEIGHT), "loss_weight out of range")
    for name in ("span_offset_bytes", "span_size_bytes"):
        _require(_flat(table[name]) >= 0, f"{name} below 0")


def require_listed_alike(table: pa.Table) -> None:
    """Raises ValueError where cells are empty that may not be, or lists of the items or the spans
    of a sample differ in length, as far as the table has these columns."""
    for name in table.schema.names:
        if table[name].null_count and name not in ADDED_COLUMNS:
            raise ValueError(f"column {name!r} has empty cells")
    for all_lists in ((*_ITEM_LISTS, "item_shape", *ITEM_NOTES), _SPAN_LISTS):
        lists = [name for name in all_lists if name in table.schema.names]
        counts = [_counts(table[name]) for name in lists]
        alike = all(np.array_equal(counts[0], each) for each in counts)
        _require(alike, f"lists that differ in length: {', '.join(lists)}")


def _require_shapes(table: pa.Table, lengths: LengthTable, limits: DecodeLimits) -> None:
    """Raises ValueError unless shapes are [frames, height, width, 3] for vision and [samples] for
    audio, within the limits of a sample."""
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


def _require_pieces(table: pa.Table) -> None:
    """Raises ValueError unless the key of each piece ends with its number. The keys are in the
    part's digest, and so vouch for the numbers."""
    pieces = _flat(table["piece"], levels=0, empty=0)
    _require(pieces >= 0, "piece below 0")
    cut = table.filter(pa.array(pieces > 0))
    said = pc.replace_substring_regex(cut["key"], r"^(?s:.*)#([0-9]+)$", r"\1")
    _require(said.equals(cut["piece"].cast(pa.string())), "keys of other pieces than it says")


def _require_notes(table: pa.Table, lengths: LengthTable, limits: DecodeLimits) -> None:
    """Raises ValueError unless the optional columns of items hold possible values."""
    kinds = _flat(table["item_kind"], empty=-1)
    is_recording = kinds == int(ItemKind.RECORDING)
    known = np.isin(kinds, [-1, *(int(kind) for kind in ItemKind)])
    is_audio = lengths.item_modality == int(Modality.AUDIO)
    _require(known & ((kinds == -1) | (is_recording == is_audio)), "an unknown kind of item")

    grids = pc.list_flatten(table["item_grid"])
    given = np.flatnonzero(np.asarray(pc.is_valid(grids).to_numpy()))
    sides = _flat(table["item_grid"], levels=2, empty=0)
    _require(_counts(pc.drop_null(grids)) == 4, "grids of other than 4 numbers")
    _require((sides >= 1) & (sides <= limits.max_llm_tokens), "grids out of range")
    patches = sides.reshape(-1, 4)[:, :3].astype(np.float64).prod(axis=1)
    # Where patches do not merge, a grid may leave out some that are encoded (llava_next's borders).
    alike = (patches == lengths.item_encoder_tokens[given]) | (sides.reshape(-1, 4)[:, 3] == 1)
    _require(alike, "grids of other patches than tokens")

    seconds = _floats(table["item_seconds_per_patch"])
    _require((seconds > 0) & (seconds <= limits.max_video_s), "seconds_per_patch out of range")

    frames = pc.drop_null(pc.list_flatten(table["item_key_frames_s"]))
    _require(_counts(frames) <= limits.max_video_frames, "too many key frames")
    times = _floats(table["item_key_frames_s"], levels=2)
    _require((times >= 0) & (times <= limits.max_video_s), "key frames out of range")
    later = np.ones(len(times), dtype=bool)  # except for the first of each clip
    later[1:] = np.diff(times) > 0
    starts = np.cumsum(_counts(frames)) - _counts(frames)
    later[starts[starts < len(times)]] = True
    _require(later, "key frames out of order")


def _require(holds: "NDArray[np.bool_] | bool", otherwise: str) -> None:
    if not np.all(holds):
        raise ValueError(f"it has {otherwise}")


def _counts(column: Any) -> NDArray[np.int64]:
    """Lengths of the lists of a column, int64[rows]."""
    return np.asarray(pc.list_value_length(column).to_numpy(), dtype=np.int64)


def _flat(column: Any, levels: int = 1, *, empty: int | None = None) -> NDArray[np.int64]:
    """Items of the lists of a column, int64[items]; `empty` replaces missing values."""
    for _ in range(levels):
        column = pc.list_flatten(column)
    filled = column if empty is None else pc.fill_null(column, empty)
    return np.asarray(filled.to_numpy(), dtype=np.int64)


def _floats(column: Any, levels: int = 1) -> NDArray[np.float64]:
    """Items of the lists of a column, without missing values: float64[items]."""
    for _ in range(levels):
        column = pc.list_flatten(column)
    return np.asarray(pc.drop_null(column).to_numpy(), dtype=np.float64)


def _alike(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether two types are the same; the names of list items may differ."""
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        return _alike(found.value_type, wanted.value_type)
    return bool(found.equals(wanted))
