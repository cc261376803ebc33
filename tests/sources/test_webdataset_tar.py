"""Tars: grouping, order of media, damage."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import webdataset
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.sample import MediaBlob
from dataservice.decode.image import image_size
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.formats.webdataset_tar import split_name
from tests.decode.files import Files
from tests.sources.support import good, scan

Spec = Callable[..., SourceSpec]
WriteTar = Callable[..., Path]


def test_members_of_one_key_are_one_sample(tmp_path: Path, spec: Spec, write_tar: WriteTar) -> None:
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("000.jpg", b"J"),
            ("000.json", b'{"messages": []}'),
            ("001.txt", "grün".encode()),
            ("001.WAV", b"W"),
            ("001.cls", b"7"),
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


def in_parts(*images: object) -> dict[str, object]:
    parts = [{"type": "image", "image": image} for image in images]
    return {"messages": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize(
    ("record", "shown"),
    [
        ({"images": ["folder/0.b.png", "0.a.png"]}, b"ba"),
        (in_parts("0.b.png", "0.a.png"), b"ba"),
        ({"images": ["0.a.png", "0.b.png"]}, b"ab"),
        ({"images": ["0.b.png", "other.png"]}, b"ab"),  # other names tell nothing of these
        (in_parts(3, 4), b"ab"),
    ],
)
def test_media_are_in_the_order_in_which_the_record_names_them(
    tmp_path: Path, spec: Spec, write_tar: WriteTar, record: dict[str, object], shown: bytes
) -> None:
    images = [("0.a.png", b"a"), ("0.b.png", b"b")]
    path = write_tar(tmp_path / "a.tar", [*images, ("0.json", json.dumps(record).encode())])
    (sample,) = scan(spec(path, "webdataset"))
    assert b"".join(blob.data for blob in good(sample).media) == shown


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


MEMBERS = {
    **{f: ("image", Files.image(16, 8, p)) for f, p in (
        ("bmp", "BMP"), ("tiff", "TIFF"), ("tif", "TIFF"), ("avif", "AVIF"), ("jp2", "JPEG2000"),
        ("image", "JPEG"), ("img", "PNG"), ("input", "PNG"), ("bin", "WEBP"), ("0", "GIF"),
    )},
    **{f: ("video", Files.video(3, container=c, codec=k, rate=25)) for f, c, k in (
        ("mov", "mov", "libx264"), ("m4v", "mp4", "libx264"), ("avi", "avi", "libx264"),
        ("mpg", "mpeg", "mpeg1video"), ("video", "mp4", "libx264"), ("x", "matroska", "libx264"),
    )},
    **{f: ("audio", Files.audio(0.2, container=c, codec=k, rate=48_000)) for f, c, k in (
        ("m4a", "ipod", "aac"), ("opus", "ogg", "libopus"), ("aac", "adts", "aac"),
        ("audio", "wav", "pcm_s16le"), ("snd", "flac", "flac"),
    )},
}  # fmt: skip


@pytest.mark.parametrize("suffix", MEMBERS)
def test_media_are_known_by_their_suffix_or_by_their_first_bytes(
    tmp_path: Path, spec: Spec, suffix: str
) -> None:
    kind, data = MEMBERS[suffix]
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as tar:
        tar.write({"__key__": "000", "txt": b"a cat", f"a.{suffix}": data})
    source = spec(tmp_path / "a.tar", "webdataset")
    (sample,) = scan(source)
    assert good(sample).record == {"text": "a cat"}
    assert [(b.kind, b.data) for b in good(sample).media] == [(kind, data)]
    assert open_format(source).read(sample.key, sample.location) == sample.raw


def test_what_an_image_cannot_be_decoded_from_is_refused_by_name_and_not_trained_as_text() -> None:
    for suffix, heic in (("heic", b"\0\0\0\x18ftypheic" + bytes(99)), ("jp2", MEMBERS["jp2"][1])):
        blob = MediaBlob(kind="image", name=f"000.{suffix}", data=heic)
        with pytest.raises(SampleError, match=rf"000.{suffix}.*readable are JPEG"):
            image_size(blob, DEFAULT_LIMITS)


@pytest.mark.parametrize("first", ["png", "txt"])
def test_a_tar_whose_texts_and_media_lie_apart_is_refused_and_not_trained_without_media(
    tmp_path: Path, spec: Spec, write_tar: WriteTar, first: str
) -> None:
    suffixes = sorted(("png", "txt"), key=lambda suffix: suffix != first)
    members = [(f"{k}.{suffix}", b"x") for suffix in suffixes for k in range(3)]
    with pytest.raises(SourceError, match=r"the text of key '0' and its media at two places"):
        scan(spec(write_tar(tmp_path / "a.tar", members), "webdataset"))
    alike = [("0.txt", b"x"), ("1.txt", b"x"), ("0.txt", b"x")]
    assert len(scan(spec(write_tar(tmp_path / "b.tar", alike), "webdataset"))) == 3


@pytest.mark.parametrize(("suffix", "kind"), [("tga", "image"), ("exr", "image"), ("ac3", "audio")])
def test_members_of_rare_kinds_are_media_too(
    tmp_path: Path, spec: Spec, write_tar: WriteTar, suffix: str, kind: str
) -> None:
    members = [("0.txt", b"a cat"), (f"0.{suffix}", bytes(40))]
    (sample,) = scan(spec(write_tar(tmp_path / "a.tar", members), "webdataset"))
    assert [blob.kind for blob in good(sample).media] == [kind]


def test_a_text_has_no_byte_order_mark(tmp_path: Path, spec: Spec, write_tar: WriteTar) -> None:
    (sample,) = scan(
        spec(write_tar(tmp_path / "a.tar", [("0.txt", b"\xef\xbb\xbfa cat")]), "webdataset")
    )
    assert good(sample).record == {"text": "a cat"}


def test_members_that_nobody_reads_are_said_once_a_source(
    tmp_path: Path, spec: Spec, write_tar: WriteTar, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(2):
        members = [(f"{k}.{s}", b"x") for k in range(3) for s in ("txt", "npy", "cls", "a.pth")]
        write_tar(tmp_path / f"{number}.tar", members)
    assert len(scan(spec(tmp_path / "*.tar", "webdataset"))) == 6
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" are not")[0].rpartition("/")[2] for text in said] == [
        "0.tar: 3 members ending in .npy",
        "0.tar: 3 members ending in .pth",
    ]
    assert "ignore: [npy]" in said[0]
    caplog.clear()
    scan(spec(tmp_path / "*.tar", "webdataset", ignore=("npy", ".pth")))
    assert not caplog.records


def test_ignored_suffixes_are_no_part_of_a_sample(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    members = [("0.jpg", b"J"), ("0.seg.png", b"S"), ("0.depth.PNG", b"D"), ("0.alt.txt", b"a")]
    path = write_tar(tmp_path / "a.tar", [*members, ("0.txt", b"t"), ("0.json", b'{"image": "x"}')])
    source = spec(path, "webdataset", ignore=("seg.png", "depth.png", "alt.txt", "image"))
    (sample,) = scan(source)
    assert (good(sample).record, [b.name for b in good(sample).media]) == ({"text": "t"}, ["0.jpg"])
    assert open_format(source).read(sample.key, sample.location) == sample.raw
    (sample,) = scan(spec(path, "webdataset"))
    assert "has 2 texts, ['0.alt.txt', '0.txt']" in str(sample.raw)


def test_a_text_beside_a_json_with_another_is_refused_until_one_of_them_is_ignored(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    members = [("0.txt", b"a cat\n"), ("0.json", b'{"caption": "a cat", "width": 9}')]
    members += [("1.txt", b"a cat"), ("1.json", b'{"caption": "a tabby cat on a mat"}')]
    members += [("0.jpg", b"J"), ("1.jpg", b"J")]
    path = write_tar(tmp_path / "a.tar", sorted(members))
    same, other = scan(spec(path, "webdataset"))
    assert good(same).record["text"] == "a cat\n"
    assert "'1.txt' has the text 'a cat', and caption of its JSON is 'a tabby" in str(other.raw)
    _, short = scan(spec(path, "webdataset", ignore=("caption",)))
    _, long = scan(spec(path, "webdataset", ignore=("txt",)))
    assert good(short).record == {"text": "a cat"}
    assert good(long).record == {"caption": "a tabby cat on a mat"}


def test_a_record_that_names_an_image_which_is_not_there_is_refused(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    record = b'{"image": "a.jpg", "url": "https://e.org/a.jpg", "width": 3, "text": "t"}'
    path = write_tar(tmp_path / "a.tar", [("0.json", record), ("1.json", record), ("1.jpg", b"J")])
    first, second = scan(spec(path, "webdataset"))
    assert "key 'image' names image 'a.jpg'" in str(first.raw)
    assert good(second).media[0].data == b"J"


def test_media_that_belong_to_no_sample_are_refused_by_name(
    tmp_path: Path, spec: Spec, write_tar: WriteTar
) -> None:
    picture = Files.image(8, 8, "PNG")
    members = [("0.jpg", b"J"), ("picture", picture), ("README", b"read"), ("0.txt", b"t")]
    lost, hidden, whole = scan(
        spec(write_tar(tmp_path / "a.tar", [*members, ("d/.1.png", picture)]), "webdataset")
    )
    assert "member 'picture' is image by its first bytes" in str(lost.raw)
    assert (good(whole).record, len(good(whole).media)) == ({"text": "t"}, 1)
    assert "'d/.1.png'" in str(hidden.raw)


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


# ---- folders that Energon prepared --------------------------------------------------------


@pytest.fixture
def prepared(tmp_path: Path, write_tar: WriteTar) -> Path:
    """Six shards, the last two of them in other splits."""
    folder = tmp_path / "prepared"
    for k in range(6):
        write_tar(folder / "shards" / f"{k:03}.tar", [(f"{k}.txt", b"word")])
        (folder / "shards" / f"{k:03}.tar.idx").write_bytes(bytes(16))
    (folder / ".nv-meta").mkdir()
    parts = {"train": ["shards/{000..003}.tar"], "val": ["shards/004.tar"], "test": []}
    (folder / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump({"split_parts": parts}))
    (folder / ".nv-meta" / ".info.json").write_text('{"shard_counts": {"shards/000.tar": 1}}')
    return folder


def keys(source: SourceSpec) -> list[str]:
    return [sample.key for sample in scan(source)]


def test_of_a_prepared_folder_the_split_train_is_read(
    prepared: Path, spec: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    assert keys(spec(prepared, "webdataset")) == ["0", "1", "2", "3"]
    assert "2 of its files are not read, such as" in caplog.text
    assert keys(spec(prepared / "shards" / "{004,005}.tar", "webdataset")) == ["4", "5"]
    split = prepared / ".nv-meta" / "split.yaml"
    stated = yaml.safe_load(split.read_text()) | {"exclude": ["shards/{001,002,004}.tar"]}
    split.unlink()
    (prepared / ".nv-meta" / "split.json").write_text(json.dumps(stated))
    assert keys(spec(prepared, "webdataset")) == ["0", "3"]


@pytest.mark.parametrize(
    ("split", "reason"),
    [
        ({"split_parts": {"val": ["shards/000.tar"]}}, r"split\.yaml is no list.*train"),
        ({"split_parts": {"train": [{"a": 1}]}}, r"split\.yaml is no list.*a shard's name"),
        ({"split_parts": {"train": ["{0..99999}"] * 11}}, "more than 1,000,000 shards"),
        ({"split_parts": {"train": ["shards/009.tar"]}}, r"lacks 1 of the 1 files.*009\.tar"),
        ({"split_parts": {"train": []}}, r"none of its 6 files, such as .*000\.tar, is data"),
        (
            {"split_parts": {"train": ["shards/000.tar"]}, "exclude": ["shards/000.tar/7"]},
            r"excludes single samples, such as 'shards/000\.tar/7'",
        ),
    ],
)
def test_a_split_that_cannot_be_had_is_refused(
    prepared: Path, spec: Spec, split: object, reason: str
) -> None:
    (prepared / ".nv-meta" / "split.yaml").write_text(yaml.safe_dump(split))
    with pytest.raises(SourceError, match=reason):
        list_files(spec(prepared, "webdataset"))
