"""Rows of an index that were read once are found again, by the same team, of the same parts."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scale.made_job import hand_over
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.sources.catalog import FoundIndex, IndexedCatalog, find_index
from dataservice.sources.catalog_handover import RowFiles
from dataservice.sources.index import build_index
from dataservice.sources.index_cache import DETAILS, LENGTHS, IndexCache

TEAM = "red"
GIB = 2**30
Find = Callable[..., FoundIndex]


@pytest.fixture
def source(
    tmp_path: Path, spec: Callable[..., SourceSpec], write_jsonl: Callable[..., Path]
) -> SourceSpec:
    """Texts in three files."""
    for number in range(3):
        records = [{"text": "word " * (k % 7 + 1)} for k in range(20 + number)]
        write_jsonl(tmp_path / "data" / f"{number}.jsonl", records)
    return spec(tmp_path / "data" / "*.jsonl", "jsonl", name="texts")


@pytest.fixture
def find(tmp_path: Path, source: SourceSpec, measurer: Callable[[], SampleMeasurer]) -> Find:
    """Finds the index of these texts, which is written first."""
    index_dir = str(tmp_path / "index")
    build_index(source, out_dir=index_dir, make_measurer=measurer)

    def found(limits: DecodeLimits = DEFAULT_LIMITS) -> FoundIndex:
        return find_index([source], index_dir, measurer().fingerprint, limits=limits)

    return found


@pytest.fixture
def cache(tmp_path: Path) -> IndexCache:
    return IndexCache(tmp_path / "cache", GIB)


def keep(cache: IndexCache, found: FoundIndex, team: str = TEAM) -> IndexedCatalog:
    """Read what was found and keep it."""
    catalog = found.read(cache.folder)
    files = hand_over(catalog, cache.folder)
    cache.keep(team, found.head.rows_name, files)
    os.close(files.lengths)
    return catalog


def kept(cache: IndexCache) -> list[Path]:
    return sorted(path for path in Path(cache.folder or "").glob("*/*"))


def test_what_is_found_is_what_was_read(cache, find):
    read = keep(cache, find())
    found = cache.find(TEAM, find().head, DEFAULT_LIMITS)
    assert found is not None
    ids = np.arange(read.samples)
    assert found.details(ids) == read.details(ids)
    assert found.identity == read.identity
    np.testing.assert_array_equal(found.llm_tokens, read.llm_tokens)
    np.testing.assert_array_equal(found.lengths(ids).item_offsets, read.lengths(ids).item_offsets)


def test_another_team_finds_nothing(cache, find):
    keep(cache, find())
    assert cache.names(TEAM) == [find().head.rows_name]
    assert cache.names("blue") == []
    assert cache.find("blue", find().head, DEFAULT_LIMITS) is None


def test_parts_that_were_written_again_are_read_again(cache, find, tmp_path):
    before = find().head.rows_name
    (part, *_) = sorted((tmp_path / "index" / "texts").glob("part-*.parquet"))
    shutil.copy(part, tmp_path / "copy")
    (tmp_path / "copy").replace(part)
    os.utime(part, (1, 1))
    assert find().head.rows_name != before
    assert find(DecodeLimits(max_llm_tokens=77)).head.rows_name not in ("", before)


def test_an_index_without_one_of_its_parts_has_no_name(find, tmp_path):
    (part, *_) = sorted((tmp_path / "index" / "texts").glob("part-*.parquet"))
    part.unlink()
    assert find().head.rows_name == ""


def test_two_that_keep_the_same_rows_keep_one_of_both(cache, find):
    first, second = find(), find()
    keep(cache, first)
    files = [path.stat().st_ino for path in kept(cache)]
    keep(cache, second)
    assert [path.stat().st_ino for path in kept(cache)] == files
    assert len(files) == 2


@pytest.mark.parametrize("suffix", [LENGTHS, DETAILS])
def test_rows_that_are_not_whole_are_removed(cache, find, suffix):
    keep(cache, find())
    (damaged,) = [path for path in kept(cache) if path.suffix == suffix]
    data = damaged.read_bytes()
    damaged.unlink()
    damaged.write_bytes(data[: len(data) // 2])
    assert cache.find(TEAM, find().head, DEFAULT_LIMITS) is None
    assert kept(cache) == []
    keep(cache, find())
    assert cache.find(TEAM, find().head, DEFAULT_LIMITS) is not None


def test_rows_are_whole_while_they_are_used_though_they_had_to_go(cache, find, tmp_path):
    read = keep(cache, find())
    found = cache.find(TEAM, find().head, DEFAULT_LIMITS)
    assert found is not None
    keep(IndexCache(tmp_path / "cache", 1), find(), "blue")
    assert kept(cache) == []
    ids = np.arange(read.samples)
    assert found.details(ids) == read.details(ids)


def test_what_was_opened_least_recently_goes_first(cache, find, tmp_path):
    for team in ("red", "blue", "green"):
        keep(cache, find(), team)
        for path in kept(cache):  # each is ten seconds older than the next
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10 * 10**9))
    assert cache.find("red", find().head, DEFAULT_LIMITS) is not None  # the newest from now on
    one = sum(path.stat().st_size for path in kept(cache)) // 3
    keep(IndexCache(tmp_path / "cache", 3 * one), find(), "white")
    left = {team for team in ("red", "blue", "green", "white") if cache.names(team)}
    assert left == {"red", "green", "white"}


def test_a_folder_that_others_may_look_into_keeps_nothing(find, tmp_path):
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "file").touch()
    for name in ("open", "link", "file"):
        cache = IndexCache(tmp_path / name, GIB)
        keep(cache, find())
        assert cache.folder is None
        assert cache.find(TEAM, find().head, DEFAULT_LIMITS) is None
    assert list((tmp_path / "open").iterdir()) == []


def test_a_name_that_is_no_digest_leads_nowhere(cache, find):
    catalog = find().read(cache.folder)
    files = RowFiles(lengths=hand_over(catalog, cache.folder).lengths, details=0)
    for name in ("", "../../etc/passwd", "A" * 64, "a" * 64 + "\n"):
        cache.keep(TEAM, name, files)
    assert kept(cache) == []
