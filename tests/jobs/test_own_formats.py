"""Formats of the users' own in a job: what its index holds to, and who runs their code."""

import sys
from pathlib import Path

import pytest

from dataservice.core.errors import IndexStaleError, SpecError, StateError
from dataservice.jobs.find_samples import Wanted
from dataservice.jobs.indexing import index_job
from dataservice.jobs.preview import preview_job
from dataservice.jobs.setup import build_files, find_files, job_records, open_job
from dataservice.jobs.worker_pipeline import code_owner
from tests.jobs.corpus import PAGES, job_of, make_corpus, write_job

CODE = """
class Lines:
    version = {version}

    def __init__(self, key="text"):
        self.key = key

    def locate(self, file):
        start = 0
        for line in file:
            yield [(start, len(line))]
            start += len(line)

    def parse(self, parts):
        return {{self.key: parts[0].decode().strip()}}
"""
CUSTOM = {"lines": "their_lines:Lines"}
LINES = ["the first line", "a second one", "and the third"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus with a source whose format is code."""
    monkeypatch.syspath_prepend(tmp_path / "code")
    (tmp_path / "code").mkdir()
    write_code(tmp_path / "corpus", 1)
    home = make_corpus(tmp_path / "corpus")
    (home / "a.lines").write_text("\n".join(LINES) + "\n")
    job(home)
    return home


def write_code(home: Path, version: int) -> None:
    """The code, as a process that begins now finds it."""
    (home.parent / "code" / "their_lines.py").write_text(CODE.format(version=version))
    sys.modules.pop("their_lines", None)


def job(home: Path, **options: str) -> None:
    plain = [
        {"name": "pages", "format": "parquet", "url": "pages.parquet"},
        {
            "name": "theirs",
            "format": "custom",
            "format_code": {"name": "lines", "options": options},
            "url": "*.lines",
        },
    ]
    write_job(home, sources=plain)


def record(home: Path):
    return job_records((home / "job.yaml").read_text(), str(home))[0]


def index(home: Path) -> dict[str, int]:
    """Files of each source that had to be indexed."""
    made = index_job(job_of(home), custom_processors=CUSTOM)
    return {each.source: each.files - each.files_reused for each in made}


def shown(home: Path) -> list[str]:
    found = preview_job(
        job_of(home), Wanted(random=9), sources=["theirs"], custom_processors=CUSTOM
    )
    texts = ["".join(piece.text for piece in each.pieces) for each in found]
    return sorted(text.removesuffix("<|endoftext|>") for text in texts)


def test_its_samples_are_previewed_with_an_index_and_without(home):
    assert shown(home) == sorted(LINES)
    assert index(home) == {"pages": 1, "theirs": 1}
    assert shown(home) == sorted(LINES)


def test_the_coordinator_opens_the_job_and_never_has_the_code(home, monkeypatch):
    index(home)
    built = build_files(record(home), custom_processors=CUSTOM)
    monkeypatch.setitem(sys.modules, "their_lines", None)  # no import finds it
    opened = find_files(record(home), built).read()
    assert opened.sizes == (len(PAGES), len(LINES))


def test_what_is_decoded_belongs_to_the_team_alone(home):
    index(home)
    setup = open_job(record(home), custom_processors=CUSTOM)
    assert code_owner(setup.pipeline) == ""


def test_changed_code_asks_for_a_new_index_of_its_own_sources_alone(home):
    index(home)
    before = open_job(record(home), custom_processors=CUSTOM)
    write_code(home, 2)
    with pytest.raises(IndexStaleError, match=r"source 'theirs' is stale: its format was 'lines "):
        open_job(record(home), custom_processors=CUSTOM)
    assert index(home) == {"pages": 0, "theirs": 1}
    with pytest.raises(StateError, match="was registered in sample order"):
        open_job(before.record, custom_processors=CUSTOM)


def test_its_options_are_a_part_of_it(home):
    index(home)
    job(home, key="caption")
    with pytest.raises(IndexStaleError, match="source 'theirs' is stale"):
        open_job(record(home), custom_processors=CUSTOM)


def test_a_class_that_the_operator_does_not_allow_is_refused(home):
    with pytest.raises(SpecError, match=r"format 'lines' is not in the service's config, which ha"):
        index_job(job_of(home), custom_processors={})


def test_a_class_that_reads_no_format_is_refused(home, monkeypatch):
    (home.parent / "code" / "their_others.py").write_text(
        "class Prepares:\n    def prepare(self, sample):\n        return sample\n"
    )
    with pytest.raises(SpecError, match=r"is a Prepares without locate\(file\) and parse\(parts\)"):
        index_job(job_of(home), custom_processors={"lines": "their_others:Prepares"})
