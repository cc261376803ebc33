"""How often a step with spread experts makes the host wait for the device, while CP groups change.

The device is played, and knows for which file it is waited (see ``fake_device.py``). Experts send
one another's replicas rows in every layer of every microbatch, and nothing waits for them. What the
runtime waits for is once a step: the sum that begins it, and which gradients there are, of what all
replicas hold, and of experts where several replicas hold the same. Where FSDP2 shards the model it
knows the latter. Torch itself waits for nothing.
"""

import pytest

from tests.trainer_client.runtime.fake_device import THERE, FakeDevice
from tests.trainer_client.runtime.model_there import (
    connected_there,
    model_there,
    play_a_stream,
    play_a_transport,
    whole_grad,
)
from tests.trainer_client.runtime.random_experts import (
    EXPERTS,
    make_experts,
    own_name,
    sharded,
    spread,
)
from tests.trainer_client.runtime.random_steps import (
    make_shard,
    random_plan,
    random_samples,
    single_process,
)
from tests.trainer_client.runtime.sharded_there import play_sharding_there
from trainer_client.runtime import GroupPool, run_step

REPLICAS = 4
A_SUM = ("a copy to the host", "trainer_client/runtime/host_numbers.py")
SEEDS = (2, 3, 5)


def experts_there(pool, of_group, shards, **choices):
    """The model on the device, and the sum of its gradients."""
    whole = model_there(make_experts)
    if not shards:
        return spread(pool, of_group, whole)
    model, reduction = sharded(pool, of_group, whole, **choices)
    for layer in model.layers:
        for expert in layer.mlp.experts:
            expert.set_force_sum_reduction_for_comms(True)  # gloo has no sum of scaled numbers
    return model, reduction


def worst_difference(result, model, samples, first):
    """The largest relative error of the loss and of gradients, ``first`` being this replica's first
    expert. Collective where they are sharded."""
    loss, grads = single_process(make_experts(), samples)
    worst = abs(result.loss - loss) / abs(loss)
    for name, parameter in model.named_parameters():
        good = grads[own_name(name, first)]
        difference = (whole_grad(parameter) - good).norm() / good.norm().clamp_min(1e-3)
        worst = max(worst, float(difference))
    return worst


def steps_there(rank, size, of_group, shards, choices):
    """Of steps of one model, one for each seed: the microbatches, their CP degrees, what waited and
    for which file, and the error of the result."""
    play_a_stream()
    play_a_transport()
    found, first = [], rank % of_group * (EXPERTS // of_group)
    with FakeDevice() as device, GroupPool(timeout_s=60) as pool:
        play_sharding_there(device)
        connected_there(pool)
        model, reduction = experts_there(pool, of_group, shards, **choices)
        for seed in SEEDS:
            samples = random_samples(seed)
            waves = random_plan(samples, size, (1, 2, 3), seed)
            shard = make_shard(samples, waves, size, rank, seed).to(THERE)
            model.zero_grad()
            device.reads.clear()
            device.copies.clear()
            ahead = seed % 2 == 0
            result = run_step(model, shard, pool, gradients=reduction, features_ahead=ahead)
            waited = [(str(wait), wait.by) for wait in (*device.reads, *device.copies)]
            error = worst_difference(result, model, samples, first)
            degrees = {len(members) for wave in waves for members, _ in wave}
            found.append((len(shard.microbatches), degrees, waited, error))
    return found


@pytest.mark.parametrize(
    ("of_group", "shards", "choices", "sums"),
    [
        (2, False, {}, 3),
        (4, False, {}, 2),
        (2, True, {}, 1),
        (2, True, {"every_microbatch": True}, 1),
        (4, True, {"keep_weights": True}, 1),
    ],
)
def test_no_microbatch_with_spread_experts_makes_the_host_wait(
    world, of_group, shards, choices, sums
):
    for found in world(steps_there, REPLICAS, of_group, shards, choices).values():
        assert {1, 2, 3} <= set().union(*(degrees for _, degrees, *_ in found))
        assert len({microbatches for microbatches, *_ in found}) > 1
        for _, _, waited, error in found:
            assert waited == [A_SUM] * sums
            assert error <= 1e-10
