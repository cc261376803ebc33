"""No order of posting can deadlock: what ranks really post, replayed by a checker of its own.

A rank's whole step runs alone, over a transport that notes the group calls and collectives which
NCCL would get. The queues of all ranks are then replayed together.
"""

import random

import pytest

from tests.trainer_client.runtime.planned_steps import planned_steps
from tests.trainer_client.runtime.posted_order import Post, Wait, stuck
from tests.trainer_client.runtime.random_chunks import HIDDEN, cut, only_its_parts
from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
)
from trainer_client.runtime import (
    GroupPool,
    PeerGroup,
    PipelineMesh,
    evaluate_step,
    run_pipeline_step,
    run_step,
)


def random_shards(seed, replicas, degrees):
    samples = random_samples(seed)
    waves = random_plan(samples, replicas, degrees, seed)
    return [make_shard(samples, waves, replicas, replica, seed) for replica in range(replicas)]


def queues_of(recorder, steps, ahead=(None,)):
    """What each replica posts in these steps, each of which is a shard by replica. Replicas have
    `features_ahead` in turn."""
    queues = {}
    for replica in range(len(steps[0])):
        queues[replica] = recorder.begin()
        model = make_model(())
        pool = GroupPool(replica=replica, replicas=len(steps[0]), timeout_s=60)
        for shards in steps:
            run_step(model, shards[replica], pool, features_ahead=ahead[replica % len(ahead)])
        assert pool.communicators == 1
    return queues


def posts_of(queues):
    return [post for queue in queues.values() for post in queue if isinstance(post, Post)]


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(("replicas", "degrees"), [(2, (1, 2)), (4, (1, 2, 3)), (9, (1, 3, 4, 5))])
def test_random_plans_come_through_on_one_communicator(recorder, replicas, degrees, ahead):
    steps = [random_shards(seed, replicas, degrees) for seed in range(2)]
    queues = queues_of(recorder, steps, (ahead,))
    assert not stuck(queues)
    assert len({post.communicator for post in posts_of(queues)}) == 1


@pytest.mark.parametrize("ahead", [True, False])
def test_plans_of_the_planner_come_through_on_one_communicator(recorder, ahead):
    _, steps = planned_steps(4, 2)
    assert max(degree for shards in steps for degree in shards[0].plan.degrees) > 1
    assert not stuck(queues_of(recorder, steps, (ahead,)))


EXCHANGE, RING = "the feature exchange (forward)", "ring attention (forward)"


def actions_of(recorder, monkeypatch, act, **options):
    """What one replica of a ring posts in a step, in this order."""
    posted, post = [], PeerGroup.post

    def noted(group, sends, receives, *, action, channel=0):
        posted.append(action)
        return post(group, sends, receives, action=action, channel=channel)

    monkeypatch.setattr(PeerGroup, "post", noted)
    recorder.begin()
    act(
        make_model(()),
        random_shards(1, 7, (5, 7))[0],
        GroupPool(replica=0, replicas=7, timeout_s=60),
        **options,
    )
    return posted


def test_features_that_travel_ahead_are_posted_between_a_wave_s_forward_and_backward_rings(
    recorder, monkeypatch
):
    """So no ring of the forward pass queues behind an encoder of the next wave."""
    ahead = actions_of(recorder, monkeypatch, run_step, features_ahead=True)
    after = actions_of(recorder, monkeypatch, run_step, features_ahead=False)
    back = "ring attention (backward)"
    first = after[: after.index(RING)].count(EXCHANGE)
    assert after[: after.index(back)].count(EXCHANGE) == first
    assert ahead[: ahead.index(RING)].count(EXCHANGE) == first
    assert ahead[: ahead.index(back)].count(EXCHANGE) > first


def test_without_a_backward_pass_they_are_posted_before_the_rings(recorder, monkeypatch):
    posted = actions_of(recorder, monkeypatch, evaluate_step)
    after = actions_of(recorder, monkeypatch, run_step, features_ahead=False)
    first = after[: after.index(RING)].count(EXCHANGE)
    assert posted[: posted.index(RING)].count(EXCHANGE) > first > 0


def test_a_replica_that_alone_sends_features_ahead_would_deadlock(recorder):
    steps = [random_shards(0, 4, (1, 2, 3))]
    assert not stuck(queues_of(recorder, steps))
    assert stuck(queues_of(recorder, steps, (True, False, False, False)))


def test_a_hop_of_a_ring_has_two_peers(recorder, monkeypatch):
    seen = PeerCount(monkeypatch)
    queues_of(recorder, [random_shards(1, 7, (5, 7))])
    peers = seen.by_action["ring attention (forward)"] | seen.by_action["ring attention (backward)"]
    assert peers == {1, 2}, "one where the ring is of two"


class PeerCount:
    """How many peers are in a post, by what it is for."""

    def __init__(self, monkeypatch):
        self.by_action = {}
        post = PeerGroup.post

        def counted(group, sends, receives, *, action, channel=0):
            peers = {peer for tensor, peer in (*sends, *receives) if tensor.numel()}
            self.by_action.setdefault(action, set()).add(len(peers))
            return post(group, sends, receives, action=action, channel=channel)

        monkeypatch.setattr(PeerGroup, "post", counted)


def queues_of_pipeline(recorder, stages, virtual_stages):
    """Of each column, one communicator for its rings and sums; of a replica, one for its row, and
    one for each channel between two stages."""
    replicas = 3
    shards = random_shards(5, replicas, (1, 2, 3))
    queues = {}
    for rank in range(replicas * stages):
        queues[rank] = recorder.begin()
        with PipelineMesh(
            stages=stages, virtual_stages=virtual_stages, rank=rank, world_size=replicas * stages
        ) as mesh:
            shard = only_its_parts(shards[mesh.replica], mesh.stage, stages)
            chunks = cut(make_model(()), stages * virtual_stages)[mesh.stage :: stages]
            run_pipeline_step(chunks, shard, mesh, HIDDEN)
            assert mesh.groups.communicators == 1
    return queues


@pytest.mark.parametrize(("stages", "virtual_stages"), [(2, 1), (2, 2), (3, 1)])
def test_pipelines_come_through_with_a_communicator_each_way(recorder, stages, virtual_stages):
    assert not stuck(queues_of_pipeline(recorder, stages, virtual_stages))


def test_pipelines_whose_channels_shared_one_communicator_would_deadlock(recorder, monkeypatch):
    """A receive is posted an action ahead, and what is sent before it arrives queues behind it."""
    rows = {}

    def shared(mesh, kind, *pair):
        if mesh not in rows:
            place = {"replica": mesh.stage, "replicas": mesh.stages}
            rows[mesh] = GroupPool(**place, lane=f"shared row {mesh.replica}")
        return rows[mesh].get(pair)

    monkeypatch.setattr(PipelineMesh, "channel", shared)
    assert stuck(queues_of_pipeline(recorder, 3, 1))


def swapped(queue, one, other):
    changed = list(queue)
    changed[one], changed[other] = queue[other], queue[one]
    return changed


def test_two_hops_in_another_order_on_one_replica_are_found(recorder):
    queues = queues_of(recorder, [random_shards(2, 4, (2, 3))])
    draw, found = random.Random(0), 0
    for _ in range(20):
        rank = draw.randrange(4)
        one, other = sorted(draw.sample(range(len(queues[rank])), 2))
        first, second = queues[rank][one], queues[rank][other]
        if {type(first), type(second)} != {Post} or first.batch == second.batch:
            continue
        assert stuck({**queues, rank: swapped(queues[rank], one, other)})
        found += 1
    assert found > 3


def two_ranks(first, second):
    """Both ranks post two batches, to the other, in these orders."""
    batches = {"a": [("send", 1), ("recv", 1)], "b": "all-reduce"}
    other = {"a": [("send", 0), ("recv", 0)], "b": "all-reduce"}
    return {
        0: [Post(k, "c", 0, 2, batches[name]) for k, name in enumerate(first)],
        1: [Post(k, "c", 1, 2, other[name]) for k, name in enumerate(second)],
    }


def test_the_checker_tells_a_deadlock_from_none():
    assert not stuck(two_ranks("ab", "ab"))
    assert sorted(stuck(two_ranks("ab", "ba"))) == [0, 1]
    assert sorted(stuck(two_ranks("ab", "a"))) == [0]
    # A rank that waits for one communicator before it posts to another, and the reverse.
    crossed = {
        0: [Post(0, "c", 0, 2, "sum"), Wait(0), Post(1, "d", 0, 2, "sum")],
        1: [Post(0, "d", 1, 2, "sum"), Wait(0), Post(1, "c", 1, 2, "sum")],
    }
    assert sorted(stuck(crossed)) == [0, 1]
