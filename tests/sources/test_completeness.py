"""Media that a record speaks of and nobody reads; and metadata, which is let alone."""

import base64
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataservice.core.errors import SampleError
from dataservice.core.job import ColumnMap, SourceSpec
from dataservice.core.sample import MediaBlob
from dataservice.sources.formats.completeness import Completeness
from tests.decode.files import Files
from tests.sources.support import scan

PNG = Files.image(8, 8, "PNG")


def check(record, *kinds, unnamed=False, file="data/a.jsonl", **more):
    spec = SourceSpec(name="s", url="u", format="jsonl", **more)
    media = [MediaBlob(kind=kind, name="x", data=b"x") for kind in kinds]
    Completeness(spec).require(record, media, file=file, unnamed=unnamed)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("img", "a.jpg", "image"),
        ("image_path", "coco/a.PNG", "image"),
        ("picture", "a.webp", "image"),
        ("imageFile", "a.tiff", "image"),
        ("image_2", "b.jpg", "image"),
        ("photos", ["a.jpg", "b.jpg"], "image"),
        ("image_url", "https://example.org/a.jpg?size=9", "image"),
        ("audio_filepath", "a.wav", "audio"),
        ("audio_path", "a.opus", "audio"),
        ("wav", "a.wav", "audio"),
        ("clip", "a.mov", "video"),
        ("video_paths", [{"path": "a.mp4"}], "video"),
        ("img", {"bytes": "…", "path": None}, "image"),
        ("anything", "data:image/png;base64,AAAA", "image"),
        ("file_path", "a.wav", "audio"),
        ("media", ["a.mp4"], "video"),
        ("attachments", [{"type": "image", "path": "a.png"}], "image"),
        ("b64", base64.b64encode(PNG).decode(), "image"),
    ],
)
def test_media_under_a_key_that_nobody_reads_are_refused_by_name(key, value, kind):
    for record in ({key: value, "text": "t"}, {"messages": [{"role": "user", key: value}]}):
        with pytest.raises(SampleError, match=rf"key '{key}' names {kind} .*ignore: \['{key}'\]"):
            check(record)
        check(record, ignore=(key,))


@pytest.mark.parametrize(
    "record",
    [
        {"url": "https://example.org/a.jpg", "filename": "a.jpg", "key": "000", "source": "x.mp4"},
        {"file_name": "a.png", "original_width": 640, "image_width": 640, "image_height": 480},
        {"image_id": 17, "image_caption": "A cat", "num_images": 2, "images": 2, "audio": None},
        {"audio_duration": 1.5, "speech": "Ladies and gentlemen", "video_title": "How to"},
        {"img_hash": "9f0d", "picture": "a picture of a cat", "photo": "", "images": [], "n": True},
        {"text": "x" * 500, "sha": "A" * 64, "embedding": "QUJD" * 60},
        {"messages": [{"role": "user", "content": "see a.jpg"}], "meta": {"image_url": "a.jpg"}},
        {"path": "src/logo.svg", "file": "report.pdf", "media": "print", "meta": {"images": 3}},
    ],
)
def test_metadata_of_ordinary_sets_are_let_alone(record):
    check(record)


def said(caplog, *records, kinds=(), unnamed=False, **more):
    """What is said of records of a source, one after another."""
    completeness = Completeness(SourceSpec(name="s", url="u", format="jsonl", **more))
    media = [MediaBlob(kind=kind, name="x", data=b"x") for kind in kinds]
    caplog.clear()
    for record in records:
        completeness.require(record, media, file="data/a.jsonl", unnamed=unnamed)
    return caplog.messages


@pytest.mark.parametrize("value", ["a.jpg", ["a.jpg"], {"src": "a.jpg"}, [{"path": "a.jpg"}]])
def test_a_file_that_may_be_metadata_is_named_once_where_the_sample_has_none(caplog, value):
    record = {"text": "see b.png", "id": "0001.jpg", "filename": value, "title": "A cat."}
    (message,) = said(caplog, record, record)
    assert "source 's': data/a.jsonl: key 'filename' names image" in message
    assert "columns: {image: 'filename'}" in message
    assert "ignore: ['filename']" in message
    (message,) = said(caplog, record, unnamed=True)
    assert "columns" not in message


@pytest.mark.parametrize("format", ["jsonl", "parquet", "webdataset"])
def test_every_format_names_files_that_may_be_lost(tmp_path, caplog, spec, write_tar, format):
    record = {"text": "t", "filename": "a.jpg"}
    path = tmp_path / f"a.{format}"
    if format == "jsonl":
        path.write_text(json.dumps(record))
    elif format == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        write_tar(path, [("a.json", json.dumps(record).encode())])
    (sample,) = scan(spec(path, format))
    assert sample.raw.record["text"] == "t"
    assert "key 'filename' names image" in caplog.text


def test_no_file_is_named_that_describes_a_medium_or_is_no_part_of_the_sample(caplog):
    record = {"text": "t", "filename": "a.jpg"}
    assert not said(caplog, record, kinds=("image",))
    assert said(caplog, record, kinds=("audio",))
    assert not said(caplog, record, ignore=("filename",))
    assert not said(caplog, record, image_column="picture")
    assert not said(caplog, {"note": "as in a.jpg"}, columns=ColumnMap(text="note"))


def test_records_with_a_key_for_every_file_do_not_fill_the_log(caplog):
    assert 0 < len(said(caplog, *({f"k{n}": "a.jpg"} for n in range(100)))) < 10


@pytest.mark.parametrize("kind", ["audio", "video"])
@pytest.mark.parametrize(
    "record", [{"start": 0.5, "end": 1.0}, {"begin": 0, "end": 3}, {"offset": 2.5, "duration": 1}]
)
def test_a_part_of_a_recording_is_not_trained_as_the_whole(record, kind):
    with pytest.raises(SampleError, match=r"part of a longer recording .*write ignore: \["):
        check({"text": "t", **record}, kind)
    check({"text": "t", **record}, kind, ignore=tuple(record))
    check({"text": "t", **record}, "image")
    whole = {"offset": 0, "duration": 2.0, "start": "once", "end": [1.0], "start_time": None}
    check({"text": "t", **whole}, kind)


def test_what_describes_a_medium_that_the_sample_has_is_metadata():
    check({"image_path": "/orig/a.jpg", "image_url": "https://e.org/a.jpg"}, "image")
    with pytest.raises(SampleError, match="audio_path"):
        check({"audio_path": "a.wav"}, "image")


def test_a_second_image_that_is_not_read_is_not_metadata():
    with pytest.raises(SampleError, match=r"key 'image_2' .* has 1 image file\."):
        check({"image_2": "b.jpg"}, "image")


def test_members_of_an_archive_may_be_named_by_its_record():
    check({"image": "a.jpg", "image_2": "b.jpg"}, "image", "image", unnamed=True)
    check({"image": "000123"}, "image", unnamed=True)
    with pytest.raises(SampleError, match="image_2"):
        check({"image": "a.jpg", "image_2": "b.jpg"}, "image", unnamed=True)
    with pytest.raises(SampleError, match="key 'image' names image '000123'"):
        check({"image": "000123"}, unnamed=True)


def test_the_metadata_of_an_image_folder_name_its_files():
    record = {"file_name": "0001.png", "text": "a cat"}
    check(record)
    with pytest.raises(SampleError, match="file_name"):
        check(record, file="train/metadata.jsonl")


@pytest.mark.parametrize("meta", [{"images": ["a.png"]}, [{"n": 1}, {"images": ["a.png"]}]])
def test_media_inside_an_object_are_refused_where_the_sample_has_none(meta):
    record = {"text": "t", "meta": meta}
    with pytest.raises(SampleError, match=r"key 'meta.images' names image .*'a.png'"):
        check(record)
    for ignored in ("meta", "meta.images"):
        check(record, ignore=(ignored,))
    check(record, "image")
    check(record, image_column="meta.images")


def test_the_remedy_names_the_key_as_a_column_where_that_is_possible():
    for record, column in (
        ({"file_name": "a.png"}, "file_name"),
        ({"meta": {"image": "a.png"}}, "meta.image"),
    ):
        with pytest.raises(SampleError, match=rf"columns: {{image: '{column}'}}"):
            check({**record, "text": "t"}, file="train/metadata.jsonl")
    for unnamed, record in (
        (True, {"img": "a.png"}),
        (False, {"messages": [{"role": "user", "img": "a.png"}]}),
    ):
        with pytest.raises(SampleError, match=r"Put its path under 'image'"):
            check(record, unnamed=unnamed)


def test_a_source_with_an_image_column_of_its_choice_has_chosen():
    check({"image_url": "a.jpg"}, image_column="photo")


def test_reasons_are_of_bounded_length():
    with pytest.raises(SampleError) as refused:
        check({"image" + " x" * 10_000: ["a.jpg"] * 10_000})
    assert len(str(refused.value)) < 1000
