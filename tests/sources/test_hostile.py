"""Names, links and addresses in a user's files and job lead nowhere else."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataservice.core.errors import IndexStaleError, SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.core.sample import RawSample
from dataservice.sources.catalog import find_index
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index import build_index
from dataservice.sources.reader import SourceReader
from dataservice.sources.storage import Storage

Spec = Callable[..., SourceSpec]
Write = Callable[..., Path]
Measurer = Callable[[], SampleMeasurer]


def only(source: SourceSpec, limits: DecodeLimits | None = None) -> RawSample | SampleError:
    """The one sample of a source."""
    opened = open_format(source, limits) if limits else open_format(source)
    (sample,) = opened.scan(list_files(source)[0])
    return sample.raw


# ---- media beside a record ----------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "data" / "media").mkdir(parents=True)
    return tmp_path / "data"


def test_a_link_that_leaves_the_folder_is_refused(
    data: Path, spec: Spec, write_jsonl: Write, write_parquet: Write
) -> None:
    (data / "media" / "a.png").symlink_to("../../secret.png")
    (data / "elsewhere").symlink_to("..")
    for name in ("media/a.png", "elsewhere/secret.png"):
        source = spec(write_jsonl(data / "a.jsonl", [{"image": name}]), "jsonl")
        assert "inside the folder" in str(only(source))
        assert "links included" in str(only(source))
        source = spec(write_parquet(data / "a.parquet", {"image": [name]}), "parquet")
        assert "links included" in str(only(source))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.png",
        "/secret.png",
        "..\\secret.png",
        "memory://secret.png",
        "%2e%2e/secret.png",
        "media/%2E%2e%2f..%2Fsecret.png",
        "%2fsecret.png",
        "..%5csecret.png",
    ],
)
def test_a_name_on_the_web_or_in_a_table_leaves_the_folder_in_no_spelling(
    data: Path, spec: Spec, write_parquet: Write, name: str
) -> None:
    """On the web what is percent-encoded leads as far; on disk it is a name like any other."""
    remote = Storage(spec("memory://hostile/data/a.jsonl", "jsonl"))
    with pytest.raises(SampleError, match="inside the folder"):
        remote.read_beside("/hostile/data/a.jsonl", name, DEFAULT_LIMITS)
    rows = spec(write_parquet(data / "a.parquet", {"image": [{"path": name}]}), "parquet")
    assert ("there is no file" if "%" in name else "inside the folder") in str(only(rows))


def test_a_link_inside_the_folder_is_followed(data: Path, spec: Spec, write_jsonl: Write) -> None:
    (data / "real.png").write_bytes(b"picture")
    (data / "media" / "a.png").symlink_to("../real.png")
    raw = only(spec(write_jsonl(data / "a.jsonl", [{"image": "media/a.png"}]), "jsonl"))
    assert isinstance(raw, RawSample)
    assert raw.media[0].data == b"picture"


def test_a_folder_that_is_a_link_itself_holds_what_it_leads_to(
    data: Path, tmp_path: Path, spec: Spec, write_jsonl: Write
) -> None:
    (data / "a.png").write_bytes(b"picture")
    write_jsonl(data / "a.jsonl", [{"image": "a.png"}])
    (tmp_path / "linked").symlink_to(data)
    assert isinstance(only(spec(tmp_path / "linked" / "a.jsonl", "jsonl")), RawSample)


def test_a_pipe_a_device_and_a_folder_are_no_media(
    data: Path, spec: Spec, write_jsonl: Write
) -> None:
    os.mkfifo(data / "pipe.png")
    (data / "zero.png").symlink_to("/dev/zero")
    for name, reason in (
        ("pipe.png", "a device, a pipe or a socket"),
        ("zero.png", "inside the folder"),
        ("media", "no file 'media'"),
    ):
        source = spec(write_jsonl(data / "a.jsonl", [{"image": name}]), "jsonl")
        assert reason in str(only(source))


def test_media_may_lie_under_a_root_of_their_own_and_nowhere_else(
    data: Path, tmp_path: Path, spec: Spec, write_jsonl: Write
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(b"picture")
    path = write_jsonl(data / "a.jsonl", [{"image": "a.png"}])
    raw = only(spec(path, "jsonl", media_root=str(tmp_path / "pictures")))
    assert isinstance(raw, RawSample)
    assert raw.media[0].data == b"picture"
    write_jsonl(data / "a.jsonl", [{"image": "../secret.png"}])
    refused = only(spec(path, "jsonl", media_root=str(tmp_path / "pictures")))
    assert "inside the folder" in str(refused)
    with pytest.raises(SourceError, match=r"media_root .* lies in another storage"):
        Storage(spec(path, "jsonl", media_root="memory://pictures"))


def test_media_above_the_limits_are_not_read(data: Path, spec: Spec, write_jsonl: Write) -> None:
    with (data / "large.png").open("wb") as stream:
        stream.truncate(2**40)  # takes no disk
    (data / "small.png").write_bytes(b"x" * 60)
    path = write_jsonl(data / "a.jsonl", [{"image": "large.png"}])
    assert "max_media_bytes" in str(only(spec(path, "jsonl")))
    write_jsonl(path, [{"images": ["small.png"] * 3}])
    assert "max_sample_bytes is 100" in str(
        only(spec(path, "jsonl"), DecodeLimits(max_sample_bytes=100))
    )
    assert "max_media_items is 2" in str(only(spec(path, "jsonl"), DecodeLimits(max_media_items=2)))


def test_remote_media_are_read_no_further_than_the_limit(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Storage(spec("memory://hostile/a.jsonl", "jsonl"))
    opened.fs.pipe_file("/hostile/m.png", b"x" * 1000)
    limits = DecodeLimits(max_media_bytes=1000)
    assert opened.read_beside("/hostile/a.jsonl", "m.png", limits) == b"x" * 1000
    with pytest.raises(SampleError, match="max_media_bytes is 999"):
        opened.read_beside("/hostile/a.jsonl", "m.png", replace(limits, max_media_bytes=999))
    opened.fs.rm("/hostile", recursive=True)


@pytest.mark.parametrize("limit", ["max_media_bytes", "max_sample_bytes", "max_media_items"])
def test_a_tar_sample_above_a_limit_is_refused_when_scanned_and_when_read(
    tmp_path: Path, spec: Spec, write_tar: Write, limit: str
) -> None:
    path = write_tar(tmp_path / "a.tar", [("a.0.png", b"x" * 60), ("a.1.png", b"x" * 60)])
    source = spec(path, "webdataset")
    limits = DecodeLimits(**{limit: {"max_media_items": 1}.get(limit, 59)})
    (whole,) = open_format(source).scan(list_files(source)[0])
    assert limit in str(only(source, limits))
    if limit != "max_media_bytes":
        with pytest.raises(SampleError, match=limit):
            open_format(source, limits).read("a", whole.location)


# ---- addresses ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "reference://x.parquet",
        "simplecache::http://example.org/a.parquet",
        "zip://a.parquet::/tmp/a.zip",
        "github://owner:repo@main/a.parquet",
        "data:,hello",
        "python://x",
        "dask://x/a.parquet",
        "sftp://host/a.parquet",
    ],
)
def test_a_url_that_is_no_plain_storage_is_refused_before_it_is_opened(
    spec: Spec, url: str
) -> None:
    with pytest.raises(SourceError, match="of no storage that jobs may read"):
        Storage(spec(url, "parquet"))
    with pytest.raises(SourceError, match="of no storage that jobs may read"):
        find_index([spec("/a.parquet", "parquet")], url, "x").read()


@pytest.mark.parametrize("option", ["protocol", "fo", "target_protocol", "target_options"])
def test_storage_options_cannot_choose_another_storage(spec: Spec, option: str) -> None:
    source = spec("/a.parquet", "parquet", storage_options={option: "reference"})
    with pytest.raises(SourceError, match=f"storage_options names {option}"):
        Storage(source)


# ---- bytes that change --------------------------------------------------------------------


def indexed(source: SourceSpec, folder: Path, measurer: Measurer) -> SourceReader:
    build_index(source, out_dir=str(folder), make_measurer=measurer)
    return SourceReader([source])


def test_a_media_file_that_is_replaced_after_indexing_is_seen(
    data: Path, tmp_path: Path, spec: Spec, write_jsonl: Write, measurer: Measurer
) -> None:
    (data / "media" / "a.png").write_bytes(b"picture")
    source = spec(write_jsonl(data / "a.jsonl", [{"image": "media/a.png", "text": "x"}]), "jsonl")
    reader = indexed(source, tmp_path / "index", measurer)
    catalog = find_index([source], str(tmp_path / "index"), "words-1").read()
    ((ref, _),) = catalog.details(np.array([0]))
    assert reader.read(ref).media[0].data == b"picture"
    (data / "media" / "a.png").write_bytes(b"Picture")  # as long, another
    with pytest.raises(SampleError, match=r"bytes of sample .* changed since indexing.*index"):
        reader.read(ref)
    assert reader.read(replace(ref, crc32=None)).media[0].data == b"Picture"


def test_the_checksum_covers_text_kind_and_order_of_media(
    tmp_path: Path, spec: Spec, write_tar: Write, measurer: Measurer
) -> None:
    members = [("a.0.png", b"one"), ("a.1.png", b"two"), ("a.txt", b"word")]
    path = write_tar(tmp_path / "a.tar", members)
    source = spec(path, "webdataset")
    reader = indexed(source, tmp_path / "index", measurer)
    catalog = find_index([source], str(tmp_path / "index"), "words-1").read()
    ((ref, _),) = catalog.details(np.array([0]))
    reader.read(ref)
    for place, data in ((0, b"two"), (1, b"one"), (2, b"Word")):
        other = [*members]
        other[place] = (members[place][0], data)
        write_tar(path, other)
        with pytest.raises(SampleError, match="changed since indexing"):
            reader.read(ref)


# ---- names that cannot be written down ----------------------------------------------------


def test_names_and_ids_that_are_no_text_do_not_stop_indexing(
    tmp_path: Path, spec: Spec, write_tar: Write, measurer: Measurer
) -> None:
    path = write_tar(tmp_path / "data" / "a.tar", [("b\udcff.txt", b"word"), ("c.txt", b"word")])
    half = r'{"id": "\ud800", "text": "word"}'
    (tmp_path / "data" / "a.jsonl").write_text(
        "\n".join((half, json.dumps({"id": "x" * 5000, "text": "word"}), '{"text": "bad \\ud800"}'))
    )
    tars = spec(path, "webdataset", name="tars")
    lines = spec(tmp_path / "data" / "a.jsonl", "jsonl", name="lines")
    for source in (tars, lines):
        build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    catalog = find_index([tars, lines], str(tmp_path / "index"), "words-1").read()
    details = catalog.details(np.arange(catalog.samples))
    assert [ref.key for ref, _ in details] == ["b\\xff", "c", "a.jsonl:1", "a.jsonl:2"]
    reader = SourceReader([tars, lines])
    assert all(reader.read(ref).record["text"] == "word" for ref, _ in details)


# ---- indexes that are not ours ------------------------------------------------------------


def part_of(folder: Path) -> Path:
    (part,) = (folder / "src").glob("part-*.parquet")
    return part


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("llm_tokens", 0, "llm_tokens out of range"),
        ("llm_tokens", 2**30, "llm_tokens out of range"),
        ("loss_tokens", 99, "loss_tokens out of range"),
        ("item_modality", [5], "an unknown modality"),
        ("item_encoder_tokens", [0], "encoder_tokens out of range"),
        ("item_llm_tokens", [9], "items out of their sample"),
        ("item_position", [-1], "items out of their sample"),
        ("item_shape", [[1, 2**15, 2**15, 3]], "max_decoded_bytes"),
        ("item_shape", [[1, 28, 3]], "shapes of another rank"),
        ("item_shape", [[1, 28, 28, 4]], "without 3 channels"),
        ("item_shape", [], "differ"),
        ("span_size_bytes", [-1, 3], "below 0"),
        ("key", None, "empty cells"),
        ("content", None, "empty cells"),
        ("content", bytes(16), "other samples than its manifest says"),
        ("key", "1", "other samples than its manifest says"),
        ("item_kind", [7], "an unknown kind of item"),
        ("item_kind", [2], "an unknown kind of item"),
        ("item_kind", [0, 0], "differ"),
        ("item_grid", [[1, 2, 8]], "grids of other than 4 numbers"),
        ("item_grid", [[1, 0, 16, 2]], "grids out of range"),
        ("item_grid", [[1, 2, 9, 2]], "grids of other patches"),
        ("item_seconds_per_patch", [-1.0], "seconds_per_patch out of range"),
        ("item_seconds_per_patch", [float("nan")], "seconds_per_patch out of range"),
        ("item_key_frames_s", [[1.0, 0.5]], "key frames out of order"),
        ("item_key_frames_s", [[float("inf")]], "key frames out of range"),
    ],
)
def test_an_index_that_says_what_no_index_says_is_refused(
    tmp_path: Path,
    spec: Spec,
    write_tar: Write,
    measurer: Measurer,
    column: str,
    value: object,
    reason: str,
) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.png", b"p"), ("0.txt", b"word")])
    source = spec(path, "webdataset")
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    part = part_of(tmp_path / "index")
    table = pq.read_table(part)
    place = table.schema.get_field_index(column)
    field = table.schema.field(place)
    pq.write_table(table.set_column(place, field, pa.array([value], field.type)), part)
    with pytest.raises(IndexStaleError, match=reason):
        find_index([source], str(tmp_path / "index"), "words-1").read()


def test_a_grid_of_patches_that_do_not_merge_may_leave_some_out(
    tmp_path: Path, spec: Spec, write_tar: Write, measurer: Measurer
) -> None:
    source = spec(
        write_tar(tmp_path / "a.tar", [("0.png", b"p"), ("0.txt", b"word")]), "webdataset"
    )
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    part = part_of(tmp_path / "index")
    table = pq.read_table(part)
    place = table.schema.get_field_index("item_grid")
    field = table.schema.field(place)
    grids = pa.array([[[1, 2, 3, 1]]], field.type)
    pq.write_table(table.set_column(place, field, grids), part)
    catalog = find_index([source], str(tmp_path / "index"), "words-1").read()
    assert catalog.item_details(np.array([0])).notes.grid.tolist() == [[1, 2, 3, 1]]


def test_an_index_that_unfolds_is_refused_before_it_does(
    tmp_path: Path, spec: Spec, write_tar: Write, measurer: Measurer
) -> None:
    source = spec(write_tar(tmp_path / "a.tar", [("0.txt", b"word")]), "webdataset")
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    part = part_of(tmp_path / "index")
    table = pq.read_table(part)
    many = pa.concat_tables([table] * 20_000)
    pq.write_table(many, part, row_group_size=20_000)
    with pytest.raises(IndexStaleError, match="row group 0 has 20,000 rows"):
        find_index([source], str(tmp_path / "index"), "words-1").read()
    pq.write_table(table.drop_columns(["crc32"]), part)
    with pytest.raises(IndexStaleError, match="it has no column 'crc32'"):
        find_index([source], str(tmp_path / "index"), "words-1").read()
