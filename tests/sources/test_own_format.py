"""A format of the user's own: where its samples lie, what they are, and what it may get wrong."""

import io
import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from dataservice.core.errors import SampleError, SourceError, SpecError, StorageAwayError
from dataservice.core.job import CodeSpec, ColumnMap, SourceSpec
from dataservice.core.limits import DecodeLimits
from dataservice.core.own_format import FormatCode, Ranges
from dataservice.core.sample import RawSample
from dataservice.sources.checksum import sample_checks
from dataservice.sources.formats.own_samples import OwnSamples
from dataservice.sources.formats.registry import list_files, open_format
from dataservice.sources.index import build_index
from dataservice.sources.opened import OpenedSource
from tests.sources.support import good, scan

JPEG = b"\xff\xd8\xff\xe0 a picture"
HEAD = struct.Struct("<II")


class Records:
    """A record is the size of its JSON, that of its picture, and both."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def locate(self, file: IO[bytes]) -> Iterator[Ranges]:
        offset = 0
        while head := file.read(HEAD.size):
            sizes = HEAD.unpack(head)
            record = offset + HEAD.size
            yield [(record, sizes[0]), (record + sizes[0], sizes[1])]
            offset = file.seek(record + sum(sizes))

    def parse(self, parts: Sequence[bytes]) -> dict[str, object]:
        record, picture = parts
        return {**json.loads(record), **({"image": picture} if picture else {})}


def written(path: Path, *records: tuple[dict[str, Any], bytes]) -> Path:
    data = io.BytesIO()
    for record, picture in records:
        text = json.dumps(record).encode()
        data.write(HEAD.pack(len(text), len(picture)) + text + picture)
    path.write_bytes(data.getvalue())
    return path


def source(path: Path, make: Callable[[], Any] | None = Records, **more: Any) -> OpenedSource:
    return OpenedSource(
        name="theirs",
        format="custom",
        format_code=CodeSpec(name="records"),
        url=str(path),
        code=FormatCode(name="records", digest="0", make=make),
        **more,
    )


def with_parse(parse: Callable[[Sequence[bytes]], Any]) -> Callable[[], Records]:
    """The same format, whose rows come from here."""

    def make() -> Records:
        made = Records()
        made.parse = parse  # type: ignore[method-assign]
        return made

    return make


def with_locate(*ranges: Any) -> Callable[[], Records]:
    """The same format, whose samples lie there."""

    def make() -> Records:
        made = Records()
        made.locate = lambda file: iter(ranges)  # type: ignore[method-assign]
        return made

    return make


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(
        tmp_path / "a.rec",
        ({"id": "first", "caption": "a cat"}, JPEG),
        ({"text": "words alone"}, b""),
    )


def test_samples_come_in_the_files_order_with_their_own_keys_or_their_place(path):
    first, second = scan(source(path))
    assert (first.key, second.key) == ("first", "a.rec:1")
    assert [(blob.kind, blob.data) for blob in good(first).media] == [("image", JPEG)]
    assert good(first).record["caption"] == "a cat"
    assert good(second).record == {"text": "words alone"}
    assert not good(second).media
    assert second.behind_bytes == path.stat().st_size


def test_what_is_read_elsewhere_are_the_bytes_that_were_indexed_and_the_code_is_not_asked(path):
    def fails(parts: Sequence[bytes]) -> Any:
        raise AssertionError("parsed where no code runs")

    for each in scan(source(path)):
        anywhere = open_format(source(path, with_parse(fails)))
        read = anywhere.read(each.key, each.location)
        assert each.unparsed is not None
        assert sample_checks(read) == sample_checks(each.unparsed)
        parsed = OwnSamples(source(path), "records", Records(), DecodeLimits()).parsed(read)
        assert parsed == each.raw


def test_a_changed_byte_changes_the_digest(path):
    first, _ = scan(source(path))
    data = path.read_bytes()
    path.write_bytes(data.replace(b"a picture", b"b picture"))
    read = open_format(source(path)).read(first.key, first.location)
    assert first.unparsed is not None
    assert sample_checks(read) != sample_checks(first.unparsed)


def test_rows_are_laid_out_as_the_source_says(tmp_path):
    record = {"q": "what?", "a": "a cat", "score": 0.5, "seen": "thumb.jpg"}
    path = written(tmp_path / "a.rec", (record, JPEG))
    columns = ColumnMap(image="image", question="q", answer="a", loss_weight="score")
    (sample,) = scan(source(path, columns=columns, ignore=("seen",)))
    raw = good(sample)
    assert (raw.record["question"], raw.record["answer"]) == ("what?", "a cat")
    assert raw.loss_weight == 0.5


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (["a", "list"], "Return a row: a dict of columns by name"),
        ({"text": {1, 2}}, "parsed a row that is not JSON"),
        ({"text": "x", "image": "beside.jpg"}, "names the file 'beside.jpg'"),
        ({"text": "x", "image_path": "beside.jpg"}, "'image_path' names image"),
        ({"text": "x", "extra": b"\x00\x01 no medium"}, "no known image, clip or recording"),
        ({"text": "x" * 200}, "max_record_bytes"),
        ({"text": "x", "image": JPEG * 40}, "max_sample_bytes"),
    ],
)
def test_a_row_that_cannot_be_read_is_refused_alone_and_by_its_reason(path, row, reason):
    calls = iter([row, {"text": "the next"}])
    spec = source(path, with_parse(lambda parts: next(calls)))
    opened = open_format(spec, DecodeLimits(max_record_bytes=150, max_sample_bytes=400))
    bad, following = (each for file in list_files(spec) for each in opened.scan(file))
    assert isinstance(bad.raw, SampleError)
    assert reason in str(bad.raw)
    assert isinstance(following.raw, RawSample)


def test_code_that_fails_over_a_sample_is_named_with_its_error(path):
    def fails(parts: Sequence[bytes]) -> Any:
        raise ValueError("no such version")

    for each in scan(source(path, with_parse(fails))):
        assert "'records' failed with ValueError: no such version" in str(each.raw)


def test_a_file_that_the_code_fails_over_is_a_damaged_one(path):
    path.write_bytes(path.read_bytes() + b"torn")
    with pytest.raises(SourceError, match=r"a\.rec: 'records' failed with error: unpack"):
        scan(source(path))


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 10**9)],
        [(-4, 8)],
        [(8, -4)],
        [],
        (3, 5),
        [(0, 1.5)],
        [(0, 1, 2)],
        "ab",
        None,
        [(0, 1)] * 2000,
    ],
)
def test_ranges_that_the_file_does_not_have_are_refused_by_name(path, ranges):
    with pytest.raises(SourceError, match=r"a\.rec: its code locates sample 0 at .* \(offset, si"):
        scan(source(path, with_locate(ranges)))


class Lazy(Mapping[str, object]):
    """A row whose cells are computed when they are asked for."""

    def __getitem__(self, column: str) -> object:
        raise KeyError("no such version")

    def __iter__(self) -> Iterator[str]:
        return iter(["text"])

    def __len__(self) -> int:
        return 1


def test_a_row_that_fails_when_it_is_looked_at_fails_as_code_that_parses(path):
    for each in scan(source(path, with_parse(lambda parts: Lazy()))):
        assert "'records' failed with KeyError: 'no such version'" in str(each.raw)


def test_ranges_that_fail_when_they_are_looked_at_fail_as_code_that_locates(path):
    def torn() -> Iterator[tuple[int, int]]:
        yield 0, 4
        raise struct.error("torn")

    with pytest.raises(SourceError, match=r"a\.rec: 'records' failed with error: torn"):
        scan(source(path, with_locate(torn())))


def test_code_that_ends_as_a_script_does_ends_no_more_than_its_sample_or_its_file(path):
    def ends(_: object) -> Any:
        sys.exit(0)

    for each in scan(source(path, with_parse(ends))):
        assert "'records' failed with SystemExit: 0" in str(each.raw)

    def make() -> Records:
        made = Records()
        made.locate = ends  # type: ignore[method-assign]
        return made

    with pytest.raises(SourceError, match=r"a\.rec: 'records' failed with SystemExit: 0"):
        scan(source(path, make))


@pytest.mark.parametrize("wraps", [False, True])
def test_storage_that_is_away_while_code_locates_is_no_damage(path, tmp_path, measurer, wraps):
    def away(file: IO[bytes]) -> Iterator[Ranges]:
        try:
            raise ConnectionResetError(104, "reset by peer")
            yield
        except OSError as error:
            if wraps:  # as the libraries of formats do
                raise ValueError("no such archive") from error
            raise

    def make() -> Records:
        made = Records()
        made.locate = away  # type: ignore[method-assign]
        return made

    with pytest.raises(StorageAwayError, match=r"a\.rec cannot be read: ConnectionResetError"):
        build_index(
            source(path, make),
            out_dir=str(tmp_path / "index"),
            make_measurer=measurer,
            leave_out_damaged=True,
        )


def test_tuples_and_keys_that_are_numbers_are_as_json_has_them(path):
    turns = ({"role": "user", "content": ({"type": "image"},)},)
    row = {"messages": turns, "sizes": {1: (2, 3)}, "image": (JPEG, None, JPEG), "more": [None]}
    for each in scan(source(path, with_parse(lambda parts: row))):
        raw = good(each)
        assert raw.record["messages"] == [{"role": "user", "content": [{"type": "image"}]}]
        assert raw.record["sizes"] == {"1": [2, 3]}
        assert [blob.data for blob in raw.media] == [JPEG, JPEG]


def test_a_process_that_has_no_code_says_so(path):
    with pytest.raises(SourceError, match=r"whose code does not run here\. Index the job with the"):
        scan(source(path, None))
    plain = SourceSpec(
        name="theirs", format="custom", format_code=CodeSpec(name="records"), url=str(path)
    )
    with pytest.raises(SourceError, match="whose code does not run here"):
        scan(plain)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"format": "custom"}, "has format: custom and no format_code"),
        ({"format": "jsonl", "format_code": CodeSpec(name="r")}, "format: jsonl and format_code"),
        (
            {"format": "custom", "format_code": CodeSpec(name="r"), "media_root": "m"},
            "Leave media_root out",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(given, reason):
    with pytest.raises(SpecError, match=reason):
        SourceSpec(name="theirs", url="a", **given)
