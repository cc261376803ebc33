"""The small model on the played device, whose clock is a stream's."""

import time

import torch

from tests.trainer_client.runtime.fake_device import THERE, moved
from tests.trainer_client.runtime.random_steps import ITEM_WIDTH, Model, make_model
from trainer_client.runtime import clock, pipeline_timeline

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


class ModelThere(Model):
    def dummy_item(self, modality):
        return torch.ones(1, ITEM_WIDTH[modality], dtype=torch.float64, device=THERE)


def model_there():
    model = make_model(())
    model.__class__ = ModelThere
    return moved(model)


def from_there(model):
    """Its gradients, in a model of the CPU."""
    plain = make_model(())
    for target, source in zip(plain.parameters(), model.parameters(), strict=True):
        target.grad = None if source.grad is None else source.grad.held
    return plain


def connected_there(pool):
    """All replicas, with sums on the device, as NCCL has them."""
    pool.everyone.device = THERE
