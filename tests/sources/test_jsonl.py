"""JSONL: lines, media beside the file, paths that climb out."""

import gzip
import json
import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import RawSample
from dataservice.sources.formats.protocol import Divisible, ScannedSample
from dataservice.sources.formats.registry import list_files, open_format
from tests.sources.support import scan

Spec = Callable[..., SourceSpec]
Write = Callable[..., Path]


def test_a_line_is_a_sample_and_reads_the_same_by_its_span(
    tmp_path: Path, spec: Spec, write_jsonl: Write
) -> None:
    records = [{"id": 7, "text": "größer"}, {"text": "b"}, {"id": "x", "text": "c" * 5000}]
    source = spec(write_jsonl(tmp_path / "a.jsonl", records), "jsonl")
    samples = scan(source)
    assert [s.key for s in samples] == ["7", "a.jsonl:2", "x"]
    for sample, record in zip(samples, records, strict=True):
        assert sample.raw == RawSample(key=sample.key, record=record)
        assert open_format(source).read(sample.key, sample.location) == sample.raw


def test_media_are_images_then_videos_then_audio_from_either_key(
    tmp_path: Path, spec: Spec, write_jsonl: Write
) -> None:
    for name in ("a.jpg", "b.png", "c.mp4", "d.wav", "e.wav"):
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / name).write_bytes(name.encode())
    record = {
        "audios": ["m/d.wav", "m/e.wav"],
        "video": "m/c.mp4",
        "images": ["m/../m/b.png", "m/a.jpg"],
        "image": None,
    }
    source = spec(write_jsonl(tmp_path / "a.jsonl", [record]), "jsonl")
    (sample,) = scan(source)
    raw = open_format(source).read(sample.key, sample.location)
    assert raw == sample.raw
    assert [(b.kind, b.data) for b in raw.media] == [
        ("image", b"b.png"), ("image", b"a.jpg"), ("video", b"c.mp4"),
        ("audio", b"d.wav"), ("audio", b"e.wav"),
    ]  # fmt: skip


def test_a_second_image_under_a_key_of_its_own_is_refused(
    tmp_path: Path, spec: Spec, write_jsonl: Write
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"A")
    record = {"image": "a.jpg", "image_2": "b.jpg", "image_path": "old/a.jpg", "text": "t"}
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    (sample,) = scan(spec(path, "jsonl"))
    assert "key 'image_2' names image 'b.jpg'" in str(sample.raw)
    source = spec(path, "jsonl", ignore=("image_2",), placeholders="text")
    (sample,) = scan(source)
    assert isinstance(sample.raw, RawSample)
    assert set(sample.raw.record) == {"image", "image_path", "text"}
    assert sample.raw.placeholders == "text"
    assert open_format(source).read(sample.key, sample.location) == sample.raw


def test_an_ignored_key_is_not_read(tmp_path: Path, spec: Spec, write_jsonl: Write) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"image": "gone.jpg", "text": "t"}])
    (sample,) = scan(spec(path, "jsonl", ignore=("image",)))
    assert sample.raw == RawSample(key="a.jsonl:1", record={"text": "t"})


def test_parts_that_name_other_files_than_the_record_are_refused(
    tmp_path: Path, spec: Spec, write_jsonl: Write
) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jpg").write_bytes(name.encode())

    def record(named: object, *in_parts: str) -> dict[str, object]:
        parts = [{"type": "image", "image": value} for value in in_parts]
        return {"images": named, "messages": [{"role": "user", "content": [*parts, "?"]}]}

    path = write_jsonl(
        tmp_path / "a.jsonl",
        [
            record(["a.jpg", "b.jpg"], "b.jpg", "a.jpg"),
            record("a.jpg", "b.jpg"),
            record(["a.jpg", "b.jpg"], "./a.jpg", "file://b.jpg"),
        ],
    )
    *others, same = scan(spec(path, "jsonl"))
    for sample in others:
        assert "it is unclear which belong where. Write ignore: ['images']" in str(sample.raw)
    assert isinstance(same.raw, RawSample)
    samples = scan(spec(path, "jsonl", ignore=("images",)))
    shown = [[blob.data for blob in sample.raw.media] for sample in samples]
    assert shown == [[b"b", b"a"], [b"b"], [b"a", b"b"]]


@pytest.mark.parametrize("value", ["a.jpg", "data:image/jpeg;base64,/9j/"])
def test_options_of_a_part_are_kept_to_be_refused_unless_they_are_ignored(
    tmp_path: Path, spec: Spec, write_jsonl: Write, value: str
) -> None:
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff")
    part = {"type": "image", "image": value, "max_pixels": 9, "min_pixels": None}
    record = {"messages": [{"role": "user", "content": [part, "max_pixels"]}]}
    path = write_jsonl(tmp_path / "a.jsonl", [record])
    for ignored, kept in (((), True), (("max_pixels",), False)):
        (sample,) = scan(spec(path, "jsonl", ignore=ignored))
        assert isinstance(sample.raw, RawSample)
        assert [blob.data for blob in sample.raw.media] == [b"\xff\xd8\xff"]
        (turn,) = sample.raw.record["messages"]
        assert ("max_pixels" in turn["content"][0]) == kept
        assert turn["content"][1] == "max_pixels"


@pytest.mark.parametrize(
    "path",
    ["../secret.jpg", "/etc/passwd", "m/../../secret.jpg", "..", ".", "..\\secret.jpg",
     "file:///etc/passwd", "s3://bucket/x.jpg", "a\0.jpg"],
)  # fmt: skip
def test_a_path_out_of_the_folder_is_refused(
    tmp_path: Path, spec: Spec, write_jsonl: Write, path: str
) -> None:
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    source = spec(write_jsonl(tmp_path / "data" / "a.jsonl", [{"image": path}]), "jsonl")
    (sample,) = scan(source)
    assert isinstance(sample.raw, SampleError)
    assert "inside the folder" in str(sample.raw)
    with pytest.raises(SampleError, match="inside the folder"):
        open_format(source).read(sample.key, sample.location)


def test_an_empty_text_in_place_of_a_path_is_told_as_such(
    tmp_path: Path, spec: Spec, write_jsonl: Write
) -> None:
    records = [{"image": "", "text": "a cat"}]  # as mixtures with texts alone have it
    (sample,) = scan(spec(write_jsonl(tmp_path / "a.jsonl", records), "jsonl"))
    assert isinstance(sample.raw, SampleError)
    assert "key 'image' is an empty text" in str(sample.raw)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{nope", "line 2 of .*a.jsonl is not valid JSON"),
        (b"[1, 2]", "line 2 of .* JSON list"),
        (b'"text"', "JSON str"),
        (b'{"text": "\xff"}', "line 2 .* not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"image": "gone.jpg"}', "no file 'gone.jpg'"),
        (b'{"image": "a.jsonl/b.jpg"}', "no file 'a.jsonl/b.jpg'"),
        (b'{"image": "circle.jpg"}', "no file 'circle.jpg'"),
        (b'{"image": "socket.jpg"}', "no file 'socket.jpg'"),
        (rb'{"image": "\ud800.jpg"}', r"no file '\\ud800.jpg'"),
        (b'{"image": "."}', "inside the folder"),
        (b'{"image": 3}', "key 'image' holds 3"),
        (b'{"image": {"path": "a.jpg"}}', "key 'image' holds {'path'"),
        (b'{"image": "%s"}' % (b"A" * 5000), "key 'image' holds 5,000 characters.*no path"),
        (b'{"image": "%s.jpg"}' % (b"a/" * 5000), "holds 10,004 characters.*no path"),
        (b'{"image_path": "gone.jpg", "text": "t"}', "key 'image_path' names image 'gone.jpg'"),
        (b'{"audio_filepath": "a.wav", "text": "t"}', "key 'audio_filepath' names audio"),
        (b'{"images": ["a", {}]}', "key 'images' holds {}|no file 'a'"),
    ],
)
def test_one_bad_line_leaves_the_others(
    tmp_path: Path, spec: Spec, line: bytes, reason: str
) -> None:
    (tmp_path / "circle.jpg").symlink_to("circle.jpg")
    os.mknod(tmp_path / "socket.jpg", stat.S_IFSOCK)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b'\n\n  \n{"text": "b"}')
    first, second, third = scan(spec(tmp_path / "a.jsonl", "jsonl"))
    assert isinstance(first.raw, RawSample)
    with pytest.raises(SampleError, match=reason):
        raise second.raw  # type: ignore[misc]
    assert third.key == "a.jsonl:5"
    assert isinstance(third.raw, RawSample)


def test_a_bad_sample_keeps_its_own_id(tmp_path: Path, spec: Spec, write_jsonl: Write) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"id": "q1", "image": "gone.jpg"}])
    (sample,) = scan(spec(path, "jsonl"))
    assert sample.key == "q1"


def test_a_compressed_file_is_refused(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(SourceError, match="compressed"):
        scan(spec(tmp_path / "a.jsonl.gz", "jsonl"))


def test_a_json_array_is_refused_with_its_format(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "a.json").write_text('\n[{"text": "a"}]')
    with pytest.raises(SourceError, match="format: json"):
        scan(spec(tmp_path / "a.json", "jsonl"))


def test_an_endless_line_is_passed_over_by_number(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" + "x" * 5000 + '\n{"text": "b"}')
    source, limits = spec(tmp_path / "a.jsonl", "jsonl"), DecodeLimits(max_record_bytes=100)
    opened = open_format(source, limits)
    first, second, third = opened.scan(list_files(source)[0])
    assert "line 2 of" in str(second.raw)
    assert "5,001; the limit max_record_bytes is 100" in str(second.raw)
    assert third.raw == opened.read(third.key, third.location)
    assert third.raw.record == {"text": "b"}
    with pytest.raises(SampleError, match="max_record_bytes"):
        opened.read(second.key, second.location)
    assert isinstance(first.raw, RawSample)


LINES = st.lists(
    st.one_of(
        st.just(b""),
        st.just(b"   \r"),
        st.just(b"no json"),
        st.integers(0, 150).map(lambda size: json.dumps({"text": "x" * size}).encode()),
    ),
    max_size=30,
)


@given(lines=LINES, ends=st.booleans(), piece_bytes=st.integers(1, 400))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_pieces_of_a_file_hold_its_samples_each_once_under_the_same_names(
    tmp_path: Path, spec: Spec, lines: list[bytes], ends: bool, piece_bytes: int
) -> None:
    """Also where lines are blank, damaged, longer than a piece or than the limit."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * ends)
    source = spec(path, "jsonl")
    opened = open_format(source, DecodeLimits(max_record_bytes=100))
    assert isinstance(opened, Divisible)
    (file,) = list_files(source)
    whole = list(opened.scan(file))
    pieces = opened.divided(file, piece_bytes)
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert sum(piece.end - piece.start for piece in pieces) == path.stat().st_size
    found, before = [], 0
    for piece in pieces:
        found += opened.scan_piece(file, replace(piece, records_before=before))
        before += opened.records_in(file, piece)
    assert [_told(each) for each in found] == [_told(each) for each in whole]


def _told(sample: ScannedSample) -> tuple[object, ...]:
    raw = str(sample.raw) if isinstance(sample.raw, SampleError) else sample.raw
    return sample.key, sample.location, raw, sample.behind_bytes


def test_a_file_that_is_no_jsonl_is_not_divided(tmp_path: Path, spec: Spec) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("[\n" + json.dumps({"text": "x"}) + "\n]")
    source = spec(path, "jsonl")
    opened = open_format(source)
    assert isinstance(opened, Divisible)
    assert opened.divided(list_files(source)[0], 4) == ()
