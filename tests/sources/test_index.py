"""Building an index: resuming, what is skipped, several processes, failure."""

import contextlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataservice.core.errors import SourceError, StorageAwayError
from dataservice.core.job import ColumnMap, SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.core.sample import ItemKind, RawSample, SampleLengths
from dataservice.sources import index, index_files, part_reader, shared_indexing
from dataservice.sources.catalog import find_index
from dataservice.sources.checksum import sample_checks
from dataservice.sources.formats.parquet_footer import MOST_FOOTER_BYTES
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.registry import list_files
from dataservice.sources.formats.webdataset_tar import WebDatasetTar
from dataservice.sources.index import IndexSummary, build_index
from dataservice.sources.index_folder import MANIFEST, IndexFolder, part_name
from dataservice.sources.index_part import SCHEMA, PartWriter, read_record
from dataservice.sources.manifest import (
    IndexedFile,
    LongSamples,
    MediaCounts,
    Recipe,
    SkippedSample,
)
from dataservice.sources.part_reader import read_part
from dataservice.sources.part_sums import SUMS
from dataservice.sources.reader import SourceReader
from dataservice.sources.soundness import require_bounded
from dataservice.sources.storage import SourceFile
from tests.waiting import wait_for

Spec = Callable[..., SourceSpec]
Write = Callable[..., Path]

MEASURER_MODULE = """
import os
import time
from dataservice.core.sample import SampleLengths

class LengthMeasurer:
    fingerprint = "length-1"
    def measure(self, raw):
        text = raw.record["text"]
        if text == "die":
            os._exit(9)
        while "hold" in text and os.path.exists(os.environ["HOLD"]):
            open(f"{os.environ['HOLD']}.{os.getpid()}", "w").close()
            time.sleep(0.01)
        if "MEASURED" in os.environ:
            with open(os.environ["MEASURED"], "ab", buffering=0) as log:
                log.write(b".")
        return SampleLengths(llm_tokens=len(text), loss_tokens=1)
    def measure_pieces(self, raw):
        return (self.measure(raw),)
"""


class Counting:
    """Wraps a measurer and counts what it measures."""

    def __init__(self, inner: SampleMeasurer) -> None:
        self.inner, self.measured = inner, 0

    @property
    def fingerprint(self) -> str:
        return self.inner.fingerprint

    def measure(self, raw: RawSample) -> SampleLengths:
        self.measured += 1
        return self.inner.measure(raw)

    def measure_pieces(self, raw: RawSample) -> tuple[SampleLengths, ...]:
        return (self.measure(raw),)


@pytest.fixture
def counting(measurer: Callable[[], SampleMeasurer]) -> Counting:
    return Counting(measurer())


@pytest.fixture
def shards(tmp_path: Path, spec: Spec, write_tar: Write) -> SourceSpec:
    """Three tars of four samples, one of them without a usable text."""
    for shard in range(3):
        members = []
        for k in range(4):
            text = b"so bad" if (shard, k) == (1, 2) else b"one two"
            members += [(f"{shard}{k}.jpg", b"J" * k), (f"{shard}{k}.txt", text)]
        write_tar(tmp_path / "data" / f"{shard}.tar", members)
    return spec(tmp_path / "data" / "*.tar", "webdataset", name="shards")


def test_an_index_has_a_row_a_sample_with_its_place_and_lengths(
    tmp_path: Path, shards: SourceSpec, counting: Counting
) -> None:
    summary = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    assert (summary.rows, summary.files, summary.files_reused) == (11, 3, 0)
    parts = sorted((tmp_path / "index" / "shards").glob("part-*.parquet"))
    assert len(parts) == 3
    rows = [row for part in parts for row in pq.ParquetFile(part).read().to_pylist()]
    row = next(row for row in rows if row["key"] == "13")
    assert row["file"] == "1.tar"
    assert row["span_name"] == ["13.jpg", "13.txt"]
    assert row["span_size_bytes"] == [3, 7]
    assert (row["row_group"], row["row"]) == (-1, -1)
    assert (row["llm_tokens"], row["loss_tokens"]) == (6, 2)
    assert row["item_shape"] == [[1, 28, 3, 3]]
    assert not list((tmp_path / "index" / "shards").glob("*.tmp"))


def test_a_bad_sample_is_listed_with_its_reason_and_not_indexed(
    tmp_path: Path, shards: SourceSpec, counting: Counting
) -> None:
    summary = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    (skipped,) = summary.skipped
    assert (skipped.key, Path(skipped.file).name) == ("12", "1.tar")
    assert "the text is bad" in skipped.reason
    folder = tmp_path / "index" / "shards"
    assert json.loads((folder / "left_out.jsonl").read_text()) == asdict(skipped)
    assert json.loads((folder / "manifest.json").read_text())["rows"] == 11


def test_a_manifest_is_as_long_whether_a_few_samples_are_left_out_or_many(
    tmp_path: Path, counting: Counting
) -> None:
    lengths = []
    for bad in (1, 500):
        home = tmp_path / str(bad)
        home.mkdir()
        records = [{"id": f"{n:03d}", "text": "" if n < bad else "a fox"} for n in range(501)]
        (home / "a.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
        spec = SourceSpec(name="texts", format="jsonl", url=str(home / "a.jsonl"))
        build_index(spec, out_dir=str(home / "index"), make_measurer=lambda: counting)
        lines = (home / "index" / "texts" / "left_out.jsonl").read_text().splitlines()
        assert len(lines) == bad
        lengths.append(len((home / "index" / "texts" / "manifest.json").read_text()))
    assert abs(lengths[0] - lengths[1]) < 10


def test_a_second_run_measures_nothing_and_gives_the_same(
    tmp_path: Path, shards: SourceSpec, counting: Counting
) -> None:
    first = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    counting.measured = 0
    again = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    assert counting.measured == 0
    assert again.files_reused == 3
    assert (again.fingerprint, again.rows, again.skipped) == (
        first.fingerprint, first.rows, first.skipped,
    )  # fmt: skip


def test_an_interrupted_run_is_taken_up_where_it_ended(
    tmp_path: Path, shards: SourceSpec, counting: Counting
) -> None:
    def interrupt(rows: int, _done: int, _total: int) -> None:
        if rows > 4:
            raise KeyboardInterrupt

    index = tmp_path / "index" / "shards"
    with pytest.raises(KeyboardInterrupt):
        build_index(
            shards,
            out_dir=str(tmp_path / "index"),
            make_measurer=lambda: counting,
            progress=interrupt,
        )
    assert len(list(index.glob("part-*"))) == 1
    counting.measured = 0
    summary = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    assert (summary.files_reused, counting.measured, summary.rows) == (1, 8, 11)


def test_only_what_changed_is_indexed_again_and_leftovers_go(
    tmp_path: Path, shards: SourceSpec, counting: Counting, write_tar: Write
) -> None:
    before = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    write_tar(tmp_path / "data" / "0.tar", [("new.txt", b"x")])
    (tmp_path / "data" / "2.tar").unlink()
    left = f"{part_name('0.tar')}.{uuid.uuid4().hex}.tmp"
    (tmp_path / "index" / "shards" / left).write_bytes(b"of a killed run")
    counting.measured = 0
    after = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    assert (after.files_reused, counting.measured, after.rows) == (1, 1, 4)
    assert after.fingerprint != before.fingerprint
    kept = [path.name for path in (tmp_path / "index" / "shards").glob("part-*")]
    assert sorted(kept) == sorted(map(part_name, ("0.tar", "1.tar")))


class Failing(Counting):
    """Fails at one sample."""

    def __init__(self, inner: SampleMeasurer, error: Exception) -> None:
        super().__init__(inner)
        self.error = error

    def measure(self, raw: RawSample) -> SampleLengths:
        if raw.key == "11":
            raise self.error
        return super().measure(raw)


def test_a_surprise_of_a_processor_leaves_out_its_sample_alone(
    tmp_path: Path, shards: SourceSpec, counting: Counting
) -> None:
    failing = Failing(counting.inner, KeyError("boxes"))
    summary = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: failing)
    assert summary.rows == 10
    (reason,) = (each.reason for each in summary.skipped if each.key == "11")
    assert re.match(r"measuring it failed .*: KeyError: 'boxes', at line \d+ of test_ind", reason)


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError("the tokenizer's disk is full")])
def test_what_is_no_fault_of_a_sample_leaves_none_out(
    tmp_path: Path, shards: SourceSpec, counting: Counting, error: Exception
) -> None:
    failing = Failing(counting.inner, error)
    with pytest.raises((MemoryError, OSError, SourceError)):
        build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: failing)
    assert not list((tmp_path / "index" / "shards").glob(MANIFEST))


@pytest.mark.parametrize("name", ["part-00000.parquet", "part-0.snappy.parquet", "notes.tmp"])
def test_files_of_others_in_the_folder_of_an_index_stay(
    tmp_path: Path, shards: SourceSpec, counting: Counting, name: str
) -> None:
    theirs = tmp_path / "data" / "shards" / name
    theirs.parent.mkdir()
    theirs.write_bytes(b"a data set of the source's name")
    build_index(shards, out_dir=str(tmp_path / "data"), make_measurer=lambda: counting)
    assert theirs.read_bytes() == b"a data set of the source's name"


def test_a_damaged_part_is_written_again(
    tmp_path: Path, shards: SourceSpec, counting: Counting
) -> None:
    build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    part = next((tmp_path / "index" / "shards").glob("part-*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])
    counting.measured = 0
    summary = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    assert (summary.files_reused, counting.measured) == (2, 4)


def test_rows_of_kept_parts_are_read_again_only_under_other_limits(
    tmp_path: Path, shards: SourceSpec, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def noted(*given: Any) -> Iterator[Any]:
        read.append(given[-1])
        return read_part(*given)

    def run(limits: DecodeLimits) -> int:
        read.clear()
        out_dir = str(tmp_path / "index")
        build_index(shards, out_dir=out_dir, make_measurer=lambda: counting, limits=limits)
        return len(read)

    monkeypatch.setattr(part_reader, "read_part", noted)
    fewer = DecodeLimits(max_media_items=7)
    runs = (DEFAULT_LIMITS, DEFAULT_LIMITS, DEFAULT_LIMITS, fewer, fewer)
    assert [run(limits) for limits in runs] == [0, 3, 0, 3, 0]
    assert counting.measured == 12


def test_sums_that_cannot_be_written_cost_time_alone(
    tmp_path: Path,
    shards: SourceSpec,
    counting: Counting,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "index" / "shards"
    build = partial(
        build_index, shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting
    )

    @contextlib.contextmanager
    def full(folder: IndexFolder, name: str) -> Iterator[Any]:
        with replace_file(folder, name) as stream:
            yield stream
            if name == SUMS:
                raise OSError("the disk is full")

    replace_file = IndexFolder.replace
    monkeypatch.setattr(IndexFolder, "replace", full)
    first = build()
    assert build().fingerprint == first.fingerprint
    assert "will read all rows again: the disk is full" in caplog.text
    assert not (folder / SUMS).exists()


@pytest.mark.parametrize("sums", ["kept", "", "[]", "{}", '{"sha256": 7}', '{"judged_by": []}'])
def test_a_part_with_other_rows_than_it_says_is_written_again(
    tmp_path: Path, shards: SourceSpec, counting: Counting, sums: str
) -> None:
    first = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    folder = tmp_path / "index" / "shards"
    if sums == "kept":
        build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
        assert len(json.loads((folder / SUMS).read_text())["sha256"]) == 3
    else:
        (folder / SUMS).write_text(sums)
    part = folder / part_name("0.tar")
    other_rows(part)
    damaged = part.read_bytes()
    for _ in range(2):  # the second time it is as it was when the first run wrote it again
        counting.measured = 0
        again = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
        assert (again.files_reused, counting.measured) == (2, 4)
        assert again.fingerprint == first.fingerprint
        part.write_bytes(damaged)


def test_another_measurer_measures_all_again(
    tmp_path: Path, shards: SourceSpec, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    monkeypatch.setattr(type(counting.inner), "fingerprint", "words-2")
    second = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    assert second.files_reused == 0
    assert second.fingerprint != first.fingerprint


def test_progress_ends_with_all_rows_and_bytes(
    tmp_path: Path, shards: SourceSpec, counting: Counting
) -> None:
    told: list[tuple[int, int, int]] = []
    build_index(
        shards,
        out_dir=str(tmp_path / "index"),
        make_measurer=lambda: counting,
        progress=lambda *numbers: told.append(numbers),
    )
    size_bytes = sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    assert told[0] == (0, 0, size_bytes)
    assert told[-1] == (12, size_bytes, size_bytes)
    assert told == sorted(told)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1500])


def test_damaged_files_stop_no_other_and_are_all_named_in_one_run(
    tmp_path: Path, shards: SourceSpec, counting: Counting, write_tar: Write
) -> None:
    cut(tmp_path / "data" / "0.tar")
    write_tar(tmp_path / "data" / "3.tar", [("x" * 3_000_000, b""), ("a.txt", b"one")])
    (tmp_path / "data" / "4.tar").write_bytes(b"\x1f\x8b" + bytes(600))
    with pytest.raises(SourceError) as caught:
        build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    said = str(caught.value)
    assert "3 of its 5 files cannot be read" in said
    for line in ("0.tar: .*truncated", "3.tar: .*max_header_bytes", "4.tar: .*compressed"):
        assert re.search(line, said)
    assert "1.tar" not in said
    assert "--leave-out-damaged" in said
    assert len(list((tmp_path / "index" / "shards").glob("part-*"))) == 2
    assert not (tmp_path / "index" / "shards" / "manifest.json").exists()


def test_damaged_files_are_left_out_when_that_is_asked_for(
    tmp_path: Path, shards: SourceSpec, counting: Counting
) -> None:
    whole = build_index(shards, out_dir=str(tmp_path / "whole"), make_measurer=lambda: counting)
    cut(tmp_path / "data" / "0.tar")
    summary = build_index(
        shards,
        out_dir=str(tmp_path / "index"),
        make_measurer=lambda: counting,
        leave_out_damaged=True,
    )
    (file,) = summary.left_out
    assert file.name == "0.tar"
    assert "truncated" in file.reason
    assert (summary.rows, summary.files) == (7, 2)
    catalog = find_index([shards], str(tmp_path / "index"), counting.fingerprint).read()
    assert catalog.samples == 7  # and 0.tar is not taken for a new file
    manifest = json.loads((tmp_path / "index" / "shards" / "manifest.json").read_text())
    assert [each["name"] for each in manifest["left_out_files"]] == ["0.tar"]
    # The choice is part of the identity: without the file altogether it is another.
    (tmp_path / "data" / "0.tar").unlink()
    without = build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    assert len({whole.fingerprint, summary.fingerprint, without.fingerprint}) == 3


def test_a_false_parquet_footer_is_damage(
    tmp_path: Path, spec: Spec, write_parquet: Write, counting: Counting
) -> None:
    for name in ("a", "b"):
        write_parquet(tmp_path / "data" / f"{name}.parquet", {"text": ["one"]})
    (tmp_path / "data" / "b.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    source = spec(tmp_path / "data", "parquet")
    with pytest.raises(SourceError, match=r"1 of its 2 files cannot be read.*\n  b\.parquet: "):
        build_index(source, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)


def test_a_misspelt_column_is_no_damage_to_be_left_out(
    tmp_path: Path, spec: Spec, write_parquet: Write, counting: Counting
) -> None:
    for name in ("a", "b"):
        write_parquet(tmp_path / "data" / f"{name}.parquet", {"note": ["x"], "caption": ["one"]})
    source = spec(tmp_path / "data", "parquet", columns=ColumnMap(caption="capton"))
    with pytest.raises(SourceError, match="not one of its 2 files can be read") as caught:
        build_index(source, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    said = str(caught.value)
    assert "no column 'capton', which columns.caption of the source names" in said
    assert "caption, note" in said
    assert "--leave-out-damaged" not in said


@pytest.mark.parametrize("held", ["parquet", "arrow", "jsonl", "json", "webdataset"])
@pytest.mark.parametrize("named", ["parquet", "arrow", "jsonl", "json", "webdataset", "mds"])
def test_a_file_of_another_format_is_told_by_its_own(
    tmp_path: Path, spec: Spec, counting: Counting, write_tar: Write, held: str, named: str
) -> None:
    table, path = pa.table({"text": ["one"]}), tmp_path / "data"
    if held == "parquet":
        pq.write_table(table, path)
    elif held == "arrow":
        with pa.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    elif held == "webdataset":
        write_tar(path, [("a.txt", b"one")])
    else:
        path.write_text('{"text": "one"}' if held == "jsonl" else '[{"text": "one"}]')
    source = spec(path, named)
    if held == named:
        build_index(source, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
        return
    with pytest.raises(SourceError, match=f"format: {held}") as caught:
        build_index(source, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)
    assert str(caught.value).count(f"format: {held}") == 1


def test_storage_that_is_away_is_no_damage_and_cannot_be_left_out(
    tmp_path: Path, shards: SourceSpec, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_format: object, file: SourceFile) -> Iterator[ScannedSample]:
        raise ConnectionResetError(104, "reset by peer", file.path)
        yield

    monkeypatch.setattr(WebDatasetTar, "scan", away)
    with pytest.raises(StorageAwayError, match=r"0\.tar cannot be read: ConnectionResetError"):
        build_index(
            shards,
            out_dir=str(tmp_path / "index"),
            make_measurer=lambda: counting,
            leave_out_damaged=True,
        )


def test_the_summary_counts_media_tokens_and_reasons(
    tmp_path: Path, spec: Spec, write_tar: Write, counting: Counting
) -> None:
    members: list[tuple[str, bytes]] = []
    for k in range(100):
        members += [(f"{k:03}.jpg", b"J")] if k % 2 else []
        members += [(f"{k:03}.mp4", b"V")] if k % 5 == 0 else []
        members += [(f"{k:03}.wav", b"W")] if k % 10 == 0 else []
        members += [(f"{k:03}.txt", b"word " * (k + 1))]
    members += [(f"{k}.json", b"{not json}") for k in range(1000, 1007)] + [("z.txt", b"bad")]
    source = spec(write_tar(tmp_path / "data" / "a.tar", members), "webdataset")
    for _ in range(2):  # the second reuses the part, and counts it too
        found = build_index(source, out_dir=str(tmp_path / "i"), make_measurer=lambda: counting)
        assert found.media == MediaCounts(images=50, clips=20, recordings=10)
        lengths = [k + 1 + 4 * (k % 2) + 4 * (k % 5 == 0) + 2 * (k % 10 == 0) for k in range(100)]
        tokens = found.tokens
        assert (tokens.total, tokens.longest) == (sum(lengths), max(lengths))
        assert (tokens.p50, tokens.p99) == (sorted(lengths)[49], sorted(lengths)[98])
        assert [each.samples for each in found.skipped_reasons] == [7, 1]
        assert found.skipped_reasons[0].reason.startswith("member … is not valid JSON (Expecting")


def test_the_summary_counts_what_is_learnt_and_the_samples_without_any(
    tmp_path: Path, spec: Spec, write_tar: Write, measurer: Callable[[], SampleMeasurer]
) -> None:
    class Learning(Counting):
        def measure(self, raw: RawSample) -> SampleLengths:
            return replace(super().measure(raw), loss_tokens=0 if int(raw.key) < 30 else 3)

    members = [(f"{k:03}.txt", b"word " * 9) for k in range(100)]
    source = spec(write_tar(tmp_path / "data" / "a.tar", members), "webdataset")
    found = build_index(
        source, out_dir=str(tmp_path / "i"), make_measurer=lambda: Learning(measurer())
    )
    assert (found.tokens.learnt, found.tokens.unlearnt) == (3 * 70, 30)


def test_what_is_known_of_an_item_is_in_the_index_and_in_no_comparison(
    tmp_path: Path, spec: Spec, write_tar: Write, counting: Counting
) -> None:
    class Noting(Counting):
        def measure(self, raw: RawSample) -> SampleLengths:
            lengths = super().measure(raw)
            (item,) = lengths.items
            noted = replace(
                item,
                kind=ItemKind.CLIP,
                grid=(2, 2, 4, 2),
                seconds_per_patch=0.5,
                key_frames_s=(0.0, 1.5),
            )
            assert noted == item
            return replace(lengths, items=(noted,))

    members = [("a.mp4", b"V"), ("a.txt", b"word")]
    source = spec(write_tar(tmp_path / "a.tar", members), "webdataset")
    noting = Noting(counting.inner)
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=lambda: noting)
    (part,) = (tmp_path / "index" / "src").glob("part-*")
    (row,) = pq.read_table(part).to_pylist()
    assert row["item_kind"] == [1]
    assert row["item_grid"] == [[2, 2, 4, 2]]
    assert (row["item_seconds_per_patch"], row["item_key_frames_s"]) == ([0.5], [[0.0, 1.5]])
    assert row["content"] == sample_checks(SourceReader([source]).read(
        find_index([source], str(tmp_path / "index"), "words-1").read().details(np.array([0]))[0][0]
    ))[1]  # fmt: skip


def test_a_source_of_which_no_sample_can_be_used_is_refused_with_reasons(
    tmp_path: Path, spec: Spec, write_jsonl: Write, counting: Counting
) -> None:
    bad = [{"id": f"k{number}", "text": "bad"} for number in range(1, 8)]
    path = write_jsonl(tmp_path / "a.jsonl", [*bad, {"text": ""}])
    with pytest.raises(SourceError) as error:
        build_index(
            spec(path, "jsonl"), out_dir=str(tmp_path / "index"), make_measurer=lambda: counting
        )
    said, *reasons, remedy = str(error.value).splitlines()
    assert said == "source 'src': not one of its 8 samples can be used:"
    assert [line.split(" × ")[0].strip() for line in reasons] == ["7", "1"]
    assert "bad" in reasons[0]
    assert reasons[0].endswith(" First: src/k1")
    assert "has 0 tokens" in reasons[1]
    assert (
        remedy
        == "Mend what the reasons name, or correct the source's format or the job's pipeline."
    )
    assert not (tmp_path / "index" / "src" / "manifest.json").exists()


def test_a_source_without_samples_is_refused(
    tmp_path: Path, spec: Spec, write_tar: Write, counting: Counting
) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.npy", b"x")])
    with pytest.raises(SourceError, match="is empty: its 1 files"):
        build_index(
            spec(path, "webdataset"), out_dir=str(tmp_path / "i"), make_measurer=lambda: counting
        )


def test_an_index_that_cannot_be_written_is_named(
    tmp_path: Path, shards: SourceSpec, counting: Counting
) -> None:
    (tmp_path / "index").write_text("a file")
    with pytest.raises(SourceError, match=r"index of source 'shards': .*cannot be created"):
        build_index(shards, out_dir=str(tmp_path / "index"), make_measurer=lambda: counting)


def test_an_index_inside_its_own_source_is_refused(
    tmp_path: Path, spec: Spec, write_parquet: Write, counting: Counting
) -> None:
    write_parquet(tmp_path / "a.parquet", {"text": ["one"]})
    source, index = spec(tmp_path, "parquet"), str(tmp_path / "index")
    build_index(source, out_dir=index, make_measurer=lambda: counting)
    with pytest.raises(SourceError, match=r"takes in its own index.*outside of the source"):
        build_index(source, out_dir=index, make_measurer=lambda: counting)


def test_an_index_may_lie_at_any_url(shards: SourceSpec, counting: Counting) -> None:
    build_index(shards, out_dir="memory://test-index", make_measurer=lambda: counting)
    catalog = find_index([shards], "memory://test-index", counting.fingerprint).read()
    assert catalog.samples == 11


@pytest.fixture
def spawnable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], SampleMeasurer]:
    """A measurer in a module that other processes can import."""
    (tmp_path / "spawned_measurer.py").write_text(MEASURER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spawned_measurer", raising=False)
    import spawned_measurer  # type: ignore[import-not-found]

    return spawned_measurer.LengthMeasurer  # type: ignore[no-any-return]


@pytest.fixture
def pool_for_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_files, "SMALLEST_POOLED_BYTES", 0)


def indexed_alike(
    folder: Path, source: SourceSpec, measurer: Callable[[], SampleMeasurer]
) -> IndexSummary:
    """The source indexed by one process and by two, which must come to the same."""
    told: list[tuple[int, int, int]] = []
    build = partial(build_index, source, make_measurer=measurer)
    one = build(out_dir=str(folder / "one"))
    two = build(
        out_dir=str(folder / "two"), workers=2, progress=lambda *numbers: told.append(numbers)
    )
    assert replace(two, seconds=one.seconds) == one
    assert told[-1] == (one.rows + len(one.skipped), told[-1][2], told[-1][2])
    names = [sorted(path.name for path in (folder / d / "src").iterdir()) for d in ("one", "two")]
    assert names[0] == names[1], "nothing is left behind"
    catalogs = [find_index([source], str(folder / d), "length-1").read() for d in ("one", "two")]
    ids = np.arange(one.rows)
    assert catalogs[0].details(ids) == catalogs[1].details(ids)
    return two


@pytest.mark.usefixtures("pool_for_any_size")
def test_several_processes_give_the_same_index_as_one(
    tmp_path: Path, spec: Spec, write_jsonl: Write, spawnable: Callable[[], SampleMeasurer]
) -> None:
    for k in range(5):
        write_jsonl(tmp_path / "data" / f"{k}.jsonl", [{"text": "x" * (k + 1)}] * (200 * k + 3))
    indexed_alike(tmp_path, spec(tmp_path / "data", "jsonl"), spawnable)


@pytest.mark.usefixtures("pool_for_any_size")
def test_several_processes_index_one_large_file_as_one_process_does(
    tmp_path: Path,
    spec: Spec,
    write_jsonl: Write,
    spawnable: Callable[[], SampleMeasurer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_indexing, "SMALLEST_PIECE_BYTES", 1000)
    records: list[dict[str, object]] = [{"text": "x" * (k % 90 + 1)} for k in range(2000)]
    for k in (3, 700, 1999):
        records[k] = {"text": "x", "image": "absent.jpg"}
    write_jsonl(tmp_path / "data" / "large.jsonl", records)
    write_jsonl(tmp_path / "data" / "small.jsonl", records[:5])
    made = indexed_alike(tmp_path, spec(tmp_path / "data", "jsonl"), spawnable)
    assert len(made.skipped) == 4
    groups = pq.ParquetFile(tmp_path / "two" / "src" / part_name("large.jsonl")).num_row_groups
    assert groups > 4, "its pieces were indexed each for itself"


@pytest.mark.usefixtures("pool_for_any_size")
def test_several_processes_index_one_large_file_of_row_groups_as_one_process_does(
    tmp_path: Path,
    spec: Spec,
    write_parquet: Write,
    spawnable: Callable[[], SampleMeasurer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_indexing, "SMALLEST_PIECE_BYTES", 1000)
    texts = [f"{k} " * (k % 90 + 1) for k in range(500)]
    write_parquet(tmp_path / "data" / "large.parquet", {"text": texts})
    indexed_alike(tmp_path, spec(tmp_path / "data", "parquet"), spawnable)
    part = pq.ParquetFile(tmp_path / "two" / "src" / part_name("large.parquet"))
    assert part.num_row_groups > 4, "its pieces were indexed each for itself"


@pytest.fixture
def three_large(
    tmp_path: Path, spec: Spec, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> SourceSpec:
    """Files that two processes share, each as several pieces."""
    monkeypatch.setattr(index_files, "SMALLEST_POOLED_BYTES", 0)
    monkeypatch.setattr(shared_indexing, "SMALLEST_PIECE_BYTES", 1000)
    for k in range(3):
        write_jsonl(tmp_path / "data" / f"{k}.jsonl", [{"text": "x" * 50}] * 600)
    return spec(tmp_path / "data", "jsonl")


def interrupt_all() -> None:
    """As Ctrl-C in a terminal does: it reaches every process of the run."""
    for child in multiprocessing.active_children():
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
    raise KeyboardInterrupt


def test_an_interrupted_run_finishes_what_is_under_way_and_begins_nothing_more(
    tmp_path: Path,
    spec: Spec,
    write_jsonl: Write,
    spawnable: Callable[[], SampleMeasurer],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(index_files, "SMALLEST_POOLED_BYTES", 0)
    for k in range(8):
        write_jsonl(tmp_path / "data" / f"{k}.jsonl", [{"text": "x" * 50}] * 5_000)
    index, at_interrupt = tmp_path / "index" / "src", list[int]()

    def interrupt(rows: int, done_bytes: int, total_bytes: int) -> None:
        if rows:
            at_interrupt.append(len(list(index.glob("part-*.parquet"))))
            interrupt_all()

    build = partial(build_index, spec(tmp_path / "data", "jsonl"), make_measurer=spawnable)
    with pytest.raises(KeyboardInterrupt):
        build(workers=2, out_dir=str(tmp_path / "index"), progress=interrupt)
    kept = len(list(index.glob("part-*.parquet")))
    assert max(1, at_interrupt[0]) <= kept <= at_interrupt[0] + 4, "two under way, not all eight"
    assert "finished first" in caplog.text
    assert build(out_dir=str(tmp_path / "index")).files_reused == kept


def test_shared_files_that_are_finished_when_a_run_is_interrupted_are_kept(
    tmp_path: Path, three_large: SourceSpec, spawnable: Callable[[], SampleMeasurer]
) -> None:
    index = tmp_path / "index" / "src"

    def interrupt(rows: int, done_bytes: int, total_bytes: int) -> None:
        if any(path.name.endswith(".parquet") for path in index.glob("part-*")):
            interrupt_all()

    build = partial(build_index, three_large, make_measurer=spawnable, workers=2)
    with pytest.raises(KeyboardInterrupt):
        build(out_dir=str(tmp_path / "index"), progress=interrupt)
    left = [path.name for path in index.glob("part-*")]
    assert left
    whole = [name for name in left if name.endswith(".parquet")]
    assert whole
    again = build(out_dir=str(tmp_path / "index"))
    assert (again.files_reused, again.pieces_reused) == (len(whole), len(left) - len(whole))


class Begun:
    """A large file that two processes share, until both wait at samples of its later part, and what
    they have left of it then: pieces, and no part."""

    def __init__(self, folder: Path, source: SourceSpec, measurer: type[SampleMeasurer]) -> None:
        self.source, self.measurer = source, measurer
        self.out, self.index = folder / "index", folder / "index" / "src"
        self.hold, self.log = folder / "hold", folder / "measured"

    def pieces(self) -> list[Path]:
        return sorted(self.index.glob("part-*.parquet.*-*[0-9]"))

    def in_its_midst(self) -> bool:
        """Whether both processes wait."""
        return len(list(self.hold.parent.glob("hold.*"))) == 2

    def samples(self, pieces: Sequence[Path] | None = None) -> int:
        """Of these pieces, or of all: those that were measured."""
        found = self.pieces() if pieces is None else pieces
        with contextlib.ExitStack() as opened:
            records = [read_record(opened.enter_context(piece.open("rb"))) for piece in found]
        return sum(record.rows + len(record.skipped) for record in records if record)

    def interrupt(self, *_: int) -> None:
        if self.hold.exists() and self.in_its_midst():
            self.hold.unlink()  # what is begun is finished, and kept too
            interrupt_all()

    def build(self, **options: Any) -> IndexSummary:
        made = {"out_dir": str(self.out), "make_measurer": self.measurer, **options}
        return build_index(self.source, **made)

    def leave_pieces(self) -> int:
        """The samples of the pieces that an interrupted run leaves."""
        with pytest.raises(KeyboardInterrupt):
            self.build(workers=2, progress=self.interrupt)
        assert not list(self.index.glob("*.parquet"))
        self.log.unlink()
        assert 0 < self.samples() < BEGUN
        return self.samples()

    def measured(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0

    def require_as_in_one_go(self, made: IndexSummary) -> None:
        """The index is the one that one run makes, and no piece is left of it."""
        one = self.build(out_dir=str(self.out.parent / "one"))
        assert replace(made, seconds=0, pieces_reused=0) == replace(one, seconds=0)
        folders = [self.index, self.out.parent / "one" / "src"]
        names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
        assert names[0] == names[1], "nothing is left behind"
        manifests = [(folder / MANIFEST).read_text() for folder in folders]
        assert manifests[0] == manifests[1], "the digests of contents and places among it"
        catalogs = [
            find_index([self.source], str(folder.parent), self.measurer.fingerprint).read()
            for folder in folders
        ]
        ids = np.arange(one.rows)
        assert catalogs[0].details(ids) == catalogs[1].details(ids)


BEGUN = 600  # samples


def begun_texts() -> list[str]:
    texts = [f"text {k} ".ljust(k % 30 + 20, "x") for k in range(BEGUN)]
    texts = [text if k < 200 else f"{text} hold" for k, text in enumerate(texts)]
    texts[3] = texts[450] = ""  # which cannot be used
    return texts


@pytest.fixture(params=["jsonl", "parquet"])
def begun(
    tmp_path: Path,
    spec: Spec,
    write_jsonl: Write,
    write_parquet: Write,
    spawnable: type[SampleMeasurer],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Begun:
    monkeypatch.setattr(index_files, "SMALLEST_POOLED_BYTES", 0)
    monkeypatch.setattr(shared_indexing, "SMALLEST_PIECE_BYTES", 1000)
    monkeypatch.setenv("HOLD", str(tmp_path / "hold"))
    monkeypatch.setenv("MEASURED", str(tmp_path / "measured"))
    (tmp_path / "hold").touch()
    if request.param == "jsonl":
        write_jsonl(tmp_path / "data" / "large.jsonl", [{"text": text} for text in begun_texts()])
    else:
        write_parquet(tmp_path / "data" / "large.parquet", {"text": begun_texts()})
    return Begun(tmp_path, spec(tmp_path / "data", request.param), spawnable)


only_lines = pytest.mark.parametrize("begun", ["jsonl"], indirect=True)

KILLED_RUN = """
import pickle, sys
from dataservice.sources import index_files, shared_indexing
from dataservice.sources.index import build_index

if __name__ == "__main__":
    from spawned_measurer import LengthMeasurer
    index_files.SMALLEST_POOLED_BYTES = 0
    shared_indexing.SMALLEST_PIECE_BYTES = 1000
    source, out = pickle.loads(bytes.fromhex(sys.argv[1])), sys.argv[2]
    build_index(source, out_dir=out, make_measurer=LengthMeasurer, workers=2)
"""


def test_a_run_that_is_killed_amid_a_large_file_is_taken_up_behind_its_pieces(
    tmp_path: Path, begun: Begun
) -> None:
    (tmp_path / "killed_run.py").write_text(KILLED_RUN)
    arguments = [pickle.dumps(begun.source).hex(), str(begun.out)]
    running = subprocess.Popen(
        [sys.executable, str(tmp_path / "killed_run.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )
    with running:
        wait_for(lambda: begun.in_its_midst() or running.poll() is not None)
        assert running.poll() is None, "it is in the midst of it"
        processes = psutil.Process(running.pid).children(recursive=True)
        running.kill()
    assert len(processes) >= 2
    assert not psutil.wait_procs(processes, timeout=60)[1], "none of them writes beside the next"
    left, pieces = begun.samples(), begun.pieces()
    begun.log.unlink()
    begun.hold.unlink()
    told: list[tuple[int, int, int]] = []
    made = begun.build(workers=3, progress=lambda *numbers: told.append(numbers))
    assert 0 < begun.measured() == BEGUN - left < BEGUN
    assert made.pieces_reused == len(pieces)
    assert told[-1] == (BEGUN - left, told[0][2], told[0][2]), "all that was to be done"
    begun.require_as_in_one_go(made)


@only_lines
def test_a_single_process_takes_up_what_several_have_left(begun: Begun) -> None:
    left = begun.leave_pieces()
    made = begun.build(workers=1)
    assert begun.measured() == BEGUN - left
    begun.require_as_in_one_go(made)


@only_lines
def test_a_file_of_which_all_pieces_are_left_is_only_joined(begun: Begun) -> None:
    begun.hold.unlink()

    def interrupt(rows: int, done_bytes: int, total_bytes: int) -> None:
        if done_bytes == total_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        begun.build(workers=2, progress=interrupt)
    assert begun.measured() == BEGUN
    pieces = len(begun.pieces())
    made = begun.build(workers=2)
    assert (begun.measured(), made.pieces_reused) == (BEGUN, pieces)
    begun.require_as_in_one_go(made)


def cut_off(piece: Path) -> None:
    piece.write_bytes(piece.read_bytes()[:-20])


def other_rows(piece: Path) -> None:
    """Rows that fit no more what the piece says of them."""
    with pq.ParquetFile(piece) as part:
        rows, said = part.read(), part.metadata.metadata
    kept = rows.take([1, 0, *range(2, rows.num_rows)])
    pq.write_table(kept.replace_schema_metadata(said), piece)


@only_lines
@pytest.mark.parametrize("damage", [cut_off, other_rows])
def test_a_damaged_piece_that_was_left_is_made_again(
    begun: Begun, damage: Callable[[Path], None]
) -> None:
    begun.leave_pieces()
    first, damaged, *others = begun.pieces()
    left = begun.samples([first, *others])
    damage(damaged)
    made = begun.build(workers=2)
    assert (begun.measured(), made.pieces_reused) == (BEGUN - left, len(others) + 1)
    begun.require_as_in_one_go(made)


@only_lines
def test_no_piece_is_used_of_a_file_that_has_changed_since(begun: Begun, tmp_path: Path) -> None:
    begun.leave_pieces()
    data = tmp_path / "data" / "large.jsonl"
    data.write_text(data.read_text().replace("text 7 ", "next 7 "))
    made = begun.build(workers=2)
    assert (begun.measured(), made.pieces_reused) == (BEGUN, 0)
    begun.require_as_in_one_go(made)


@only_lines
def test_no_piece_is_used_of_another_recipe(begun: Begun) -> None:
    begun.leave_pieces()
    begun.source = replace(begun.source, ignore=("url",))
    made = begun.build(workers=2)
    assert (begun.measured(), made.pieces_reused) == (BEGUN, 0)
    begun.require_as_in_one_go(made)


@only_lines
def test_pieces_of_a_file_that_is_gone_go_when_a_run_completes(
    begun: Begun, tmp_path: Path, write_jsonl: Write
) -> None:
    begun.leave_pieces()
    (tmp_path / "data" / "large.jsonl").unlink()
    write_jsonl(tmp_path / "data" / "other.jsonl", [{"text": "x"}])
    begun.require_as_in_one_go(begun.build())


@pytest.mark.parametrize("workers", [1, 2])
def test_a_large_file_that_is_gone_is_left_out_whoever_reads_it(
    tmp_path: Path,
    three_large: SourceSpec,
    spawnable: Callable[[], SampleMeasurer],
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
) -> None:
    def gone(spec: SourceSpec) -> Sequence[SourceFile]:
        files = list_files(spec)
        (tmp_path / "data" / "1.jsonl").unlink()
        return files

    monkeypatch.setattr(index, "list_files", gone)
    out = {"out_dir": str(tmp_path / "index"), "make_measurer": spawnable, "workers": workers}
    with pytest.raises(
        SourceError, match=r"(?s)1 of its 3 files cannot be read; the others are.*1.js"
    ):
        build_index(three_large, **out)
    assert len(list((tmp_path / "index" / "src").glob("part-*.parquet"))) == 2


def test_a_file_of_which_much_is_left_out_has_an_index_that_opens(
    tmp_path: Path, spec: Spec, write_jsonl: Write, measurer: Callable[[], SampleMeasurer]
) -> None:
    """What is left out stands in the part's footer."""
    bad = [{"id": f"{k:0500}", "text": "bad"} for k in range(18_000)]
    source = spec(write_jsonl(tmp_path / "a.jsonl", [{"text": "good"}, *bad]), "jsonl")
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    assert find_index([source], str(tmp_path / "index"), "words-1").read().samples == 1


def test_a_part_of_half_a_million_left_out_samples_can_be_read_again(tmp_path: Path) -> None:
    """In plain text its footer had 75 MB, above what readers take: each run made it anew."""
    why = "the record has neither text nor messages, which a sample of this format needs"
    skipped = [SkippedSample(file="a.jsonl", key=f"{k:012}", reason=why) for k in range(500_000)]
    path = tmp_path / "part"
    with path.open("wb") as stream, PartWriter(stream) as writer:
        writer.write(SCHEMA.empty_table())
        made = writer.finish(
            recipe=Recipe.of(SourceSpec(name="src", url="a.jsonl", format="jsonl"), "words-1"),
            file=IndexedFile(name="a.jsonl", size_bytes=1, version="1"),
            media=MediaCounts(),
            skipped=skipped,
            long=LongSamples(),
        )
    assert len(made.to_json()) > MOST_FOOTER_BYTES
    with path.open("rb") as stream:
        require_bounded(stream, DEFAULT_LIMITS)
        assert read_record(stream) == made


@pytest.mark.usefixtures("pool_for_any_size")
def test_a_process_that_dies_gives_an_error_and_not_a_hang(
    tmp_path: Path, spec: Spec, write_jsonl: Write, spawnable: Callable[[], SampleMeasurer]
) -> None:
    for k in range(3):
        write_jsonl(tmp_path / "data" / f"{k}.jsonl", [{"text": "die" if k == 1 else "live"}])
    with pytest.raises(SourceError, match=r"one of 2 indexing processes died"):
        build_index(
            spec(tmp_path / "data", "jsonl"),
            out_dir=str(tmp_path / "index"),
            make_measurer=spawnable,
            workers=2,
        )


@pytest.mark.usefixtures("pool_for_any_size")
def test_a_process_that_dies_while_files_are_handed_out_gives_the_same_error(
    tmp_path: Path,
    spec: Spec,
    write_jsonl: Write,
    spawnable: Callable[[], SampleMeasurer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Dying(ProcessPoolExecutor):
        """One of its processes dies behind the first file."""

        submitted = 0

        def submit(self, *given: Any, **named: Any) -> Future[Any]:
            self.submitted += 1
            if self.submitted > 1:
                raise BrokenProcessPool("a child process terminated abruptly")
            return super().submit(*given, **named)

    monkeypatch.setattr(index_files, "ProcessPoolExecutor", Dying)
    for k in range(3):
        write_jsonl(tmp_path / "data" / f"{k}.jsonl", [{"text": "live"}])
    with pytest.raises(SourceError, match=r"one of 2 indexing processes died"):
        build_index(
            spec(tmp_path / "data", "jsonl"),
            out_dir=str(tmp_path / "index"),
            make_measurer=spawnable,
            workers=2,
        )
