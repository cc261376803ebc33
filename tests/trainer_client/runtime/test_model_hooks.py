"""A model's own hooks see the microbatches that it is called with, however it is wrapped."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.trainer_client.runtime.random_steps import (
    Model,
    make_model,
    make_shard,
    random_plan,
    random_samples,
    single_process,
    whole,
    worst_difference,
)
from trainer_client.runtime import GroupPool, run_step
from trainer_client.shard import Microbatch


class Hooked(Model):
    def forward(self, microbatch, groups):
        self.seen.append(("forward", microbatch))
        return super().forward(microbatch, groups)


def hooked(how, compiled):
    """A wrapped model, with hooks of every place; each notes what it is given, and the first hands
    on another microbatch."""
    model = make_model(())
    model.__class__, model.seen = Hooked, []

    def noting(name):
        def hook(module, arguments):
            microbatch, *rest = arguments
            model.seen.append((name, microbatch))
            return (replace(microbatch), *rest)

        return hook

    def after(module, arguments, result):
        model.seen.append(("after", arguments[0]))

    model.register_forward_pre_hook(noting("before FSDP2" if how == "fsdp" else "first"))
    if how == "ddp":
        wrapper = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        wrapper.register_forward_pre_hook(noting("wrapper"))
    else:
        for part in (*model.encoders.values(), *model.layers, model):
            fully_shard(part)
        model.register_forward_pre_hook(noting("put first"), prepend=True)
        wrapper = model
    model.register_forward_pre_hook(noting("last"))
    model.register_forward_hook(after)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, given: (given[0] * 1.0, *given[1:]))
        if compiled:
            layer.compile(fullgraph=how == "ddp", dynamic=True, backend="aot_eager")
    return wrapper, model


def hooks_of(module):
    """Their handles, in the order in which they run."""
    return list(vars(module)["_forward_pre_hooks"])


def hooks_seen(rank, size, how, compiled):
    """By hook, what it saw; the error; and which hooks the model has afterwards."""
    samples = random_samples(11)
    shard = make_shard(samples, random_plan(samples, size, (1, 2), 11), size, rank, 11)
    wrapper, model = hooked(how, compiled)
    before = hooks_of(model), hooks_of(wrapper)
    with GroupPool(timeout_s=60) as pool:
        result = run_step(wrapper, shard, pool)
    left = (hooks_of(model), hooks_of(wrapper)) == before
    loss, grads = single_process(make_model(()), samples)
    waves = len(shard.microbatches)
    order = [name for name, _ in model.seen[: len(model.seen) // waves]]
    handed_on = all(type(given) is Microbatch for _, given in model.seen)
    return order, len(model.seen), waves, handed_on, left, worst_difference(
        result, whole(wrapper), loss, grads
    )  # fmt: skip


ORDER = {
    "ddp": ["wrapper", "first", "last", "forward", "after"],
    "fsdp": ["put first", "before FSDP2", "last", "forward", "after"],
}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_every_hook_is_given_the_microbatch_and_what_it_makes_of_it_goes_on(world, how, compiled):
    for answer in world(hooks_seen, 2, how, compiled).values():
        order, calls, waves, microbatches, left, (parameter, difference) = answer
        assert order == ORDER[how]
        assert calls == waves * len(order)
        assert microbatches
        assert left, "hooks of the runtime are gone, the others in their order"
        assert difference <= 1e-10, parameter


class Half(Model):
    def encode(self, modality, batch):
        kind = self.places.weight.dtype  # as a model of half precision takes its items
        return super().encode(modality, replace(batch, items=[i.to(kind) for i in batch.items]))


def sealed_from_casts(rank, size):
    samples = random_samples(10)
    for sample in samples:
        sample.weight = 0.3
    shard = make_shard(samples, random_plan(samples, size, (1,), 10), size, rank, 10)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, types = make_model(()).float(), set()
    model.__class__ = Half
    model.register_forward_pre_hook(lambda _, given: types.add(given[0].weights.dtype))
    fully_shard([model, model.head], mp_policy=policy)
    with GroupPool(timeout_s=60) as pool:
        run_step(model, shard, pool)
    return types


def test_modules_that_are_sharded_as_one_leave_microbatches_as_they_are(world):
    for types in world(sealed_from_casts, 2).values():
        assert types == {torch.float64}
