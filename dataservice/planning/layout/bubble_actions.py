"""From placed kernels to actions of devices, and how much of them runs in bubbles."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.layout.actions import KINDS, Actions, join_actions
from dataservice.planning.layout.bubble_inputs import BackboneTimes, EncoderPlan
from dataservice.planning.layout.bubble_placement import COMPUTE, LINKS
from dataservice.planning.layout.bubble_split import Members, PipelineRun
from dataservice.planning.layout.bubble_streams import LabelledStream
from dataservice.planning.layout.bubble_timeline import KernelRows, Timeline

_FORWARD, _BACKWARD = KINDS.index("forward"), KINDS.index("backward")


def in_kernels(
    layers_s: NDArray[np.float64], layer_of: NDArray[np.int64], after_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Starts of kernels [microbatch, kernel] from those of their layers [microbatch, layer]."""
    return layers_s[:, layer_of] + after_s


def inside_share(
    runs: Sequence[PipelineRun], forward: LabelledStream, backward: LabelledStream, step_s: float
) -> float:
    """Share of encoder compute that lies between 0 and `step_s`; 1 where there is none."""
    outside = total = 0.0
    for run in runs:
        for stream, starts in ((forward, run.forward_s), (backward, run.backward_s)):
            computes = stream.kernels.resource == COMPUTE
            seconds = stream.kernels.seconds[computes]
            begin = starts[:, computes]
            early = np.clip(-begin, 0.0, seconds)
            late = np.clip(begin + seconds - step_s, 0.0, seconds)
            outside += float((early + late).sum())
            total += float(seconds.sum()) * len(starts)
    return max(0.0, 1.0 - outside / total) if total > 0 else 1.0


def pipeline_actions(
    stream: LabelledStream,
    starts: NDArray[np.float64],
    members: Members,
    plan: EncoderPlan,
    pipeline: int,
    *,
    backward: bool,
) -> Actions:
    """The kernels of an encoder pipeline, placed at `starts` [member, kernel]."""
    block, part = divmod(pipeline, plan.slices)
    device = (block * plan.pipeline_parallel + stream.stage) * plan.slices + part
    kind = np.where(stream.kernels.resource == LINKS, 1, 0) + (_BACKWARD if backward else _FORWARD)
    count = len(members)
    return Actions(
        device=np.tile(device, count),
        kind=np.tile(kind, count),
        encoder=np.tile(stream.kernels.encoder, count),
        microbatch=np.repeat(np.array(members, np.int64), stream.stage.size),
        stage=np.tile(stream.stage, count),
        layer=np.tile(stream.layer, count),
        kernel=np.tile(stream.kernel, count),
        start_s=starts.ravel(),
        end_s=(starts + stream.kernels.seconds).ravel(),
    )


def backbone_actions(
    backbone: BackboneTimes, rows: KernelRows, plan: EncoderPlan, later_s: float
) -> Actions:
    """The backbone's kernels, alike on all slices of a stage, `later_s` after their own times."""
    stage = rows.chunk % backbone.pipeline_parallel
    kind = np.where(rows.direction == 1, _BACKWARD, _FORWARD) + rows.communicates
    parts = [
        Actions(
            device=stage * plan.slices + part,
            kind=kind,
            encoder=np.full(stage.size, -1),
            microbatch=rows.microbatch,
            stage=rows.chunk,
            layer=rows.layer,
            kernel=rows.kernel,
            start_s=rows.start_s + later_s,
            end_s=rows.end_s + later_s,
        )
        for part in range(plan.slices)
    ]
    return join_actions(parts)


def collective_actions(
    backbone: BackboneTimes, timeline: Timeline, plan: EncoderPlan, later_s: float
) -> Actions:
    """The gather that ends before the first forward may begin, and the scatter of each stage."""
    devices = np.arange(backbone.pipeline_parallel * plan.slices)
    scatter_s = timeline.last_s[devices // plan.slices] + later_s
    gather_s = np.full(devices.size, later_s)
    none = np.full(2 * devices.size, -1)
    return Actions(
        device=np.tile(devices, 2),
        kind=np.repeat([KINDS.index("gather"), KINDS.index("scatter")], devices.size),
        encoder=none,
        microbatch=none,
        stage=none,
        layer=none,
        kernel=none,
        start_s=np.concatenate([gather_s, scatter_s]),
        end_s=np.concatenate([gather_s + backbone.gather_s, scatter_s + backbone.scatter_s]),
    )
