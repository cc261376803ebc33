"""Experts that are spread over replicas, beside CP groups that change from wave to wave."""

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_client.runtime.posted_order import Post, stuck
from tests.trainer_client.runtime.random_chunks import HIDDEN, cut, only_its_parts
from tests.trainer_client.runtime.random_experts import (
    EXPERTS,
    MAKERS,
    make_experts,
    own_name,
    spread,
    worst_gradient,
)
from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
)
from tests.trainer_client.runtime.world_device import DEVICE
from trainer_client.runtime import (
    ExpertReduction,
    FsdpReduction,
    GroupPool,
    LayoutError,
    PipelineMesh,
    SumReduction,
    run_pipeline_step,
    run_step,
)

REPLICAS = 4


def shards_of(seed):
    samples = random_samples(seed)
    waves = random_plan(samples, REPLICAS, (1, 2, 3), seed)
    return samples, [make_shard(samples, waves, REPLICAS, rank, seed) for rank in range(REPLICAS)]


def spread_cases(rank, size, cases):
    found = {}
    for seed, of_group, ahead, make, *choices in cases:
        samples, shards = shards_of(seed)
        loss, grads = single_process(make_experts(), samples)
        with GroupPool(timeout_s=60, lane=f"{seed} {of_group}") as pool:
            model, reduction = MAKERS[make](pool, of_group, **dict(choices))
            result = run_step(model, shards[rank], pool, gradients=reduction, features_ahead=ahead)
        worst = max(
            abs(result.loss - loss) / abs(loss), worst_gradient(model, grads, rank, of_group)
        )
        idle = sum(microbatch.idle for microbatch in shards[rank].microbatches)
        found[seed, of_group] = worst, model.layers[0].mlp.calls, idle
    return found


def refusals(rank, size):
    alone = init_device_mesh(DEVICE.type, (size, 1), mesh_dim_names=("replicas", "alone"))["alone"]
    nested = make_experts()
    expert = fully_shard(nested.layers[0].mlp.experts[0], mesh=alone)
    fully_shard(nested)
    said = []
    with GroupPool(timeout_s=60) as pool:
        for refused in (
            lambda: ExpertReduction(nested, pool, experts=[expert], holders=[rank]),
            lambda: run_step(nested, shards_of(2)[1][0], pool),
            lambda: FsdpReduction(nested, pool.everyone, experts=[nested.layers[1].mlp]),
        ):
            try:
                refused()
            except LayoutError as error:
                said.append(str(error))
    return said


def without_reductions(rank, size):
    """What steps over a group apart say that are not told how to sum gradients."""
    said = []
    with GroupPool(timeout_s=60) as pool:
        spread(pool, size)
        for model in (make_experts(), DistributedDataParallel(make_experts())):
            with pytest.raises(LayoutError) as refused:
                run_step(model, shards_of(2)[1][0], pool)
            said.append(str(refused.value))
        model, samples = make_model(()), random_samples(2)
        shard = make_shard(samples, [[(range(size), range(len(samples)))]], size, rank, 2)
        run_step(model, shard, pool, gradients=SumReduction(model, pool.everyone))
    return said


def pipelined(rank, size, virtual_stages):
    """The largest difference of a stage whose replicas hold different experts, and the errors of
    reductions that do not fit its chunks."""
    stages, replicas = 2, size // 2
    samples = random_samples(11)
    waves = random_plan(samples, replicas, (1, 2), 11)
    loss, grads = single_process(make_experts(), samples)
    with PipelineMesh(stages=stages, virtual_stages=virtual_stages, timeout_s=60) as mesh:
        shard = make_shard(samples, waves, replicas, mesh.replica, 11)
        shard = only_its_parts(shard, mesh.stage, stages)
        model, _ = spread(mesh.groups, replicas)
        chunks = cut(model, stages * virtual_stages)[mesh.stage :: stages]
        reductions = [
            ExpertReduction(
                chunk,
                mesh.groups,
                experts=[layer.mlp.experts for layer in chunk.layers],
                holders=[mesh.replica],
            )
            for chunk in chunks
        ]
        said = []
        for wrong in (None, reductions[1:]):
            with pytest.raises(LayoutError) as refused:
                run_pipeline_step(chunks, shard, mesh, HIDDEN, gradients=wrong)
            said.append(str(refused.value))
        result = run_pipeline_step(chunks, shard, mesh, HIDDEN, gradients=reductions)
    first = mesh.replica * (EXPERTS // replicas)
    mine = {id(parameter) for chunk in chunks for parameter in chunk.parameters()}
    worst = abs(result.loss - loss) / abs(loss)
    for name, parameter in model.named_parameters():
        if id(parameter) in mine:
            good = grads[own_name(name, first)]
            difference = (parameter.grad - good).norm() / good.norm().clamp_min(1e-3)
            worst = max(worst, float(difference))
    idle = any(sum(len(members) for members, _ in wave) < replicas for wave in waves)
    return worst, idle, said


def test_spread_experts_get_the_gradients_of_a_single_process(world):
    cases = [
        (2, 2, False, "spread"),
        (5, 4, True, "spread"),
        (3, 2, True, "sharded"),
        (6, 2, False, "sharded", ("every_microbatch", True)),
        (7, 4, False, "sharded"),
    ]
    answers = world(spread_cases, REPLICAS, cases)
    assert any(idle for found in answers.values() for _, _, idle in found.values())
    for seed, of_group, *_ in cases:
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


def test_experts_that_a_wrapper_would_sum_wrongly_are_refused_with_the_remedy(world):
    for plain, unnamed, whole in world(refusals, 2).values():
        assert "give ExpertReduction the model without a wrapper" in plain
        assert "FsdpReduction(..., experts=...)" in plain
        assert "reduced over 1 ranks" in unnamed
        assert (
            "name experts that fewer replicas share in FsdpReduction(..., experts=...)" in unnamed
        )
        assert "call fully_shard on each of them" in whole


def test_a_step_over_a_group_apart_is_refused_unless_it_says_how_gradients_are_summed(world):
    for said in world(without_reductions, 2).values():
        for refused in said:
            assert "replicas [0, 1] have a group apart" in refused
            assert "Give gradients=ExpertReduction(model, groups" in refused


@pytest.mark.parametrize("virtual_stages", [1, 2])
def test_experts_of_a_pipeline_get_the_gradients_of_a_single_process(world, virtual_stages):
    for worst, idle, (unsaid, too_few) in world(pipelined, 4, virtual_stages).values():
        assert worst <= 1e-10
        assert idle
        assert "have a group apart" in unsaid
        assert f"`gradients` has {virtual_stages - 1} reductions" in too_few
