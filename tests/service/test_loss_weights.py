"""Weighed samples on a real service: the gradients of ranks are those of the weighted mean over the
global batch, as a plain loop over the records has it."""

import json
import types

import grpc
import numpy as np
import pytest
from dataservice_proto.columns import VERSION
from dataservice_proto.v1 import coordinator_pb2, coordinator_pb2_grpc

from tests.service.small import spoil, write_jsonl
from tests.service.support import dataservice, job_file, serving
from tests.service.text_model import text_model
from tests.trainer_client.runtime.conftest import run_world
from tests.trainer_client.runtime.random_steps import (
    single_process,
    worst_difference,
)
from trainer_client import LossWeightsNotRead, ShardDataset
from trainer_client.runtime import GroupPool, run_step

pytestmark = pytest.mark.long

STEPS, LONG = 4, 130
SCORES = [0.3, None, 0, 2.5, 1]  # of the rated texts, over and over
SOURCE_WEIGHTS = {"rated": 0.5, "plain": 3.0}


def records_of(source):
    words = np.random.default_rng(len(source)).choice(
        ["the", "fox", "over", "a", "dog"], (24, LONG)
    )
    made = []
    for number, row in enumerate(words):
        length = LONG if number == 5 else 10 + 3 * number
        record = {"id": f"{source}-{number}", "text": " ".join(row[:length])}
        score = SCORES[number % len(SCORES)] if source == "rated" else None
        made.append({**record, **({} if score is None else {"score": score})})
    return made


def changed(data):
    """One text has its first words in another order."""
    before = json.dumps(records_of("rated")[7]).encode()
    record = json.loads(before)
    words = record["text"].split()
    record["text"] = " ".join([*words[1:], words[0]])
    assert data.count(before) == 1
    return data.replace(before, json.dumps(record).encode())


@pytest.fixture(scope="module")
def served(corpus, tmp_path_factory):
    """A service with the job of two ranks and one that a single rank holds, over the same texts, of
    which one changed since it was indexed."""
    home = tmp_path_factory.mktemp("weighed")
    sources = []
    for name, weight in SOURCE_WEIGHTS.items():
        write_jsonl(home / f"{name}.jsonl", records_of(name))
        columns = {"loss_weight": "score"} if name == "rated" else {}
        url = str(home / f"{name}.jsonl")
        source = {"name": name, "format": "jsonl", "url": url}
        sources.append({**source, "loss_weight": weight, "columns": columns})
    own = {
        "sources": sources,
        "index": str(home / "index"),
        "pipeline": {"tokenizer": str(corpus / "tokenizer")},
        "batch": {"samples": 8},
    }
    pair = job_file(corpus, home, **own, plan={"memory_tokens": 128})
    whole = job_file(corpus, home, job="whole", **own, plan={"memory_tokens": 16384})
    with serving(home) as service:
        dataservice("index", str(pair))
        spoil(home / "rated.jsonl", changed)
        for file in (pair, whole):
            service.cli("job", "submit", str(file))
        yield service.address


def steps_of(address, job, rank=0, world=1):
    with ShardDataset(address, job=job, rank=rank, world_size=world, timeout_s=60) as dataset:
        for shard in dataset:
            yield shard
            dataset.commit(shard.step)
            if shard.step + 1 == STEPS:
                break


def trained(rank, size, address):
    """Of each step: its loss, its gradients, and the degrees of its groups."""
    found = []
    with GroupPool(timeout_s=60) as groups:
        for shard in steps_of(address, "job", rank, size):
            model = text_model()
            result = run_step(model, shard, groups)
            grads = {name: p.grad for name, p in model.named_parameters()}
            found.append((result.loss, result.loss_tokens, grads, shard.plan.degrees))
    return found


def samples_of(shard):
    """The samples that came, each with the weight that its record and its source say."""
    weights = [
        SOURCE_WEIGHTS[source] * record.get("score", 1)
        for source in SOURCE_WEIGHTS
        for record in records_of(source)
    ]
    for mb in shard.microbatches:
        bounds = mb.cu_seqlens.tolist()
        for start, length, sample in zip(
            bounds, mb.lengths.tolist(), mb.sample_ids.tolist(), strict=False
        ):
            own = slice(start, start + length)
            assert set(mb.loss_weights[own].tolist()) == {weights[sample]}
            yield types.SimpleNamespace(
                ids=mb.input_ids[own], labels=mb.labels[own], items=[], weight=weights[sample]
            )


def test_two_ranks_have_the_gradients_of_the_weighted_mean_over_the_batch(served, tmp_path):
    answers = run_world(trained, 2, tmp_path, served)
    degrees, masked = set(), 0
    for step, shard in enumerate(steps_of(served, "whole")):
        samples = list(samples_of(shard))
        reference = text_model()
        loss, grads = single_process(reference, samples)
        tokens = [int((sample.labels != -100).sum()) for sample in samples]
        masked += tokens.count(0)
        for found, loss_tokens, theirs, groups in (answers[rank][step] for rank in (0, 1)):
            model = text_model()
            for name, parameter in model.named_parameters():
                parameter.grad = theirs[name]
            result = types.SimpleNamespace(loss=found)
            parameter, difference = worst_difference(result, model, loss, grads)
            assert difference <= 1e-10, (step, parameter)
            assert loss_tokens == sum(tokens)
            degrees |= set(groups)
        planned = shard.plan.weighted_loss_tokens
        counted = sum(s.weight * n for s, n in zip(samples, tokens, strict=True))
        if 0 not in tokens:
            assert planned == pytest.approx(counted, rel=1e-12)
    assert degrees == {1, 2}
    assert masked == 1


def test_a_loop_that_leaves_the_weights_out_is_refused(served):
    with ShardDataset(served, job="whole", rank=0, world_size=1, timeout_s=60) as dataset:
        shard = next(iter(dataset))
        assert all(mb.labels is not None for mb in shard.microbatches)
        with pytest.raises(LossWeightsNotRead, match=r"mb\.loss_weights"):
            dataset.commit(shard.step)


def test_a_client_of_before_is_refused_when_it_opens(served):
    request = coordinator_pb2.OpenSessionRequest(
        columns=VERSION, job="whole", rank=0, world_size=1, client="old:1"
    )
    with grpc.insecure_channel(served) as channel:
        stream = coordinator_pb2_grpc.CoordinatorStub(channel).OpenSession(request, timeout=60)
        with pytest.raises(grpc.RpcError) as refused:
            next(stream)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "Install this release's client" in refused.value.details()
