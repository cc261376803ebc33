"""From a sample's id, as a rank has it, to its file, its text and the steps that trained it."""

import json

import pytest

from soak.service import dataservice
from tests.cli.support import says
from tests.service.small import SAMPLES, indexed_job, make_corpus
from tests.service.support import Ranks, explained, serving

ROUNDS = 2


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("sample") / "corpus")


@pytest.fixture(scope="module")
def trained(home):
    """A job of two attempts, the second from the start again, and the ranks of the second."""
    path = indexed_job(home, ready_steps=1)
    with serving(home) as service:
        service.cli("job", "submit", str(path))
        for _ in range(ROUNDS):
            ranks = Ranks(service.address, 2).start().join()
        yield service, ranks


def found(service, sample):
    return json.loads(service.cli("explain", "job", "--sample", str(sample), "--json").stdout)


@pytest.mark.long
def test_every_sample_leads_to_its_file_its_text_and_both_attempts(trained, home):
    service, ranks = trained
    step_of = {
        sample: shard.step
        for shards in ranks.shards.values()
        for shard in shards
        for microbatch in shard.microbatches
        if not microbatch.idle
        for sample in microbatch.sample_ids.tolist()
    }
    assert len(step_of) == SAMPLES
    for sample in (0, 9, SAMPLES - 1):
        said = found(service, sample)
        step = step_of[sample]
        assert [(s["step"], s["attempt"], s["fate"]) for s in said["steps"]] == [
            (step, attempt, "committed") for attempt in range(1, ROUNDS + 1)
        ]
        assert f"{said['source']}/{said['key']}" in explained(service, step)["samples"]
        named = ("--source", said["source"], "--sample", f"key={said['key']}")
        (preview,) = json.loads(
            dataservice("preview", str(home / "job.yaml"), *named, "--json").stdout
        )
        assert preview["pieces"] == said["preview"]["pieces"]
        assert preview["location"] == said["location"]


def test_it_is_printed_with_its_text_and_a_table_of_its_steps(trained):
    service, _ = trained
    said = " ".join(service.cli("explain", "job", "--sample", "0").stdout.split())
    says(said, "images/image-00", "images-0.tar, bytes", "⟦a shape on a ground<|im_end|>⟧")
    says(said, "steps that it was in", "committed learnt")


@pytest.mark.long
def test_files_that_are_not_on_this_machine_are_said(trained, home):
    service, _ = trained
    (home / "tokenizer").rename(home / "away")
    try:
        said = " ".join(service.cli("explain", "job", "--sample", "0").stdout.split())
        assert found(service, 0)["preview"] is None
    finally:
        (home / "away").rename(home / "tokenizer")
    says(said, "images/image-00", "its text cannot be shown from here: tokenizer", "learnt")
