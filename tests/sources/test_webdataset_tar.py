"""Tars: grouping, order of media, damage."""

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import RawSample
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.formats.webdataset_tar import split_name

Spec = Callable[..., SourceSpec]
WriteTar = Callable[..., Path]


def scan(spec: SourceSpec) -> list[ScannedSample]:
    opened = open_format(spec)
    return [sample for file in list_files(spec) for sample in opened.scan(file)]


def good(sample: ScannedSample) -> RawSample:
    assert isinstance(sample.raw, RawSample), sample.raw
    return sample.raw


def test_members_of_one_key_are_one_sample(tmp_path: Path, spec: Spec, write_tar: WriteTar) -> None:
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("000.jpg", b"J"),
            ("000.json", b'{"messages": []}'),
            ("001.txt", "grün".encode()),
            ("001.WAV", b"W"),
            ("001.npy", b"ignored"),
        ],
    )
    first, second = scan(spec(path, "webdataset"))
    assert (first.key, good(first).record) == ("000", {"messages": []})
    assert [(b.kind, b.data) for b in good(first).media] == [("image", b"J")]
    assert (second.key, good(second).record) == ("001", {"text": "grün"})
    assert [(b.kind, b.name) for b in good(second).media] == [("audio", "001.WAV")]


def test_every_scanned_sample_reads_the_same_by_its_location(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    members = []
    for k in range(7):
        members += [(f"d/{k:03}.{i}.png", bytes([k, i]) * (50_000 * k + 1)) for i in range(k)]
        members.append((f"d/{k:03}.json", f'{{"id": "{k}", "text": "t"}}'.encode()))
    source = spec(write_tar(tmp_path / "a.tar", members), "webdataset")
    samples = scan(source)
    assert [s.key for s in samples] == [f"d/{k:03}" for k in range(7)]
    for sample in samples:
        assert open_format(source).read(sample.key, sample.location) == good(sample)


def test_media_are_in_natural_order_images_before_video_before_audio(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    names = ["0.10.jpg", "0.2.jpg", "0.a.mp3", "0.b.mp4", "0.1.gif", "0.json"]
    path = write_tar(tmp_path / "a.tar", [(n, b"{}") for n in names])
    (sample,) = scan(spec(path, "webdataset"))
    assert [b.name for b in good(sample).media] == [
        "0.1.gif", "0.2.jpg", "0.10.jpg", "0.b.mp4", "0.a.mp3",
    ]  # fmt: skip


def test_metadata_json_and_a_caption_are_merged(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"a caption"), ("0.json", b'{"url": "u"}')])
    (sample,) = scan(spec(path, "webdataset"))
    assert good(sample).record == {"text": "a caption", "url": "u"}


names = st.from_regex(r"([ab.]{0,2}/){0,2}[a-c_]{1,2}(\.[a-c]{0,2}){0,3}", fullmatch=True)


@given(names)
def test_the_key_follows_the_rule_of_webdataset_itself(name: str) -> None:
    key, suffix = webdataset.tariterators.base_plus_ext(name)
    assert split_name(name) == ((key, suffix) if suffix else None)


@pytest.mark.parametrize("name", ["._000.jpg", "d/.hidden.jpg", "__meta__/a.json", "plain", ""])
def test_names_that_are_no_part_of_a_sample_are_passed_over(name: str) -> None:
    assert split_name(name) is None


def test_a_tar_written_by_webdataset_groups_as_webdataset_groups_it(
    tmp_path: Path, spec: Spec
) -> None:
    path = tmp_path / "a.tar"
    with path.open("wb") as stream, webdataset.TarWriter(stream) as writer:
        for k in range(5):
            writer.write({"__key__": f"x/{k:04}", "jpg": b"j" * k, "json": {"text": str(k)}})
    with path.open("rb") as stream:
        theirs = list(
            webdataset.tariterators.group_by_keys(
                webdataset.tariterators.tar_file_expander([{"url": "a", "stream": stream}])
            )
        )
    ours = scan(spec(path, "webdataset"))
    assert [s.key for s in ours] == [t["__key__"] for t in theirs]
    assert [good(s).media[0].data for s in ours] == [t["jpg"] for t in theirs]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_are_not_followed_but_named(tmp_path: Path, spec: Spec, kind: bytes) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        info = tarfile.TarInfo("000.jpg")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
        text = tarfile.TarInfo("000.txt")
        text.size = 5
        tar.addfile(text, io.BytesIO(b"hello"))
        other = tarfile.TarInfo("001.txt")
        other.size = 5
        tar.addfile(other, io.BytesIO(b"world"))
    first, second = scan(spec(path, "webdataset"))
    assert isinstance(first.raw, SampleError)
    assert "000.jpg" in str(first.raw)
    assert "link" in str(first.raw)
    assert good(second).record == {"text": "world"}


def test_names_that_climb_are_only_names(tmp_path: Path, spec: Spec, write_tar: WriteTar) -> None:
    path = write_tar(tmp_path / "a.tar", [("../../etc/x.txt", b"hi"), ("/abs/y.txt", b"ho")])
    assert [good(s).record["text"] for s in scan(spec(path, "webdataset"))] == ["hi", "ho"]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("0.json", b"{nope")], "member '0.json' is not valid JSON"),
        ([("0.json", b"[1]")], "JSON list"),
        ([("0.txt", b"\xff\xfe")], "not UTF-8"),
        ([("0.jpg", b"a"), ("0.jpg", b"b")], "occurs twice"),
    ],
)
def test_one_bad_sample_leaves_the_others(
    tmp_path: Path, spec: Spec, write_tar: WriteTar, members: list[tuple[str, bytes]], reason: str
) -> None:
    path = write_tar(tmp_path / "a.tar", [*members, ("1.txt", b"fine")])
    first, second = scan(spec(path, "webdataset"))
    assert reason in str(first.raw)
    assert good(second).record == {"text": "fine"}


def test_a_tar_cut_inside_a_member_is_truncated(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"x" * 1000), ("1.txt", b"y" * 5000)])
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(SourceError, match=r"a\.tar is truncated: member '1.txt' .* has 3000"):
        scan(spec(path, "webdataset"))


def test_a_tar_cut_between_members_is_truncated(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    path = write_tar(tmp_path / "a.tar", [("0.txt", b"x" * 512), ("1.txt", b"y" * 5000)])
    path.write_bytes(path.read_bytes()[:1024])
    with pytest.raises(SourceError, match=r"truncated: it ends at byte 1024"):
        scan(spec(path, "webdataset"))


def test_a_damaged_header_in_the_middle_does_not_end_the_source_silently(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    path = write_tar(tmp_path / "a.tar", [(f"{k}.txt", b"x") for k in range(4)])
    data = bytearray(path.read_bytes())
    data[2048 + 148 : 2048 + 156] = b"\xff" * 8  # the checksum of the third header
    path.write_bytes(data)
    with pytest.raises(SourceError, match="damaged at byte 2048"):
        scan(spec(path, "webdataset"))


def test_tars_joined_with_cat_are_refused(tmp_path: Path, spec: Spec, write_tar: WriteTar) -> None:
    one = write_tar(tmp_path / "one.tar", [("0.txt", b"x")]).read_bytes()
    (tmp_path / "two.tar").write_bytes(one + one)
    with pytest.raises(SourceError, match="separate files"):
        scan(spec(tmp_path / "two.tar", "webdataset"))


def test_a_compressed_tar_is_refused_with_the_reason(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    plain = write_tar(tmp_path / "a.tar", [("0.txt", b"x")])
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(plain.read_bytes()))
    with pytest.raises(SourceError, match=r"compressed with gzip.*Decompress"):
        scan(spec(path, "webdataset"))


@pytest.mark.parametrize("content", [b"", b"hello, this is no tar" * 100])
def test_a_file_that_is_no_tar_is_refused(tmp_path: Path, spec: Spec, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(SourceError, match=r"a\.tar \(\d+ bytes\) is no tar"):
        scan(spec(tmp_path / "a.tar", "webdataset"))


def test_a_tar_that_shrank_after_indexing_is_reported(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    source = spec(write_tar(tmp_path / "a.tar", [("0.txt", b"x" * 9000)]), "webdataset")
    (sample,) = scan(source)
    (tmp_path / "a.tar").write_bytes(b"short")
    with pytest.raises(SourceError, match="changed after it was indexed"):
        open_format(source).read(sample.key, sample.location)
    (tmp_path / "a.tar").unlink()
    with pytest.raises(SourceError, match="no such file"):
        open_format(source).read(sample.key, sample.location)
