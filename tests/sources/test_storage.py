"""Finding files: patterns, folders, and what is not there."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import tenacity

from dataservice.core.errors import SourceError, StorageAwayError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import ByteSpan, RawSample, SampleRef
from dataservice.sources import filesystem, storage
from dataservice.sources.formats.protocol import ScannedSample
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.reader import SourceReader
from dataservice.sources.storage import Storage
from tests.web_store import WebStore, running

Spec = Callable[..., SourceSpec]
SPAN = ByteSpan(name="m", offset_bytes=0, size_bytes=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("000.tar", "001.tar", "002.tar", "notes.md", "deep/003.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * 10)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*.tar", ["000", "001", "002"]),
        ("{000..002}.tar", ["000", "001", "002"]),
        ("{002,000}.tar", ["000", "002"]),
        ("{00*,deep/*}.tar", ["000", "001", "002", "003"]),
        ("001.tar", ["001"]),
        ("", ["000", "001", "002", "003"]),
    ],
)
def test_patterns_and_folders_are_expanded_in_order(
    folder: Path, spec: Spec, pattern: str, names: list[str]
) -> None:
    files = list_files(spec(folder / pattern, "webdataset"))
    assert [Path(file.path).stem for file in files] == names
    assert all(file.size_bytes == 10 and file.version for file in files)


@pytest.mark.parametrize("pattern", ["*.tar", "**/*.tar", "{000,001}.tar", ""])
def test_a_link_to_a_file_is_listed_as_that_file(tmp_path: Path, spec: Spec, pattern: str) -> None:
    blob, linked = tmp_path / "blobs" / "8f3a", tmp_path / "snapshot"
    blob.parent.mkdir()
    linked.mkdir()
    blob.write_bytes(b"x" * 10)
    os.utime(blob, (1, 1))
    (linked / "000.tar").write_bytes(b"x" * 10)
    (linked / "001.tar").symlink_to(blob)  # as in the cache of Hugging Face's hub
    _, file = list_files(spec(linked / pattern, "webdataset"))
    assert (file.name, file.size_bytes, float(file.version)) == ("001.tar", 10, 1.0)


@pytest.mark.parametrize("pattern", ["*.tar", ""])
def test_a_link_that_leads_nowhere_is_named(folder: Path, spec: Spec, pattern: str) -> None:
    (folder / "004.tar").symlink_to(folder / "gone.tar")
    with pytest.raises(SourceError, match=r"004\.tar cannot be listed: there is no such file"):
        list_files(spec(folder / pattern, "webdataset"))


def test_a_name_with_the_signs_of_a_pattern_is_taken_as_it_is(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "a[1]*.tar").write_bytes(b"")
    (file,) = list_files(spec(tmp_path / "a[1]*.tar", "webdataset"))
    assert file.path.endswith("a[1]*.tar")


def test_a_file_name_that_is_not_in_utf8_is_refused_by_name(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "a.tar").write_bytes(b"")
    (tmp_path / os.fsdecode(b"b\xff.tar")).write_bytes(b"")
    with pytest.raises(SourceError, match=r"b\\udcff.tar' is not in UTF-8.*Rename it"):
        list_files(spec(tmp_path / "*.tar", "webdataset"))


def test_missing_files_of_a_range_are_named(folder: Path, spec: Spec) -> None:
    with pytest.raises(SourceError, match=r"source 'src' has no file at '.*007.tar'.*and 4 more"):
        list_files(spec(folder / "{000..011}.tar", "webdataset"))


def test_a_missing_path_is_named(tmp_path: Path, spec: Spec) -> None:
    with pytest.raises(SourceError, match=r"source 'src' has no file at '.*gone.tar'"):
        list_files(spec(tmp_path / "gone.tar", "webdataset"))


@pytest.mark.parametrize("pattern", ["*.tgz", "empty"])
def test_a_pattern_or_folder_without_files_is_empty(
    tmp_path: Path, spec: Spec, pattern: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"source 'src' is empty: no .tar file matches"):
        list_files(spec(tmp_path / pattern, "webdataset"))


def test_unbalanced_braces_are_refused(tmp_path: Path, spec: Spec) -> None:
    with pytest.raises(SourceError, match="unbalanced braces"):
        list_files(spec(tmp_path / "{000..002.tar", "webdataset"))


def test_an_unknown_protocol_is_refused(spec: Spec) -> None:
    with pytest.raises(SourceError, match="of no storage that jobs may read"):
        list_files(spec("nosuch://bucket/a.tar", "webdataset"))


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("s3://bucket/a.tar", "s3"),
        ("abfs://lake/a.tar", "az"),
        (f"hf://datasets/org/name@{'0' * 40}/a.tar", "hf"),
    ],
)
def test_a_protocol_without_its_package_names_the_package(
    spec: Spec, monkeypatch: pytest.MonkeyPatch, url: str, extra: str
) -> None:
    def missing(_url: str, **_options: object) -> None:
        raise ImportError("Install it to access the store")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(SourceError, match=rf"needs a package .*service,{extra}\]"):
        list_files(spec(url, "webdataset"))


def test_whatever_a_file_system_raises_becomes_a_source_error(
    folder: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Storage(spec(folder / "000.tar", "webdataset"))
    for error, says in ((PermissionError(13, "no"), "permission denied"), (KeyError("k"), "KeyEr")):

        def fail(*_args: object, _error: Exception = error, **_more: object) -> None:
            raise _error

        monkeypatch.setattr(opened.fs, "open", fail)
        with pytest.raises(SourceError, match=rf"source 'src': p cannot be read: {says}"):
            opened.read_spans("p", [SPAN])


class Failing:
    """Stands for a call of a file system: raises each of these, then answers."""

    def __init__(self, answer: object, *errors: Exception) -> None:
        self.answer, self.errors, self.calls = answer, list(errors), 0

    def __call__(self, *_args: object, **_more: object) -> object:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.answer


class HttpError(Exception):
    """As HTTP clients have them."""

    def __init__(self, status: int) -> None:
        self.status = status


PASSING = (
    ConnectionResetError(104, "reset"), TimeoutError(), OSError(16, "slow down"), HttpError(503),
    HttpError(429), RuntimeError("a client's own"),
)  # fmt: skip
LASTING = (
    FileNotFoundError("p"), PermissionError("p"), OSError(22, "range"), HttpError(404),
    MemoryError("p"), OSError(40, "a circle of links"), OSError(6, "a socket"),
)  # fmt: skip


@pytest.fixture
def far(spec: Spec) -> Storage:
    return Storage(spec("memory://far/a.tar", "webdataset"))


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_storage_far_away_that_fails_in_passing_is_asked_again(
    far: Storage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(far.fs, "cat_ranges", asked := Failing([b"x"], error))
    assert far.read_spans("p", [SPAN]) == [b"x"]
    assert asked.calls == 2


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_storage_far_away_that_has_answered_is_not_asked_again(
    far: Storage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(far.fs, "cat_ranges", asked := Failing([b"x"], error))
    with pytest.raises(SourceError, match="source 'src': p cannot be read"):
        far.read_spans("p", [SPAN])
    assert asked.calls == 1


class Clock:
    """Stands for the module `time` of tenacity: time passes only while it sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_storage_that_stays_away_is_given_up(far: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (tenacity, tenacity.nap):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(far.fs, "open", asked := Failing(None, *[PASSING[0]] * 1000))
    with pytest.raises(SourceError, match="source 'src': p cannot be read: ConnectionReset"):
        far.open("p")
    assert 1 < asked.calls < 1000
    assert clock.now_s >= filesystem.OUTAGE_S


def test_spans_are_read_in_any_order_and_across_gaps(
    tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "BRIDGED_GAP_BYTES", 16)
    data = bytes(range(256)) * 4
    (tmp_path / "a.tar").write_bytes(data)
    opened = Storage(spec(tmp_path / "a.tar", "webdataset"))
    places = [(700, 20), (0, 5), (8, 0), (10, 30), (500, 100), (15, 2)]
    spans = [ByteSpan(name=str(o), offset_bytes=o, size_bytes=s) for o, s in places]
    expected = [data[o : o + s] for o, s in places]
    assert opened.read_spans(str(tmp_path / "a.tar"), spans) == expected
    assert opened.read_spans(str(tmp_path / "a.tar"), []) == []


def test_a_span_without_bytes_asks_for_none(far: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def cat_ranges(paths: list[str], starts: list[int], ends: list[int], **_: object) -> object:
        asked.append((starts, ends))
        return [b"12345"]

    monkeypatch.setattr(far.fs, "cat_ranges", cat_ranges)
    places = [(0, 0), (10**6, 5), (2 * 10**6, 0)]
    spans = [ByteSpan(name=str(o), offset_bytes=o, size_bytes=s) for o, s in places]
    assert far.read_spans("p", spans) == [b"", b"12345", b""]
    assert asked == [([10**6], [10**6 + 5])]


def test_any_fsspec_url_is_listed_scanned_and_read(
    tmp_path: Path, spec: Spec, write_tar: Callable[..., Path]
) -> None:
    files = fsspec.filesystem("memory")
    tar = write_tar(tmp_path / "a.tar", [("0.txt", b"hello"), ("0.jpg", b"J")])
    files.pipe_file("/test-storage/t/000.tar", tar.read_bytes())
    files.pipe_file("/test-storage/l/a.jsonl", b'{"text": "t", "image": "m/x.png"}\n')
    files.pipe_file("/test-storage/l/m/x.png", b"X")
    tars = spec("memory://test-storage/t/{000..000}.tar", "webdataset", name="tars")
    lines = spec("memory://test-storage/l/*.jsonl", "jsonl", name="lines")
    reader = SourceReader([tars, lines])
    for source in (tars, lines):
        (file,) = list_files(source)
        (sample,) = open_format(source).scan(file)
        ref = SampleRef(sample_id=0, source=source.name, key=sample.key, location=sample.location)
        assert isinstance(sample.raw, RawSample)
        assert len(sample.raw.media) == 1
        assert reader.read(ref) == sample.raw
    files.rm("/test-storage", recursive=True)


def test_a_reader_knows_only_the_sources_of_its_job(spec: Spec) -> None:
    ref = SampleRef(sample_id=0, source="other", key="k", location=None)  # type: ignore[arg-type]
    with pytest.raises(SourceError, match=r"source 'other', but this reader has only 'src'"):
        SourceReader([spec("/x.tar", "webdataset")]).read(ref)


def test_what_is_read_together_is_fetched_at_once_and_neighbours_in_one_request(
    tmp_path: Path, spec: Spec
) -> None:
    lines = [b'{"text": "line %d"}\n' % number for number in range(40)]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_bytes(b"".join(lines))
    with running(WebStore(tmp_path, "")) as store:
        source = replace(spec(tmp_path, "jsonl"), url=f"{store.url}/{{a,b}}.jsonl")
        found = [sample for file in list_files(source) for sample in scanned(source, file)]
        refs = [
            SampleRef(sample_id=n, source="src", key=sample.key, location=sample.location)
            for n, sample in enumerate(found)
        ]
        reader = SourceReader([source])
        alone = [reader.read(ref) for ref in refs[5:8]]
        store.asked.clear()
        together = reader.read_together([refs[5], refs[7], refs[6], refs[45]])
        assert [*together[:1], together[2], together[1]] == alone
        assert together[3] == replace(alone[0], key=refs[45].key)
        ranges = [path for path, range_ in store.asked if range_]
        assert sorted(ranges) == ["/a.jsonl", "/b.jsonl"]
        assert reader.read(refs[5]) == alone[0]
        assert len([1 for _, range_ in store.asked if range_]) == 3, "nothing is kept"


def test_of_samples_that_are_read_together_each_fails_alone(tmp_path: Path, spec: Spec) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "one"}\n' * 3)
    with running(WebStore(tmp_path, "")) as store:
        source = replace(spec(tmp_path, "jsonl"), url=f"{store.url}/a.jsonl")
        (file,) = list_files(source)
        first, *_ = scanned(source, file)
        beyond = replace(
            first.location, spans=(ByteSpan(name="x", offset_bytes=10**6, size_bytes=5),)
        )
        gone = replace(first.location, file=f"{store.url}/gone.jsonl")
        refs = [
            SampleRef(sample_id=n, source="src", key=str(n), location=location)
            for n, location in enumerate((beyond, first.location, gone))
        ]
        results = SourceReader([source]).read_together(refs)
    assert isinstance(results[0], SourceError)
    assert isinstance(results[1], RawSample)
    assert isinstance(results[2], SourceError)
    assert not any(isinstance(result, StorageAwayError) for result in results)


@pytest.mark.parametrize(
    ("url", "far"),
    [("data/a.tar", False), ("/x:y/a.tar", False), ("file:///x", False), ("s3://b/a.tar", True)],
)
def test_a_source_is_far_by_its_protocol(url: str, far: bool) -> None:
    assert filesystem.is_far(url) is far


def scanned(source: SourceSpec, file: storage.SourceFile) -> list[ScannedSample]:
    return [*open_format(source).scan(file)]
