"""Experts that are spread over replicas, beside CP groups that change from wave to wave."""

import pytest
from torch.distributed.fsdp import fully_shard

from tests.trainer_client.runtime.posted_order import Post, stuck
from tests.trainer_client.runtime.random_experts import EXPERTS, make_experts
from tests.trainer_client.runtime.random_steps import (
    make_shard,
    random_plan,
    random_samples,
    single_process,
)
from trainer_client.runtime import ExpertReduction, GroupPool, LayoutError, run_step

REPLICAS = 4


def shards_of(seed):
    samples = random_samples(seed)
    waves = random_plan(samples, REPLICAS, (1, 2, 3), seed)
    return samples, [make_shard(samples, waves, REPLICAS, rank, seed) for rank in range(REPLICAS)]


def spread(pool, size):
    """The model with this replica's experts, and the sum of its gradients; expert groups are of
    `size` consecutive replicas."""
    model, replica = make_experts(), pool.replica
    first = replica - replica % size
    group = pool.apart(range(first, first + size))
    for layer in model.layers:
        layer.mlp.spread(group)
    experts = [layer.mlp.experts for layer in model.layers]
    holders = range(replica % size, REPLICAS, size)
    return model, ExpertReduction(model, pool, experts=experts, holders=holders)


def own_name(name, first):
    """The name that a parameter has where all experts are in one process."""
    if ".experts." not in name:
        return name
    layer, _, rest = name.partition(".experts.")
    number, _, part = rest.partition(".")
    return f"{layer}.experts.{int(number) + first}.{part}"


def spread_cases(rank, size, cases):
    found = {}
    for seed, of_group, ahead in cases:
        samples, shards = shards_of(seed)
        loss, grads = single_process(make_experts(), samples)
        with GroupPool(timeout_s=60, lane=f"{seed} {of_group}") as pool:
            model, reduction = spread(pool, of_group)
            result = run_step(model, shards[rank], pool, gradients=reduction, features_ahead=ahead)
        first = rank % of_group * (EXPERTS // of_group)
        worst = abs(result.loss - loss) / abs(loss)
        for name, parameter in model.named_parameters():
            good = grads[own_name(name, first)]
            worst = max(worst, float((parameter.grad - good).norm() / good.norm().clamp_min(1e-3)))
        idle = sum(microbatch.idle for microbatch in shards[rank].microbatches)
        found[seed, of_group] = worst, model.layers[0].mlp.calls, idle
    return found


def refusal(rank, size):
    with GroupPool(timeout_s=60) as pool:
        try:
            ExpertReduction(fully_shard(make_experts()), pool, experts=[], holders=[rank])
        except LayoutError as error:
            return str(error)


def test_spread_experts_get_the_gradients_of_a_single_process(world):
    cases = [(2, 2, False), (5, 4, True)]
    answers = world(spread_cases, REPLICAS, cases)
    assert any(idle for found in answers.values() for _, _, idle in found.values())
    for seed, of_group, _ in cases:
        of_ranks = [answers[rank][seed, of_group] for rank in range(REPLICAS)]
        assert max(worst for worst, _, _ in of_ranks) <= 1e-10
        waves = len(shards_of(seed)[1][0].microbatches)
        assert {calls for _, calls, _ in of_ranks} == {waves}, "each as often, idle or not"


def queues_of(recorder, of_group, *, skips=False):
    """What each replica posts. With `skips`, idle ones leave their experts out."""
    queues = {}
    _, shards = shards_of(2)
    for replica in range(REPLICAS):
        queues[replica] = recorder.begin()
        pool = GroupPool(replica=replica, replicas=REPLICAS, timeout_s=60)
        model, reduction = spread(pool, of_group)
        decode = model.decode

        def decode_or_skip(microbatch, *given, model=model, decode=decode):
            if skips and microbatch.idle:
                return model.head(model.tokens(microbatch.input_ids))
            return decode(microbatch, *given)

        model.decode = decode_or_skip
        run_step(model, shards[replica], pool, gradients=reduction)
    return queues


@pytest.mark.parametrize("of_group", [2, 4])
def test_experts_and_rings_come_through_on_communicators_of_their_own(recorder, of_group):
    queues = queues_of(recorder, of_group)
    posts = [post for queue in queues.values() for post in queue if isinstance(post, Post)]
    assert len({post.communicator for post in posts}) > 1
    assert not stuck(queues)


def test_an_idle_replica_that_left_its_experts_out_would_hold_up_the_others(recorder):
    assert stuck(queues_of(recorder, 4, skips=True))


def test_a_wrapped_model_is_refused_as_it_sums_its_gradients_itself(world):
    for said in world(refusal, 2).values():
        assert "give ExpertReduction the model without a wrapper" in said
