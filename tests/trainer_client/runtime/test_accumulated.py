"""Steps before one step of the optimizer: each adds its gradients to those that are there."""

import pytest

from tests.trainer_client.runtime.random_experts import MAKERS, make_experts, worst_gradient
from tests.trainer_client.runtime.random_steps import (
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    whole,
    worst_difference,
    wrapped,
)
from trainer_client.runtime import FsdpReduction, GroupPool, run_step

SEEDS = (10, 11, 12)
EVERY = "fsdp, every microbatch"


def run_steps(model, pool, rank, size, gradients=None):
    """One step a seed, whose samples are others; returns the last one's result."""
    for seed in SEEDS:
        samples = random_samples(seed)
        waves = random_plan(samples, size, (1, 2), seed)
        shard = make_shard(samples, waves, size, rank, seed)
        result = run_step(model, shard, pool, gradients=gradients)
    return result


def summed_alone(make):
    """The last seed's loss and the gradients of all, of one process."""
    totals = {}
    for seed in SEEDS:
        loss, grads = single_process(make(), random_samples(seed))
        for name, grad in grads.items():
            if grad is not None:
                totals[name] = totals.get(name, 0) + grad
    return loss, {name: totals.get(name) for name in grads}


def of_wrapped(rank, size, ways):
    found = {}
    with GroupPool(timeout_s=60) as pool:
        for how in ways:
            model, gradients = wrapped("fsdp" if how == EVERY else how, ()), None
            if how == EVERY:
                gradients = FsdpReduction(model, pool.everyone, every_microbatch=True)
            result = run_steps(model, pool, rank, size, gradients)
            alone = summed_alone(lambda: make_model(()))
            found[how] = worst_difference(result, whole(model), *alone)
    return found


def test_gradients_are_added_however_they_are_summed(world):
    for found in world(of_wrapped, 3, ("plain", "ddp", "fsdp", EVERY)).values():
        assert len(found) == 4
        for how, (parameter, difference) in found.items():
            assert difference <= 1e-10, (how, parameter)


def of_experts(rank, size, cases):
    _, expected = summed_alone(make_experts)
    found = {}
    for make, of_group in cases:
        with GroupPool(timeout_s=60, lane=f"{make} {of_group}") as pool:
            model, reduction = MAKERS[make](pool, of_group)
            run_steps(model, pool, rank, size, reduction)
        found[make, of_group] = worst_gradient(model, expected, rank, of_group)
    return found


@pytest.mark.parametrize("make", ["spread", "sharded"])
def test_gradients_of_spread_experts_are_added_whoever_holds_them(world, make):
    for found in world(of_experts, 4, [(make, 2), (make, 4)]).values():
        assert len(found) == 2
        assert max(found.values()) <= 1e-10, found
