"""Arrow files as `save_to_disk` and Arrow's own writers lay them out: what is read, by how many
bytes, and what is refused."""

import io
import logging
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.ports import SampleMeasurer
from dataservice.core.sample import SampleLocation
from dataservice.sources.catalog import find_index
from dataservice.sources.formats import arrow
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index import build_index
from dataservice.sources.reader import SourceReader
from tests.sources.listed import check_that_its_list_is_believed
from tests.sources.support import good, held, scan, wrong_reads

Spec = Callable[..., SourceSpec]
ROWS = 40


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def picture(number: int) -> dict[str, object]:
    noise = np.random.default_rng(number).integers(0, 255, (9, 12 + number, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noise).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": f"{number}.png"}


def data_set(rows: int = ROWS) -> datasets.Dataset:
    """Rows with none to two pictures, turns, numbers and a vector; some cells are null."""
    features = datasets.Features(
        {
            "id": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "good": datasets.Value("bool"),
            "score": datasets.Value("float32"),
            "vector": datasets.Array2D((2, 2), "float32"),
            "mask": datasets.Value("binary"),
        }
    )
    values = [
        {
            "id": f"k{k}",
            "images": [picture(k + i) for i in range(k % 3)],
            "messages": [
                {"role": "user", "content": f"q{k}" + "<image>" * (k % 3)},
                {"role": "assistant", "content": None if k % 7 == 0 else "é" * k},
            ],
            "good": None if k % 4 == 0 else k % 2 == 0,
            "score": k / 2,
            "vector": [[1, 2], [3, 4]],
            "mask": b"m" * 500,
        }
        for k in range(rows)
    ]
    return datasets.Dataset.from_list(values, features=features)


def saved(path: Path, shards: int = 2) -> Path:
    data_set().save_to_disk(path, num_shards=shards)
    return path


def written(
    path: Path, table: pa.Table, *, file: bool = False, rows: int = 3, **options: Any
) -> Path:
    """A table as an Arrow stream or file, in batches of a few rows."""
    make = pa.ipc.new_file if file else pa.ipc.new_stream
    with make(path, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def some_texts() -> pa.Table:
    return pa.table({"id": [f"k{k}" for k in range(7)], "text": [f"words {k}" for k in range(7)]})


def texts_with_pictures() -> pa.Table:
    return some_texts().append_column("image", held(*(bytes([k]) * 99 for k in range(7))))


def without_nulls(turn: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in turn.items() if value is not None}


# ---- what is read -------------------------------------------------------------------------


def test_a_saved_data_set_is_what_its_own_library_reads(tmp_path: Path, spec: Spec) -> None:
    samples = scan(spec(saved(tmp_path / "set"), "arrow"))
    theirs = datasets.load_from_disk(tmp_path / "set")
    theirs = theirs.cast_column("images", datasets.List(datasets.Image(decode=False)))
    for sample, row in zip(samples, theirs, strict=True):
        raw = good(sample)
        assert raw.key == row["id"]
        assert [(b.kind, b.data, b.name) for b in raw.media] == [
            ("image", image["bytes"], image["path"]) for image in row["images"]
        ]
        assert raw.record["messages"] == [without_nulls(turn) for turn in row["messages"]]
        assert (raw.record.get("good"), raw.record["score"]) == (row["good"], row["score"])
        assert set(raw.record) <= {"id", "messages", "good", "score"}


@pytest.mark.parametrize("few_bytes", [arrow.FEW_BYTES, 1])
def test_rows_read_in_any_order_from_many_threads_are_those_scanned(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch, few_bytes: int
) -> None:
    monkeypatch.setattr(arrow, "FEW_BYTES", few_bytes)
    source = spec(saved(tmp_path / "set"), "arrow")
    samples = scan(source)
    assert len(samples) == ROWS
    assert wrong_reads(open_format(source), samples, threads=8) == []


def test_one_row_is_read_without_its_batch(tmp_path: Path, spec: Spec) -> None:
    (path,) = saved(tmp_path / "set", shards=1).glob("*.arrow")
    for sample in scan(spec(path, "arrow")):
        raw = good(sample)
        own_bytes = sum(len(blob.data) for blob in raw.media) + len(repr(raw.record))
        read_bytes = sum(span.size_bytes for span in sample.location.spans)
        assert read_bytes < own_bytes + 300 < path.stat().st_size / 4


def test_files_and_streams_hold_the_same_samples_here_and_far_away(
    tmp_path: Path, spec: Spec
) -> None:
    table = texts_with_pictures()
    stream = scan(spec(written(tmp_path / "s.arrow", table), "arrow"))
    source = spec(written(tmp_path / "f.arrow", table, file=True), "arrow")
    assert [s.raw for s in scan(source)] == [s.raw for s in stream]
    assert [(s.location.row_group, s.location.row) for s in stream] == [
        (k // 3, k % 3) for k in range(7)
    ]
    fsspec.filesystem("memory").pipe_file("/far/f.arrow", (tmp_path / "f.arrow").read_bytes())
    far = spec("memory://far/f.arrow", "arrow")
    assert [s.raw for s in scan(far)] == [s.raw for s in stream]
    opened = open_format(far)
    assert all(opened.read(s.key, s.location) == s.raw for s in scan(far))


def test_an_index_leads_back_to_every_sample(
    tmp_path: Path, spec: Spec, measurer: Callable[[], SampleMeasurer]
) -> None:
    source = spec(written(tmp_path / "a.arrow", texts_with_pictures()), "arrow")
    build_index(source, out_dir=str(tmp_path / "index"), make_measurer=measurer)
    catalog = find_index([source], str(tmp_path / "index"), "words-1").read()
    reader = SourceReader([source])
    raws = [reader.read(ref) for ref, _ in catalog.details(np.arange(catalog.samples))]
    assert raws == [sample.raw for sample in scan(source)]


def test_columns_are_media_record_or_refused_as_in_other_tables(tmp_path: Path, spec: Spec) -> None:
    png = picture(1)["bytes"]
    assert isinstance(png, bytes)
    table = pa.table({"text": ["t"], "jpg": [b"J"], "thing": [png]})
    path = written(tmp_path / "a.arrow", table)
    with pytest.raises(SourceError, match=r"column 'thing' holds image files.*ignore: \[thing\]"):
        scan(spec(path, "arrow"))
    (sample,) = scan(spec(path, "arrow", ignore=("thing",)))
    assert [(b.kind, b.data) for b in good(sample).media] == [("image", b"J")]
    with pytest.raises(SourceError, match=r"no column 'photo', which image_column.*thing"):
        scan(spec(path, "arrow", image_column="photo"))


def test_a_row_above_the_limits_leaves_the_others(tmp_path: Path, spec: Spec) -> None:
    table = pa.table({"text": ["a", "b" * 5000, "c"], "image": held(b"A", b"B", b"C" * 5000)})
    source = spec(written(tmp_path / "a.arrow", table), "arrow")
    limits = DecodeLimits(max_record_bytes=1000, max_sample_bytes=1000)
    (file,) = list_files(source)
    first, second, third = open_format(source, limits).scan(file)
    assert good(first).record == {"text": "a"}
    assert "max_record_bytes" in str(second.raw)
    assert "max_sample_bytes" in str(third.raw)
    with pytest.raises(SampleError, match="max_sample_bytes"):
        open_format(source, limits).read("k", third.location)


def test_a_row_larger_than_a_sample_may_be_is_not_read(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "FEW_BYTES", 2**20)
    table = pa.table({"text": ["a", "b", "c"], "image": held(b"A", b"B" * 2**25, b"C")})
    source = spec(written(tmp_path / "a.arrow", table), "arrow")
    (file,) = list_files(source)
    opened = open_format(source, DecodeLimits(max_sample_bytes=2**21))
    tracemalloc.start()
    first, second, third = opened.scan(file)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (good(first).media[0].data, good(third).media[0].data) == (b"A", b"C")
    assert "max_sample_bytes" in str(second.raw)
    assert peak_bytes < 2**23


# ---- folders ------------------------------------------------------------------------------


def test_what_a_data_set_does_not_name_in_its_folder_is_not_read(
    tmp_path: Path, spec: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    folder = saved(tmp_path / "set")
    datasets.load_from_disk(folder).map(lambda row: {"more": row["id"]})
    (cache,) = folder.glob("cache-*.arrow")
    with caplog.at_level(logging.WARNING):
        for url in (folder, folder / "*.arrow"):
            caplog.clear()
            names = [Path(file.path).name for file in list_files(spec(url, "arrow"))]
            assert names == ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
            assert cache.name in caplog.text
    assert len(list_files(spec(cache, "arrow"))) == 1, "it is read where the url names it"


def test_a_missing_shard_of_a_data_set_is_named(tmp_path: Path, spec: Spec) -> None:
    folder = saved(tmp_path / "set")
    check_that_its_list_is_believed(
        spec(folder, "arrow"),
        folder,
        lost="data-00001-of-00002.arrow",
        list_name="state.json",
        damaged='{"_data_files": 3}',
    )


def test_the_splits_of_a_data_set_are_chosen_in_the_url(tmp_path: Path, spec: Spec) -> None:
    splits = datasets.DatasetDict(train=data_set(5), test=data_set(2))
    splits.save_to_disk(tmp_path / "set")
    with pytest.raises(SourceError, match=r"holds 2 data sets or splits.*set/train, or several"):
        list_files(spec(tmp_path / "set", "arrow"))
    assert len(scan(spec(tmp_path / "set" / "train", "arrow"))) == 5
    assert len(scan(spec(tmp_path / "set" / "{train,test}", "arrow"))) == 7
    datasets.DatasetDict(train=data_set(5)).save_to_disk(tmp_path / "one")
    assert len(scan(spec(tmp_path / "one", "arrow"))) == 5


def test_files_that_the_url_names_are_asked_about_once(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    for k in range(5):
        written(tmp_path / f"{k}.arrow", some_texts())
    asked: list[str] = []
    local = type(fsspec.filesystem("file"))
    info = local.info
    monkeypatch.setattr(local, "info", lambda fs, path: (asked.append(path), info(fs, path))[1])
    assert len(list_files(spec(tmp_path / "{0..4}.arrow", "arrow"))) == 5
    assert len(asked) == 5


# ---- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize("file", [False, True])
def test_a_file_cut_anywhere_is_refused_by_name(tmp_path: Path, spec: Spec, file: bool) -> None:
    path = written(tmp_path / "a.arrow", some_texts(), file=file)
    whole = path.read_bytes()
    for keep in {*range(0, len(whole), 8), len(whole) - 1}:
        path.write_bytes(whole[:keep])
        with pytest.raises(SourceError, match=r"a\.arrow is not an Arrow file, or a truncated"):
            scan(spec(path, "arrow"))


def test_a_stream_without_its_end_mark_says_how_to_mend_it(tmp_path: Path, spec: Spec) -> None:
    path = written(tmp_path / "a.arrow", some_texts())
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(SourceError, match="append the 8 bytes FF FF FF FF 00 00 00 00"):
        scan(spec(path, "arrow"))
    path.write_bytes(whole[:-8] + b"\xff\xff\xff\xff\0\0\0\0")
    assert len(scan(spec(path, "arrow"))) == 7


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_batches_are_refused_with_the_remedy(
    tmp_path: Path, spec: Spec, codec: str
) -> None:
    path = written(tmp_path / "a.arrow", some_texts(), compression=codec)
    with pytest.raises(SourceError, match=r"compressed record batches.*compression=None"):
        scan(spec(path, "arrow"))


def test_a_type_that_cannot_be_read_is_refused_by_its_column(tmp_path: Path, spec: Spec) -> None:
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    path = written(tmp_path / "a.arrow", pa.table({"text": ["x", "y", "z"], "word": words}))
    with pytest.raises(SourceError, match=r"column 'word' is of type dictionary.*remove_columns"):
        scan(spec(path, "arrow"))
    samples = scan(spec(path, "arrow", ignore=("word",)))
    assert [good(s).record for s in samples] == [{"text": "x"}, {"text": "y"}, {"text": "z"}]
    views = pa.table({"text": ["x"], "view": pa.array(["v"], pa.string_view())})
    with pytest.raises(SourceError, match=r"column 'view' is of type string_view"):
        scan(spec(written(path, views), "arrow", ignore=("view",)))


def test_a_file_without_a_column_for_samples_says_which_it_has(tmp_path: Path, spec: Spec) -> None:
    vectors = pa.table({"vector": pa.array([[0.5]], pa.list_(pa.float32())), "mask": [b"m"]})
    path = written(tmp_path / "a.arrow", vectors)
    with pytest.raises(SourceError, match=r"no column of text, numbers or media; it has vector, m"):
        scan(spec(path, "arrow"))


def hostile(path: Path, old: int, new: int) -> None:
    """Replace a 64-bit number in the header of the first record batch."""
    data = bytearray(path.read_bytes())
    (schema_bytes,) = struct.unpack_from("<I", data, 4)
    start = 8 + schema_bytes
    (header_bytes,) = struct.unpack_from("<I", data, start + 4)
    header = bytes(data[start + 8 : start + 8 + header_bytes])
    changed = header.replace(struct.pack("<q", old), struct.pack("<q", new))
    assert changed != header
    data[start + 8 : start + 8 + header_bytes] = changed
    path.write_bytes(data)


@pytest.mark.parametrize("stated", [2**40, 2**62, -1, 2**63 - 1])
@pytest.mark.parametrize("what", ["body", "rows", "buffer"])
def test_a_message_that_states_what_it_does_not_hold_is_refused_before_memory(
    tmp_path: Path, spec: Spec, what: str, stated: int
) -> None:
    texts = ["x" * 211] * 13  # numbers that a header has once
    path = written(tmp_path / "a.arrow", pa.table({"text": texts}), rows=13)
    with path.open("rb") as stream:
        stream.seek(0)
        reader = pa.ipc.MessageReader.open_stream(stream)
        reader.read_next_message()
        body = reader.read_next_message().body.size
    hostile(path, {"body": body, "rows": 13, "buffer": 211 * 13}[what], stated)
    tracemalloc.start()
    with pytest.raises(SourceError, match=r"a\.arrow is not an Arrow file, or a truncated"):
        scan(spec(path, "arrow"))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2**22


def test_offsets_that_lead_elsewhere_are_refused(tmp_path: Path, spec: Spec) -> None:
    path = written(tmp_path / "a.arrow", pa.table({"text": ["ab", "cd", "ef"]}))
    whole = path.read_bytes()
    offsets = struct.pack("<4i", 0, 2, 4, 6)
    assert whole.count(offsets) == 1
    for changed in ((0, 2, 4, 2**30), (0, 5, 4, 6), (-8, 2, 4, 6), (4, 3, 2, 1)):
        path.write_bytes(whole.replace(offsets, struct.pack("<4i", *changed)))
        with pytest.raises(SourceError, match=r"a\.arrow .*offsets"):
            scan(spec(path, "arrow"))


def test_a_text_that_is_no_text_is_refused(tmp_path: Path, spec: Spec) -> None:
    path = written(tmp_path / "a.arrow", pa.table({"text": ["word"]}))
    path.write_bytes(path.read_bytes().replace(b"word", b"w\xff\xfed"))
    with pytest.raises(SourceError, match=r"a\.arrow .*truncated or damaged.*UTF8"):
        scan(spec(path, "arrow"))


def test_a_row_that_is_gone_is_reported(tmp_path: Path, spec: Spec) -> None:
    path = written(tmp_path / "a.arrow", some_texts())
    source = spec(path, "arrow")
    sample = scan(source)[4]
    written(path, pa.table({"other": list(range(70))}))
    with pytest.raises(SourceError, match="changed after it was indexed"):
        open_format(source).read(sample.key, sample.location)
    path.write_bytes(b"no arrow" * 99)
    with pytest.raises(SourceError, match="changed after it was indexed"):
        open_format(source).read(sample.key, sample.location)
    gone = SampleLocation(file=f"{path}x", row_group=0, row=0)
    with pytest.raises(SourceError, match="no such file"):
        open_format(source).read("k", gone)
