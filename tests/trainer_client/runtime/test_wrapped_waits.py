"""How often a step of a model in DDP or FSDP2 makes the host wait for the device.

The device is played (see ``fake_device.py`` and ``sharded_there.py``), and knows for which file it
is waited. The runtime waits once, for the sum that begins a step: which gradients there are, DDP
and FSDP2 know. What torch waits for besides:

    FSDP2  nothing: its streams wait for one another
    DDP    one copy to the host a step, behind its last backward pass, where this rank used no
           weight of some encoder in the step: whether others did decides who keeps no gradient

A GPU has another wait of DDP's, which is not to be seen here: in its first ten steps, and then in
each hundredth, it reads its own clock of the step before, as the last microbatch begins.
"""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_client.runtime.fake_device import BEHIND_ALL_NODES, FakeDevice
from tests.trainer_client.runtime.model_there import (
    connected_there,
    from_there,
    model_there,
    play_a_stream,
    play_a_transport,
    waits_of_steps,
)
from tests.trainer_client.runtime.random_steps import (
    make_model,
    random_plan,
    random_samples,
    single_process,
    worst_difference,
)
from tests.trainer_client.runtime.sharded_there import play_sharding_there
from trainer_client.runtime import FsdpReduction, GroupPool

AT_THE_START = ("a copy to the host", "trainer_client/runtime/host_numbers.py")
OF_DDP = ("a copy to the host", BEHIND_ALL_NODES)
CHOICES = {
    "fsdp": {},
    "hsdp": {},
    "fsdp, every microbatch": {"every_microbatch": True},
    "fsdp, weights kept": {"keep_weights": True},
}
SEEDS = (2, 3, 5)


def wrapped_there(how):
    model = model_there()
    if how == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    mesh = None
    if how == "hsdp":
        ranks = torch.distributed.get_world_size()
        mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    for part in (*model.encoders.values(), *model.layers, model):
        fully_shard(part, mesh=mesh)
    return model


def samples_of(seed, modalities):
    """Random samples, without the items of other modalities."""
    samples = random_samples(seed)
    for sample in samples:
        sample.items = [item for item in sample.items if item[0] in modalities]
    return samples


def steps_there(rank, size, how, modalities):
    """See ``waits_of_steps``."""
    play_a_stream()
    play_a_transport()
    drawn = [(seed, samples_of(seed, modalities)) for seed in SEEDS]
    drawn = [(seed, each, random_plan(each, size, (1, 2), seed)) for seed, each in drawn]
    with FakeDevice() as device, GroupPool(timeout_s=60) as pool:
        play_sharding_there(device)
        connected_there(pool)
        model = wrapped_there(how)
        reduction = None
        if how in CHOICES:
            reduction = FsdpReduction(model, pool.everyone, **CHOICES[how])

        def error_of(result, samples):
            single = single_process(make_model(()), samples)
            return worst_difference(result, from_there(model), *single)[1]

        return waits_of_steps(device, pool, model, reduction, drawn, error_of)


@pytest.mark.parametrize("how", ["ddp", *CHOICES])
def test_no_microbatch_of_a_wrapped_model_makes_the_host_wait(world, how):
    for found in world(steps_there, 2, how, ("vision", "audio")).values():
        assert {1, 2} <= set().union(*(degrees for _, degrees, *_ in found))
        assert len({microbatches for microbatches, *_ in found}) > 1
        for _, _, waited, error in found:
            assert waited == [AT_THE_START]
            assert error <= 1e-10


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_an_encoder_that_a_step_leaves_unused_is_waited_for_by_ddp_once_a_step(world, how):
    for found in world(steps_there, 2, how, ("vision",)).values():
        assert len({microbatches for microbatches, *_ in found}) > 1
        for _, _, waited, error in found:
            assert waited == [AT_THE_START, OF_DDP][: 2 if how == "ddp" else 1]
            assert error <= 1e-10
