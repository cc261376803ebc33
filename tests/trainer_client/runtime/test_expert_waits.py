"""How often a step with spread experts makes the host wait for the device, while CP groups change.

The device is played, and knows for which file it is waited (see ``fake_device.py``). Experts send
one another's replicas rows in every layer of every microbatch, and nothing waits for them. What the
runtime waits for is once a step: the sum that begins it, and which gradients there are, of what all
replicas hold, and of experts where several replicas hold the same. Where FSDP2 shards the model it
knows the latter. Torch itself waits for nothing.
"""

import pytest

from tests.trainer_client.runtime.fake_device import FakeDevice
from tests.trainer_client.runtime.model_there import (
    connected_there,
    model_there,
    play_a_stream,
    play_a_transport,
    waits_of_steps,
    whole_grad,
)
from tests.trainer_client.runtime.random_experts import (
    make_experts,
    sharded,
    spread,
    worst_gradient,
)
from tests.trainer_client.runtime.random_steps import (
    random_plan,
    random_samples,
    single_process,
)
from tests.trainer_client.runtime.sharded_there import play_sharding_there
from trainer_client.runtime import GroupPool

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


def steps_there(rank, size, of_group, shards, choices):
    """See ``waits_of_steps``."""
    play_a_stream()
    play_a_transport()
    drawn = [(seed, random_samples(seed)) for seed in SEEDS]
    drawn = [(seed, each, random_plan(each, size, (1, 2, 3), seed)) for seed, each in drawn]
    with FakeDevice() as device, GroupPool(timeout_s=60) as pool:
        play_sharding_there(device)
        connected_there(pool)
        model, reduction = experts_there(pool, of_group, shards, **choices)

        def error_of(result, samples):
            loss, grads = single_process(make_experts(), samples)
            worst = worst_gradient(model, grads, rank, of_group, whole_grad)
            return max(abs(result.loss - loss) / abs(loss), worst)

        return waits_of_steps(device, pool, model, reduction, drawn, error_of)


@pytest.mark.parametrize(
    ("of_group", "shards", "choices", "sums"),
    [
        pytest.param(2, False, {}, 3, marks=pytest.mark.full),
        (4, False, {}, 2),
        (2, True, {}, 1),
        pytest.param(2, True, {"every_microbatch": True}, 1, marks=pytest.mark.full),
        pytest.param(4, True, {"keep_weights": True}, 1, marks=pytest.mark.full),
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
