"""Data sets on the Hugging Face Hub: at one commit, by byte ranges, by the Hub's own client."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dataservice.core.errors import SourceError, StorageAwayError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import ByteSpan
from dataservice.sources.catalog import find_index
from dataservice.sources.formats.registry import list_files
from dataservice.sources.index import build_index
from dataservice.sources.opened import Grant, OpenedSource
from dataservice.sources.reader import SourceReader
from dataservice.sources.roots import Roots
from dataservice.sources.storage import Storage
from tests.hub import COMMIT, NAME, Hub
from tests.web_store import running

Spec = Callable[..., SourceSpec]
HERE = f"hf://datasets/{NAME}@{COMMIT}"
TOKEN = "hf_hunter2"
ROWS = 40
WORDS = [" ".join([f"word{row}"] * 500) for row in range(ROWS)]


@pytest.fixture
def home(tmp_path: Path, write_parquet: Callable[..., Path]) -> Path:
    """A data set: two tables, and lines that name files beside them."""
    home = tmp_path / "dataset"
    for part in range(2):
        keys = [f"{part}-{row}" for row in range(ROWS)]
        columns = {"id": keys, "text": WORDS}
        write_parquet(home / "data" / f"train-{part}.parquet", columns, row_group_size=4)
    (home / "lines.jsonl").write_text(json.dumps({"image": "a.png", "text": "<image> a"}) + "\n")
    (home / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))
    return home


@pytest.fixture
def served(home: Path) -> Iterator[Hub]:
    with running(Hub(home, token="")) as serving:
        yield serving


def at(served: Hub, spec: Spec, path: str, format: str = "parquet") -> SourceSpec:
    return spec(f"{HERE}/{path}", format, storage_options={"endpoint": served.url})


@pytest.mark.parametrize("path", ["data/*.parquet", "data", "data/train-{0,1}.parquet"])
def test_a_data_set_is_indexed_and_read_back(served, spec, measurer, tmp_path, path) -> None:
    source = at(served, spec, path)
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    catalog = find_index([source], str(tmp_path / "index"), measurer.fingerprint).read()
    assert catalog.samples == 2 * ROWS
    reader = SourceReader([source])
    for ref, _ in catalog.details(np.arange(catalog.samples)):
        assert reader.read(ref).record["text"] == WORDS[int(ref.key.partition("-")[2])]


def test_of_a_file_only_the_bytes_that_are_wanted_are_fetched(served, spec) -> None:
    source = at(served, spec, "lines.jsonl", "jsonl")
    (file,) = list_files(source)
    storage = Storage(source)
    served.asked.clear()
    span = ByteSpan(name="line", offset_bytes=2, size_bytes=7)
    assert storage.read_spans(file.path, [span]) == [b'image":']
    assert [ranges for _, ranges in served.asked if ranges] == ["bytes=2-8"]


def test_files_that_records_name_are_read_beside_them(served, spec, measurer, tmp_path) -> None:
    source = at(served, spec, "lines.jsonl", "jsonl")
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    catalog = find_index([source], str(tmp_path / "index"), measurer.fingerprint).read()
    ((ref, _),) = catalog.details(np.array([0]))
    (blob,) = SourceReader([source]).read(ref).media
    assert blob.data == (served.home / "a.png").read_bytes()


def test_a_file_is_known_by_its_content_at_the_commit(served, spec) -> None:
    first, second = list_files(at(served, spec, "data/*.parquet"))
    assert (first.name, second.name) == ("train-0.parquet", "train-1.parquet")
    assert first.version != second.version != ""


@pytest.mark.parametrize(
    "place",
    [
        f"datasets/{NAME}",
        f"datasets/{NAME}/data",
        f"datasets/{NAME}@main/data",
        f"datasets/{NAME}@v1.0/data",
        f"datasets/{NAME}@{COMMIT[:12]}/data",
        f"datasets/{NAME}@{COMMIT}0/data",
        f"datasets/{NAME}@{{{COMMIT},main}}/data",
        f"{NAME}@{COMMIT}/data",
        f"buckets/{NAME}/data",
    ],
)
def test_what_is_not_one_commit_is_refused_with_how_to_find_it(served, spec, place) -> None:
    source = spec(f"hf://{place}", "parquet", storage_options={"endpoint": served.url})
    with pytest.raises(SourceError, match=r"does not name one commit.*40 hex.*git ls-remote"):
        list_files(source)
    assert served.asked == []


def granted(served: Hub, source: SourceSpec, token: str) -> SourceSpec:
    """The source with the profile of an operator who has this token."""
    roots = Roots.of(["hf://datasets/org"], "")
    grant = Grant(options={"endpoint": served.url}, secret={"token": token}, roots=roots)
    return OpenedSource(
        name=source.name, url=source.url, format=source.format, storage_profile="hub", grant=grant
    )


def test_a_gated_data_set_is_read_with_the_token_of_a_profile(served, spec) -> None:
    served.token = TOKEN
    source = at(served, spec, "data/*.parquet")
    assert len(list_files(granted(served, source, TOKEN))) == 2
    elsewhere = replace(granted(served, source, TOKEN), url=source.url.replace("org/", "other/"))
    with pytest.raises(SourceError, match="lies outside of what this service reads"):
        Storage(elsewhere).open(elsewhere.url)


def test_a_token_that_is_refused_is_refused_at_once_and_not_quoted(served, spec) -> None:
    served.token = "another"
    with pytest.raises(SourceError, match="401") as refused:
        list_files(granted(served, at(served, spec, "data/*.parquet"), TOKEN))
    assert not isinstance(refused.value, StorageAwayError)
    assert TOKEN not in str(refused.value)
