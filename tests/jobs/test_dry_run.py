"""A dry run says of the beginning of each file what an index would, and leaves nothing behind."""

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from dataservice.jobs.dry_run import dry_run
from dataservice.jobs.indexing import index_job
from tests.jobs.corpus import BAD, USABLE, job_of, write_job


def files_below(folder):
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def dry(home, rows, **options):
    return dry_run(job_of(home), samples_per_file=rows, custom_processors={}, **options)


def test_a_dry_run_over_whole_files_says_what_their_index_says(home):
    done = dry(home, 1000)
    summaries = index_job(job_of(home), custom_processors={})
    assert [replace(each, seconds=0.0) for each in done.summaries] == [
        replace(each, seconds=0.0) for each in summaries
    ]
    assert done.read_bytes == done.total_bytes > 0
    assert done.problem == ""


def test_only_the_beginning_of_each_file_is_measured(home):
    (home / "more.jsonl").write_text('{"text": "the cat"}\n' * 500)
    write_job(home, sources=[{"name": "talks", "format": "jsonl", "url": "*.jsonl"}])
    seen = []
    done = dry(home, 4, progress=lambda *told: seen.append(told))
    (talks,) = done.summaries
    assert talks.files == 2
    assert talks.rows + len(talks.skipped) == 8
    assert {each.key for each in talks.skipped} == set(BAD)
    assert (talks.media.images, talks.media.clips, talks.media.recordings) == (1, 1, 0)
    lines = (home / "talks.jsonl").read_bytes().splitlines(keepends=True)
    read = sum(map(len, lines[:4])) + 4 * len('{"text": "the cat"}\n')
    assert done.read_bytes == read < done.total_bytes
    assert seen[-1][2:] == (done.read_bytes, done.total_bytes)


def test_nothing_is_written(home, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    before = files_below(tmp_path)
    dry(home, 3)
    assert files_below(tmp_path) == before
    assert not (home / "index").exists()


def test_an_index_that_is_there_is_neither_used_nor_touched(home):
    index_job(job_of(home), custom_processors={})
    before = {path: path.read_bytes() for path in files_below(home / "index")}
    done = dry(home, 2)
    assert [each.files_reused for each in done.summaries] == [0, 0]
    assert done.summaries[0].rows < len(USABLE)
    assert {path: path.read_bytes() for path in files_below(home / "index")} == before


def test_damaged_files_are_named_beside_the_others(home):
    (home / "bad.jsonl").write_text("[1]")
    write_job(home, sources=[{"name": "talks", "format": "jsonl", "url": "*.jsonl"}])
    done = dry(home, 3)
    assert [file.name for file in done.summaries[0].left_out] == ["bad.jsonl"]
    assert done.problem == ""


def test_a_source_without_one_whole_file_names_all_of_them_and_stops_no_other(home):
    (home / "talks.jsonl").write_text("[1]")
    done = dry(home, 3)
    assert [each.source for each in done.summaries] == ["pages"]
    assert "source 'talks': not one of its 1 files can be read" in done.problem
    assert "one JSON array" in done.problem


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_parquet_is_cut_inside_of_its_row_groups(home, rows):
    assert dry(home, rows).summaries[-1].rows == rows
