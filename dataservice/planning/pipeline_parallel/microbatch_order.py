"""The order in which microbatches enter the pipeline: searched, or by MMScale's Alg. 3, corrected.

That fills the intervals of the first stage. The smallest microbatch opens the pipeline and the p−1
smallest close it, because the last p−1 intervals between backwards of the first stage have no
forward to fill them. Interval 1, from the end of the first forward to the first backward, takes the
p−1 microbatches whose forwards sum closest to it; each later interval, from one backward to the
arrival of the next, takes one.

    stage 0  F0 |<- interval 1: F1 … F(p−1) ->| B0 |<- interval 2: F(p) ->| B1 | …

Corrections: the loop ends at l−2p+2, where the paper's l−p would place l+p−2 microbatches; with
l < 2p−1 there is nothing to match, and the middle falls by size.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.plan_options import algorithm_named
from dataservice.planning.invariants import check_permutation
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.pipeline_parallel.simulator import (
    Program,
    checked_times,
    make_program,
    makespan,
    operation_offsets,
)

OrderAlgorithm = Literal["search", "mmscale"]
# Whether a search goes on from the paper's order.
ALGORITHMS: dict[OrderAlgorithm, bool] = {"search": True, "mmscale": False}
# Operations simulated in a search: by microbatch, and at least. Sets its time, not its clock.
_OPERATIONS_A_MICROBATCH = 24_000
_LEAST_OPERATIONS = 600_000
# Up to this many microbatches every order is tried: 40,320 of them in about 6 ms at 4 stages.
_EXHAUSTIVE_MICROBATCHES = 8
# Trials that one round of the search takes for each pair of microbatches; what is left starts more.
_TRIALS_A_PAIR = 4


@kernel
def order_by_intervals(
    forward: NDArray[np.float64], backward: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Order int64[l] from times [microbatch, device]. O(l·(l + p))."""
    count, stages = forward.shape
    sizes = forward.sum(axis=1) + backward.sum(axis=1)
    rising = np.argsort(sizes, kind="mergesort")
    order = np.empty(count, np.int64)
    order[0] = rising[0]
    rear = min(stages - 1, count - 1)
    for i in range(rear):
        order[count - 1 - i] = rising[1 + i]
    # The middle, by rising forward time of the first stage.
    middle = rising[1 + rear :]
    if count < 2 * stages - 1:
        for i in range(middle.size):
            order[1 + i] = middle[middle.size - 1 - i]
        return order
    middle = middle[np.argsort(forward[middle, 0], kind="mergesort")]
    if stages == 1:
        order[1 : count - rear] = middle
        return order
    _fill_intervals(forward, backward, middle, order)
    return order


@kernel
def _fill_intervals(
    forward: NDArray[np.float64],
    backward: NDArray[np.float64],
    middle: NDArray[np.int64],
    order: NDArray[np.int64],
) -> None:
    count, stages = forward.shape
    first = order[0]
    interval = forward[first, 1:].sum() + backward[first, 1:].sum()
    at = _closest_window(forward, middle, stages - 1, interval)
    order[1:stages] = middle[at : at + stages - 1]
    middle = np.concatenate((middle[:at], middle[at + stages - 1 :]))
    placed = stages
    # Ends of each device's last operation, and of every forward and backward so far.
    clock = np.zeros(stages, np.float64)
    done = np.zeros((2, stages), np.int64)
    ends = np.zeros((2, count, stages), np.float64)
    while middle.size > 0:
        _advance(forward, backward, order, placed, clock, done, ends)
        # Next backward of the first stage: it arrives from stage 1 once the known ones ran.
        due = placed - stages + 1
        interval = ends[1, due, 1] - clock[0]
        at = _closest_window(forward, middle, 1, interval)
        order[placed] = middle[at]
        placed += 1
        middle = np.concatenate((middle[:at], middle[at + 1 :]))


@leaf
def _closest_window(
    forward: NDArray[np.float64], rising: NDArray[np.int64], size: int, target: float
) -> int:
    """Start of the `size` neighbours whose first-stage forwards sum closest to the target."""
    total = 0.0
    for i in range(size):
        total += forward[rising[i], 0]
    best = 0
    distance = abs(total - target)
    for start in range(1, rising.size - size + 1):
        total += forward[rising[start + size - 1], 0] - forward[rising[start - 1], 0]
        if abs(total - target) < distance:
            distance = abs(total - target)
            best = start
    return best


@leaf
def _advance(
    forward: NDArray[np.float64],
    backward: NDArray[np.float64],
    order: NDArray[np.int64],
    placed: int,
    clock: NDArray[np.float64],
    done: NDArray[np.int64],
    ends: NDArray[np.float64],
) -> None:
    """Run every operation of 1F1B that the first `placed` microbatches of the order allow."""
    stages = clock.size
    count = order.size
    moved = True
    while moved:
        moved = False
        for s in range(stages):
            while True:
                ahead = done[0, s] - done[1, s] <= stages - 1 - s and done[0, s] < count
                if ahead:
                    at = done[0, s]
                    if at >= placed or (s > 0 and at >= done[0, s - 1]):
                        break
                    begin = clock[s] if s == 0 else max(clock[s], ends[0, at, s - 1])
                    clock[s] = begin + forward[order[at], s]
                    ends[0, at, s] = clock[s]
                    done[0, s] += 1
                else:
                    at = done[1, s]
                    if at >= count or (s < stages - 1 and at >= done[1, s + 1]):
                        break
                    arrived = ends[1, at, s + 1] if s < stages - 1 else ends[0, at, s]
                    clock[s] = max(clock[s], arrived) + backward[order[at], s]
                    ends[1, at, s] = clock[s]
                    done[1, s] += 1
                moved = True


def order_microbatches(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    virtual_stages: int = 1,
    algorithm: OrderAlgorithm = "search",
    activation_limit: ArrayLike | None = None,
    operations: int | None = None,
    seed: int = 0,
) -> NDArray[np.int32]:
    """Order int32[microbatches] that keeps 1F1B, or interleaved 1F1B, short.

    Arguments as for `simulate_1f1b`. "mmscale" is Alg. 3, on the sum of a device's chunks where
    stages are virtual; "search" starts from the best of it and of a few simple orders and moves
    microbatches against the exact simulator, so it is never worse than any of them. `operations`
    is what the search may simulate, about 2.5 ns each; by default it follows the input's size, and
    up to 8 microbatches every order is tried, so that the best is found.
    Raises PlanningError on bad input.
    """
    searched = algorithm_named(ALGORITHMS, algorithm, "algorithm")
    forward, backward, stages = checked_times(forward_s, backward_s, virtual_stages)
    count = forward.shape[0]
    shape = (count, virtual_stages, stages)
    by_device = forward.reshape(shape).sum(axis=1), backward.reshape(shape).sum(axis=1)
    paper = order_by_intervals(*by_device)
    if not searched or count == 1:
        return _checked(paper)
    program = make_program(count, stages, virtual_stages, activation_limit)
    durations = np.concatenate([forward.ravel(), backward.ravel()])
    if operations is None and count <= _EXHAUSTIVE_MICROBATCHES:
        return _checked(_try_all(durations, paper, program))
    if operations is None:
        operations = max(_LEAST_OPERATIONS, _OPERATIONS_A_MICROBATCH * count)
    starts = _starts(forward, backward, paper)
    best = _search(durations, starts, program, operations // program.kind.size, seed)
    return _checked(best)


def _checked(order: NDArray[np.int64]) -> NDArray[np.int32]:
    check_permutation(order, order.size, "order of microbatches")
    return order.astype(np.int32)


def _starts(
    forward: NDArray[np.float64], backward: NDArray[np.float64], paper: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Orders [k, microbatch] to start from: the paper's, as given, rising, falling, a hill."""
    size = forward.sum(axis=1) + backward.sum(axis=1)
    rising = np.argsort(size, kind="stable")
    hill = np.concatenate([rising[::2], rising[1::2][::-1]])
    return np.stack([paper, np.arange(paper.size), rising, rising[::-1], hill])


@leaf
def _random(state: NDArray[np.uint64]) -> int:
    """xorshift64*: the top 31 bits."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return int((x * np.uint64(2685821657736338717)) >> np.uint64(33))


@leaf
def _rotate(order: NDArray[np.int64], source: int, target: int) -> None:
    """Take the microbatch at `source` out and put it in at `target`."""
    moved = order[source]
    step = 1 if target > source else -1
    place = source
    while place != target:
        order[place] = order[place + step]
        place += step
    order[target] = moved


@kernel
def _try_all(
    durations: NDArray[np.float64], start: NDArray[np.int64], program: Program
) -> NDArray[np.int64]:
    """The best of all orders, `start` if none is better. Orders come in lexicographic turn."""
    count = start.size
    chunks = durations.size // (2 * count)
    offsets = operation_offsets(program, count, chunks)
    ends = np.zeros(offsets.size + 1, np.float64)
    best: NDArray[np.int64] = start.copy()
    best_value = makespan(durations, offsets, start, chunks, program, ends)
    order = np.arange(count)
    while True:
        value = makespan(durations, offsets, order, chunks, program, ends)
        if value < best_value:
            best_value = value
            best[:] = order
        pivot = count - 2
        while pivot >= 0 and order[pivot] > order[pivot + 1]:
            pivot -= 1
        if pivot < 0:
            return best
        after = count - 1
        while order[after] < order[pivot]:
            after -= 1
        order[pivot], order[after] = order[after], order[pivot]
        order[pivot + 1 :] = order[pivot + 1 :][::-1].copy()


@kernel
def _search(
    durations: NDArray[np.float64],
    starts: NDArray[np.int64],
    program: Program,
    trials: int,
    seed: int,
) -> NDArray[np.int64]:
    """The best order seen in rounds of late-acceptance search: one round from the best start, and,
    where few microbatches need few trials, more from shuffles of it."""
    count = starts.shape[1]
    chunks = durations.size // (2 * count)
    offsets = operation_offsets(program, count, chunks)  # int64[operations]
    ends = np.zeros(offsets.size + 1, np.float64)  # float64[operations + 1]
    state = np.empty(1, np.uint64)
    state[0] = np.uint64(88172645463325252) ^ (np.uint64(seed) * np.uint64(0x9E3779B97F4A7C15))
    best: NDArray[np.int64] = starts[0].copy()  # int64[microbatches]
    best_value = np.inf
    for s in range(starts.shape[0]):
        time = makespan(durations, offsets, starts[s], chunks, program, ends)
        if time < best_value:
            best_value = time
            best[:] = starts[s]
    rounds = max(1, trials // (_TRIALS_A_PAIR * count * count))
    for turn in range(rounds):
        order = best.copy()
        if turn > 0:
            _shuffle(order, state)
        value = _late_acceptance(
            durations, offsets, order, chunks, program, ends, trials // rounds, state
        )
        if value < best_value:
            best_value = value
            best[:] = order
    return best


@leaf
def _shuffle(order: NDArray[np.int64], state: NDArray[np.uint64]) -> None:
    for i in range(order.size - 1, 0, -1):
        j = _random(state) % (i + 1)
        order[i], order[j] = order[j], order[i]


@kernel
def _late_acceptance(
    durations: NDArray[np.float64],
    offsets: NDArray[np.int64],
    order: NDArray[np.int64],
    chunks: int,
    program: Program,
    ends: NDArray[np.float64],
    trials: int,
    state: NDArray[np.uint64],
) -> float:
    """Swaps and insertions, taken when no worse than now or than some trials ago. Leaves the best
    order of the round in `order` and returns its makespan."""
    count = order.size
    value = makespan(durations, offsets, order, chunks, program, ends)
    history = np.full(max(4, min(50, trials // 40)), value)
    best = order.copy()
    best_value = value
    for trial in range(trials):
        i = _random(state) % count
        j = _random(state) % (count - 1)
        j += 1 if j >= i else 0
        swap = _random(state) & 1
        if swap:
            order[i], order[j] = order[j], order[i]
        else:
            _rotate(order, i, j)
        time = makespan(durations, offsets, order, chunks, program, ends)
        slot = trial % history.size
        if time <= value or time < history[slot]:
            value = time
            if value < best_value:
                best_value = value
                best[:] = order
        elif swap:
            order[i], order[j] = order[j], order[i]
        else:
            _rotate(order, j, i)
        history[slot] = min(history[slot], value)
    order[:] = best
    return best_value
