"""Of a large index the lengths come first; what else there is comes when it is asked for."""

import os
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataservice.core.errors import IndexStaleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.ports import SampleMeasurer
from dataservice.core.sample import IntArray
from dataservice.core.sample_columns import SampleColumns
from dataservice.sources import index_rows
from dataservice.sources.catalog import FoundIndex, IndexedCatalog, find_index, find_rows
from dataservice.sources.catalog_handover import take_over_details, take_over_lengths
from dataservice.sources.index import build_index
from dataservice.sources.index_part import LENGTH_COLUMNS, PACKED
from dataservice.sources.late_details import FETCHED_KEPT, LateDetails
from dataservice.sources.length_cells import LENGTHS as LENGTHS_FILE
from dataservice.sources.length_records import require_sound_lengths
from tests.sources.support import (
    ROWS_A_SMALL_GROUP,
    in_small_row_groups,
    pictures_and_texts,
)
from tests.waiting import LIMIT_S, wait_for

LENGTHS = ("llm_tokens", "loss_tokens", "item_offsets", "item_modality", "item_encoder_tokens",
           "item_llm_tokens", "item_position", "item_frames")  # fmt: skip


class Index:
    """An index on disk, and what was fetched of it."""

    def __init__(self, source: SourceSpec, folder: str, measurer: str) -> None:
        self._of = (source, folder, measurer)
        self.fetched: list[list[int]] = []
        self.errors: list[Exception] = []  # of the next fetches
        self.before_fetching: Callable[[], object] = lambda: None

    @property
    def found(self) -> FoundIndex:
        source, folder, measurer = self._of
        return find_index([source], folder, measurer)

    def fetch(self, rows: IntArray) -> int:
        self.fetched.append(np.asarray(rows).tolist())
        self.before_fetching()
        if self.errors:
            raise self.errors.pop()
        details = self.found.rows.some(np.asarray(rows))  # closes its file when it goes
        return os.dup(details.descriptor)

    def late(self) -> IndexedCatalog:
        """Its catalog, of which the lengths alone have been read."""
        found = self.found
        lengths = found.rows.lengths()
        try:
            return take_over_lengths(found.head, lengths, DEFAULT_LIMITS, self.fetch)
        finally:
            os.close(lengths)


OF_PARTS_ALONE = ["without its lengths", "of an older release"]


@pytest.fixture(params=["of this release", *OF_PARTS_ALONE])
def index(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: Callable[..., SourceSpec],
    write_tar: Callable[..., Path],
    measurer: Callable[[], SampleMeasurer],
) -> Index:
    """Pictures and texts in three parts of several row groups, which are read a few at a time."""
    in_small_row_groups(monkeypatch)
    for shard in range(3):
        write_tar(tmp_path / "data" / f"{shard}.tar", pictures_and_texts(shard, 10 + shard))
    source = spec(tmp_path / "data" / "*.tar", "webdataset", name="media")
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    if request.param in OF_PARTS_ALONE:
        (tmp_path / "index" / "media" / LENGTHS_FILE).unlink()
    if request.param == "of an older release":
        for part in parts_of(tmp_path):
            table = pq.read_table(part).drop_columns([PACKED])
            pq.write_table(table, part, row_group_size=ROWS_A_SMALL_GROUP)
    return Index(source, str(tmp_path / "index"), measurer().fingerprint)


def parts_of(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "index" / "media").glob("part-*.parquet"))


def changed(part: Path, column: str, change: Callable[[list[Any]], None]) -> None:
    """The same part with other cells in a column; its manifest still says what it held. Lengths
    are packed once, in the column that is changed."""
    table = pq.read_table(part)
    if column in (*LENGTH_COLUMNS, "item_shape") and PACKED in table.schema.names:
        table = table.drop_columns([PACKED])
    place = table.schema.get_field_index(column)
    cells = table[column].to_pylist()
    change(cells)
    field = table.schema.field(place)
    table = table.set_column(place, field, pa.array(cells, field.type))
    pq.write_table(table, part, row_group_size=ROWS_A_SMALL_GROUP)


def test_lengths_that_come_first_are_those_of_the_whole(index):
    late, whole = index.late(), index.found.read()
    ids = np.arange(whole.samples)
    for name in LENGTHS:
        np.testing.assert_array_equal(
            getattr(late.lengths(ids), name), getattr(whole.lengths(ids), name)
        )
    assert late.identity == whole.identity
    assert (late.totals, late.longest_sample) == (whole.totals, whole.longest_sample)
    assert index.fetched == []


@pytest.mark.parametrize("rows_a_share", [1, index_rows.LEAST_ROWS])
def test_details_of_any_samples_are_those_of_the_whole_before_and_after_it_was_read(
    index, monkeypatch, rows_a_share
):
    monkeypatch.setattr(index_rows, "LEAST_ROWS", rows_a_share)
    late, whole, rng = index.late(), index.found.read(), np.random.default_rng(7)
    for turn in range(40):
        if turn == 30:
            details = index.found.rows.details()
            take_over_details(late, os.dup(details.descriptor))
            index.fetched.clear()
        ids = rng.integers(0, whole.samples, rng.integers(0, 9))
        assert late.details(ids)[:] == whole.details(ids)[:]
        for each in fields(SampleColumns):
            ours, theirs = (getattr(made.columns(ids), each.name) for made in (late, whole))
            np.testing.assert_array_equal(ours, theirs)
        np.testing.assert_array_equal(
            late.item_details(ids).notes.grid, whole.item_details(ids).notes.grid
        )
        np.testing.assert_array_equal(late.loss_weights(ids), whole.loss_weights(ids))
        assert late.at_hand == (turn >= 30)
    assert index.fetched == []


def test_a_step_that_was_fetched_is_at_hand_while_it_is_planned(index):
    late = index.late()
    late.fetch(np.array([7, 3, 3, 20]))
    late.columns(np.array([20, 7, 7]))
    late.item_details(np.array([3, 7]))
    assert index.fetched == [[3, 7, 20]]
    for k in range(FETCHED_KEPT):
        late.fetch(np.array([k, 10 + k]))
    late.columns(np.array([3, 7, 20]))
    assert index.fetched[-1] == [3, 7, 20]
    assert len(index.fetched) == FETCHED_KEPT + 2


def test_for_rows_that_are_at_hand_nobody_waits(index):
    late, go = index.late(), threading.Event()
    late.fetch(np.array([7, 3]))
    index.before_fetching = lambda: go.wait(LIMIT_S)
    slow = threading.Thread(target=late.fetch, args=(np.array([4]),), daemon=True)
    slow.start()
    wait_for(lambda: index.fetched[-1] == [4])
    done = threading.Thread(target=late.columns, args=(np.array([3, 7]),), daemon=True)
    done.start()
    wait_for(lambda: not done.is_alive())
    assert slow.is_alive()
    go.set()
    slow.join()


def test_of_no_samples_nothing_is_fetched(index):
    late = index.late()
    late.fetch(np.zeros(0, np.int64))
    late.columns(np.array([4]))
    assert index.fetched == [[4]]


def test_row_groups_without_a_wanted_row_are_not_read(index, monkeypatch):
    read = []
    read_group = pq.ParquetFile.read_row_group

    def counted(part, group, **more):
        read.append(group)
        return read_group(part, group, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    index.late().fetch(np.array([0, 1, 9, 10]))
    assert sorted(read) == [0, 0, 2]


def test_a_fetch_that_fails_is_tried_again_by_the_next(index):
    late = index.late()
    index.errors = [SourceError("its storage is away")]
    with pytest.raises(SourceError, match="away"):
        late.columns(np.array([4]))
    late.columns(np.array([4]))
    assert index.fetched == [[4], [4]]


def test_an_index_found_to_be_damaged_gives_nothing_any_more(index):
    late = index.late()
    late.fetch(np.array([4]))
    assert isinstance(late.parts.details, LateDetails)
    late.parts.details.fail(IndexStaleError("it holds other samples"))
    for ids in ([4], [5]):
        with pytest.raises(IndexStaleError, match="other samples"):
            late.columns(np.array(ids))
    assert late.lengths(np.array([5])).llm_tokens[0] > 0


@pytest.mark.parametrize(
    ("column", "cell", "reason"),
    [
        ("span_size_bytes", [-1, -1, -1], "below 0"),
        ("key", None, "empty cells"),
        ("span_name", ["a", "b", "c", "d"], "differ"),
        ("loss_weight", 1e9, "loss_weight out of range"),
    ],
)
def test_locations_that_no_index_has_are_told_when_they_are_read(
    index, tmp_path, column, cell, reason
):
    changed(parts_of(tmp_path)[0], column, lambda cells: cells.__setitem__(2, cell))
    late = index.late()
    late.columns(np.array([12, 30]))
    bad = [k for k in range(late.samples) if _fails(late, k, reason)]
    assert len(bad) == 1
    with pytest.raises(IndexStaleError, match=reason):
        index.found.rows.details()


def _fails(late: IndexedCatalog, sample: int, reason: str) -> bool:
    try:
        late.columns(np.array([sample]))
    except IndexStaleError as error:
        return reason in str(error)
    return False


@pytest.mark.parametrize(
    ("column", "cell", "reason"),
    [
        ("llm_tokens", 0, "llm_tokens out of range"),
        ("loss_tokens", -1, "loss_tokens out of range"),
        ("loss_tokens", None, "empty cells"),
        ("item_modality", [0, 0, 0, 0], "differ"),
        ("item_shape", [[]] * 9, "shapes of another rank|differ"),
    ],
)
@pytest.mark.parametrize("index", OF_PARTS_ALONE, indirect=True)
def test_lengths_that_no_index_has_are_refused_at_once(index, tmp_path, column, cell, reason):
    changed(parts_of(tmp_path)[1], column, lambda cells: cells.__setitem__(5, cell))
    with pytest.raises(IndexStaleError, match=reason):
        index.found.rows.lengths()


@pytest.mark.parametrize("index", OF_PARTS_ALONE, indirect=True)
def test_a_part_of_other_samples_than_its_manifest_says_is_refused(index, tmp_path):
    first, second, _ = parts_of(tmp_path)
    first.write_bytes(second.read_bytes())
    with pytest.raises(IndexStaleError, match=r"has \d+ rows, its manifest says"):
        index.found.rows.lengths()


def test_lengths_that_the_other_process_damaged_are_refused_or_sound(index):
    """Whoever wrote the file: the process that planned by it would plan nonsense."""
    found, rng, refused = index.found, Random(5), 0
    lengths = found.rows.lengths()
    whole = os.pread(lengths, os.fstat(lengths).st_size, 0)
    os.close(lengths)
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(128, len(data))] = rng.choice((0, 1, 127, 128, 255))
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        copy = os.memfd_create("copy")
        os.write(copy, data)
        try:
            late = take_over_lengths(found.head, copy, DEFAULT_LIMITS, index.fetch)
        except ValueError:
            refused += 1
        else:
            require_sound_lengths(late.lengths(np.arange(late.samples)), DEFAULT_LIMITS)
        finally:
            os.close(copy)
    assert refused > 100


@pytest.mark.parametrize("index", ["without its lengths"], indirect=True)
def test_packed_lengths_that_are_damaged_are_refused_or_sound(index, tmp_path):
    rng, refused = Random(6), 0
    part = parts_of(tmp_path)[1]
    whole = part.read_bytes()
    for _ in range(100):

        def damage(cells: list[Any]) -> None:
            group = rng.randrange(0, len(cells), ROWS_A_SMALL_GROUP)
            data = bytearray(cells[group])
            data[rng.randrange(4, len(data))] = rng.choice((0, 1, 127, 128, 255))
            cells[group] = bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])

        changed(part, PACKED, damage)
        try:
            late = index.late()
        except IndexStaleError:
            refused += 1
        else:
            require_sound_lengths(late.lengths(np.arange(late.samples)), DEFAULT_LIMITS)
            if pq.read_table(part)[PACKED] != pq.read_table(pa.BufferReader(whole))[PACKED]:
                with pytest.raises(IndexStaleError, match="packs other lengths than it has"):
                    index.found.rows.details()
        part.write_bytes(whole)
    assert 30 < refused < 100


@pytest.mark.parametrize("index", ["without its lengths"], indirect=True)
@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (lambda rows: pa.array(range(rows)), "of int64, not binary"),
        (lambda rows: pa.nulls(rows, pa.binary()), "cut short"),
        (lambda rows: pa.array([b"\1"] * rows), "cut short"),
    ],
)
def test_a_column_that_packs_nothing_is_refused(index, tmp_path, cells, reason):
    part = parts_of(tmp_path)[1]
    table = pq.read_table(part).drop_columns([PACKED])
    table = table.append_column(PACKED, cells(table.num_rows))
    pq.write_table(table, part, row_group_size=ROWS_A_SMALL_GROUP)
    for read in (index.found.rows.lengths, index.found.rows.details):
        with pytest.raises(IndexStaleError, match=reason):
            read()


@pytest.mark.parametrize("index", ["without its lengths"], indirect=True)
def test_lengths_that_another_release_packed_are_read_from_their_columns(index, tmp_path):
    known = index.found.read()

    def of_form_2(cells: list[Any]) -> None:
        cells[:] = [None if cell is None else b"\2" + cell[1:] for cell in cells]

    for part in parts_of(tmp_path):
        changed(part, PACKED, of_form_2)
    late, ids = index.late(), np.arange(known.samples)
    for name in LENGTHS:
        found, wanted = (getattr(each.lengths(ids), name) for each in (late, known))
        np.testing.assert_array_equal(found, wanted)
    assert len(index.found.rows.details()) == known.samples


def test_rows_of_other_lengths_than_steps_are_planned_by_are_refused(index, tmp_path):
    late = index.late()
    changed(parts_of(tmp_path)[0], "loss_tokens", lambda cells: cells.__setitem__(0, 0))
    bad = [k for k in range(late.samples) if _fails(late, k, "other lengths")]
    assert len(bad) == 1


def test_an_index_written_again_is_not_read_as_the_one_that_was_found(index, tmp_path):
    head = index.found.head
    again = (["media"], str(tmp_path / "index"), head.identity, head.rows_name)
    assert len(find_rows(*again)) == sum(head.sources.sizes)
    os.utime(parts_of(tmp_path)[0], (1, 1))
    with pytest.raises(IndexStaleError, match="written again while"):
        find_rows(*again)


def test_details_of_other_samples_do_not_complete_a_catalog(index):
    late = index.late()
    with pytest.raises(ValueError, match="different samples"):
        take_over_details(late, index.fetch(np.array([1, 2])))
    assert not late.at_hand
