"""Reads a part of an index: it is a user's file, so it is checked before it is used."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dataservice.core.errors import IndexStaleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import LengthTable
from dataservice.sources.index_folder import IndexFolder, part_name
from dataservice.sources.index_part import (
    ADDED_COLUMNS,
    DETAIL_COLUMNS,
    ITEM_NOTES,
    LENGTH_COLUMNS,
    SCHEMA,
)
from dataservice.sources.length_columns import lengths_of
from dataservice.sources.manifest import AGAIN, PartRecord
from dataservice.sources.rows_digest import LOSS_WEIGHT, RowsDigest
from dataservice.sources.soundness import require_bounded, require_schema, require_sound

_COLUMNS = [*LENGTH_COLUMNS, *DETAIL_COLUMNS, *ITEM_NOTES, LOSS_WEIGHT, "content"]


def read_part(
    folder: IndexFolder, record: PartRecord, limits: DecodeLimits
) -> Iterator[tuple[pa.Table, LengthTable]]:
    """The columns of a part, one row group at a time, each with its lengths. A row that is no piece
    of a document has the piece 0, and one without a loss weight has 1, also where the part is of a
    release without the column.

    Raises IndexStaleError when the part is missing, damaged, or not the one that the manifest's
    `record` describes; the last is known only at the part's end.
    """
    name = part_name(record.file.name)
    found, digest = 0, RowsDigest()
    try:
        with folder.open(name) as stream:
            require_bounded(stream, limits)
            part = pq.ParquetFile(stream)
            require_schema(part.schema_arrow)
            for group in range(part.num_row_groups):
                table = _filled(part.read_row_group(group, columns=_COLUMNS))
                lengths = lengths_of(table)
                require_sound(table, lengths, limits)
                digest.add(table)
                found += table.num_rows
                yield table, lengths
    except (OSError, ValueError, pa.ArrowException) as error:
        raise IndexStaleError(_damaged(folder, name, f"is missing or damaged ({error})")) from error
    if found != record.rows:
        raise IndexStaleError(
            _damaged(folder, name, f"has {found} rows, its manifest says {record.rows}")
        )
    if (digest.identity, digest.places) != (record.identity, record.places):
        raise IndexStaleError(_damaged(folder, name, "holds other samples than its manifest says"))


def _filled(table: pa.Table) -> pa.Table:
    """The table with the meaning of empty cells in their place, or in that of a whole column."""
    for name, empty in ADDED_COLUMNS.items():
        place, kind = table.schema.get_field_index(name), SCHEMA.field(name).type
        if place < 0:
            cells = pa.array(np.full(table.num_rows, empty), type=kind)
            table = table.append_column(name, cells)
        else:
            given: Any = table[name]
            table = table.set_column(place, name, pc.fill_null(given, pa.scalar(empty, kind)))
    return table


def read_tokens(folder: IndexFolder, record: PartRecord) -> Iterator[NDArray[np.int32]]:
    """LLM tokens of a part's samples, one row group at a time. The part is not checked. Raises
    IndexStaleError where it cannot be read."""
    name = part_name(record.file.name)
    try:
        with folder.open(name) as stream:
            part = pq.ParquetFile(stream)
            for group in range(part.num_row_groups):
                yield part.read_row_group(group, columns=["llm_tokens"])["llm_tokens"].to_numpy()
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise IndexStaleError(_damaged(folder, name, f"is missing or damaged ({error})")) from error


def _damaged(folder: IndexFolder, name: str, what: str) -> str:
    return (
        f"{folder.owner}: {folder.path}/{name} {what}. Write it again: {AGAIN}; the same files "
        "give the same index, and checkpoints fit it."
    )
