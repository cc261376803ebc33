"""One file has the lengths of all parts of an index: what it says is what they say, or refused."""

import errno
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataservice.core.crc32 import crc32
from dataservice.core.errors import IndexStaleError, StorageAwayError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.ports import SampleMeasurer
from dataservice.core.sample import LengthTable
from dataservice.sources import part_reader
from dataservice.sources.catalog import FoundIndex, find_index
from dataservice.sources.index import build_index
from dataservice.sources.index_folder import IndexFolder
from dataservice.sources.index_part import PACKED
from dataservice.sources.index_rows import IndexRows
from dataservice.sources.length_cells import LENGTHS, LengthCells
from dataservice.sources.length_records import require_sound_lengths
from dataservice.sources.lengths_file import COLUMNS, MappedLengths
from tests.sources.support import (
    ROWS_A_SMALL_GROUP,
    in_small_row_groups,
    pictures_and_texts,
)

PARTS = 6


class Index:
    """An index of small parts, which may be written again."""

    def __init__(
        self,
        home: Path,
        source: SourceSpec,
        measurer: Callable[[], SampleMeasurer],
        write_tar: Callable[..., Path],
    ) -> None:
        self._home, self._source, self._measurer, self._write_tar = (
            home,
            source,
            measurer,
            write_tar,
        )
        self.folder = home / "index" / source.name
        for shard in range(PARTS):
            self.write_shard(shard, rows=3 * shard + 1)

    def write_shard(self, shard: int, *, rows: int, words: int = 1) -> None:
        members = pictures_and_texts(shard, rows, words)
        self._write_tar(self._home / "data" / f"{shard}.tar", members)

    def index(self) -> None:
        out_dir = str(self._home / "index")
        build_index(self._source, out_dir=out_dir, make_measurer=self._measurer)

    @property
    def found(self) -> FoundIndex:
        index_dir, measurer = str(self._home / "index"), self._measurer().fingerprint
        return find_index([self._source], index_dir, measurer)

    @property
    def rows(self) -> IndexRows:
        return self.found.rows

    def lengths(self) -> LengthTable:
        """As they come first."""
        return _mapped(self.rows.lengths())

    def whole(self) -> LengthTable:
        """As the parts have them."""
        return _mapped(self.rows.read()[0])

    def known(self) -> list[bool]:
        """Of which parts the file has the lengths."""
        cells = LengthCells(IndexFolder(str(self._home / "index"), self._source.name))
        return [cells.of(record) is not None for _, record in self.rows.parts]


def _mapped(descriptor: int) -> LengthTable:
    try:
        mapped = MappedLengths(descriptor)
        return mapped.take(np.arange(len(mapped)))
    finally:
        os.close(descriptor)


@pytest.fixture
def index(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: Callable[..., SourceSpec],
    write_tar: Callable[..., Path],
    measurer: Callable[[], SampleMeasurer],
) -> Index:
    in_small_row_groups(monkeypatch)
    source = spec(tmp_path / "data" / "*.tar", "webdataset", name="media")
    index = Index(tmp_path, source, measurer, write_tar)
    index.index()
    return index


@pytest.fixture
def parts_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that are opened from now on."""
    opened, open_file = [], IndexFolder.open

    def noted(folder, name):
        opened.append(name)
        return open_file(folder, name)

    monkeypatch.setattr(IndexFolder, "open", noted)
    return opened


def same(one: LengthTable, other: LengthTable) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)


def test_the_lengths_of_all_parts_are_read_from_one_file_without_opening_any(index, parts_read):
    whole = index.whole()
    rows = index.rows
    parts_read.clear()
    os.close(rows.lengths())
    assert set(parts_read) == {LENGTHS}
    assert same(index.lengths(), whole)


def test_parts_that_the_file_does_not_know_are_read_themselves(index):
    old = (index.folder / LENGTHS).read_bytes()
    index.write_shard(2, rows=9, words=5)
    index.write_shard(5, rows=2, words=7)
    index.index()
    (index.folder / LENGTHS).write_bytes(old)
    assert index.known() == [True, True, False, True, True, False]
    assert same(index.lengths(), index.whole())
    assert len(index.rows.details()) == len(index.whole())


def test_a_run_that_changes_one_part_reads_the_lengths_of_no_other(index, monkeypatch):
    read, packed_cells = [], part_reader.packed_cells
    monkeypatch.setattr(
        "dataservice.sources.length_cells.packed_cells",
        lambda folder, record: read.append(record.file.name) or packed_cells(folder, record),
    )
    index.write_shard(3, rows=4, words=3)
    index.index()
    assert read == ["3.tar"]
    assert all(index.known())
    assert same(index.lengths(), index.whole())


def test_parts_of_a_release_that_packed_nothing_or_otherwise_are_packed_anew(index):
    whole = index.whole()
    for number, part in enumerate(sorted(index.folder.glob("part-*.parquet"))):
        table = pq.read_table(part)
        cells = table[PACKED].to_pylist()
        cells = [cell and b"\2" + cell[1:] for cell in cells]
        kept = table.drop_columns([PACKED])
        if number % 2:
            kept = kept.append_column(PACKED, [cells])
        rewrite(part, kept, ROWS_A_SMALL_GROUP)
    (index.folder / LENGTHS).unlink()
    before = [path.read_bytes() for path in sorted(index.folder.glob("part-*.parquet"))]
    index.index()
    assert before == [path.read_bytes() for path in sorted(index.folder.glob("part-*.parquet"))]
    assert all(index.known())
    assert same(index.lengths(), whole)


def rewrite(part: Path, table: pa.Table, rows_a_group: int) -> None:
    """The part with this table, and what its footer says of it."""
    notes = pq.read_metadata(part).metadata or {}
    kept = {name: note for name, note in notes.items() if name != b"ARROW:schema"}
    pq.write_table(table.replace_schema_metadata(kept), part, row_group_size=rows_a_group)


@pytest.mark.parametrize(
    "damaged",
    [
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: b"",
        lambda data: data[-16:],
        lambda data: data[3:],
        lambda data: data[:-8] + b"lengths9",
        lambda data: data[:-16] + b"\xff" * 8 + data[-8:],
        lambda data: data.replace(b'"part-', b"{part-"),
    ],
    ids=["end", "most", "all", "cells", "begin", "form", "size", "head"],
)
def test_a_file_that_cannot_be_read_is_not_used_and_the_log_says_so(index, caplog, damaged):
    path, whole = index.folder / LENGTHS, index.whole()
    path.write_bytes(damaged(path.read_bytes()))
    assert same(index.lengths(), whole)
    assert f"{LENGTHS} is not used" in caplog.text
    index.index()
    assert all(index.known())


def test_any_byte_that_is_damaged_is_noticed_at_once(index):
    path, rng = index.folder / LENGTHS, Random(7)
    whole = path.read_bytes()
    for _ in range(30):
        data = bytearray(whole)
        data[rng.randrange(cells_bytes(whole))] ^= rng.choice((1, 2, 64, 128, 255))
        path.write_bytes(data)
        for read in (index.lengths, index.rows.details):
            with pytest.raises(
                IndexStaleError, match=r"lengths.bin is damaged.*remove that file and"
            ):
                read()


def test_other_lengths_than_the_parts_have_are_refused_or_sound_and_told_once_all_is_read(index):
    path, rng, refused = index.folder / LENGTHS, Random(8), 0
    whole, right = path.read_bytes(), index.whole()
    head = json.loads(whole[cells_bytes(whole) : -16])
    sizes = [cell[1] for _, _, cells in head for cell in cells]
    starts = np.cumsum([0, *sizes]).tolist()
    for _ in range(30):
        data = bytearray(whole[: cells_bytes(whole)])
        data[rng.randrange(len(data))] ^= rng.choice((1, 2, 64, 128, 255))
        sums = iter([crc32(data[a:b]) for a, b in pairwise(starts)])
        lying = [[n, i, [[r, size, next(sums)] for r, size, _ in cells]] for n, i, cells in head]
        text = json.dumps(lying).encode()
        path.write_bytes(data + text + len(text).to_bytes(8, "little") + whole[-8:])
        try:
            lengths = index.lengths()
            require_sound_lengths(lengths, DEFAULT_LIMITS)
            if same(lengths, right):
                continue  # between the columns and the end of a cell
        except IndexStaleError:
            refused += 1
        with pytest.raises(IndexStaleError, match=r"lengths.bin is damaged.*remove that file and"):
            index.rows.details()
    assert 6 < refused < 30


def cells_bytes(whole: bytes) -> int:
    """Of a file, how many bytes of it are cells."""
    return len(whole) - 16 - int.from_bytes(whole[-16:-8], "little")


@pytest.mark.parametrize(
    "cell",
    [
        ["4", 99, 1],
        [4.5, 99, 1],
        [-4, 99, 1],
        [4, -99, 1],
        [10**9, 99, 1],
        [4, 2**40, 1],
        [float("inf"), 99, 1],
        [],
    ],
)
def test_a_head_that_says_nonsense_is_not_believed(index, caplog, cell):
    path, whole = index.folder / LENGTHS, index.whole()
    data = path.read_bytes()
    head = json.loads(data[cells_bytes(data) : -16])
    head[0][2][0] = cell
    text = json.dumps(head).encode()
    path.write_bytes(data[: cells_bytes(data)] + text + len(text).to_bytes(8, "little") + data[-8:])
    assert same(index.lengths(), whole)
    assert f"{LENGTHS} is not used" in caplog.text


def test_damaged_lengths_are_mended_by_the_next_run(index):
    path, whole = index.folder / LENGTHS, index.whole()
    right = path.read_bytes()
    path.write_bytes(right[:40] + bytes([right[40] ^ 1]) + right[41:])
    index.index()
    assert path.read_bytes() == right
    assert same(index.lengths(), whole)
    index.rows.details()


def divided_otherwise(index: Index, rows_a_group: int) -> None:
    """The same parts in other row groups, as another number of processes leaves them."""
    for path in index.folder.glob("part-*.parquet"):
        rewrite(path, pq.read_table(path).drop_columns([PACKED]), rows_a_group)


@pytest.mark.parametrize("rows_a_group", [1, 3, 100])
def test_it_is_of_the_same_lengths_however_their_rows_are_divided(index, rows_a_group):
    whole = index.whole()
    divided_otherwise(index, rows_a_group)
    for _ in range(2):
        assert all(index.known())
        assert same(index.lengths(), whole)
        assert len(index.rows.details()) == len(whole)
        index.index()


def test_storage_that_does_not_answer_is_no_damage(index, monkeypatch):
    open_file = IndexFolder.open

    def away(folder, name):
        if name == LENGTHS:
            raise StorageAwayError("it does not answer")
        return open_file(folder, name)

    rows = index.rows
    monkeypatch.setattr(IndexFolder, "open", away)
    for read in (rows.lengths, rows.details):
        with pytest.raises(StorageAwayError):
            read()


def test_it_is_opened_once_to_be_compared_or_copied_however_many_parts_there_are(index, parts_read):
    rows = index.rows
    parts_read.clear()
    rows.details()
    assert parts_read.count(LENGTHS) == 2, "its head, then its cells"
    index.write_shard(3, rows=4, words=3)
    for _ in range(2):
        parts_read.clear()
        index.index()
        assert parts_read.count(LENGTHS) == 2


def test_where_it_cannot_be_written_the_index_is_made_without_it(index, monkeypatch, caplog):
    replace = IndexFolder.replace

    def full(folder, name):
        if name == LENGTHS:
            raise OSError(errno.ENOSPC, "No space left on device")
        return replace(folder, name)

    (index.folder / LENGTHS).unlink()
    monkeypatch.setattr(IndexFolder, "replace", full)
    index.index()
    assert "take longer to open" in caplog.text
    assert not any(index.known())
    assert same(index.lengths(), index.whole())


def test_what_a_killed_run_left_of_it_goes_with_the_next(index):
    left = index.folder / f"{LENGTHS}.{'0123' * 8}.tmp"
    left.write_bytes(b"x")
    index.index()
    assert not left.exists()


def test_an_index_whose_lengths_were_written_again_is_not_read_as_the_one_that_was_found(index):
    before = index.found.head
    os.utime(index.folder / LENGTHS, (1, 1))
    assert index.found.head.rows_name != before.rows_name
