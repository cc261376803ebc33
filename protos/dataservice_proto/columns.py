"""Columns of numbers in `bytes` fields: little-endian, end to end, as narrow as the numbers allow.

    packed([3, -1, 200])     6 bytes: the three as int16
    read(data, rows=3)       the width follows from the length: 6 / 3

Which columns a message has, and what counts the rows of each, is a table: what is counted is summed
of an earlier column, so a rank's rows and their numbers travel together. A column of which nothing
is known is empty. `VERSION` changes with the tables; both ends must have the same.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 2
# Of ORDERS and RECEIPTS, which pass between coordinator and workers alone.
ORDERS_VERSION = 3
RECEIPTS_VERSION = 1

_WIDTHS = (1, 2, 4, 8)
_TYPES = {width: f"<i{width}" for width in _WIDTHS}
_FEW = 64  # numbers that are compared sooner one by one
_MOST = 127  # of a byte with a sign
_MOST_ROWS = 2**31 - 1  # that one number may count


@dataclass(frozen=True)
class Column:
    """A column by name. `counted` is the column whose sum is the number of rows, or the name of a
    number that is given; a row has `numbers` of them, whole or `real`. An `optional` one may be
    empty though it has rows; of one that counts rows, a number may be -1 where `absent` says so,
    and counts none."""

    name: str
    counted: str
    numbers: int = 1
    real: bool = False
    optional: bool = False
    absent: bool = False


SHARD = (
    Column("wave_pack", "waves"),
    Column("wave_seconds", "waves", real=True),
    Column("wave_member", "waves"),
    Column("wave_degree", "waves"),
    Column("wave_samples", "waves"),
    Column("wave_items", "waves"),
    Column("group", "wave_degree"),
    Column("sample_id", "wave_samples"),
    Column("sample_tokens", "wave_samples"),
    Column("sample_padded", "wave_samples"),
    Column("sample_weight", "wave_samples", real=True, optional=True),
    Column("item_modality", "wave_items"),
    Column("item_start", "wave_items"),
    Column("item_tokens", "wave_items"),
    Column("item_kind", "wave_items", optional=True),
    Column("item_grid", "wave_items", numbers=4, optional=True),
    Column("item_seconds", "wave_items", real=True, optional=True),
    Column("phase_parts", "phases", optional=True, absent=True),
    Column("phase_sends", "phases", optional=True),
    Column("phase_receives", "phases", optional=True),
    Column("part_pack", "phase_parts"),
    Column("part_items", "phase_parts"),
    Column("place", "part_items"),
    Column("place_first", "part_items", optional=True),
    Column("place_stop", "part_items", optional=True),
    Column("place_of", "part_items", optional=True),
    Column("place_kind", "part_items", optional=True),
    Column("place_grid", "part_items", numbers=4, optional=True),
    Column("place_seconds", "part_items", real=True, optional=True),
    Column("send_row", "phase_sends"),
    Column("send_rows", "phase_sends"),
    Column("send_target", "phase_sends"),
    Column("receive_row", "phase_receives"),
    Column("receive_rows", "phase_receives"),
    Column("receive_source", "phase_receives"),
    Column("wave_ring", "waves", optional=True),
)
"""A replica's part of a step: `waves` is given, and `phases` is twice as many. The packs that
several replicas share are counted through the step, and `wave_ring` has the number of each wave's,
-1 where its pack is nobody else's."""

SHARD_FIELDS = {column.name: 4 + place for place, column in enumerate(SHARD[:-1])}
SHARD_FIELDS["wave_ring"] = 41  # behind how many there are in the step
"""The numbers of the fields of a ShardColumns, by column."""

TICKET = (
    Column("sequence_worker", "sequences"),
    Column("sequence_pack", "sequences"),
    Column("sequence_member", "sequences"),
    Column("part_worker", "parts"),
    Column("part_pack", "parts"),
    Column("part_items", "parts"),
    Column("place", "part_items"),
    Column("place_first", "part_items", optional=True),
    Column("place_stop", "part_items", optional=True),
    Column("place_of", "part_items", optional=True),
)
"""What a ticket gives; how many `sequences` and `parts` there are is given."""

TICKET_FIELDS = {column.name: 10 + place for place, column in enumerate(TICKET)}
"""The numbers of the fields of a Ticket, by column."""

ORDERS = (
    Column("pack", "packs"),
    Column("degree", "packs"),
    Column("samples", "packs"),
    Column("sample_id", "samples"),
    Column("file", "samples"),
    Column("key_bytes", "samples"),
    Column("epoch", "samples"),
    Column("row_group", "samples"),
    Column("row", "samples"),
    Column("piece", "samples"),
    Column("crc32", "samples"),
    Column("llm_tokens", "samples"),
    Column("loss_tokens", "samples"),
    Column("spans", "samples"),
    Column("span_name_bytes", "spans"),
    Column("span_offset_bytes", "spans"),
    Column("span_size_bytes", "spans"),
    Column("items", "samples"),
    Column("item_modality", "items"),
    Column("item_encoder_tokens", "items"),
    Column("item_llm_tokens", "items"),
    Column("item_position", "items"),
    Column("sides", "items"),
    Column("side", "sides"),
    Column("file_source", "files"),
    Column("path_bytes", "files"),
)
"""The packs that one worker is to decode, with their samples and the files that these lie in;
`packs` and `files` are given."""

RECEIPTS = (
    Column("pack", "packs"),
    Column("size_bytes", "packs"),
    Column("decode_s", "packs", real=True),
    Column("room_s", "packs", real=True),
    Column("bad_samples", "packs"),
    Column("digests", "packs"),
)
"""What some packs of one step took; `packs` is given."""

SUMMARY = (
    Column("pack_wave", "packs"),
    Column("pack_degree", "packs"),
    Column("pack_replicas", "pack_degree"),
    Column("pack_tokens", "packs"),
    Column("pack_seconds", "packs", real=True),
)
"""The groups of a whole step, by pack; `packs` is given."""


def least_and_most(values: NDArray[Any]) -> tuple[int, int]:
    """Of whole numbers of any shape, 0 and 0 where there are none."""
    if not values.size:
        return 0, 0
    if values.size <= _FEW:
        numbers = values.ravel().tolist()
        return int(min(numbers)), int(max(numbers))
    return int(values.min()), int(values.max())


def narrowest(values: NDArray[Any]) -> str:
    """The type that `packed` gives to whole numbers, as numpy names it."""
    least, most = least_and_most(values)
    for width in _WIDTHS:
        bound = 1 << (8 * width - 1)
        if -bound <= least and most < bound:
            return _TYPES[width]
    raise ValueError(f"numbers from {least} to {most} do not fit into 64 bits")


def packed(values: "NDArray[Any] | Sequence[float]") -> bytes:
    """A column of whole or real numbers as bytes."""
    if isinstance(values, list) and 0 <= min(values, default=0) <= max(values, default=0) <= _MOST:
        with suppress(TypeError):  # of real numbers
            return bytes(values)  # as they are nearly always few, for which an array takes long
    of = np.asarray(values)
    if not of.size:
        return b""
    if of.dtype.kind == "f":
        return np.ascontiguousarray(of, "<f8").tobytes()
    return of.astype(narrowest(of)).tobytes()


def read(data: bytes, rows: int, column: Column) -> NDArray[Any]:
    """The rows of a column: int64[rows] or float64[rows], [rows, numbers] where a row has more; no
    rows of an optional one that is empty. Raises ValueError where it has not so many."""
    if not data and column.optional:
        rows = 0
    count = rows * column.numbers
    width = 8 if column.real or not count else len(data) // count
    if width not in _WIDTHS or len(data) != count * width:
        raise ValueError(
            f"column {column.name} has {len(data)} bytes for {rows} rows of {column.numbers}"
        )
    values = np.frombuffer(data, "<f8" if column.real else f"<i{width}")
    values = values if column.real else values.astype(np.int64)
    return values if column.numbers == 1 else values.reshape(rows, column.numbers)


def read_all(
    table: Sequence[Column], columns: Mapping[str, bytes], given: Mapping[str, int]
) -> dict[str, NDArray[Any]]:
    """Every column by name, as `read` gives it. Raises ValueError where their lengths contradict
    each other, or where one counts rows that there cannot be."""
    rows = dict(given)
    counting = {column.counted for column in table}
    found: dict[str, NDArray[Any]] = {}
    for column in table:
        found[column.name] = values = read(columns[column.name], rows[column.counted], column)
        if column.name in counting:
            rows[column.name] = _sum(values, column)
    return found


def _sum(counts: NDArray[Any], column: Column) -> int:
    least, most = (int(counts.min()), int(counts.max())) if counts.size else (0, 0)
    if least < -column.absent or most > _MOST_ROWS:  # the sum must not overflow either
        raise ValueError(f"column {column.name} counts from {least} to {most} rows")
    return int(np.maximum(counts, 0).sum())


def columns_of(message: Any, table: Sequence[Column]) -> dict[str, bytes]:
    """The columns of a message with a field for each."""
    return {column.name: getattr(message, column.name) for column in table}


def read_shard(message: Any) -> dict[str, NDArray[Any]]:
    """The columns of a ShardColumns, checked. Raises ValueError where the message is of another
    version, or its columns contradict each other."""
    if message.version != VERSION:
        raise ValueError(
            f"its columns are of version {message.version}, and version {VERSION} is read here. "
            "Install the client of the service's release"
        )
    waves = int(message.waves)
    given = {"waves": waves, "phases": 2 * waves}
    return read_all(SHARD, columns_of(message, SHARD), given)


@dataclass(frozen=True)
class TicketPart:
    """What a worker streams in one piece: the sequence of `member` of a pack, or, with -1, `items`,
    of each the units in `ranges` (first, stop, of), or all of it where there are none."""

    pack: int
    member: int
    items: "tuple[int, ...]" = ()
    ranges: "tuple[tuple[int, int, int], ...]" = ()


class TicketColumns:
    """The columns of a ticket, read."""

    def __init__(self, columns: Mapping[str, bytes], *, sequences: int, parts: int) -> None:
        """Raises ValueError where the columns contradict each other."""
        self._of = read_all(TICKET, columns, {"sequences": sequences, "parts": parts})
        self._ends = np.cumsum(self._of["part_items"])

    def parts_at(self, worker: int) -> "list[TicketPart]":
        """What the worker at this place streams: by pack, and of a pack first the sequence."""
        of = self._of
        sequences = np.flatnonzero(of["sequence_worker"] == worker)
        found = [
            TicketPart(pack, member)
            for pack, member in zip(
                of["sequence_pack"][sequences].tolist(),
                of["sequence_member"][sequences].tolist(),
                strict=True,
            )
        ]
        for part in np.flatnonzero(of["part_worker"] == worker).tolist():
            own = slice(self._ends[part] - of["part_items"][part], self._ends[part])
            units = [of[name][own].tolist() for name in ("place_first", "place_stop", "place_of")]
            items = tuple(of["place"][own].tolist())
            found.append(
                TicketPart(int(of["part_pack"][part]), -1, items, tuple(zip(*units, strict=True)))
            )
        return sorted(found, key=lambda part: part.pack)
