"""What was read from other machines is found on this one's disk: by team, address and version."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dataservice.core.errors import SampleError
from dataservice.core.job import SourceSpec
from dataservice.core.sample import RawSample, SampleRef
from dataservice.sources import kept_ranges
from dataservice.sources.checksum import sample_crc32
from dataservice.sources.reader import SourceReader
from dataservice.workers.byte_cache import ByteCache, KeptReads
from dataservice.workers.kept_files import CacheSpec, KeptFiles
from tests.service.object_store import object_store
from tests.sources.support import good, scan
from tests.web_store import StoreRequest, WebStore, running

SAMPLES = 6


class TaggedRequest(StoreRequest):
    """Tells entity tags of what a file holds, as object stores do."""

    def send(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        file = self.server.home / self.path.lstrip("/")
        if self.server.tags and file.is_file():
            headers = {**(headers or {}), "ETag": f'"{hash(file.read_bytes())}"'}
        if self.command == "GET":
            self.server.sent_bytes += len(data)
        super().send(status, data, headers)


class TaggedStore(WebStore):
    request = TaggedRequest
    tags = True
    sent_bytes = 0


@pytest.fixture
def home(tmp_path: Path, write_tar) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    members = [
        member
        for n in range(SAMPLES)
        for member in ((f"{n}.jpg", picture(n)), (f"{n}.txt", b"a picture"))
    ]
    write_tar(home / "some.tar", members)
    lines = [{"id": str(n), "image": f"{n}.jpg", "text": "<image> a"} for n in range(SAMPLES)]
    (home / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for n in range(SAMPLES):
        (home / f"{n}.jpg").write_bytes(picture(n))
    return home


def picture(n: int) -> bytes:
    return b"\xff\xd8\xff" + bytes([n]) * (1000 + n)


@pytest.fixture
def store(home: Path) -> Iterator[TaggedStore]:
    with running(TaggedStore(home, token="")) as serving:
        yield serving


@pytest.fixture
def cache(tmp_path: Path) -> CacheSpec:
    return CacheSpec(folder=str(tmp_path / "cache"), limit_bytes=2**30, key="ab" * 32)


@pytest.fixture(params=["some.tar", "lines.jsonl"])
def source(request, store: TaggedStore, spec) -> SourceSpec:
    format = "webdataset" if request.param.endswith("tar") else "jsonl"
    return spec(f"{store.url}/{request.param}", format)


def refs_of(source: SourceSpec) -> list[SampleRef]:
    return [
        SampleRef(
            sample_id=n,
            source=source.name,
            key=sample.key,
            location=sample.location,
            crc32=sample_crc32(good(sample)),
        )
        for n, sample in enumerate(scan(source))
    ]


def epoch(source: SourceSpec, kept: ByteCache | None, refs, team="a") -> list[RawSample]:
    """Every sample as another process reads it, half of them one by one."""
    reader = SourceReader([source], ranges=kept.of(team) if kept else None)
    together = reader.read_together(refs[: len(refs) // 2])
    assert all(isinstance(each, RawSample) for each in together)
    return [*together, *(reader.read(ref) for ref in refs[len(refs) // 2 :])]


def test_a_second_epoch_reads_no_byte_of_the_server_and_gets_the_same(store, source, cache) -> None:
    refs = refs_of(source)
    plain = epoch(source, None, refs)
    assert epoch(source, ByteCache(cache), refs) == plain
    store.sent_bytes = 0
    again = ByteCache(cache)
    assert epoch(source, again, refs[::-1]) == plain[::-1]
    assert store.sent_bytes == 0
    reads = again.reads()
    assert (reads.missed, reads.found > 0, reads.found_bytes > SAMPLES * 1000) == (0, True, True)
    assert again.reads() == KeptReads(), "since they were asked for last"


def test_two_teams_share_nothing(store, source, cache) -> None:
    refs = refs_of(source)
    epoch(source, ByteCache(cache), refs, team="a")
    store.sent_bytes = 0
    other = ByteCache(cache)
    epoch(source, other, refs, team="b")
    assert other.reads().found == 0
    assert store.sent_bytes > SAMPLES * 1000


def test_a_file_that_has_changed_is_read_anew(store, source, cache, home, monkeypatch) -> None:
    monkeypatch.setattr(kept_ranges, "VERSION_S", 0.0)
    refs = refs_of(source)
    kept = ByteCache(cache)
    reader = SourceReader([source], ranges=kept.of("a"))
    before = [reader.read(ref) for ref in refs]
    for file in home.iterdir():
        file.write_bytes(file.read_bytes().replace(bytes([2]) * 1000, bytes([99]) * 1000))
    with pytest.raises(SampleError, match="changed since indexing"):
        reader.read(refs[2])
    now = reader.read(replace(refs[2], crc32=None))
    assert now.media[0].data != before[2].media[0].data


def test_what_was_kept_of_a_file_while_it_was_exchanged_is_read_once_more(
    store, source, cache, home
) -> None:
    """The version is told before the bytes are sent: they may be of the next."""
    refs = refs_of(source)
    whole = {file: file.read_bytes() for file in home.iterdir()}
    kept = ByteCache(cache)
    reader = SourceReader([source], ranges=kept.of("a"))
    reader.read(refs[0])  # has the versions told, of the tar at least
    for file, data in whole.items():
        file.write_bytes(data.replace(bytes([1]) * 1000, bytes([99]) * 1000))
    with pytest.raises(SampleError):
        reader.read(refs[1])
    for file, data in whole.items():
        file.write_bytes(data)
    assert epoch(source, ByteCache(cache), refs) == epoch(source, None, refs)


def test_of_a_file_without_a_version_nothing_is_kept(store, source, cache) -> None:
    store.tags = False
    refs = refs_of(source)
    assert epoch(source, ByteCache(cache), refs) == epoch(source, None, refs)
    assert [*Path(cache.folder).glob("*/*")] == []


def test_a_folder_that_cannot_be_written_is_told_once_and_costs_nothing_else(
    source, cache, tmp_path, caplog
) -> None:
    (tmp_path / "file").touch()
    refs = refs_of(source)
    kept = ByteCache(replace(cache, folder=str(tmp_path / "file" / "cache")))
    assert epoch(source, kept, refs) == epoch(source, None, refs)
    assert len([each for each in caplog.records if "can be kept" in each.message]) == 1


def test_local_files_are_not_kept(home, spec, cache) -> None:
    source = spec(str(home / "some.tar"), "webdataset")
    epoch(source, ByteCache(cache), refs_of(source))
    assert [*Path(cache.folder).glob("*/*")] == []


def content(n: int) -> bytes:
    return bytes([n]) * 2_000_000


KEEPER = """
import sys
from dataservice.workers.kept_files import CacheSpec, KeptFiles
files = KeptFiles(CacheSpec(folder=sys.argv[1], limit_bytes=2**24, key="ab" * 32), "bytes")
print("ready", flush=True)
while True:
    for n in range(16):
        files.keep(files.name([b"%d" % n]), [bytes([n]) * 2_000_000])
"""


@pytest.mark.parametrize("after", [3, 7, 13])
def test_writers_that_are_killed_leave_nothing_torn(tmp_path, after) -> None:
    """Three processes write the same files and remove them to make room, and one dies at once."""
    folder = str(tmp_path / "cache")
    keepers = [
        subprocess.Popen([sys.executable, "-c", KEEPER, folder], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    files = KeptFiles(CacheSpec(folder=folder, limit_bytes=2**24, key="ab" * 32), "bytes")
    found = 0
    try:
        for keeper in keepers:
            assert keeper.stdout is not None
            assert keeper.stdout.readline() == "ready\n"
        while found < 16 * after:
            for n in range(16):
                data = files.find(files.name([b"%d" % n]), 2_000_000)
                assert data is None or data.tobytes() == content(n)
                found += data is not None
            if found > 8 * after:
                os.kill(keepers[0].pid, signal.SIGKILL)
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()
            assert keeper.stdout is not None
            keeper.stdout.close()
    for n in range(16):
        data = files.find(files.name([b"%d" % n]), 2_000_000)
        assert data is None or data.tobytes() == content(n)


@pytest.mark.long
def test_of_an_object_store_what_is_kept_outlives_its_network(home, spec, cache, tmp_path) -> None:
    with object_store(home, "kept", tmp_path / "store.log") as network:
        for name, format in (("some.tar", "webdataset"), ("lines.jsonl", "jsonl")):
            source = spec(f"s3://kept/{name}", format)
            refs = refs_of(source)
            plain = epoch(source, None, refs)
            kept = ByteCache(cache)
            reader = SourceReader([source], ranges=kept.of("a"))
            assert [reader.read(ref) for ref in refs] == plain
            network.cut(lambda _address: True)
            try:
                assert [reader.read(ref) for ref in refs] == plain, "and asks the store for nothing"
            finally:
                network.heal()
