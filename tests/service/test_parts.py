"""A replica of several ranks over a real service: peers agree, and fetch what they read."""

import json
from collections import Counter

import pytest
import torch

from tests.service.support import Ranks, job_file, serving

pytestmark = pytest.mark.long

TENSOR, STAGES, REPLICAS = 2, 2, 2
PER_REPLICA = TENSOR * STAGES
PARTS = [("inputs",), ("tokens",), ("labels",), ()]  # by stage, then tensor rank


@pytest.fixture(scope="module")
def epochs(corpus, tmp_path_factory):
    """One epoch of two replicas of four ranks each, and one of two plain ranks."""
    home = tmp_path_factory.mktemp("parts")
    changes = {"plan": {"memory_tokens": 4096}}  # two replicas hold the longest sample
    topology = {"tensor_parallel": TENSOR, "pipeline_parallel": STAGES}
    with serving(home) as service:
        for job, more in (("peers", {"topology": topology}), ("plain", {})):
            service.cli("job", "submit", str(job_file(corpus, home, job=job, **changes, **more)))
        plain = Ranks(service.address, REPLICAS, job="plain").start()
        peers = Ranks(
            service.address,
            REPLICAS * PER_REPLICA,
            job="peers",
            parts_of=lambda rank: PARTS[rank % PER_REPLICA],
        )
        peers.start().join()
        plain.join()
        jobs = json.loads(service.cli("job", "list", "--json").stdout)
        service.stop()
    return peers, plain, {job["job"]: job for job in jobs}


def numbers(microbatch):
    """What the plan says of a microbatch."""
    return (
        (microbatch.wave, microbatch.pack, microbatch.cp_group, microbatch.cp_rank),
        microbatch.sample_ids.tolist(),
        microbatch.cu_seqlens.tolist(),
        microbatch.lengths.tolist(),
        microbatch.position_ids.tolist(),
    )


def test_every_sample_comes_once_to_each_rank_of_its_replica(epochs):
    peers, plain, jobs = epochs
    assert peers.digests.keys() == plain.digests.keys()
    assert jobs["peers"]["committed_step"] == len(peers.digests) - 1
    assert set(plain.visits.values()) == {1}
    assert peers.visits == Counter(dict.fromkeys(plain.visits, PER_REPLICA))


def test_peers_of_a_replica_hold_one_plan_and_the_same_microbatches(epochs):
    peers, _, _ = epochs
    for rank, shards in peers.shards.items():
        first = peers.shards[rank // PER_REPLICA * PER_REPLICA]
        for shard, other in zip(shards, first, strict=True):
            assert shard.replica == rank // PER_REPLICA
            assert shard.plan == other.plan
            assert list(map(numbers, shard.microbatches)) == list(map(numbers, other.microbatches))


def test_waves_are_ordered_for_the_stages_of_the_topology(epochs):
    peers, plain, _ = epochs
    for ranks, algorithm in ((peers, "search"), (plain, "as_formed")):
        for shard in ranks.shards[0]:
            (report,) = [stage for stage in shard.plan.stages if stage.stage == "order"]
            assert report.algorithm == (algorithm if len(shard.plan.waves) > 1 else "as_formed")
            assert report.lower_bound <= report.after <= report.before


def test_tokens_come_to_the_first_stage_labels_to_the_last_and_media_to_who_encodes(epochs):
    peers, _, _ = epochs
    received = Counter()
    for rank, shards in peers.shards.items():
        place = rank % PER_REPLICA
        for shard in shards:
            received[place] += shard.size_bytes
            for microbatch in shard.microbatches:
                assert hasattr(microbatch, "input_ids") == (place < TENSOR)
                assert hasattr(microbatch, "labels") == (place == TENSOR)
                batches = [b for b in (microbatch.vision, microbatch.audio) if b is not None]
                assert not batches or place < TENSOR
                assert all(hasattr(batch, "items") == (place == 0) for batch in batches)
    tokens = sum(
        microbatch.local_tokens
        for rank in range(0, REPLICAS * PER_REPLICA, PER_REPLICA)
        for shard in peers.shards[rank]
        for microbatch in shard.microbatches
    )
    assert received[0] > 10 * received[1]
    assert (received[1], received[2], received[3]) == (8 * tokens, 4 * tokens, 0)


def test_the_loss_is_weighted_by_the_labels_that_the_last_stages_hold(epochs):
    peers, _, _ = epochs
    for step in peers.digests:
        last = [peers.shards[r * PER_REPLICA + TENSOR][step] for r in range(REPLICAS)]
        held = torch.cat([m.labels for shard in last for m in shard.microbatches])
        assert {shard.plan.loss_tokens for shard in last} == {int((held != -100).sum())}
