"""1F1B and interleaved 1F1B as data: every operation in an order in which it can be run.

Each pipeline stage (device) runs a fixed list: warm-up forwards, then one forward and one backward
in turn, then the backwards left. With v virtual stages, device s holds model chunks s, s+p, … and
takes microbatches in rounds of p through its first chunk, then through its second, and so on.

    p = 3, v = 1      s=0  F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
                      s=1  F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
                      s=2  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
"""

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
    warm_up = _warm_up(microbatches, stages, virtual_stages)
    total = microbatches * virtual_stages
    if activation_limit is not None:
        limit = np.broadcast_to(np.asarray(activation_limit), (stages,))
        if limit.min() < 1:
            raise PlanningError(
                f"activation_limit is {limit.min()}; a stage holds at least 1 microbatch: raise it"
            )
        # A stage cannot run ahead of the one that feeds it.
        warm_up = np.minimum.accumulate(np.minimum(warm_up, limit - 1))
    program = Program(*_compile(microbatches, stages, virtual_stages, warm_up))
    # Interleaving wants whole rounds of p microbatches. A last round that is not whole can leave
    # devices waiting for each other; a longer warm-up always resolves that.
    while program.kind.size < 2 * total * stages:
        if activation_limit is not None:
            raise PlanningError(
                f"activation_limit is {activation_limit}; {stages} stages of {virtual_stages} "
                f"chunks then wait for each other for ever: raise it, {total} always works"
            )
        warm_up = np.minimum(warm_up + 1, total)
        program = Program(*_compile(microbatches, stages, virtual_stages, warm_up))
    return program


def _warm_up(microbatches: int, stages: int, virtual_stages: int) -> NDArray[np.int64]:
    """Forwards each device runs before its first backward: int64[p]."""
    ahead = stages - 1 - np.arange(stages)
    warm_up = ahead if virtual_stages == 1 else 2 * ahead + (virtual_stages - 1) * stages
    return np.minimum(warm_up, microbatches * virtual_stages).astype(np.int64)


@leaf
def _place(index: int, microbatches: int, stages: int, chunks: int) -> tuple[int, int]:
    """Microbatch position and local chunk of a device's index-th forward."""
    whole = index // (stages * chunks)
    size = min(stages, microbatches - whole * stages)
    inside = index - whole * stages * chunks
    return whole * stages + inside % size, inside // size


@kernel
def _compile(
    microbatches: int, stages: int, chunks: int, warm_up: NDArray[np.int64]
) -> tuple[
    NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]
]:
    total = microbatches * chunks
    wanted = 2 * total * stages
    columns = np.empty((5, wanted), np.int64)  # int64[5, operations]
    # int64[kind, microbatch, chunk]: the operation that ran it, or −1
    run_as = np.full((2, microbatches, stages * chunks), -1, np.int64)
    forwards = np.zeros(stages, np.int64)  # int64[stages]: how many ran
    backwards = np.zeros(stages, np.int64)
    last = np.full(stages, -1, np.int64)  # int64[stages]: operation that ran last
    done = 0
    moved = True
    while moved:
        moved = False
        for device in range(stages):
            while forwards[device] + backwards[device] < 2 * total:
                step_f = forwards[device]
                step_b = backwards[device]
                forward = step_f < total and step_f - step_b <= warm_up[device]
                kind = FORWARD if forward else BACKWARD
                position, local = _place(
                    step_f if forward else step_b, microbatches, stages, chunks
                )
                if not forward:
                    local = chunks - 1 - local
                chunk = local * stages + device
                needs = _needs(run_as, kind, position, chunk)
                if needs == -2:
                    break
                columns[:, done] = (position, chunk, kind, last[device], needs)
                run_as[kind, position, chunk] = done
                last[device] = done
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
