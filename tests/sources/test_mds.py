"""Shards of MosaicML Streaming: every encoding, folders, damage."""

import io
import json
import logging
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from PIL import Image

from dataservice.core.errors import SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.core.sample import RawSample
from dataservice.sources.catalog import find_index
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index import build_index
from dataservice.sources.reader import SourceReader
from tests.sources.listed import check_that_its_list_is_believed
from tests.sources.mds_writer import files_in_list, listed, pixels, shard
from tests.sources.support import good, scan, wrong_reads

Spec = Callable[..., SourceSpec]
TEXT = {"id": "str", "text": "str"}


def texts(first: int, count: int = 5) -> bytes:
    return shard(
        {**TEXT, "image": "jpeg", "n": "int"},
        [
            {
                "id": f"k{k}".encode(),
                "text": b"word " * (k + 1),
                "image": b"\xff\xd8\xff" + bytes([k]),
                "n": struct.pack("<q", -k),
            }
            for k in range(first, first + count)
        ],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return listed([texts(0), texts(5)], tmp_path / "set")


def one(tmp_path: Path, spec: Spec, encoding: str, value: bytes, name: str = "it") -> RawSample:
    """The only sample of a shard with one column."""
    path = tmp_path / "a.mds"
    path.write_bytes(shard({name: encoding}, [{name: value}]))
    (sample,) = scan(spec(path, "mds"))
    if isinstance(sample.raw, Exception):
        raise sample.raw
    return sample.raw


# ---- what is read -------------------------------------------------------------------------


def test_a_record_is_a_sample_and_one_byte_range(folder: Path, spec: Spec) -> None:
    samples = scan(spec(folder, "mds"))
    for k, sample in enumerate(samples):
        raw = good(sample)
        assert raw.record == {"id": f"k{k}", "text": "word " * (k + 1), "n": -k}
        assert [(b.kind, b.data) for b in raw.media] == [("image", b"\xff\xd8\xff" + bytes([k]))]
        assert (sample.key, len(sample.location.spans)) == (f"k{k}", 1)
    assert len(samples) == 10


@pytest.mark.parametrize(
    ("encoding", "value", "wanted"),
    [
        ("str", "é".encode(), "é"),
        ("json", b'[{"a": 1.5}]', [{"a": 1.5}]),
        ("int", struct.pack("<q", -7), -7),
        ("uint8", b"\xff", 255),
        ("float32", struct.pack("<f", 0.5), 0.5),
        ("str_int", b"123456789012345678901", 123456789012345678901),
        ("str_float", b"0.1", 0.1),
        ("str_decimal", b"1.10", "1.10"),
    ],
)
def test_text_numbers_and_json_are_the_record(
    tmp_path: Path, spec: Spec, encoding: str, value: bytes, wanted: object
) -> None:
    assert one(tmp_path, spec, encoding, value).record == {"it": wanted}


@pytest.mark.parametrize(
    ("encoding", "value", "files"),
    [
        ("jpeg", b"J", [b"J"]),
        ("png", b"P", [b"P"]),
        ("list[jpeg]", files_in_list(b"A", b"BB"), [b"A", b"BB"]),
        ("list[png]", files_in_list(), []),
        ("jpeg_array", files_in_list(b"A", b"BB", reserved=False), [b"A", b"BB"]),
    ],
)
def test_columns_encoded_as_images_are_images_under_any_name(
    tmp_path: Path, spec: Spec, encoding: str, value: bytes, files: list[bytes]
) -> None:
    media = one(tmp_path, spec, encoding, value).media
    assert [(blob.kind, blob.data) for blob in media] == [("image", data) for data in files]


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA"])
def test_raw_pixels_become_a_picture_of_the_same_pixels(
    tmp_path: Path, spec: Spec, mode: str
) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (150, 170, 4), dtype=np.uint8)
    picture = Image.fromarray(noise, "RGBA").convert(mode)
    value = pixels(170, 150, mode, picture.tobytes())
    for encoding, stored in (("pil", value), ("list[pil]", files_in_list(value))):
        (blob,) = one(tmp_path, spec, encoding, stored).media
        read = Image.open(io.BytesIO(blob.data))
        assert (read.format, read.mode, read.size) == ("PNG", mode, (170, 150))
        assert read.tobytes() == picture.tobytes()


def test_bytes_are_media_by_their_columns_name_or_refused(tmp_path: Path, spec: Spec) -> None:
    (blob,) = one(tmp_path, spec, "bytes", b"sound", name="audio").media
    assert (blob.kind, blob.data) == ("audio", b"sound")
    assert one(tmp_path, spec, "bytes", b"\0" * 99).media == ()
    with pytest.raises(SourceError, match=r"column 'it' holds image files.*ignore: \[it\]"):
        one(tmp_path, spec, "bytes", b"\xff\xd8\xff\xe0")
    with pytest.raises(SourceError, match=r"column 'text' is read as text.*binary"):
        one(tmp_path, spec, "bytes", b"words", name="text")


@pytest.mark.parametrize("encoding", ["pkl", "ndarray", "ndarray:float32:2,2", "unheard"])
def test_other_encodings_are_refused_unless_they_are_ignored(
    tmp_path: Path, spec: Spec, encoding: str
) -> None:
    path = tmp_path / "a.mds"
    path.write_bytes(shard({"text": "str", "it": encoding}, [{"text": b"t", "it": b"\x80." * 9}]))
    with pytest.raises(SourceError, match=rf"column 'it' is encoded as '{encoding}'.*\[it\]"):
        scan(spec(path, "mds"))
    (sample,) = scan(spec(path, "mds", ignore=("it",)))
    assert good(sample).record == {"text": "t"}


def test_many_threads_read_what_was_scanned_here_and_far_away(folder: Path, spec: Spec) -> None:
    near = spec(folder, "mds")
    memory = fsspec.filesystem("memory")
    for path in folder.iterdir():
        memory.pipe_file(f"/mds/{path.name}", path.read_bytes())
    far = spec("memory://mds", "mds")
    samples = scan(near)
    assert [s.raw for s in scan(far)] == [s.raw for s in samples]
    for source in (near, far):
        assert wrong_reads(open_format(source), scan(source), threads=8) == []


def test_an_index_leads_back_to_every_sample(
    folder: Path, tmp_path: Path, spec: Spec, measurer: Callable[[], SampleMeasurer]
) -> None:
    source = spec(folder, "mds")
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    catalog = find_index([source], str(tmp_path / "index"), "words-1").read()
    reader = SourceReader([source])
    raws = [reader.read(ref) for ref, _ in catalog.details(np.arange(catalog.samples))]
    assert raws == [sample.raw for sample in scan(source)]


# ---- folders ------------------------------------------------------------------------------


def test_the_index_of_a_folder_says_which_shards_there_are(
    folder: Path, spec: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "shard.00007.mds").write_bytes(texts(90))
    with caplog.at_level(logging.WARNING):
        assert len(list_files(spec(folder, "mds"))) == 2
    assert "shard.00007.mds" in caplog.text
    check_that_its_list_is_believed(
        spec(folder, "mds"),
        folder,
        lost="shard.00001.mds",
        list_name="index.json",
        damaged="{}",
    )
    (folder / "index.json").unlink()
    assert len(scan(spec(folder, "mds"))) == 10, "a shard describes itself"


def test_the_splits_of_a_data_set_are_chosen_in_the_url(tmp_path: Path, spec: Spec) -> None:
    for split in ("train", "val"):
        listed([texts(0)], tmp_path / "set" / split)
    with pytest.raises(SourceError, match=r"holds 2 data sets or splits.*set/val, or several"):
        list_files(spec(tmp_path / "set", "mds"))
    assert len(scan(spec(tmp_path / "set" / "train", "mds"))) == 5
    merged = {
        "shards": [{"raw_data": {"basename": f"{s}/shard.00000.mds"}} for s in ("train", "val")]
    }
    (tmp_path / "set" / "index.json").write_text(json.dumps(merged))
    assert len(scan(spec(tmp_path / "set", "mds"))) == 10


def test_compressed_shards_are_refused_with_the_remedy(folder: Path, spec: Spec) -> None:
    shard_path = folder / "shard.00001.mds"
    shard_path.rename(f"{shard_path}.zstd")
    with pytest.raises(SourceError, match=r"shard\.00001\.mds\.zstd is compressed.*Decompress"):
        list_files(spec(folder, "mds"))
    shard_path.write_bytes(texts(5))  # decompressed beside it
    assert len(scan(spec(folder, "mds"))) == 10


# ---- what is refused ----------------------------------------------------------------------


def test_a_shard_cut_anywhere_is_refused_by_name(folder: Path, spec: Spec) -> None:
    path = folder / "shard.00001.mds"
    whole = path.read_bytes()
    for changed in (*(whole[:keep] for keep in range(0, len(whole), 5)), whole + b"x", b"x" * 999):
        path.write_bytes(changed)
        with pytest.raises(SourceError, match=r"00001\.mds is not an MDS shard, or a truncated"):
            scan(spec(path, "mds"))


@pytest.mark.parametrize("samples", [2**32 - 1, 2**31, 2**24 + 1, 300])
def test_a_head_that_states_more_than_there_is_is_refused_before_memory(
    tmp_path: Path, spec: Spec, samples: int
) -> None:
    path = tmp_path / "a.mds"
    path.write_bytes(struct.pack("<I", samples) + texts(0)[4:])
    tracemalloc.start()
    with pytest.raises(SourceError, match=r"a\.mds is not an MDS shard"):
        scan(spec(path, "mds"))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2**20


@pytest.mark.parametrize(
    ("encoding", "value", "reason"),
    [
        ("str", b"\xff\xfe", "not UTF-8"),
        ("json", b"[oops", "not valid JSON"),
        ("str_int", b"one", "is no number"),
        ("list[jpeg]", b"\0\0", "ends after 2 bytes"),
        ("list[jpeg]", struct.pack("<III", 0, 2**12, 9), "ends after 12 bytes"),
        ("list[jpeg]", struct.pack("<II", 0, 2**32 - 1), "max_media_items"),
        ("list[png]", files_in_list(b"A") + b"more", "holds 17 bytes and states 13"),
        ("pil", pixels(2**31, 2**31, "RGB", b""), "max_image_pixels"),
        ("pil", pixels(2, 2, "RGB", b"x" * 11), "states 2 x 2 pixels"),
        ("pil", pixels(2, 0, "RGB", b""), "states 2 x 0 pixels"),
        ("pil", pixels(2, 2, "CMYK", b"x" * 16), "Encode the column as png"),
        ("pil", b"short", "ends after 5 bytes"),
    ],
)
def test_a_damaged_value_is_one_bad_sample(
    tmp_path: Path, spec: Spec, encoding: str, value: bytes, reason: str
) -> None:
    path = tmp_path / "a.mds"
    sound = {"it": value, "id": b"bad"}, {"it": b"", "id": b"other"}
    path.write_bytes(shard({"it": encoding, "id": "str"}, sound))
    first, _ = scan(spec(path, "mds"))
    assert reason in str(first.raw)


def test_sizes_that_are_not_the_samples_leave_the_others(tmp_path: Path, spec: Spec) -> None:
    path = tmp_path / "a.mds"
    whole = shard(TEXT, [{"id": b"a", "text": b"first"}, {"id": b"b", "text": b"second"}])
    assert whole.count(struct.pack("<II", 1, 5)) == 1
    for sizes in ((1, 2**32 - 1), (2**32 - 1, 5), (1, 4), (0, 0)):
        path.write_bytes(whole.replace(struct.pack("<II", 1, 5), struct.pack("<II", *sizes)))
        first, second = scan(spec(path, "mds"))
        assert "the sample holds 14 bytes, and its columns take" in str(first.raw)
        assert good(second).record == {"id": "b", "text": "second"}


def test_samples_above_the_limits_leave_the_others(tmp_path: Path, spec: Spec) -> None:
    path = tmp_path / "a.mds"
    path.write_bytes(shard({"text": "str"}, [{"text": b"x" * n} for n in (10, 300, 3000)]))
    source = spec(path, "mds")
    limits = DecodeLimits(max_record_bytes=200, max_sample_bytes=1000)
    (file,) = list_files(source)
    first, second, third = open_format(source, limits).scan(file)
    assert good(first).record == {"text": "x" * 10}
    assert "max_record_bytes" in str(second.raw)
    assert "max_sample_bytes" in str(third.raw)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 3},
        {"format": "xsv"},
        {"column_names": None},
        {"column_names": ["a"]},
        {"column_names": ["text", "text"]},
        {"column_encodings": ["str", 3]},
        {"column_sizes": [None, "8"]},
        {"column_sizes": [-1, None]},
        {"column_encodings": ["int", "str"]},
    ],
)
def test_a_description_that_is_none_is_refused(
    tmp_path: Path, spec: Spec, change: dict[str, object]
) -> None:
    whole = shard(TEXT, [])
    start = whole.index(b"{")
    config = json.dumps(json.loads(whole[start:]) | change).encode()
    path = tmp_path / "a.mds"
    path.write_bytes(struct.pack("<II", 0, start + len(config)) + config)
    with pytest.raises(SourceError, match=r"a\.mds is not an MDS shard"):
        scan(spec(path, "mds"))


def test_a_shard_that_became_another_is_reported(folder: Path, spec: Spec) -> None:
    source = spec(folder, "mds")
    sample = scan(source)[0]
    (folder / "shard.00000.mds").write_bytes(b"no shard" * 999)
    with pytest.raises(SourceError, match="changed after it was indexed"):
        open_format(source).read(sample.key, sample.location)
