"""Backbones and encoders for tests of bubble schedules."""

import numpy as np

from dataservice.planning import BackboneTimes, EncoderTimes, KernelTimes, format_actions
from tests.planning.layout.bubble_replay import Asked, faults


def table(rng, layers, kernels, scale, some_zero=False):
    """Kernels of compute and communication in turn, compute the longer ones."""
    seconds = rng.uniform(0.2, 1.0, (layers, kernels)) * scale
    kinds = np.arange(kernels) % 2 == 1
    seconds[:, kinds] *= 0.4
    if some_zero:
        seconds[rng.random(seconds.shape) < 0.2] = 0.0
    return KernelTimes(seconds=seconds, communicates=kinds)


def backbone(rng, *, stages, virtual, ranks, microbatches, odd_layers=0, **more):
    layers = stages * virtual + odd_layers
    return BackboneTimes(
        forward=table(rng, layers, 4, 1.0),
        backward=table(rng, layers, 5, 1.8),
        microbatches=microbatches,
        pipeline_parallel=stages,
        virtual_stages=virtual,
        tensor_parallel=ranks,
        **more,
    )


def encoder(rng, *, layers, degrees, scale=0.3, frozen=False, kernels=3, **more):
    """Times at each degree: communication only where there is more than one rank."""
    forward, backward = {}, {}
    for degree in degrees:
        shrink = scale / degree**0.7
        forward[degree] = table(rng, layers, kernels, shrink, some_zero=True)
        backward[degree] = table(rng, layers, kernels + 1, 1.6 * shrink, some_zero=True)
    return EncoderTimes(
        name="vision", forward=forward, backward=None if frozen else backward, **more
    )


def uniform(layers, seconds, communicates):
    return KernelTimes(
        seconds=np.tile(np.array(seconds, float), (layers, 1)),
        communicates=np.array(communicates, bool),
    )


def asked(schedule, backbone, encoders, memory_bytes=np.inf):
    return Asked(
        backbone,
        list(encoders),
        schedule.plan.pipeline_parallel,
        schedule.plan.tensor_parallel,
        memory_bytes,
    )


def faults_of(schedule, backbone, encoders, memory_bytes=np.inf):
    """What the independent checker finds in the schedule's text."""
    text = format_actions(schedule.actions)
    return faults(text, asked(schedule, backbone, encoders, memory_bytes))
