"""When the backbone computes and communicates, as fixed times: what is left are its bubbles.

Times come from the exact simulator of (interleaved) 1F1B. Then every forward is put as late as the
order of its device and whoever waits for it allow, while backwards stay: the step takes as long,
the microbatches need their features later, and bubbles come earlier (the deferred dependency
points of §4.3). The backbone alone runs from 0 to `step_s`:

    stage 0  gather F0 F1 F2     F3 B0    B1    B2    B3 scatter
    stage 1  gather    F0 F1 F2  B0 F3 B1    B2    B3 scatter
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.layout.bubble_inputs import BackboneTimes, KernelTimes
from dataservice.planning.layout.bubble_placement import COMPUTE, LINKS, Gaps
from dataservice.planning.pipeline_parallel.simulator import (
    FORWARD,
    Program,
    make_program,
    simulate_1f1b,
)

# A shorter warm-up counts as good when it costs no more than rounding does.
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """The backbone alone. `start_s` float64[microbatch, chunk, 2], forward at 0, backward at 1;
    `need_s`, `gradient_s` float64[microbatch]: when the first chunk takes features (F_i), when it
    has given gradients (B_i); `first_s`, `last_s` float64[stage]: its first kernel and the end of
    its last; `step_s` from gather to scatter."""

    start_s: NDArray[np.float64]
    need_s: NDArray[np.float64]
    gradient_s: NDArray[np.float64]
    first_s: NDArray[np.float64]
    last_s: NDArray[np.float64]
    step_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelRows:
    """Kernels of the backbone, all arrays [row]. `direction` 0 forward, 1 backward."""

    direction: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    chunk: NDArray[np.int64]
    layer: NDArray[np.int64]
    kernel: NDArray[np.int64]
    communicates: NDArray[np.bool_]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


def timelines_of(backbone: BackboneTimes) -> list[Timeline]:
    """The usual schedule, and the one with a shorter warm-up where that takes no longer."""
    stages, chunks = backbone.pipeline_parallel, backbone.virtual_stages
    usual = _timeline(backbone, None)
    if chunks == 1 or stages == 1:
        return [usual]
    ahead = (chunks - 1) * stages + np.arange(stages)[::-1]
    shorter = _timeline(backbone, ahead + 1) if backbone.microbatches % stages == 0 else usual
    if shorter is usual or shorter.step_s > usual.step_s * (1 + _ROUNDING):
        return [usual]
    return [shorter, usual]


def _timeline(backbone: BackboneTimes, limit: NDArray[np.int64] | None) -> Timeline:
    stages, virtual = backbone.pipeline_parallel, backbone.virtual_stages
    shape = (backbone.microbatches, backbone.chunks)
    durations = np.empty((2, *shape))  # [kind, microbatch, chunk]
    for kind, times in enumerate((backbone.forward, backbone.backward)):
        durations[kind] = np.add.reduceat(times.seconds.sum(axis=1), backbone.chunk_bounds[:-1])
    alone = simulate_1f1b(*durations, virtual_stages=virtual, activation_limit=limit)
    program = make_program(backbone.microbatches, stages, virtual, limit)
    start_s = alone.start_s + backbone.gather_s
    end_s = alone.end_s + backbone.gather_s
    _defer_forwards(program, start_s, end_s, durations)
    by_stage = start_s.reshape(backbone.microbatches, virtual, stages, 2)
    last_s = end_s.reshape(by_stage.shape).max(axis=(0, 1, 3))
    return Timeline(
        start_s=start_s,
        need_s=start_s[:, 0, 0],
        gradient_s=end_s[:, 0, 1],
        first_s=by_stage.min(axis=(0, 1, 3)),
        last_s=last_s,
        step_s=float(last_s.max()) + backbone.scatter_s,
    )


@kernel
def _defer_forwards(
    program: Program,
    start_s: NDArray[np.float64],
    end_s: NDArray[np.float64],
    durations: NDArray[np.float64],
) -> None:
    """Put forwards as late as all that come after them allow; times [microbatch, chunk, 2] change
    in place."""
    count = program.kind.size
    latest = np.full(count, np.inf)  # float64[operations]: the latest end
    for k in range(count - 1, -1, -1):
        microbatch, chunk, kind = program.position[k], program.chunk[k], program.kind[k]
        if kind == FORWARD:
            end_s[microbatch, chunk, kind] = max(end_s[microbatch, chunk, kind], latest[k])
            start_s[microbatch, chunk, kind] = max(
                start_s[microbatch, chunk, kind],
                end_s[microbatch, chunk, kind] - durations[kind, microbatch, chunk],
            )
        for other in (program.before[k], program.needs[k]):
            if other >= 0:
                latest[other] = min(latest[other], start_s[microbatch, chunk, kind])


def kernel_rows(backbone: BackboneTimes, timeline: Timeline) -> KernelRows:
    """Every kernel of the backbone with its time, those of 0 s left out."""
    parts = []
    for direction, times in enumerate((backbone.forward, backbone.backward)):
        bounds = backbone.chunk_bounds
        chunk_of = np.repeat(np.arange(backbone.chunks), np.diff(bounds))  # int64[layer]
        after = _seconds_after_chunk_start(times, bounds, backward=direction == 1)
        starts = timeline.start_s[:, chunk_of, direction][:, :, None] + after[:, :, 0]
        ends = timeline.start_s[:, chunk_of, direction][:, :, None] + after[:, :, 1]
        microbatch, layer, number = np.nonzero(np.broadcast_to(times.seconds > 0, starts.shape))
        at = (microbatch, layer, number)
        parts.append(
            KernelRows(
                direction=np.full(microbatch.size, direction),
                microbatch=microbatch,
                chunk=chunk_of[layer],
                layer=layer,
                kernel=number,
                communicates=times.communicates[number],
                start_s=starts[at],
                end_s=ends[at],
            )
        )
    first, second = parts
    return KernelRows(
        **{
            name: np.concatenate([getattr(first, name), getattr(second, name)])
            for name in KernelRows.__slots__
        }
    )


def _seconds_after_chunk_start(
    times: KernelTimes, bounds: NDArray[np.int64], *, backward: bool
) -> NDArray[np.float64]:
    """Start and end of each kernel in its chunk: float64[layer, kernel, 2]."""
    after = np.zeros((*times.seconds.shape, 2))
    for low, high in pairwise(bounds.tolist()):
        layers = np.arange(low, high)[::-1] if backward else np.arange(low, high)
        ends = np.cumsum(times.seconds[layers].ravel())
        starts = np.concatenate([[0.0], ends[:-1]])
        after[layers] = np.stack([starts, ends], axis=1).reshape(len(layers), -1, 2)
    return after


def fine_gaps(backbone: BackboneTimes, rows: KernelRows, shortest_s: float) -> Gaps:
    """What the kernels leave of each stage's processors and links, by stage as hop. Gaps that are
    too short for any kernel are left out."""
    starts: list[NDArray[np.float64]] = []
    ends: list[NDArray[np.float64]] = []
    bounds = np.empty((backbone.pipeline_parallel, 2, 2), np.int64)
    done = 0
    stage = rows.chunk % backbone.pipeline_parallel
    for s in range(backbone.pipeline_parallel):
        for resource in (COMPUTE, LINKS):
            chosen = np.nonzero((stage == s) & (rows.communicates == (resource == LINKS)))[0]
            chosen = chosen[np.argsort(rows.start_s[chosen], kind="stable")]
            free_from = np.concatenate([[-np.inf], rows.end_s[chosen]])
            free_to = np.concatenate([rows.start_s[chosen], [np.inf]])
            wide = free_to - free_from >= shortest_s
            starts.append(free_from[wide])
            ends.append(free_to[wide])
            bounds[s, resource] = done, done + int(wide.sum())
            done += int(wide.sum())
    return Gaps(np.concatenate(starts), np.concatenate(ends), bounds)


def coarse_gaps(timeline: Timeline) -> Gaps:
    """The two large bubbles of each stage: before its first kernel, and after its last."""
    stages = timeline.first_s.size
    start_s = np.stack([np.full(stages, -np.inf), timeline.last_s], axis=1)
    end_s = np.stack([timeline.first_s, np.full(stages, np.inf)], axis=1)
    both = 2 * np.arange(stages)[:, None] + np.array([0, 2])  # int64[stage, 2]
    bounds = np.stack([both, both], axis=1)
    return Gaps(start_s.ravel(), end_s.ravel(), bounds)


def gaps_of_hops(gaps: Gaps, stages: NDArray[np.int64]) -> Gaps:
    """The same gaps for a pipeline whose hops are these stages."""
    return Gaps(gaps.start_s, gaps.end_s, np.ascontiguousarray(gaps.bounds[stages]))
