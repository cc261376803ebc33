"""Encoders cut into stages: their kernels as streams, and their bytes."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.bubble_inputs import (
    BackboneTimes,
    EncoderPlan,
    EncoderTimes,
    even_bounds,
)
from dataservice.planning.layout.bubble_placement import COMPUTE, LINKS, Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelledStream:
    """A stream of kernels, and what each is: `stage`, `layer`, `kernel` int64[u]."""

    kernels: Stream
    stage: NDArray[np.int64]
    layer: NDArray[np.int64]
    kernel: NDArray[np.int64]

    def by_layer(self) -> tuple[Stream, NDArray[np.int64], NDArray[np.float64]]:
        """The same with whole layers for kernels, of a stream that runs one after the other; the
        layer of each kernel, int64[u], and when it starts after its layer does, float64[u]."""
        kernels = self.kernels
        size = self.layer.size
        fresh = np.ones(size, np.bool_)
        fresh[1:] = (np.diff(self.layer) != 0) | (np.diff(kernels.encoder) != 0)
        group = np.cumsum(fresh) - 1
        firsts = np.nonzero(fresh)[0]
        before = np.concatenate([[0.0], np.cumsum(kernels.seconds)])
        bounds = np.append(firsts, size)
        layers = Stream(
            before[bounds[1:]] - before[bounds[:-1]],
            np.full(firsts.size, COMPUTE),
            kernels.encoder[firsts],
            np.searchsorted(bounds, kernels.offsets),
            kernels.transfer_s,
        )
        return layers, group, before[:-1] - before[firsts][group]

    def interleaved(self) -> "LabelledStream":
        """The same with the encoders' kernels of each hop in turn, each encoder as far in its work
        as the others: one communicates while another computes."""
        kernels = self.kernels
        hop = np.searchsorted(kernels.offsets, np.arange(self.stage.size), side="right")
        share = np.empty(self.stage.size)
        for own in set(zip(hop.tolist(), kernels.encoder.tolist(), strict=True)):
            chosen = (hop == own[0]) & (kernels.encoder == own[1])
            ends = np.cumsum(kernels.seconds[chosen])
            share[chosen] = (ends - 0.5 * kernels.seconds[chosen]) / ends[-1]
        order = np.lexsort((kernels.encoder, share, hop))
        return LabelledStream(
            kernels=Stream(
                kernels.seconds[order],
                kernels.resource[order],
                kernels.encoder[order],
                kernels.offsets,
                kernels.transfer_s,
            ),
            stage=self.stage[order],
            layer=self.layer[order],
            kernel=self.kernel[order],
        )


def encoder_streams(
    encoders: Sequence[EncoderTimes], plan: EncoderPlan
) -> tuple[LabelledStream, LabelledStream]:
    """Forward and backward of one microbatch through one pipeline; frozen encoders have nothing in
    the second. On a stage the kernels of all encoders run as those of one, encoder after encoder
    (§4.4)."""
    return _stream(encoders, plan, backward=False), _stream(encoders, plan, backward=True)


def _stream(
    encoders: Sequence[EncoderTimes], plan: EncoderPlan, *, backward: bool
) -> LabelledStream:
    parts: list[list[NDArray[np.generic]]] = []
    offsets = [0]
    stages = range(plan.pipeline_parallel)
    for stage in reversed(stages) if backward else stages:
        offsets.append(offsets[-1])
        for number, encoder in enumerate(encoders):
            tables = encoder.backward if backward else encoder.forward
            if tables is None:
                continue
            times = tables[plan.tensor_parallel]
            low, high = even_bounds(encoder.layers, plan.pipeline_parallel)[stage : stage + 2]
            layers = np.arange(low, high)[::-1] if backward else np.arange(low, high)
            row, kernel = np.nonzero(times.seconds[layers] > 0)
            offsets[-1] += row.size
            parts.append(
                [
                    times.seconds[layers[row], kernel],
                    np.where(times.communicates[kernel], LINKS, COMPUTE),
                    np.full(row.size, number),
                    np.full(row.size, stage),
                    layers[row],
                    kernel,
                ]
            )
    none = np.zeros(0, np.int64)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)] or [none] * 6
    seconds, resource, encoder_of, stage_of, layer, kernel = columns
    transfer_s = np.array([encoder.transfer_s for encoder in encoders], np.float64)
    stream = Stream(
        np.asarray(seconds, np.float64),
        np.asarray(resource, np.int64),
        np.asarray(encoder_of, np.int64),
        np.array(offsets, np.int64),
        transfer_s,
    )
    return LabelledStream(
        kernels=stream,
        stage=np.asarray(stage_of, np.int64),
        layer=np.asarray(layer, np.int64),
        kernel=np.asarray(kernel, np.int64),
    )


def possible_plans(backbone: BackboneTimes, encoders: Sequence[EncoderTimes]) -> list[EncoderPlan]:
    """Plans whose PP and TP divide the backbone's, of which times are known, fewest pipelines
    first. Raises PlanningError if there is none."""
    degrees = sorted(set.intersection(*(set(encoder.forward) for encoder in encoders)))
    fewest = min(encoder.layers for encoder in encoders)
    plans = [
        EncoderPlan(
            pipeline_parallel=stages,
            tensor_parallel=degree,
            blocks=backbone.pipeline_parallel // stages,
            slices=backbone.tensor_parallel // degree,
        )
        for stages in _divisors(backbone.pipeline_parallel)
        for degree in degrees
        if stages <= fewest and degree >= 1 and backbone.tensor_parallel % degree == 0
    ]
    if not plans:
        raise PlanningError(
            f"encoders have times at tensor-parallel degrees {degrees} in common; at least one "
            f"must divide the backbone's {backbone.tensor_parallel}: give times at such a degree"
        )
    return sorted(plans, key=lambda plan: (plan.pipelines, plan.pipeline_parallel))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def bytes_of_hops(
    encoders: Sequence[EncoderTimes], plan: EncoderPlan
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """On one GPU of each encoder stage: model states, and what a microbatch keeps; float64[hop]."""
    states = np.zeros(plan.pipeline_parallel)
    kept = np.zeros(plan.pipeline_parallel)
    for encoder in encoders:
        bounds = even_bounds(encoder.layers, plan.pipeline_parallel)
        for stage in range(plan.pipeline_parallel):
            layers = slice(int(bounds[stage]), int(bounds[stage + 1]))
            held = encoder.bytes_of(layers, plan.tensor_parallel)
            states[stage] += held[0]
            kept[stage] += held[1]
    return states, kept


def bytes_left(
    backbone: BackboneTimes, states: NDArray[np.float64], memory_bytes: float
) -> NDArray[np.float64]:
    """What is left of the memory of each device: float64[block, hop]; below 0 where it is too
    little."""
    held = backbone.stage_bytes.reshape(-1, states.size)
    return memory_bytes - held - states
