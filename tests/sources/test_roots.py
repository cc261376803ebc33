"""Where a service reads: whatever a path, link, URL, glob or brace says, never beyond its roots."""

from pathlib import Path

import pytest

from dataservice.core.errors import SampleError, SourceError, SpecError
from dataservice.core.job import SourceSpec
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.sample import ByteSpan
from dataservice.sources.index_folder import IndexFolder
from dataservice.sources.patterns import MOST_PATTERNS, expand
from dataservice.sources.roots import Roots
from dataservice.sources.storage import Storage
from tests.web_store import StoreRequest, WebStore, running


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A team's folder, another team's, and links between them."""
    for team in ("vision", "audio"):
        (tmp_path / "data" / team).mkdir(parents=True)
        (tmp_path / "data" / team / "a.jsonl").write_text(f'{{"text": "{team}"}}\n')
    (tmp_path / "data" / "vision-2").mkdir()
    own = tmp_path / "data" / "vision"
    (own / "folder").symlink_to(tmp_path / "data" / "audio")
    (own / "theirs.jsonl").symlink_to(tmp_path / "data" / "audio" / "a.jsonl")
    (own / "mine.jsonl").symlink_to(own / "a.jsonl")
    return tmp_path / "data"


@pytest.fixture
def roots(home: Path) -> Roots:
    return Roots.of([f"{home}/{{team}}", "s3://bucket/{team}/", "https://data.test/open"], "vision")


@pytest.mark.parametrize(
    "place",
    [
        "HOME/vision",
        "HOME/vision/a.jsonl",
        "HOME/vision/*.jsonl",
        "HOME/vision/{a,mine}.jsonl",
        "HOME/vision/mine.jsonl",
        "HOME/vision/new/x.tar",
        "HOME/audio/../vision/a.jsonl",
        "file://HOME/vision/a.jsonl",
        "s3://bucket/vision/*.tar",
        "s3://bucket/vision",
        "https://data.test/open/a.tar",
    ],
)
def test_what_lies_under_a_root_is_read(home: Path, roots: Roots, place: str) -> None:
    roots.require(place.replace("HOME", str(home)), "url")


@pytest.mark.parametrize(
    "place",
    [
        "/etc/passwd",
        "HOME",
        "HOME/audio/a.jsonl",
        "HOME/vision-2/x.tar",
        "HOME/vision/../audio/a.jsonl",
        "HOME/vision/theirs.jsonl",
        "HOME/vision/folder/a.jsonl",
        "HOME/vision/folder/*",
        "HOME/vision/*/../../audio/a.jsonl",
        "HOME/vision/{a,../audio/a}.jsonl",
        "HOME/vision/{a,b/../../../audio/a}.jsonl",
        "{HOME/vision/a,HOME/audio/a}.jsonl",
        "file://HOME/audio/a.jsonl",
        "local:///etc/passwd",
        "vision/a.jsonl",
        "s3://bucket/audio/a.tar",
        "s3://bucket/vision-2/a.tar",
        "s3://bucket/vision/../audio/a.tar",
        "s3://bucket/vision/%2e%2e/audio/a.tar",
        "https://data.test/open/.\t./secret/a.tar",
        "https://data.test/open/.\n./secret/a.tar",
        "https://data.test/open/.%0d%2e/secret/a.tar",
        "https://data.test/open/.. /secret/a.tar",
        "s3://bucket/vision/a::file:///etc/passwd",
        "simplecache::HOME/vision/a.jsonl",
        "https://data.test@evil.test/open/a.tar",
        "https://data.test/opening/a.tar",
        "HOME/vision/\ud800.jsonl",
        "HOME/vision/a\0.jsonl",
    ],
)
def test_what_does_not_is_refused_with_what_is(home: Path, roots: Roots, place: str) -> None:
    with pytest.raises(SpecError, match=r"url is .* does not read. It reads under .*data/vision"):
        roots.require(place.replace("HOME", str(home)), "url")


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("https://ann:hunter2@data.test/open/a.tar", "https://***@data.test/open/a.tar"),
        ("https://ann:hunter@2@data.test/a.tar", "https://***@data.test/a.tar"),
        ("s3://ann:hunter2@bucket/vision", "s3://***@bucket/vision"),
        ("https://ann:hunter2@data.test/{", "https://***@data.test/{"),
        ("s3://bucket/audio/a@b.tar", "s3://bucket/audio/a@b.tar"),
    ],
)
def test_a_password_in_a_url_is_not_told_where_refusals_are_logged(
    roots: Roots, place: str, shown: str
) -> None:
    with pytest.raises(SpecError) as refused:
        roots.require(place, "url")
    assert f"url is {shown!r}" in str(refused.value)
    assert "hunter" not in str(refused.value)


def test_a_root_of_teams_is_not_for_those_without_one(home: Path) -> None:
    roots = Roots.of([f"{home}/{{team}}", f"{home}/audio"], "")
    assert roots.folders == (f"{home}/audio",)
    roots.require(f"{home}/audio/a.jsonl", "url")
    with pytest.raises(SpecError) as refused:
        roots.require(f"{home}/vision/a.jsonl", "url")
    said = str(refused.value)
    assert f"under {home}/{{team}} for the jobs of that team only, and under {home}/audio" in said
    assert "`dataservice token new --role admin --team TEAM`" in said


def test_files_are_judged_again_whenever_they_are_opened(home: Path, roots: Roots) -> None:
    """A team may have made a link of what was a file when its job was submitted."""
    spec = SourceSpec(name="s", url=f"{home}/vision/*.jsonl", format="jsonl")
    storage = Storage(spec, roots)
    mine, theirs = f"{home}/vision/a.jsonl", f"{home}/vision/theirs.jsonl"
    span = ByteSpan(name="line 1", offset_bytes=0, size_bytes=4)
    assert storage.read_spans(mine, [span]) == [b'{"te']
    for read in (lambda path: storage.open(path), lambda path: storage.read_spans(path, [span])):
        with pytest.raises(SourceError, match="a link that leads out of it"):
            read(theirs)
    with pytest.raises(SampleError, match="links included"):
        storage.read_beside(mine, "theirs.jsonl", DEFAULT_LIMITS)
    with pytest.raises(SampleError, match="links included"):
        storage.read_beside(f"{home}/audio/a.jsonl", "a.jsonl", DEFAULT_LIMITS)
    assert Storage(spec).read_spans(theirs, [span]) == [b'{"te']


def test_a_folder_that_becomes_a_link_between_judging_and_opening_leads_nowhere(
    home: Path, roots: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, mine, away = home / "audio", home / "vision" / "mine", home / "vision" / "away"
    for folder in (theirs / "s", mine / "s"):
        folder.mkdir(parents=True)
        for file in (folder / "manifest.json", folder / "a.jsonl", folder / "a.png"):
            file.write_text("secret")
    storage = Storage(SourceSpec(name="s", url=f"{mine}/s/a.jsonl", format="jsonl"), roots)
    index = IndexFolder(str(mine), "s", roots)
    hold_file, judged = Roots.hold_file, []

    def swap_once_judged(self: Roots, path: str) -> bool:
        held = hold_file(self, path)
        if not judged:
            mine.rename(away)
            mine.symlink_to(theirs)
        judged.append(path)
        return held

    monkeypatch.setattr(Roots, "hold_file", swap_once_judged)
    span = ByteSpan(name="line 1", offset_bytes=0, size_bytes=4)
    for read in (
        lambda: storage.open(f"{mine}/s/a.jsonl"),
        lambda: storage.read_spans(f"{mine}/s/a.jsonl", [span]),
        lambda: storage.read_beside(f"{mine}/s/a.jsonl", "a.png", DEFAULT_LIMITS),
        lambda: index.read("manifest.json"),
    ):
        with pytest.raises((SourceError, SampleError), match=r"leads out of it|links included"):
            read()
        assert [Path(path).parts[-3] for path in judged] == ["mine", "audio"]
        judged.clear()
        mine.unlink()
        away.rename(mine)


def test_an_index_is_judged_file_by_file(home: Path, roots: Roots) -> None:
    folder = home / "vision" / "index" / "s"
    folder.mkdir(parents=True)
    (folder / "manifest.json").symlink_to(home / "audio" / "a.jsonl")
    index = IndexFolder(str(home / "vision" / "index"), "s", roots)
    with pytest.raises(SourceError, match=r"index of source 's': .* leads out of it"):
        index.read("manifest.json")
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text("{}")
    assert index.read("manifest.json") == b"{}"


@pytest.mark.parametrize(
    "url", ["{a,b}" * 40, "{1..1000000000}", f"{{x,{'{a,b}' * 40}}}", "{a..z}" * 4]
)
def test_braces_that_stand_for_too_many_files_are_refused_without_writing_them_out(
    url: str,
) -> None:
    with pytest.raises(ValueError, match=f"at most {MOST_PATTERNS:,}"):
        expand(url)


@pytest.mark.parametrize(
    ("url", "patterns"), [("a", 1), ("{000..127}", 128), ("{a,{b,c}{d,e}}-{x..z}", 15), ("{a}", 1)]
)
def test_braces_that_stand_for_some_are_written_out(url: str, patterns: int) -> None:
    assert len(expand(url)) == patterns


class _Redirecting(StoreRequest):
    """Sends whoever asks for `near` to another of its files, and for `away` to `elsewhere`."""

    server: "_RedirectingStore"

    def answer(self, path: str) -> None:
        to = {"/open/near.jsonl": "a.jsonl", "/open/away.jsonl": self.server.elsewhere}
        if path in to:
            self.send(302, headers={"Location": to[path]})
        else:
            super().answer(path)


class _RedirectingStore(WebStore):
    request = _Redirecting
    elsewhere = ""


def test_a_web_server_leads_nowhere_beyond_the_roots(tmp_path: Path) -> None:
    """A redirection is the link of a web server."""
    for folder, text in (("ours/open", b"ours"), ("ours/shut", b"shut"), ("theirs", b"theirs")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.jsonl").write_bytes(text)
    ours = _RedirectingStore(tmp_path / "ours", "")
    with running(ours) as mine, running(WebStore(tmp_path / "theirs", "")) as other:
        roots = Roots.of([f"{mine.url}/open"], "")
        span = ByteSpan(name="x", offset_bytes=0, size_bytes=4)
        for place in (f"{other.url}/a.jsonl", "/shut/a.jsonl"):
            ours.elsewhere = place
            url = f"{mine.url}/open/a.jsonl"
            storage = Storage(SourceSpec(name="web", url=url, format="jsonl"), roots)
            assert storage.read_spans(f"{mine.url}/open/near.jsonl", [span]) == [b"ours"]
            away = f"{mine.url}/open/away.jsonl"
            with pytest.raises(SourceError):
                storage.read_spans(away, [span])
            with pytest.raises(SourceError), storage.open(away) as stream:
                stream.read()
            with pytest.raises((SourceError, SampleError)):
                storage.read_beside(url, "away.jsonl", DEFAULT_LIMITS)
        assert other.asked == []
        assert not [path for path, _ in mine.asked if path.startswith("/shut")]
