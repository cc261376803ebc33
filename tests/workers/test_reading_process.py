"""A team's own code runs in a process that has no credentials: another one reads for it."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from dataservice.core.errors import SpecError
from dataservice.workers.process_decoders import ProcessDecoders
from tests.workers.apart import FACTORY, SECRET, sample
from tests.workers.trouble import a_sample, decode, pipeline_in


@pytest.fixture(scope="module")
def decoders():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(SECRET, "hunter2")
        made = ProcessDecoders(FACTORY, slots=1, timeout_s=30.0)
        made.start()
        with contextlib.closing(made):
            yield made


@pytest.fixture
def own(tmp_path):
    return pipeline_in(tmp_path, owner="vision")


def noted(folder: Path, what: str) -> tuple[int, dict[str, object]]:
    """The process that did this last, and what it held."""
    path = max(folder.glob(f"{what}.*"), key=lambda path: path.stat().st_mtime_ns)
    return int(path.suffix[1:]), json.loads(path.read_text())


def test_own_code_is_run_where_no_credentials_are_and_read_for_where_they_are(
    decoders, own, tmp_path
):
    (outcome,) = decode(decoders, own, "good")
    assert outcome.reason == ""
    reader, holds = noted(tmp_path, "reads-good")
    decoder, lacks = noted(tmp_path, "decodes-good")
    assert reader != decoder
    assert (holds["held"], holds["opened"]) == ("hunter2", "with")
    assert (lacks["held"], lacks["opened"]) == (None, "without")
    assert not lacks["inherited"]


def test_the_process_that_both_were_forked_from_has_no_credentials_either(decoders, own, tmp_path):
    decode(decoders, own, "good")
    _, lacks = noted(tmp_path, "decodes-good")
    assert SECRET not in Path(f"/proc/{lacks['parent']}/environ").read_text()


def test_without_own_code_one_process_reads_and_decodes(decoders, tmp_path):
    decode(decoders, pipeline_in(tmp_path), "good")
    (reader, holds), (decoder, _) = noted(tmp_path, "reads-good"), noted(tmp_path, "decodes-good")
    assert reader == decoder
    assert holds["held"] == "hunter2"


def test_a_process_that_held_credentials_never_runs_own_code(decoders, own, tmp_path):
    decode(decoders, pipeline_in(tmp_path), "plain")
    decode(decoders, own, "good")
    decode(decoders, pipeline_in(tmp_path), "behind")
    plain, own_code, behind = (
        noted(tmp_path, f"decodes-{key}")[0] for key in ("plain", "good", "behind")
    )
    assert own_code not in (plain, behind)


def test_the_sample_arrives_as_it_was_read(decoders, own, tmp_path):
    decode(decoders, own, "good")
    assert (tmp_path / "raw-good").read_text() == repr(sample(a_sample(1, "good").ref))


def test_what_reading_raises_is_the_samples_reason(decoders, own):
    outcomes = decode(decoders, own, "good", "gone", "fine")
    assert [outcome.reason for outcome in outcomes] == ["", "the source has vanished", ""]


def test_a_source_that_cannot_be_opened_refuses_the_pipeline(decoders, tmp_path):
    with pytest.raises(SpecError, match="there is no such profile"):
        decode(decoders, pipeline_in(tmp_path, owner="vision", no_source=True), "good")


def test_two_pipelines_of_a_team_are_each_read_from_their_own_sources(decoders, tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    one, two = (pipeline_in(folder, owner="vision") for folder in folders)
    for key, pipeline in (("a", one), ("b", two), ("c", one)):
        assert decode(decoders, pipeline, key)[0].reason == ""
    found = [sorted(path.stem for path in folder.glob("reads-*")) for folder in folders]
    assert found == [["reads-a", "reads-c"], ["reads-b"]]
    pids = {noted(folders[0], f"decodes-{key}")[0] for key in "ac"}
    assert pids == {noted(folders[1], "decodes-b")[0]}, "they share the team's process"


def test_a_reader_that_dies_once_costs_no_sample(decoders, own):
    outcomes = decode(decoders, own, "good", "crash_once", "fine")
    assert [outcome.reason for outcome in outcomes] == ["", "", ""]


def test_a_sample_that_kills_its_reader_is_masked_alone_and_says_how(decoders, own):
    outcomes = decode(decoders, own, "good", "crash", "fine")
    assert [outcome.sample is None for outcome in outcomes] == [False, True, False]
    assert "died of SIGSEGV" in outcomes[1].reason
    assert "last of 2 tries" in outcomes[1].reason


def test_a_reader_that_is_killed_while_it_waits_is_replaced(decoders, own, tmp_path):
    decode(decoders, own, "good")
    reader, _ = noted(tmp_path, "reads-good")
    os.kill(reader, signal.SIGKILL)
    assert decode(decoders, own, "again")[0].reason == ""
    assert noted(tmp_path, "reads-again")[0] != reader
