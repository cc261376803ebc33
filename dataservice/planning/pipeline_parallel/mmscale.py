"""MMScale's Alg. 3, corrected: fill the intervals of the first stage.

The smallest microbatch opens the pipeline and the p−1 smallest close it, because the last p−1
intervals between backwards of the first stage have no forward to fill them. Interval 1, from the
end of the first forward to the first backward, takes the p−1 microbatches whose forwards sum
closest to it; each later interval, from one backward to the arrival of the next, takes one.

    stage 0  F0 |<- interval 1: F1 … F(p−1) ->| B0 |<- interval 2: F(p) ->| B1 | …

Corrections: the loop ends at l−2p+2, where the paper's l−p would place l+p−2 microbatches; with
l < 2p−1 there is nothing to match, and the middle falls by size.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf


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
