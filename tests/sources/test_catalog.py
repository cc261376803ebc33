"""One contract for every Catalog, and what an index on disk must refuse."""

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from dataservice.core.errors import IndexStaleError, NotFoundError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.ports import SampleMeasurer
from dataservice.core.sample import ItemNotes, LengthTable, RawSample, SampleLengths, SampleRef
from dataservice.sources import detail_file
from dataservice.sources.catalog import IndexedCatalog, find_index, require_same_index
from dataservice.sources.checksum import sample_crc32
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index import build_index
from dataservice.sources.manifest import INDEX_VERSION
from dataservice.sources.memory import MemoryCatalog
from dataservice.sources.reader import SourceReader

Spec = Callable[..., SourceSpec]
Write = Callable[..., Path]
Measurer = Callable[[], SampleMeasurer]
Expected = list[tuple[SampleRef, SampleLengths]]


@pytest.fixture
def specs(tmp_path: Path, spec: Spec, write_tar: Write, write_jsonl: Write) -> list[SourceSpec]:
    """Two sources: tars with images and audio in two files, and texts."""
    for shard in range(2):
        members: list[tuple[str, bytes]] = []
        for k in range(9):
            members += [(f"{shard}{k}.{i}.jpg", b"J" * (i + 1)) for i in range(k % 3)]
            members += [(f"{shard}{k}.wav", b"W" * 7)] if k % 2 else []
            members += [(f"{shard}{k}.txt", b"word " * (k + 1))]
        write_tar(tmp_path / "data" / f"{shard}.tar", members)
    write_jsonl(tmp_path / "data" / "t.jsonl", [{"text": "a b " * (k + 1)} for k in range(5)])
    return [
        spec(tmp_path / "data" / "*.tar", "webdataset", name="media"),
        spec(tmp_path / "data" / "t.jsonl", "jsonl", name="texts"),
    ]


@pytest.fixture
def expected(specs: list[SourceSpec], measurer: Measurer) -> Expected:
    """What the sources hold, straight from the files."""
    rows: Expected = []
    for source in specs:
        opened = open_format(source)
        for file in list_files(source):
            for sample in opened.scan(file):
                assert isinstance(sample.raw, RawSample)
                ref = SampleRef(
                    sample_id=len(rows),
                    source=source.name,
                    key=sample.key,
                    location=sample.location,
                    crc32=sample_crc32(sample.raw),
                )
                rows.append((ref, measurer().measure(sample.raw)))
    return rows


@pytest.fixture
def index_dir(tmp_path: Path, specs: list[SourceSpec], measurer: Measurer) -> str:
    for source in specs:
        build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    return str(tmp_path / "index")


@pytest.fixture(params=["memory", "indexed"])
def catalog(
    request: pytest.FixtureRequest,
    specs: list[SourceSpec],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> MemoryCatalog | IndexedCatalog:
    if request.param == "memory":
        return MemoryCatalog(
            {
                source.name: [
                    (ref.key, ref.location, lengths)
                    for ref, lengths in expected
                    if ref.source == source.name
                ]
                for source in specs
            }
        )
    monkeypatch.setattr(detail_file, "BATCH_ROWS", 4)  # so that rows lie in many batches
    return find_index(specs, request.getfixturevalue("index_dir"), "words-1").read()


def equal(left: LengthTable, right: LengthTable) -> bool:
    return all(
        np.array_equal(getattr(left, name), getattr(right, name))
        and getattr(left, name).dtype == getattr(right, name).dtype
        for name in LengthTable.__slots__
    )


def test_ids_are_dense_over_the_sources_in_order(
    catalog: IndexedCatalog, expected: Expected
) -> None:
    assert catalog.samples == len(expected) == 23
    assert catalog.sizes == (18, 5)
    assert catalog.sources.offsets.tolist() == [0, 18, 23]
    assert [catalog.source_of(k) for k in (0, 17, 18, 22)] == ["media", "media", "texts", "texts"]


def test_lengths_are_given_in_the_order_asked_for(
    catalog: IndexedCatalog, expected: Expected
) -> None:
    for ids in ([], [22, 0, 7, 7, 17, 18], list(range(23))):
        wanted = LengthTable.of([expected[k][1] for k in ids])
        assert equal(catalog.lengths(np.array(ids, dtype=np.int64)), wanted)
    assert catalog.llm_tokens.tolist() == [lengths.llm_tokens for _, lengths in expected]


def test_details_are_given_in_the_order_asked_for(
    catalog: IndexedCatalog, expected: Expected
) -> None:
    for ids in ([], [22, 0, 7, 7, 17, 18, 1], list(range(23))):
        wanted = [expected[k] for k in ids]
        if isinstance(catalog, MemoryCatalog):  # it has seen no bytes
            wanted = [(replace(ref, crc32=None), lengths) for ref, lengths in wanted]
        assert catalog.details(np.array(ids, dtype=np.int64)) == wanted
        columns = catalog.columns(np.array(ids, dtype=np.int64))
        assert [(each.ref, each.lengths) for each in columns.samples()] == wanted


def test_what_items_are_decoded_to_is_given_in_the_order_asked_for(
    catalog: IndexedCatalog, expected: Expected
) -> None:
    for ids in ([], [22, 0, 7, 7, 17, 18, 1], list(range(23)), list(range(23))[::-1]):
        items = [item for k in ids for item in expected[k][1].items]
        found = catalog.item_details(np.array(ids, dtype=np.int64))
        assert found.modality.tolist() == [item.modality for item in items]
        assert found.values.tolist() == [math.prod(item.shape) for item in items]
        wanted = ItemNotes.of(items)
        for name in ItemNotes.__slots__:
            np.testing.assert_array_equal(getattr(found.notes, name), getattr(wanted, name))


def test_details_do_not_depend_on_how_rows_are_kept(
    specs: list[SourceSpec], index_dir: str, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detail_file, "BATCH_ROWS", 4)
    monkeypatch.setattr(detail_file, "BLOCK_ROWS", 3)
    catalog = find_index(specs, index_dir, "words-1").read()
    for size in (0, 1, 60):
        ids = np.random.default_rng(size).integers(0, 23, size=size)
        details = catalog.details(ids)
        assert list(details) == [expected[k] for k in ids]
        assert details[-2:] == [expected[k] for k in ids][-2:]


@pytest.mark.parametrize("wrong", [-1, 23])
def test_an_id_that_no_source_has_is_refused(catalog: IndexedCatalog, wrong: int) -> None:
    for ask in (catalog.lengths, catalog.details, catalog.columns, catalog.item_details):
        with pytest.raises(NotFoundError, match=f"no sample {wrong}: .* 0 to 22"):
            ask(np.array([0, wrong]))
    with pytest.raises(NotFoundError):
        catalog.source_of(wrong)


def test_every_sample_of_an_index_can_be_read(
    specs: list[SourceSpec], index_dir: str, measurer: Measurer
) -> None:
    reader = SourceReader(specs)
    catalog = find_index(specs, index_dir, "words-1").read()
    for ref, lengths in catalog.details(np.arange(catalog.samples)):
        assert measurer().measure(reader.read(ref)) == lengths


def test_no_file_is_left_behind_by_an_open_catalog(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    catalog = find_index(specs, index_dir, "words-1").read()
    assert os.listdir(tmp_path / "tmp") == []
    assert catalog.details(np.array([20]))[0][0].source == "texts"
    with pytest.raises(IndexStaleError):
        find_index(specs, index_dir, "words-2").read()
    assert os.listdir(tmp_path / "tmp") == []


def test_the_fingerprint_is_the_same_on_opening_again_and_follows_the_data(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str, measurer: Measurer, write_tar: Write
) -> None:
    first = find_index(specs, index_dir, "words-1").read().fingerprint
    assert find_index(specs, index_dir, "words-1").read().fingerprint == first
    assert find_index(specs[::-1], index_dir, "words-1").read().fingerprint != first
    write_tar(tmp_path / "data" / "2.tar", [("x.txt", b"more")])
    build_index(specs[0], out_dir=index_dir, make_measurer=measurer)
    assert find_index(specs, index_dir, "words-1").read().fingerprint != first


def refusal(specs: list[SourceSpec], index_dir: str, measurer: str = "words-1") -> str:
    with pytest.raises(IndexStaleError) as caught:
        find_index(specs, index_dir, measurer).read()
    message = str(caught.value)
    assert "dataservice index JOB.yaml" in message
    return message


def test_changed_files_are_named_with_what_each_way_out_costs(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str, write_tar: Write
) -> None:
    write_tar(tmp_path / "data" / "2.tar", [("x.txt", b"more")])
    (tmp_path / "data" / "0.tar").unlink()
    write_tar(tmp_path / "data" / "1.tar", [("x.txt", b"else")])
    message = refusal(specs, index_dir)
    assert "source 'media' is stale" in message
    assert "1 file added, whose samples would change the order: 2.tar" in message
    assert "1 file removed or renamed: 0.tar" in message
    assert "1 file of another size: 1.tar" in message
    assert "Restore what was indexed, and index, job and checkpoints fit" in message
    assert "its checkpoints no longer fit" in message


def test_a_renamed_file_is_refused_by_both_names(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str
) -> None:
    (tmp_path / "data" / "0.tar").rename(tmp_path / "data" / "7.tar")
    message = refusal(specs, index_dir)
    assert "7.tar" in message
    assert "removed or renamed: 0.tar" in message


# ---- identity by content ------------------------------------------------------------------


def touch(folder: Path) -> None:
    """Other times for all files."""
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))


def test_touched_files_are_current_and_read_once(
    tmp_path: Path,
    specs: list[SourceSpec],
    index_dir: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    before = find_index(specs, index_dir, "words-1").read()
    assert not caplog.records
    touch(tmp_path / "data")
    after = find_index(specs, index_dir, "words-1").read()
    verified = after.parts.verified
    assert after.fingerprint == before.fingerprint
    said = caplog.text
    assert "2 files compared, the same samples; `dataservice index JOB.yaml` saves" in said
    caplog.clear()
    same = require_same_index(specs, index_dir, "words-1", before.identity, verified=verified)
    assert same == verified
    again = find_index(specs, index_dir, "words-1", verified=verified)
    assert again.head.verified == verified
    assert not caplog.records
    os.utime(tmp_path / "data" / "0.tar", (2, 2))
    require_same_index(specs, index_dir, "words-1", before.identity, verified=verified)
    assert "source 'media': 2 files compared" in caplog.text
    assert "source 'texts'" not in caplog.text


def test_indexing_again_after_a_touch_gives_the_same_identity(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str, measurer: Measurer
) -> None:
    before = find_index(specs, index_dir, "words-1").read()
    touch(tmp_path / "data")
    for source in specs:
        build_index(source, out_dir=index_dir, make_measurer=measurer)
    require_same_index(specs, index_dir, "words-1", before.identity)
    assert find_index(specs, index_dir, "words-1").read().identity == before.identity


def test_corpus_and_index_under_another_root_are_the_same(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str, expected: Expected, spec: Spec
) -> None:
    before = find_index(specs, index_dir, "words-1").read()
    elsewhere = tmp_path / "another" / "mount"
    shutil.copytree(tmp_path / "data", elsewhere / "corpus")
    shutil.move(index_dir, elsewhere / "index")
    touch(elsewhere / "corpus")
    shutil.rmtree(tmp_path / "data")
    moved = [
        replace(s, url=s.url.replace(f"{tmp_path}/data", f"{elsewhere}/corpus")) for s in specs
    ]
    after = find_index(moved, f"{elsewhere}/index", "words-1").read()
    assert after.identity == before.identity
    reader, ids = SourceReader(moved), np.arange(after.samples)
    for (ref, lengths), (_, known) in zip(after.details(ids), expected, strict=True):
        assert ref.location.file.startswith(f"{elsewhere}/corpus/")
        assert lengths == known
        reader.read(ref)


def test_a_corpus_in_a_bucket_is_the_same_as_in_a_folder(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str, measurer: Measurer
) -> None:
    before = find_index(specs, index_dir, "words-1").read()
    bucket = fsspec.filesystem("memory")
    bucket.put(str(tmp_path / "data"), "/bucket/deep/data", recursive=True)
    bucket.put(index_dir, "/bucket/index", recursive=True)
    there = [replace(s, url=s.url.replace(str(tmp_path), "memory://bucket/deep")) for s in specs]
    assert find_index(there, "memory://bucket/index", "words-1").read().identity == before.identity
    for source in there:
        build_index(source, out_dir="memory://again", make_measurer=measurer)
    again = find_index(there, "memory://again", "words-1").read()
    assert again.identity == before.identity
    assert {ref.key for ref, _ in again.details(np.arange(23))} == {
        ref.key for ref, _ in find_index(specs, index_dir, "words-1").read().details(np.arange(23))
    }


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("data", "deep/0.tar"),
        ("data/", "deep/0.tar"),
        ("data/deep/*.tar", "0.tar"),
        ("data/*/0.tar", "deep/0.tar"),
        ("data/{deep,no}/{0..0}.tar", "deep/0.tar"),
        ("data/deep/0.tar", "0.tar"),
    ],
)
def test_files_go_by_their_names_below_what_is_fixed_in_the_url(
    tmp_path: Path, spec: Spec, write_tar: Write, url: str, name: str
) -> None:
    write_tar(tmp_path / "data" / "deep" / "0.tar", [("a.txt", b"one")])
    write_tar(tmp_path / "data" / "no" / "0.tar", [("a.txt", b"one")])
    assert list_files(spec(f"{tmp_path}/{url}", "webdataset"))[0].name == name


def test_other_bytes_of_the_same_size_are_refused_with_the_samples_that_differ(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str
) -> None:
    path = tmp_path / "data" / "t.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1], lines[3] = lines[1].replace(b"a b", b"a c"), lines[3].replace(b"a b", b"a c")
    path.write_bytes(b"".join(lines))
    os.utime(path, (1, 1))
    message = refusal(specs, index_dir)
    assert "t.jsonl: 2 of its 5 samples differ (t.jsonl:2, t.jsonl:4)" in message
    assert "Restore what was indexed, and index, job and checkpoints fit" in message
    assert "its checkpoints no longer fit" in message


def test_an_index_that_was_written_over_other_content_is_another(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str, measurer: Measurer
) -> None:
    """Of the same lengths even: only the words differ."""
    before = find_index(specs, index_dir, "words-1").read()
    path = tmp_path / "data" / "t.jsonl"
    path.write_text(path.read_text().replace("a b", "a c"))
    build_index(specs[1], out_dir=index_dir, make_measurer=measurer)
    assert find_index(specs, index_dir, "words-1").read().fingerprint != before.fingerprint
    with pytest.raises(IndexStaleError, match=r"written again .* its checkpoints no longer fit"):
        require_same_index(specs, index_dir, "words-1", before.identity)


def test_samples_that_lie_elsewhere_keep_their_identity_and_need_a_restart(
    tmp_path: Path, spec: Spec, write_tar: Write, measurer: Measurer
) -> None:
    source, index = spec(tmp_path / "a.tar", "webdataset"), str(tmp_path / "index")
    write_tar(tmp_path / "a.tar", [("0.txt", b"one"), ("0.jpg", b"J")])
    build_index(source, out_dir=index, make_measurer=measurer)
    before = find_index([source], index, "words-1").read()
    write_tar(tmp_path / "a.tar", [("0.jpg", b"J"), ("0.txt", b"one")])
    build_index(source, out_dir=index, make_measurer=measurer)
    with pytest.raises(IndexStaleError, match=r"Start the service again.*checkpoints fit"):
        require_same_index([source], index, "words-1", before.identity)
    assert find_index([source], index, "words-1").read().fingerprint == before.fingerprint


def test_a_part_of_another_run_than_the_manifest_is_refused(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str, measurer: Measurer
) -> None:
    """As an interrupted `dataservice index` leaves it: with as many rows, of other content."""
    manifest = (Path(index_dir) / "texts" / "manifest.json").read_text()
    path = tmp_path / "data" / "t.jsonl"
    path.write_text(path.read_text().replace("a b", "a c"))
    build_index(specs[1], out_dir=index_dir, make_measurer=measurer)
    (Path(index_dir) / "texts" / "manifest.json").write_text(manifest)
    assert "holds other samples than its manifest says" in refusal(specs, index_dir)


def test_a_media_root_may_move_with_its_corpus(
    tmp_path: Path, spec: Spec, write_jsonl: Write, measurer: Measurer
) -> None:
    def source(root: str) -> SourceSpec:
        return spec(f"{root}/text/a.jsonl", "jsonl", media_root=f"{root}/media")

    (tmp_path / "one" / "media").mkdir(parents=True)
    (tmp_path / "one" / "media" / "a.png").write_bytes(b"picture")
    write_jsonl(tmp_path / "one" / "text" / "a.jsonl", [{"image": "a.png", "text": "x"}])
    index = str(tmp_path / "index")
    build_index(source(f"{tmp_path}/one"), out_dir=index, make_measurer=measurer)
    before = find_index([source(f"{tmp_path}/one")], index, "words-1").read()
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    after = find_index([source(f"{tmp_path}/two")], index, "words-1").read()
    assert after.identity == before.identity
    other = replace(source(f"{tmp_path}/two"), media_root=f"{tmp_path}/three")
    shutil.copytree(tmp_path / "two" / "media", tmp_path / "three")
    assert find_index([other], index, "words-1").read().identity == before.identity
    (tmp_path / "three" / "a.png").write_bytes(b"Picture")
    with pytest.raises(IndexStaleError, match=r"1 of its 1 samples differ \(a\.jsonl:1"):
        find_index([other], index, "words-1").read()


def test_another_processor_or_tokenizer_is_named(specs: list[SourceSpec], index_dir: str) -> None:
    message = refusal(specs, index_dir, "words-2")
    assert "tokenizer differs" in message
    assert "'words-1' in the index, 'words-2' in the job" in message


def test_another_image_column_is_named(spec: Spec, specs: list[SourceSpec], index_dir: str) -> None:
    other = spec(specs[1].url, "jsonl", name="texts", image_column="photo")
    assert "image_column was '', the job says 'photo'" in refusal([other], index_dir)


def test_an_index_that_was_never_written_or_interrupted_is_refused(
    specs: list[SourceSpec], index_dir: str, tmp_path: Path
) -> None:
    assert "source 'media' has no complete index" in refusal(specs, str(tmp_path / "elsewhere"))
    (Path(index_dir) / "texts" / "manifest.json").unlink()
    assert "source 'texts' has no complete index" in refusal(specs, index_dir)


@pytest.mark.parametrize("text", ["", "[]", f'{{"version": {INDEX_VERSION}}}', "{"])
def test_a_damaged_manifest_is_refused(specs: list[SourceSpec], index_dir: str, text: str) -> None:
    (Path(index_dir) / "texts" / "manifest.json").write_text(text)
    assert "manifest.json is damaged" in refusal(specs, index_dir)


def test_a_manifest_of_another_version_is_refused(specs: list[SourceSpec], index_dir: str) -> None:
    (Path(index_dir) / "texts" / "manifest.json").write_text('{"version": 7}')
    message = refusal(specs, index_dir)
    assert f"has index version 7; this release reads version {INDEX_VERSION}" in message
    assert "and their checkpoints, go on only with the release that made them" in message


@pytest.mark.parametrize("keep", [None, 100])
def test_a_missing_or_damaged_part_is_refused(
    specs: list[SourceSpec], index_dir: str, keep: int | None
) -> None:
    (part,) = (Path(index_dir) / "texts").glob("part-*.parquet")
    part.unlink() if keep is None else part.write_bytes(part.read_bytes()[:keep])
    assert "missing or damaged" in refusal(specs, index_dir)


def test_a_part_with_other_rows_than_the_manifest_says_is_refused(
    specs: list[SourceSpec], index_dir: str
) -> None:
    parts = sorted((Path(index_dir) / "media").glob("part-*.parquet"))
    (text_part,) = (Path(index_dir) / "texts").glob("part-*.parquet")
    parts[0].write_bytes(text_part.read_bytes())
    assert "has 5 rows, its manifest says 9" in refusal(specs, index_dir)


def test_a_source_that_is_gone_is_named(
    tmp_path: Path, specs: list[SourceSpec], index_dir: str
) -> None:
    (tmp_path / "data" / "t.jsonl").unlink()
    with pytest.raises(SourceError, match=r"source 'texts' has no file at .*t\.jsonl"):
        find_index(specs, index_dir, "words-1").read()
