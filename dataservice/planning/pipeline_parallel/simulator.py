"""Exact times of 1F1B and interleaved 1F1B over unequal microbatches and stages.

An operation starts when its device has finished the one before it and its input has arrived:
end = max(end of before, end of needs) + duration. Nothing is approximated, so orders and plans
can be scored by it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.pipeline_parallel.schedule import (
    BACKWARD,
    FORWARD,
    Program,
    checked_times,
    make_program,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTimes:
    """A simulated pipeline step.

    `start_s`, `end_s` float64[microbatch, stage, 2]: forward at 0, backward at 1, of the caller's
    microbatches and model chunks. `peak_in_flight` int64[p]: most forwards whose backward is still
    due that a device holds, in microbatches of one chunk.
    """

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    makespan_s: float
    bubble_fraction: float
    peak_in_flight: NDArray[np.int64]


def simulate_1f1b(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    virtual_stages: int = 1,
    order: ArrayLike | None = None,
    activation_limit: ArrayLike | None = None,
) -> PipelineTimes:
    """Run microbatches through a pipeline. O(microbatches · stages).

    `forward_s`, `backward_s` [microbatch, stage]; with v virtual stages the stage axis is the p·v
    model chunks in model order and chunk c runs on device c mod p. `order` is the permutation in
    which microbatches enter (default: as given). `activation_limit`, one number or [p], bounds the
    forwards a device holds, by a shorter warm-up. Raises PlanningError on bad input, or when the
    limit would leave the devices waiting for each other.
    """
    forward, backward, stages = checked_times(forward_s, backward_s, virtual_stages)
    entering = check_order(order, forward.shape[0])
    program = make_program(forward.shape[0], stages, virtual_stages, activation_limit)
    start, end, peak = _run(forward, backward, entering, program, stages)
    makespan = float(end.max())
    busy = float(forward.sum() + backward.sum())
    return PipelineTimes(
        start_s=start,
        end_s=end,
        makespan_s=makespan,
        bubble_fraction=1.0 - busy / (stages * makespan) if makespan > 0 else 0.0,
        peak_in_flight=peak,
    )


def check_order(order: ArrayLike | None, microbatches: int) -> NDArray[np.int64]:
    """A permutation of the microbatches as int64[microbatches]."""
    if order is None:
        return np.arange(microbatches)
    entering = np.asarray(order, dtype=np.int64)
    if entering.shape != (microbatches,) or (np.sort(entering) != np.arange(microbatches)).any():
        raise PlanningError(
            f"order is {entering.tolist()}; it must name each of the {microbatches} microbatches "
            "once"
        )
    return entering


@kernel
def _run(
    forward: NDArray[np.float64],
    backward: NDArray[np.float64],
    order: NDArray[np.int64],
    program: Program,
    stages: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    count, chunks = forward.shape
    start = np.empty((count, chunks, 2), np.float64)  # [microbatch, chunk, kind]
    end = np.empty((count, chunks, 2), np.float64)  # [microbatch, chunk, kind]
    finished = np.empty(program.kind.size, np.float64)  # float64[operations]
    held = np.zeros(stages, np.int64)  # int64[stages]
    peak = np.zeros(stages, np.int64)  # int64[stages]
    for k in range(program.kind.size):
        microbatch = order[program.position[k]]
        chunk = program.chunk[k]
        kind = program.kind[k]
        begin = 0.0
        if program.before[k] >= 0:
            begin = finished[program.before[k]]
        if program.needs[k] >= 0:
            begin = max(begin, finished[program.needs[k]])
        duration = forward[microbatch, chunk] if kind == FORWARD else backward[microbatch, chunk]
        finished[k] = begin + duration
        start[microbatch, chunk, kind] = begin
        end[microbatch, chunk, kind] = finished[k]
        device = chunk % stages
        held[device] += -1 if kind == BACKWARD else 1
        peak[device] = max(peak[device], held[device])
    return start, end, peak


@kernel
def operation_offsets(program: Program, microbatches: int, chunks: int) -> NDArray[np.int64]:
    """Where each operation's duration starts in the flat table, before its microbatch is added."""
    offsets = np.empty(program.kind.size, np.int64)
    for k in range(offsets.size):
        table = 0 if program.kind[k] == FORWARD else microbatches * chunks
        offsets[k] = table + program.chunk[k]
    return offsets


@kernel
def makespan(
    durations: NDArray[np.float64],
    offsets: NDArray[np.int64],
    order: NDArray[np.int64],
    chunks: int,
    program: Program,
    ends: NDArray[np.float64],
) -> float:
    """Seconds of the whole program, and nothing else: what a search calls thousands of times.

    `durations` is [kind, microbatch, chunk], flat. `ends` has one place more than operations; the
    last, 0, stands for no predecessor.
    """
    for k in range(offsets.size):
        begin = max(ends[program.before[k]], ends[program.needs[k]])
        ends[k] = begin + durations[offsets[k] + order[program.position[k]] * chunks]
    # The last operation of device 0 is a backward that all others lead to.
    return float(ends[offsets.size - 1])
