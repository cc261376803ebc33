"""Parquet: the forms of images and conversations, random access, damage."""

import json
from collections.abc import Callable
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from dataservice.core.errors import SampleError, SourceError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import SampleLocation
from dataservice.sources.formats import parquet, parquet_file
from dataservice.sources.formats.protocol import Divisible
from dataservice.sources.formats.registry import list_files, open_format
from tests.sources.support import FILE, good, scan, wrong_reads

Spec = Callable[..., SourceSpec]
Write = Callable[..., Path]

TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def eight_rows(tmp_path: Path, write_parquet: Write) -> Path:
    turns = [[{"role": "user", "content": f"q{k}"}] for k in range(8)]
    return write_parquet(
        tmp_path / "a.parquet",
        {
            "id": pa.array([f"k{k}" for k in range(8)]),
            "image": pa.array([{"bytes": bytes([k]) * 9, "path": None} for k in range(8)], FILE),
            "conversations": pa.array(turns, TURNS),
            "embedding": pa.array([[0.5] * 4] * 8, pa.list_(pa.float32())),
            "mask": pa.array([b"\0"] * 8),
        },
    )


def test_a_row_is_a_sample_without_its_vectors_and_other_binaries(
    tmp_path: Path, spec: Spec, write_parquet: Write
) -> None:
    samples = scan(spec(eight_rows(tmp_path, write_parquet), "parquet"))
    assert [s.key for s in samples] == [f"k{k}" for k in range(8)]
    assert [(s.location.row_group, s.location.row) for s in samples] == [
        (k // 3, k % 3) for k in range(8)
    ]
    assert good(samples[5]).record == {
        "id": "k5",
        "conversations": [{"role": "user", "content": "q5"}],
    }
    assert [(b.kind, b.data) for b in good(samples[5]).media] == [("image", b"\5" * 9)]


@pytest.mark.parametrize("piece_bytes", [1, 150, 10**6])
def test_the_pieces_of_a_file_hold_its_rows_each_once_under_the_same_names(
    tmp_path: Path, spec: Spec, write_parquet: Write, piece_bytes: int
) -> None:
    rows = {"text": pa.array([f"{k} " * (k % 7 + 1) for k in range(50)])}
    source = spec(write_parquet(tmp_path / "a.parquet", rows), "parquet")
    opened = open_format(source)
    assert isinstance(opened, Divisible)
    (file,) = list_files(source)
    pieces = opened.divided(file, piece_bytes)
    assert len(pieces) == {1: 17, 10**6: 1}.get(piece_bytes, len(pieces))  # groups have three rows
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].end) == (0, file.size_bytes)
    assert list(opened.scan(file)) == [
        sample for piece in pieces for sample in opened.scan_piece(file, piece)
    ]
    assert sum(opened.records_in(file, piece) for piece in pieces) == 50


def test_a_file_that_is_no_parquet_is_not_divided(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 100)
    source = spec(tmp_path / "a.parquet", "parquet")
    opened = open_format(source)
    assert isinstance(opened, Divisible)
    assert opened.divided(list_files(source)[0], 4) == ()


@pytest.mark.parametrize("kept_bytes", [1 << 20, 0])
def test_rows_read_in_any_order_from_any_thread_are_those_scanned(
    tmp_path: Path,
    spec: Spec,
    write_parquet: Write,
    monkeypatch: pytest.MonkeyPatch,
    kept_bytes: int,
) -> None:
    monkeypatch.setattr(parquet_file, "KEPT_BYTES", kept_bytes)
    source = spec(eight_rows(tmp_path, write_parquet), "parquet")
    samples = scan(source)
    assert wrong_reads(open_format(source), samples, threads=3) == []


def test_only_a_few_files_stay_open(
    tmp_path: Path, spec: Spec, write_parquet: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "OPEN_FILES", 2)
    for k in range(5):
        write_parquet(tmp_path / f"{k}.parquet", {"text": pa.array([f"t{k}"])})
    source = spec(tmp_path / "*.parquet", "parquet")
    opened = open_format(source)
    for sample in scan(source) * 2:
        assert opened.read(sample.key, sample.location) == sample.raw
    kept = [file for file in psutil.Process().open_files() if Path(file.path).parent == tmp_path]
    assert len(kept) == 2


def test_images_come_as_lists_bytes_or_paths(
    tmp_path: Path, spec: Spec, write_parquet: Write
) -> None:
    (tmp_path / "x.png").write_bytes(b"X")
    cells = [{"bytes": b"A", "path": "a.jpg"}, {"bytes": None, "path": "x.png"}]
    write_parquet(tmp_path / "1.parquet", {"images": pa.array([cells, []], pa.list_(FILE))})
    write_parquet(tmp_path / "2.parquet", {"image": pa.array([b"B", None])})
    write_parquet(tmp_path / "3.parquet", {"image": pa.array(["x.png", None])})
    samples = scan(spec(tmp_path / "*.parquet", "parquet"))
    assert [[b.data for b in good(s).media] for s in samples] == [
        [b"A", b"X"], [], [b"B"], [], [b"X"], [],
    ]  # fmt: skip
    assert [b.name for b in good(samples[0]).media] == ["a.jpg", "x.png"]


def test_images_are_in_the_order_in_which_parts_name_them(
    tmp_path: Path, spec: Spec, write_parquet: Write
) -> None:
    images = [{"bytes": b"A", "path": "a.jpg"}, {"bytes": b"B", "path": "b.jpg"}]
    parts = [{"type": "image", "image": f"{name}.jpg"} for name in "ba"]
    turns = [{"role": "user", "content": parts}]
    columns = {"images": pa.array([images], pa.list_(FILE)), "messages": pa.array([turns])}
    (sample,) = scan(spec(write_parquet(tmp_path / "a.parquet", columns), "parquet"))
    assert [blob.data for blob in good(sample).media] == [b"B", b"A"]


def test_conversations_may_be_a_string_of_json(
    tmp_path: Path, spec: Spec, write_parquet: Write
) -> None:
    turns = [{"from": "human", "value": "hi"}]
    texts = [json.dumps(turns), "[oops", None]
    path = write_parquet(tmp_path / "a.parquet", {"conversations": pa.array(texts)})
    first, second, third = scan(spec(path, "parquet"))
    assert good(first).record == {"conversations": turns}
    assert "column 'conversations' is not valid JSON" in str(second.raw)
    assert good(third).record == {}


def test_absent_fields_of_structs_are_absent_from_the_record(
    tmp_path: Path, spec: Spec, write_parquet: Write
) -> None:
    turns = [[{"role": "user", "content": "q"}, {"role": "tool", "content": None}]]
    path = write_parquet(tmp_path / "a.parquet", {"messages": pa.array(turns, TURNS)})
    (sample,) = scan(spec(path, "parquet"))
    assert good(sample).record == {"messages": [{"role": "user", "content": "q"}, {"role": "tool"}]}


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        ({"bytes": None, "path": "gone.png"}, "no file 'gone.png'"),
        ({"bytes": None, "path": "../a.png"}, "inside the folder"),
    ],
)
def test_one_bad_row_leaves_the_others(
    tmp_path: Path, spec: Spec, write_parquet: Write, cell: dict[str, object], reason: str
) -> None:
    cells = pa.array([cell, {"bytes": b"A", "path": None}], FILE)
    source = spec(write_parquet(tmp_path / "a.parquet", {"image": cells}), "parquet")
    first, second = scan(source)
    assert isinstance(first.raw, SampleError)
    assert reason in str(first.raw)
    assert good(second).media[0].data == b"A"


def test_an_image_column_of_another_type_is_refused_by_name(
    tmp_path: Path, spec: Spec, write_parquet: Write
) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"image": pa.array([3])})
    with pytest.raises(SourceError, match=r"column 'image' .*int64.*ignore: \[image\]"):
        scan(spec(path, "parquet"))


def test_a_missing_image_column_is_named_with_those_there_are(
    tmp_path: Path, spec: Spec, write_parquet: Write
) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"text": pa.array(["t"]), "pic": pa.array([b""])})
    with pytest.raises(SourceError, match=r"no column 'photo', which image_column.*pic, text"):
        scan(spec(path, "parquet", image_column="photo"))
    assert len(scan(spec(path, "parquet"))) == 1


@pytest.mark.parametrize("keep", [0, 11, 300])
def test_a_file_that_is_not_parquet_or_cut_is_refused(
    tmp_path: Path, spec: Spec, write_parquet: Write, keep: int
) -> None:
    path = eight_rows(tmp_path, write_parquet)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"a\.parquet .*not a Parquet file"):
        scan(spec(path, "parquet"))


def test_a_row_that_is_gone_is_reported(tmp_path: Path, spec: Spec, write_parquet: Write) -> None:
    path = eight_rows(tmp_path, write_parquet)
    opened = open_format(spec(path, "parquet"))
    for group, row in ((9, 0), (0, 9), (-1, 0)):
        with pytest.raises(SourceError, match="changed after it was indexed"):
            opened.read("k", SampleLocation(file=str(path), row_group=group, row=row))
    gone = SampleLocation(file=str(path) + "x", row_group=0, row=0)
    with pytest.raises(SourceError, match="no such file"):
        opened.read("k", gone)
