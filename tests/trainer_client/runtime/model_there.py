"""The small model on the played device, whose clock is a stream's, and gloo that takes it."""

import time

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.trainer_client.runtime.fake_device import THERE, Staged, moved
from tests.trainer_client.runtime.random_steps import ITEM_WIDTH, Model, make_model, make_shard
from trainer_client.runtime import clock, group_pool, pipeline_timeline, run_step

# What waits in a step: the start's sum, of a pipeline along row and column; and which gradients
# there are, which DDP and FSDP know.
IN_A_STEP, IN_A_PIPELINE_STEP = 2, 3


class PlayedStream:
    """A clock whose moments count as those of a stream; ``reads`` of all of them, each of which
    waits for the last moment."""

    on_stream = True
    reads = 0

    def __init__(self, device):
        self.moments_s = []

    def mark(self):
        self.moments_s.append(time.perf_counter())
        return len(self.moments_s) - 1

    def read(self):
        PlayedStream.reads += 1
        return self.moments_s

    def seconds_at(self, event):
        return event.at_s


def play_a_stream():
    clock.start_clock = pipeline_timeline.start_clock = PlayedStream


def play_a_transport():
    """Of the pools of this process, which then send tensors there."""
    make = group_pool.make_transport
    group_pool.make_transport = lambda *given: Staged(make(*given))


class ModelThere(Model):
    def dummy_item(self, modality):
        return torch.ones(1, ITEM_WIDTH[modality], dtype=torch.float64, device=THERE)


def model_there(make=lambda: make_model(())):
    model = make()
    model.__class__ = ModelThere
    return moved(model)


def from_there(model):
    """Its gradients, in a model of the CPU. Collective where they are sharded."""
    plain = make_model(())
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    for target, source in zip(plain.parameters(), inner.parameters(), strict=True):
        target.grad = None if source.grad is None else whole_grad(source)
    return plain


def whole_grad(parameter):
    """The numbers of its gradient, of all replicas that have a part of it."""
    grad = parameter.grad
    if not isinstance(grad, DTensor):
        return grad.held
    part = DTensor.from_local(
        grad.to_local().held,
        grad.device_mesh,
        grad.placements,
        shape=grad.shape,
        stride=grad.stride(),
    )
    return part.full_tensor()


def connected_there(pool):
    """All replicas, and groups apart, with sums on the device, as NCCL has them."""
    pool.everyone.device = THERE
    make_apart = pool.apart

    def apart(members):
        group = make_apart(members)
        if group.size > 1:
            group.device = THERE
        return group

    pool.apart = apart


def waits_of_steps(device, pool, model, reduction, drawn, error_of):
    """Of steps of one model there, one for each of ``drawn`` (seed, samples, waves): microbatches,
    their CP degrees, what waited and for which file, and the error of the result."""
    found = []
    for seed, samples, waves in drawn:
        shard = make_shard(samples, waves, pool.replicas, pool.replica, seed).to(THERE)
        model.zero_grad()
        device.reads.clear()
        device.copies.clear()
        ahead = seed % 2 == 0
        result = run_step(model, shard, pool, gradients=reduction, features_ahead=ahead)
        waited = [(str(wait), wait.by) for wait in (*device.reads, *device.copies)]
        degrees = {len(members) for wave in waves for members, _ in wave}
        found.append((len(shard.microbatches), degrees, waited, error_of(result, samples)))
    return found
