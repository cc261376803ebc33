"""1F1B and interleaved 1F1B as data, and exact times over unequal microbatches and stages.

Each pipeline stage (device) runs a fixed list: warm-up forwards, then one forward and one backward
in turn, then the backwards left. With v virtual stages, device s holds model chunks s, s+p, … and
takes microbatches in rounds of p through its first chunk, then through its second, and so on. A
last round that they do not fill is that of a whole one, without the operations of those that are
not there: devices wait for each other no more than in whole rounds, and hold no more.

    p = 3, v = 1      s=0  F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
                      s=1  F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
                      s=2  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4

An operation starts when its device has finished the one before it and its input has arrived:
end = max(end of before, end of needs) + duration. Nothing is approximated, so orders and plans
can be scored by it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.kernels.compile import kernel, leaf

FORWARD, BACKWARD = 0, 1


class Program(NamedTuple):
    """K operations in runnable order: all int64[K]. `position` is the microbatch's place in the
    order, `chunk` the model chunk, `kind` forward or backward, `before` the operation that the
    same device ran last, `needs` the one whose output this one takes (−1: none)."""

    position: NDArray[np.int64]
    chunk: NDArray[np.int64]
    kind: NDArray[np.int64]
    before: NDArray[np.int64]
    needs: NDArray[np.int64]


def make_program(
    microbatches: int,
    stages: int,
    virtual_stages: int = 1,
    activation_limit: ArrayLike | None = None,
) -> Program:
    """The schedule as a program. O(microbatches · stages · virtual stages).

    `activation_limit` (one number or [p]) bounds the forwards a device holds at once, in
    microbatches of one chunk, by a shorter warm-up. Raises PlanningError if it is below 1, or so
    low that devices with virtual stages would wait for each other.
    """
    warm_up = most = _warm_up(stages, virtual_stages)
    if activation_limit is not None:
        limit = np.broadcast_to(np.asarray(activation_limit), (stages,))
        if limit.min() < 1:
            raise PlanningError(
                f"activation_limit is {limit.min()}; a stage holds at least 1 microbatch: raise it"
            )
        # A stage cannot run ahead of the one that feeds it.
        most = np.minimum.accumulate(np.minimum(warm_up, limit - 1))
    program = Program(*_compile(microbatches, stages, virtual_stages, warm_up, most))
    if program.kind.size < 2 * microbatches * virtual_stages * stages:
        raise PlanningError(
            f"activation_limit is {np.asarray(activation_limit)}; {stages} stages of "
            f"{virtual_stages} chunks then wait for each other for ever: raise it, "
            f"{warm_up.max() + 1} always works"
        )
    return program


def _warm_up(stages: int, virtual_stages: int) -> NDArray[np.int64]:
    """Forwards each device runs before its first backward: int64[p]."""
    ahead: NDArray[np.int64] = stages - 1 - np.arange(stages, dtype=np.int64)
    return ahead if virtual_stages == 1 else 2 * ahead + (virtual_stages - 1) * stages


@leaf
def _place(index: int, stages: int, chunks: int) -> tuple[int, int]:
    """Microbatch position and local chunk of a device's index-th forward, in whole rounds."""
    whole = index // (stages * chunks)
    inside = index - whole * stages * chunks
    return whole * stages + inside % stages, inside // stages


@kernel
def _compile(
    microbatches: int,
    stages: int,
    chunks: int,
    warm_up: NDArray[np.int64],
    most: NDArray[np.int64],
) -> tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]
]:
    total = -(-microbatches // stages) * stages * chunks  # of whole rounds
    columns = np.empty((5, 2 * microbatches * chunks * stages), np.int64)  # int64[5, operations]
    # int64[kind, microbatch, chunk]: the operation that ran it, or −1
    run_as = np.full((2, microbatches, stages * chunks), -1, np.int64)
    forwards = np.zeros(stages, np.int64)  # int64[stages]: how many ran
    backwards = np.zeros(stages, np.int64)
    held = np.zeros(stages, np.int64)  # int64[stages]: forwards whose backward is due
    last = np.full(stages, -1, np.int64)  # int64[stages]: operation that ran last
    done = 0
    moved = True
    while moved:
        moved = False
        for device in range(stages):
            while forwards[device] + backwards[device] < 2 * total:
                step_f = forwards[device]
                step_b = backwards[device]
                ahead = step_f - step_b <= warm_up[device] and held[device] <= most[device]
                forward = step_f < total and ahead
                kind = FORWARD if forward else BACKWARD
                position, local = _place(step_f if forward else step_b, stages, chunks)
                if position < microbatches:  # else it is not there, and takes no time
                    if not forward:
                        local = chunks - 1 - local
                    chunk = local * stages + device
                    needs = _needs(run_as, kind, position, chunk)
                    if needs == -2:
                        break
                    columns[:, done] = (position, chunk, kind, last[device], needs)
                    run_as[kind, position, chunk] = done
                    last[device] = done
                    held[device] += 1 if forward else -1
                    done += 1
                moved = True
                if forward:
                    forwards[device] += 1
                else:
                    backwards[device] += 1
    kept = columns[:, :done].copy()
    return kept[0], kept[1], kept[2], kept[3], kept[4]


@leaf
def _needs(run_as: NDArray[np.int64], kind: int, position: int, chunk: int) -> int:
    """The operation that feeds this one; −1 for none, −2 when it has not run yet."""
    if kind == FORWARD:
        if chunk == 0:
            return -1
        source = run_as[FORWARD, position, chunk - 1]
    else:
        if run_as[FORWARD, position, chunk] < 0:
            return -2
        last = run_as.shape[2] - 1
        source = (
            run_as[FORWARD, position, chunk]
            if chunk == last
            else run_as[BACKWARD, position, chunk + 1]
        )
    return source if source >= 0 else -2


def checked_times(
    forward_s: ArrayLike, backward_s: ArrayLike, virtual_stages: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], int]:
    """Both tables as float64 [microbatch, chunk] and the number of devices p."""
    forward = np.ascontiguousarray(forward_s, dtype=np.float64)
    backward = np.ascontiguousarray(backward_s, dtype=np.float64)
    if forward.ndim != 2 or forward.shape != backward.shape or 0 in forward.shape:
        raise PlanningError(
            f"forward_s has shape {forward.shape} and backward_s {backward.shape}; give both as "
            "[microbatch, stage] with at least one of each"
        )
    for name, times in (("forward_s", forward), ("backward_s", backward)):
        if not (times.min() >= 0 and times.max() < np.inf):
            raise PlanningError(f"{name} spans {times.min()}..{times.max()}; times are ≥ 0, finite")
    if virtual_stages < 1 or forward.shape[1] % virtual_stages:
        raise PlanningError(
            f"virtual_stages is {virtual_stages} for {forward.shape[1]} model chunks; it must "
            "divide their number"
        )
    return forward, backward, forward.shape[1] // virtual_stages


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
