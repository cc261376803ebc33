"""What a batch of a detail file keeps of its columns."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from dataservice.core.sample_columns import NO_CHECKSUM
from dataservice.sources.detail_batch import DetailBatch, columns_of, item_values, notes_of
from dataservice.sources.detail_file import DETAIL_SCHEMA

GRID = [1, 4, 4, 2]


def batch(crc32: list[int | None], notes: list[tuple[int, list[int], float] | None]) -> DetailBatch:
    """Rows of one item each, of which this is known."""
    rows = len(crc32)
    known = [note or (None, None, None) for note in notes]
    columns = {
        "key": [f"k{row}" for row in range(rows)],
        "span_name": [["txt", "jpg"]] * rows,
        "span_offset_bytes": [[10 * row, 10 * row + 5] for row in range(rows)],
        "span_size_bytes": [[5, 5]] * rows,
        "row_group": [-1] * rows,
        "row": [-1] * rows,
        "piece": [0] * rows,
        "crc32": crc32,
        "llm_tokens": [100 + row for row in range(rows)],
        "loss_tokens": [50] * rows,
        "item_modality": [[0]] * rows,
        "item_encoder_tokens": [[16]] * rows,
        "item_llm_tokens": [[4]] * rows,
        "item_position": [[1]] * rows,
        "item_shape": [[[1, 28, 28, row + 1]] for row in range(rows)],
        "item_kind": [[kind] for kind, *_ in known],
        "item_grid": [[grid] for _, grid, _ in known],
        "item_seconds_per_patch": [[seconds] for *_, seconds in known],
        "loss_weight": [1.0] * rows,
    }
    arrays = [pa.array(columns[field.name], field.type) for field in DETAIL_SCHEMA]
    return DetailBatch(pa.RecordBatch.from_arrays(arrays, schema=DETAIL_SCHEMA))


def of(rows: list[int]) -> dict[str, Any]:
    places = np.array(rows, np.int64)
    return {"rows": places, "sample_id": places, "file": np.zeros_like(places)}


@pytest.mark.parametrize("crc32", [[7, 2**32 - 1, 9], [7, None, 9], [None, None, None]])
def test_a_checksum_that_is_not_known_is_none_of_the_known(crc32: list[int | None]) -> None:
    columns, *_ = columns_of(batch(crc32, [None] * 3), **of([2, 1, 2]))
    wanted = [NO_CHECKSUM if crc32[row] is None else crc32[row] for row in (2, 1, 2)]
    assert columns.crc32.tolist() == wanted
    assert columns.crc32.dtype == np.int64


@pytest.mark.parametrize(
    "notes",
    [
        [(1, GRID, 0.5), (2, GRID, 0.25), (0, GRID, 1.0)],
        [(1, GRID, 0.5), None, (0, GRID, 1.0)],
        [None, None, None],
    ],
)
def test_notes_of_items_are_known_where_they_are(
    notes: list[tuple[int, list[int], float] | None],
) -> None:
    counts, found = notes_of(batch([0] * 3, notes), np.array([2, 1, 0]))
    wanted = [notes[row] or (-1, [0, 0, 0, 0], np.nan) for row in (2, 1, 0)]
    assert counts.tolist() == [1, 1, 1]
    assert found.kind.tolist() == [kind for kind, *_ in wanted]
    assert found.grid.tolist() == [grid for _, grid, _ in wanted]
    np.testing.assert_array_equal(found.seconds_per_patch, [seconds for *_, seconds in wanted])


class Asked:
    """A batch that knows which of its columns it was asked for."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows
        self.columns: list[str] = []

    def column(self, name: str) -> Any:
        self.columns.append(name)
        return self._rows.column(name)


def test_arrow_is_asked_once_for_a_column_of_numbers() -> None:
    of_three = batch([7, 8, 9], [(1, GRID, 0.5)] * 3)
    of_three.rows = asked = Asked(of_three.rows)  # type: ignore[assignment]
    for rows in ([0, 2], [1]):
        asked.columns.clear()
        columns_of(of_three, **of(rows))
        notes_of(of_three, np.array(rows))
        item_values(of_three, np.array(rows))
    assert asked.columns == ["key"]  # which are texts
