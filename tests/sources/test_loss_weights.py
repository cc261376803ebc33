"""A record's own loss weight: read from every format, kept in the index, part of what is drawn."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataservice.core.errors import IndexStaleError, SampleError, SourceError, SpecError
from dataservice.core.job import ColumnMap, SourceSpec
from dataservice.sources.catalog import IndexedCatalog, find_index
from dataservice.sources.formats.registry import open_format
from dataservice.sources.index import build_index
from dataservice.sources.memory import MemoryCatalog
from tests.sources.support import scan

Spec = Callable[..., SourceSpec]
Write = Callable[..., Path]

OWN = [None, 0.5, 0, 3, 1.0]  # of five records; the first has none
WEIGHTS = [1.0, 0.5, 0.0, 3.0, 1.0]
QUALITY = ColumnMap(loss_weight="quality")
# Of the samples below without weights: weights that none has do not change it.
IDENTITY_BEFORE = "6753051b654b277c9a7be04556a59515f35275fb22548ba63c05931808f60e38"


def records(own: list[Any] = OWN) -> list[dict[str, Any]]:
    plain = [{"id": f"k{k}", "text": "a b " * (k + 1)} for k in range(len(own))]
    return [
        {**each, **({} if weight is None else {"quality": weight})}
        for each, weight in zip(plain, own, strict=True)
    ]


@pytest.fixture
def lines(tmp_path: Path, spec: Spec, write_jsonl: Write) -> SourceSpec:
    path = write_jsonl(tmp_path / "data" / "t.jsonl", records())
    return spec(path, "jsonl", columns=QUALITY)


@pytest.fixture
def opened(tmp_path: Path, measurer: type) -> Callable[..., IndexedCatalog]:
    """Indexes a source, then opens it, perhaps as another source than was indexed."""

    def make(source: SourceSpec, reader: SourceSpec | None = None) -> IndexedCatalog:
        build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
        return find_index([reader or source], str(tmp_path / "index"), "words-1").read()

    return make


def weights_of(catalog: IndexedCatalog | MemoryCatalog) -> list[float]:
    return catalog.loss_weights(np.arange(catalog.samples)).tolist()


def test_records_of_every_format_have_the_weight_that_their_column_says(
    tmp_path: Path, spec: Spec, lines: SourceSpec, write_tar: Write, write_parquet: Write
) -> None:
    rows = {
        "text": [each["text"] for each in records()],
        "quality": pa.array([None if w is None else float(w) for w in OWN]),
    }
    members = [
        (f"k{k}.json", b'{"text": "a", "meta": {"quality": %s}}' % weight)
        for k, weight in enumerate((b"null", b"0.5", b"0", b"3", b"1.0"))
    ]
    deep = ColumnMap(loss_weight="meta.quality")
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as file:
        table = pa.table(rows)
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    kinds = [
        lines,
        spec(write_parquet(tmp_path / "t.parquet", rows), "parquet", columns=QUALITY),
        spec(tmp_path / "t.arrow", "arrow", columns=QUALITY),
        spec(write_tar(tmp_path / "t.tar", members), "webdataset", columns=deep),
        spec(
            write_parquet(tmp_path / "u.parquet", rows),
            "parquet",
            columns=ColumnMap(text="text", loss_weight="quality"),
        ),
    ]
    for source in kinds:
        samples = scan(source)
        assert [sample.raw.loss_weight for sample in samples] == WEIGHTS, source.format
        for sample in samples:
            assert open_format(source).read(sample.key, sample.location) == sample.raw


def test_without_the_name_of_a_column_all_records_weigh_1(
    tmp_path: Path, spec: Spec, write_jsonl: Write
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", records())
    assert {sample.raw.loss_weight for sample in scan(spec(path, "jsonl"))} == {1.0}


@pytest.mark.parametrize("wrong", [-0.5, "0.5", True, [1], float("inf"), float("nan"), 1e7])
def test_a_weight_that_is_none_is_a_bad_sample_with_its_reason(
    tmp_path: Path, spec: Spec, write_jsonl: Write, opened: Callable[..., Any], wrong: object
) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", records([0.5, wrong]))
    source = spec(path, "jsonl", columns=QUALITY)
    good, bad = scan(source)
    assert good.raw.loss_weight == 0.5
    assert isinstance(bad.raw, SampleError)
    assert "a loss weight is a number from 0 to 1,000,000" in str(bad.raw)
    assert "'quality'" in str(bad.raw)
    assert opened(source).samples == 1


def test_a_table_without_the_column_is_refused(
    tmp_path: Path, spec: Spec, write_parquet: Write
) -> None:
    path = write_parquet(tmp_path / "t.parquet", {"text": ["a", "b"]})
    with pytest.raises(SourceError, match="has no column 'quality'"):
        scan(spec(path, "parquet", columns=QUALITY))


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), 1e7])
def test_a_source_with_a_weight_that_is_none_is_refused(spec: Spec, wrong: float) -> None:
    with pytest.raises(SpecError, match=r"loss_weight .*; it must be from 0 to 1,000,000"):
        spec("x", "jsonl", loss_weight=wrong)


def test_files_without_records_have_no_column_to_name(spec: Spec) -> None:
    with pytest.raises(SpecError, match=r"text, whose files have no record.*loss_weight"):
        spec("x", "text", columns=QUALITY)


@pytest.mark.parametrize("columns", [QUALITY, ColumnMap(text="text", loss_weight="quality")])
def test_the_catalog_gives_each_sample_its_own_weight(
    lines: SourceSpec, opened: Callable[..., IndexedCatalog], spec: Spec, columns: ColumnMap
) -> None:
    catalog = opened(spec(lines.url, "jsonl", columns=columns))
    assert weights_of(catalog) == WEIGHTS
    assert catalog.loss_weights(np.array([3, 1, 1])).tolist() == [3.0, 0.5, 0.5]
    rows = [(ref.key, ref.location, lengths) for ref, lengths in catalog.details(np.arange(5))]
    assert weights_of(MemoryCatalog({"src": rows}, WEIGHTS)) == WEIGHTS
    assert weights_of(MemoryCatalog({"src": rows})) == [1.0] * 5


def test_an_index_without_weights_needs_no_new_one_and_weighs_1(
    tmp_path: Path, spec: Spec, write_jsonl: Write, opened: Callable[..., IndexedCatalog]
) -> None:
    """As the release before weights wrote it: without the column."""
    source = spec(write_jsonl(tmp_path / "data" / "t.jsonl", records()), "jsonl")
    assert opened(source).parts.identity.fingerprint == IDENTITY_BEFORE
    (part,) = (tmp_path / "index" / "src").glob("part-*.parquet")
    before = pq.ParquetFile(part).read()
    pq.write_table(before.drop_columns(["loss_weight"]), part)
    catalog = find_index([source], str(tmp_path / "index"), "words-1").read()
    assert catalog.fingerprint == IDENTITY_BEFORE
    assert weights_of(catalog) == [1.0] * 5


def test_a_column_that_is_named_later_needs_a_new_index(
    lines: SourceSpec, opened: Callable[..., IndexedCatalog], spec: Spec
) -> None:
    with pytest.raises(IndexStaleError, match=r"its columns was '', .*'loss_weight: quality'"):
        opened(spec(lines.url, "jsonl"), lines)


def test_a_sources_own_weight_needs_none(
    lines: SourceSpec, opened: Callable[..., IndexedCatalog], spec: Spec
) -> None:
    half = spec(lines.url, "jsonl", columns=QUALITY, loss_weight=0.5)
    assert weights_of(opened(lines, half)) == WEIGHTS


def test_other_weights_are_other_data_also_where_columns_keep_them_out_of_the_record(
    tmp_path: Path, spec: Spec, write_jsonl: Write, measurer: type
) -> None:
    columns = ColumnMap(text="text", loss_weight="quality")
    path = tmp_path / "data" / "t.jsonl"
    found = set()
    for own in (OWN, [None, 0.5, 0, 2, 1.0], [1, 1, 1, 1, 1], [None, None, None, None, None]):
        source = spec(write_jsonl(path, records(own)), "jsonl", columns=columns)
        build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
        found.add(find_index([source], str(tmp_path / "index"), "words-1").read().fingerprint)
    assert len(found) == 3  # a weight of 1 is no weight


def test_a_part_with_other_weights_than_its_manifest_says_is_refused(
    tmp_path: Path, lines: SourceSpec, opened: Callable[..., IndexedCatalog]
) -> None:
    opened(lines)
    (part,) = (tmp_path / "index" / "src").glob("part-*.parquet")
    table = pq.ParquetFile(part).read()
    place = table.schema.get_field_index("loss_weight")
    for weights, complaint in (
        ([1.0, 0.5, 0.0, 3.0, 0.9], "other samples than its manifest says"),
        ([1.0, 0.5, 0.0, -3.0, 1.0], "loss_weight out of range"),
    ):
        pq.write_table(table.set_column(place, "loss_weight", pa.array(weights)), part)
        with pytest.raises(IndexStaleError, match=complaint):
            find_index([lines], str(tmp_path / "index"), "words-1").read()
