"""Validation between training steps on a real service: a job of its own, passed over whole each
time, on any number of ranks, while training goes on where it was."""

import itertools

import pytest

from tests.service.small import write_jsonl
from tests.service.support import dataservice, job_file, serving
from tests.service.text_model import text_model
from tests.trainer_client.runtime.conftest import run_world
from trainer_client import ShardDataset
from trainer_client.runtime import GroupPool, evaluate_step, run_step

pytestmark = pytest.mark.long

TRAINED, HELD_OUT, EVERY = 30, 13, 2


@pytest.fixture(scope="module")
def served(corpus, tmp_path_factory):
    home = tmp_path_factory.mktemp("validation")
    with serving(home) as service:
        for job, count in (("train", TRAINED), ("held-out", HELD_OUT)):
            words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
            texts = [
                " ".join(itertools.islice(itertools.cycle(words), 7 + n)) for n in range(count)
            ]
            write_jsonl(home / f"{job}.jsonl", [{"text": text} for text in texts])
            source = {"name": job, "format": "jsonl", "url": str(home / f"{job}.jsonl")}
            file = job_file(
                corpus,
                home,
                job=job,
                sources=[source],
                index=str(home / "index"),
                pipeline={"tokenizer": str(corpus / "tokenizer")},
                batch={"samples": 5},
                plan={"memory_tokens": 128},
            )
            dataservice("index", str(file))
            service.cli("job", "submit", str(file))
        yield service.address


def opened(address, job, rank, world):
    return ShardDataset(address, job=job, rank=rank, world_size=world, timeout_s=60)


def validated(model, groups, dataset, steps=None):
    """(sum of the losses of the tokens, tokens, plans) of the next steps of a pass."""
    total, tokens, plans = 0.0, 0, []
    for shard in itertools.islice(dataset, steps):
        result = evaluate_step(model, shard, groups)
        dataset.commit(shard.step)
        total, tokens = total + result.loss * result.loss_tokens, tokens + result.loss_tokens
        plans.append(shard.plan.digest)
    return total, tokens, plans


def training(rank, size, address):
    """The samples of every training step, and every pass of validation in between."""
    model, seen, passes = text_model(), [], []
    with GroupPool(timeout_s=60) as groups, opened(address, "train", rank, size) as dataset:
        for shard in dataset:
            run_step(model, shard, groups)  # no optimizer: the model stays as it is
            dataset.commit(shard.step)
            seen.append(sorted({int(s) for mb in shard.microbatches for s in mb.sample_ids}))
            if shard.step % EVERY == 1:
                with opened(address, "held-out", rank, size) as held_out:
                    passes.append(validated(model, groups, held_out))
    return seen, passes


def interrupted(rank, size, address):
    """A pass that goes on from a checkpoint behind its first step."""
    model = text_model()
    with GroupPool(timeout_s=60) as groups:
        with opened(address, "held-out", rank, size) as begun:
            first = validated(model, groups, begun, steps=1)
            state = begun.state_dict()
        with opened(address, "held-out", rank, size) as resumed:
            resumed.load_state_dict(state)
            rest = validated(model, groups, resumed)
    return [sum(parts) for parts in zip(first[:2], rest[:2], strict=True)]


def on_ranks(scenario, size, folder, address):
    folder.mkdir()
    return run_world(scenario, size, folder, address)


def test_training_and_fixed_passes_of_validation_take_turns(served, tmp_path):
    alone = on_ranks(training, 1, tmp_path / "alone", served)[0]
    answers = on_ranks(training, 2, tmp_path / "pair", served)
    total, tokens, _ = alone[1][0]
    assert tokens > HELD_OUT
    for seen, passes in answers.values():
        assert len(passes) == len(seen) // EVERY
        for loss, count, plans in passes:
            assert (loss, count) == pytest.approx((total, tokens), rel=1e-12)
            assert plans == passes[0][2], "each pass has the same plans"
    steps = zip(*(seen for seen, _ in answers.values()), strict=True)
    trained = [sorted({*a, *b}) for a, b in steps]
    assert sorted(itertools.chain(*trained)) == list(range(TRAINED)), "each sample once"
    assert trained == alone[0], "the same on any number of ranks"


def test_a_pass_goes_on_from_a_checkpoint_of_its_own(served, tmp_path):
    (whole,) = on_ranks(training, 1, tmp_path / "whole", served)[0][1][:1]
    for answer in on_ranks(interrupted, 2, tmp_path / "parts", served).values():
        assert answer == pytest.approx(list(whole[:2]), rel=1e-12)
