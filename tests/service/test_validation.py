"""Validation between training steps on a real service: one job file names held-out sources too.
They are passed over whole each time, on any number of ranks; training goes on where it was."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dataservice.core.errors import ConflictError, SourceError
from dataservice.engine.api import JobStatus
from dataservice.serving.coordinator_client import CoordinatorClient
from tests.service.small import write_jsonl
from tests.service.support import ServiceProcess, dataservice, delete_unused, job_file, serving
from tests.service.text_model import text_model
from tests.trainer_client.runtime.conftest import run_world
from trainer_client import MisuseError, ShardDataset, StateMismatch, UnknownJob
from trainer_client.runtime import GroupPool, evaluate_step, run_step

TRAINED, HELD_OUT, OTHER, EVERY = 30, 13, 7, 2


@dataclass
class Place:
    """A service, and job files beside it whose sources are indexed."""

    service: ServiceProcess
    client: CoordinatorClient
    corpus: Path
    home: Path

    def file(self, job: str, **changes: Any) -> Path:
        """A job file over 30 texts."""
        return job_file(
            self.corpus,
            self.home,
            job=job,
            **{
                "sources": [self.source("train")],
                "index": str(self.home / "index"),
                "pipeline": {"tokenizer": str(self.corpus / "tokenizer")},
                "batch": {"samples": 5},
                "plan": {"memory_tokens": 128},
                **changes,
            },
        )

    def source(self, name: str) -> dict[str, str]:
        return {"name": name, "format": "jsonl", "url": str(self.home / f"{name}.jsonl")}

    def submit(self, job: str, **changes: Any) -> JobStatus:
        path = self.file(job, **changes)
        return self.client.submit(path.read_text(), str(path.parent))

    def jobs(self) -> dict[str, JobStatus]:
        return {each.record.name: each for each in self.client.jobs()}

    def version(self, job: str) -> int:
        return self.jobs()[job].record.spec_version

    def dataset(self, job: str) -> ShardDataset:
        return opened(self.service.address, job, 0, 1)

    def samples(self, dataset: ShardDataset) -> list[int]:
        """What a pass gives to its only rank."""
        with dataset:
            return sorted(sample for shard in dataset for sample in samples_of(shard))


@pytest.fixture(scope="module")
def place(corpus, tmp_path_factory):
    home = tmp_path_factory.mktemp("validation")
    for name, count in (("train", TRAINED), ("held-out", HELD_OUT), ("other", OTHER)):
        words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", name]
        texts = [" ".join(itertools.islice(itertools.cycle(words), 10 + n)) for n in range(count)]
        write_jsonl(home / f"{name}.jsonl", [{"text": text} for text in texts])
    with serving(home) as service, CoordinatorClient(service.address) as client:
        place = Place(service=service, client=client, corpus=corpus, home=home)
        sources = [place.source("held-out"), place.source("other")]
        dataservice("index", str(place.file("indexed", validation={"sources": sources})))
        yield place


def held_out(place: Place, source: str = "held-out", **more: Any) -> dict[str, Any]:
    return {"sources": [place.source(source)], **more}


def opened(address, job, rank, world):
    return ShardDataset(address, job=job, rank=rank, world_size=world, timeout_s=60)


def samples_of(shard) -> list[int]:
    return sorted({int(sample) for mb in shard.microbatches for sample in mb.sample_ids})


# ---- passes, with a model -------------------------------------------------------------------


def validated(model, groups, dataset, steps=None):
    """(sum of the losses of the tokens, tokens, samples, plans) of the next steps of a pass."""
    total, tokens, samples, plans = 0.0, 0, [], []
    for shard in itertools.islice(dataset, steps):
        result = evaluate_step(model, shard, groups)
        dataset.commit(shard.step)
        total, tokens = total + result.loss * result.loss_tokens, tokens + result.loss_tokens
        samples.append(samples_of(shard))
        plans.append(shard.plan.digest)
    return total, tokens, samples, plans


def training(rank, size, address):
    """The samples of every training step, and every pass of validation in between."""
    model, seen, passes = text_model(), [], []
    with GroupPool(timeout_s=60) as groups, opened(address, "taking-turns", rank, size) as dataset:
        for shard in dataset:
            run_step(model, shard, groups)  # no optimizer: the model stays as it is
            dataset.commit(shard.step)
            seen.append(samples_of(shard))
            if shard.step % EVERY == 1:
                with dataset.validation() as held_out:
                    passes.append(validated(model, groups, held_out))
    return seen, passes


def interrupted(rank, size, address):
    """A pass that goes on from a checkpoint behind its first step."""
    model = text_model()
    dataset = opened(address, "taking-turns", rank, size)
    with GroupPool(timeout_s=60) as groups:
        with dataset.validation() as begun:
            first = validated(model, groups, begun, steps=1)
            state = begun.state_dict()
        with dataset.validation() as resumed:
            resumed.load_state_dict(state)
            rest = validated(model, groups, resumed)
    return [sum(parts) for parts in zip(first[:2], rest[:2], strict=True)]


def on_ranks(scenario, size, folder, address):
    folder.mkdir()
    return run_world(scenario, size, folder, address)


@pytest.fixture(scope="module")
def taking_turns(place):
    place.submit("taking-turns", validation=held_out(place, batch={"samples": 4}))
    return place.service.address


def joined(of_ranks) -> list[list[int]]:
    """The samples of each step on all ranks."""
    return [sorted({*itertools.chain(*step)}) for step in zip(*of_ranks, strict=True)]


@pytest.mark.long
def test_training_and_fixed_passes_of_validation_take_turns(taking_turns, tmp_path):
    alone = on_ranks(training, 1, tmp_path / "alone", taking_turns)[0]
    answers = on_ranks(training, 2, tmp_path / "pair", taking_turns)
    total, tokens, samples, _ = alone[1][0]
    assert tokens > HELD_OUT
    assert len(samples) == 4, "13 samples in steps of 4"
    assert sorted(itertools.chain(*samples)) == list(range(HELD_OUT))
    for seen, passes in answers.values():
        assert len(passes) == len(seen) // EVERY
        for loss, count, _, plans in passes:
            assert (loss, count) == pytest.approx((total, tokens), rel=1e-12)
            assert plans == passes[0][3], "each pass has the same plans"
    assert joined([passes[0][2] for _, passes in answers.values()]) == samples
    trained = joined([seen for seen, _ in answers.values()])
    assert sorted(itertools.chain(*trained)) == list(range(TRAINED)), "each sample once"
    assert trained == alone[0], "the same on any number of ranks"


@pytest.mark.long
def test_a_pass_goes_on_from_a_checkpoint_of_its_own(taking_turns, tmp_path):
    (whole,) = on_ranks(training, 1, tmp_path / "whole", taking_turns)[0][1][:1]
    for answer in on_ranks(interrupted, 2, tmp_path / "parts", taking_turns).values():
        assert answer == pytest.approx(list(whole[:2]), rel=1e-12)


# ---- the job file ---------------------------------------------------------------------------


def test_one_file_is_previewed_registered_shown_and_deleted_with_its_validation(place):
    path = str(place.file("whole", validation=held_out(place)))
    (shown,) = json.loads(dataservice("preview", path, "--source", "held-out", "--json").stdout)
    assert (shown["source"], shown["problem"]) == ("held-out", None)
    mixtures = json.loads(dataservice("preview", path, "--mixture", "--json").stdout)
    assert (mixtures["job"], mixtures["validation"]["job"]) == ("whole", "whole:validation")
    submitted = json.loads(place.service.cli("job", "submit", path, "--json").stdout)
    assert [(each["job"], each["samples"]) for each in submitted] == [
        ("whole", TRAINED),
        ("whole:validation", HELD_OUT),
    ]
    (one,) = json.loads(place.service.cli("job", "show", "whole", "--json").stdout)
    assert one["validation"]["job"] == "whole:validation"
    assert one["validation"]["mixture"]["sources"][0]["source"] == "held-out"
    assert "whole:validation" in place.service.cli("job", "show", "whole").stdout
    health = place.client.health("whole")
    assert [each.health.job for each in health.jobs] == ["whole", "whole:validation"]
    with place.dataset("whole").validation() as begun:
        steps = iter(begun)
        next(steps)
        with pytest.raises(ConflictError, match="job 'whole:validation' is in use"):
            place.client.delete("whole")
        assert {"whole", "whole:validation"} <= place.jobs().keys(), "neither was deleted"
    delete_unused(place.client, "whole")
    assert not {"whole", "whole:validation"} & place.jobs().keys()


def test_each_call_of_validation_is_a_pass_from_the_beginning(place):
    place.submit("passes", validation=held_out(place))
    dataset = place.dataset("passes")
    for _ in range(2):
        assert place.samples(dataset.validation()) == list(range(HELD_OUT))
    state = dataset.validation().state_dict()
    assert state["job"] == "passes:validation"
    with pytest.raises(StateMismatch, match="belongs to job 'passes:validation'"):
        dataset.load_state_dict(state)
    with pytest.raises(MisuseError, match="has none of its own"):
        dataset.validation().validation()


def test_a_job_gets_a_validation_later_and_changes_it_until_a_pass_has_begun(place):
    place.submit("later")
    dataset = place.dataset("later")
    with pytest.raises(UnknownJob, match=r"job 'later' has no validation. Write `validation: {so"):
        place.samples(dataset.validation())
    place.submit("later", validation=held_out(place))
    place.submit("later", validation=held_out(place, "other"))
    assert place.version("later") == 1, "training is the same job by the same file"
    assert len(place.samples(dataset.validation())) == OTHER
    place.submit("later", validation=held_out(place, "other", batch={"samples": 3}))
    assert place.version("later:validation") == 2
    assert len(place.samples(dataset.validation())) == OTHER


def test_other_held_out_data_are_refused_once_a_pass_has_begun_and_deleting_it_leaves_training(
    place,
):
    place.submit("begun", validation=held_out(place, "other"))
    dataset = place.dataset("begun")
    assert len(place.samples(dataset.validation())) == OTHER
    with pytest.raises(ConflictError) as refused:
        place.submit("begun", validation=held_out(place), epochs=2)
    assert "the validation of job 'begun': passes over it were begun" in str(refused.value)
    assert "`dataservice job delete begun:validation`" in str(refused.value)
    assert place.version("begun") == 1, "neither was changed"
    place.submit("begun")
    assert len(place.samples(dataset.validation())) == OTHER, "without the section it stays"
    delete_unused(place.client, "begun:validation")
    place.submit("begun", validation=held_out(place), epochs=2)
    assert len(place.samples(dataset.validation())) == HELD_OUT
    assert place.version("begun") == 2


def test_a_job_whose_validation_has_no_index_is_not_registered_either(place):
    never = {**place.source("held-out"), "name": "never-indexed"}
    with pytest.raises(SourceError, match="the validation of job 'half': "):
        place.submit("half", validation={"sources": [never]})
    assert "half" not in place.jobs()
