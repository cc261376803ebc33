"""Files in, balanced shards out: everything between is real."""

import json

import numpy as np
import pytest
import torch

from dataservice.core.layout import member_rows
from dataservice.jobs.setup import job_records, open_job
from tests.service.support import Ranks, decoder_of_job, explained, job_file, serving


@pytest.fixture(scope="module")
def epoch(corpus, tmp_path_factory):
    """One epoch over four ranks of a service with Ray workers, and the service's explanations."""
    home = tmp_path_factory.mktemp("epoch")
    path = job_file(corpus, home)
    with serving(home, pool="ray") as service:
        service.cli("job", "submit", str(path))
        ranks = Ranks(service.address, 4).start().join()
        said = [explained(service, step) for step in (0, 3)]
        table = service.cli("explain", "job", "--step", "3").stdout
        listed = json.loads(service.cli("job", "list", "--json").stdout)
        service.stop()
    return path, ranks, said, table, listed


@pytest.fixture(scope="module")
def setup(corpus):
    path = corpus / "job.yaml"
    return open_job(job_records(path.read_text(), str(corpus))[0], custom_processors={})


def test_every_sample_is_trained_exactly_once(epoch, setup):
    _, ranks, _, _, listed = epoch
    assert ranks.visits == dict.fromkeys(range(setup.catalog.samples), 1)
    assert listed[0]["committed_step"] == len(ranks.digests) - 1


def test_members_of_a_group_hold_the_pack_as_it_was_decoded(epoch, setup):
    """Sequences put together from the members' chunks are what decoding gives, sample by sample."""
    _, ranks, _, _, _ = epoch
    decode = decoder_of_job(setup)
    degrees = set()
    for step in ranks.digests:
        packs = {}
        for rank, shards in ranks.shards.items():
            for microbatch in shards[step - shards[0].step].microbatches:
                if not microbatch.idle:
                    packs.setdefault((microbatch.wave, microbatch.pack), {})[rank] = microbatch
        for members in packs.values():
            degrees.add(len(members))
            _check_pack(members, decode)
    assert min(degrees) == 1 < max(degrees)


def _check_pack(members, decode):
    first = next(iter(members.values()))
    assert set(members) == set(first.cp_group)
    bounds = first.cu_seqlens.numpy()
    whole = {name: np.full(bounds[-1], -7) for name in ("input_ids", "labels", "position_ids")}
    for microbatch in members.values():
        rows = member_rows(np.diff(bounds), len(members), microbatch.cp_rank)
        for name, values in whole.items():
            values[rows] = getattr(microbatch, name).numpy()
    for place, sample in enumerate(first.sample_ids.tolist()):
        decoded = decode(sample)
        length = int(first.lengths[place])
        start = bounds[place]
        assert whole["input_ids"][start : start + length].tolist() == decoded.input_ids.tolist()
        assert whole["labels"][start : start + length].tolist() == decoded.labels.tolist()
        assert (whole["labels"][start + length : bounds[place + 1]] == -100).all()
        assert whole["position_ids"][start : start + length].tolist() == list(range(length))


def test_encoder_items_are_encoded_once_and_are_the_decoded_media(epoch, setup):
    """Frame by frame, as a clip may come to several ranks in pieces."""
    _, ranks, _, _, _ = epoch
    decode = decoder_of_job(setup)
    for step in list(ranks.digests)[:4]:
        received, wanted = [], []
        for shards in ranks.shards.values():
            for microbatch in shards[step].microbatches:
                if microbatch.cp_rank == 0:
                    for sample in microbatch.sample_ids.tolist():
                        for item in decode(sample).items:
                            wanted += _prints(item)
                for batch in (microbatch.vision, microbatch.audio):
                    if batch is not None:
                        for item in batch.items:
                            received += _prints(item.numpy())
        assert sorted(received) == sorted(wanted)


def _prints(item):
    frames = item if item.ndim == 4 else [item]
    return [(frame.shape, frame.dtype.str, frame.tobytes()) for frame in frames]


def test_explain_plans_the_step_again_to_the_recorded_digest(epoch):
    _, ranks, said, table, _ = epoch
    for explanation in said:
        assert explanation["plan_digest"] == explanation["ledger_plan_digest"]
        assert explanation["plan_digest"] == ranks.digests[explanation["step"]]
        assert explanation["committed"]
        assert len(explanation["samples"]) == len(explanation["plan"]["sample_ids"]["values"])
    for shown in ("waves", "stages", "(as recorded)", "group", "dispatch vision", "over bound"):
        assert shown in table


def test_loss_tokens_of_a_step_are_the_labels_that_its_ranks_hold(epoch):
    _, ranks, _, _, _ = epoch
    for step in ranks.digests:
        shards = [got[step] for got in ranks.shards.values()]
        counted = sum(
            int((microbatch.labels != -100).sum())
            for shard in shards
            for microbatch in shard.microbatches
        )
        assert {shard.plan.loss_tokens for shard in shards} == {counted}


def test_pixels_stay_bytes_on_the_wire_and_sound_is_float(epoch):
    _, ranks, _, _, _ = epoch
    batches = [
        (microbatch.vision, microbatch.audio)
        for shards in ranks.shards.values()
        for shard in shards
        for microbatch in shard.microbatches
    ]
    assert {i.dtype for v, _ in batches if v for i in v.items} == {torch.uint8}
    assert {i.dtype for _, a in batches if a for i in a.items} == {torch.float32}
