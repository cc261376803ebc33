"""The split whose slowest device is fastest, exactly: the anchor of all candidates.

With one chunk a device a dynamic program over the cuts is exact. With virtual stages device d has
chunks d, d + p, …, which no such program can follow: there the chunks' own split is improved by
shifts, and then proven, or beaten, by branch and bound, limited in nodes.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.layout.stage_times import MeanTimes
from dataservice.planning.loads.problem import certify

# Nodes of the branch and bound; a node takes about 10 ns. Shifts tried before it.
_NODES = 300_000
_SHIFTS = 200_000
# Sums of the same seconds in another order differ by this much, relatively.
_ROUNDING = 1e-12


def anchor_split(
    mean: MeanTimes, stages: int, virtual_stages: int
) -> tuple[NDArray[np.int64], float]:
    """Bounds int64[chunks + 1], and seconds that no split's slowest device goes below."""
    begin, end = -mean.work + mean.send_back, mean.work + mean.send
    chunks = stages * virtual_stages
    bounds, slowest = minmax_split(np.tile(begin, (1, chunks, 1)), np.tile(end, (1, chunks, 1)))
    if virtual_stages == 1:
        return bounds, slowest
    layers = np.diff(mean.work)
    inner = np.sort((mean.send + mean.send_back)[1:-1])
    sent = float(inner[: chunks - 1].sum())
    least = max(
        certify(np.sort(layers)[::-1], stages, equal_count=False),
        (float(mean.work[-1]) + sent) / stages,
    )
    _level(begin, end, bounds, stages, _SHIFTS)
    proven = _improve(begin, end, bounds, stages, least, _NODES)
    return bounds, _slowest(begin, end, bounds, stages) if proven else least


@kernel
def minmax_split(
    begin: NDArray[np.float64], end: NDArray[np.float64]
) -> tuple[NDArray[np.int64], float]:
    """The split whose largest chunk is least; of all such splits the one with the least summed
    squares. O(terms · chunks · layers²).

    Chunk c of layers i..j takes the largest of begin[term, c, i] + end[term, c, j]; both
    float64[term, chunk, layer + 1].
    """
    chunks, layers = begin.shape[1], begin.shape[2] - 1
    best = np.full((chunks + 1, layers + 1), np.inf)  # [chunks so far, cut]: largest chunk
    best[0, 0] = -np.inf
    for c in range(1, chunks + 1):
        for j in range(c, layers - (chunks - c) + 1):
            for i in range(c - 1, j):
                best[c, j] = min(best[c, j], max(best[c - 1, i], _cost(begin, end, c - 1, i, j)))
    limit = best[chunks, layers]
    squares = np.full((chunks + 1, layers + 1), np.inf)
    squares[0, 0] = 0.0
    came = np.zeros((chunks + 1, layers + 1), np.int64)
    for c in range(1, chunks + 1):
        for j in range(c, layers - (chunks - c) + 1):
            for i in range(c - 1, j):
                took = _cost(begin, end, c - 1, i, j)
                if took <= limit and squares[c - 1, i] + took * took < squares[c, j]:
                    squares[c, j] = squares[c - 1, i] + took * took
                    came[c, j] = i
    bounds = np.empty(chunks + 1, np.int64)
    bounds[chunks] = layers
    for c in range(chunks, 0, -1):
        bounds[c - 1] = came[c, bounds[c]]
    return bounds, float(limit)


@kernel
def _cost(
    begin: NDArray[np.float64], end: NDArray[np.float64], chunk: int, first: int, last: int
) -> float:
    cost = begin[0, chunk, first] + end[0, chunk, last]
    for term in range(1, begin.shape[0]):
        cost = max(cost, begin[term, chunk, first] + end[term, chunk, last])
    return float(cost)


@kernel
def _loads(
    begin: NDArray[np.float64],
    end: NDArray[np.float64],
    bounds: NDArray[np.int64],
    loads: NDArray[np.float64],
) -> tuple[float, float]:
    """Largest load and summed squares; `loads` [device] is filled."""
    loads[:] = 0.0
    for c in range(bounds.size - 1):
        loads[c % loads.size] += begin[bounds[c]] + end[bounds[c + 1]]
    largest, squares = 0.0, 0.0
    for load in loads:
        largest = max(largest, load)
        squares += load * load
    return largest, squares


@kernel
def _slowest(
    begin: NDArray[np.float64], end: NDArray[np.float64], bounds: NDArray[np.int64], stages: int
) -> float:
    return float(_loads(begin, end, bounds, np.zeros(stages))[0])


@kernel
def _level(
    begin: NDArray[np.float64],
    end: NDArray[np.float64],
    bounds: NDArray[np.int64],
    stages: int,
    shifts: int,
) -> None:
    """Shift runs of neighbouring bounds by a layer while that lowers (largest load, squares)."""
    chunks = bounds.size - 1
    loads = np.zeros(stages)
    largest, squares = _loads(begin, end, bounds, loads)
    moved = True
    while moved:
        moved = False
        for first in range(1, chunks):
            for last in range(first, chunks):
                for step in (-1, 1):
                    if not shift(bounds, first, last, step):
                        continue
                    shifts -= 1
                    if shifts < 0:
                        bounds[first : last + 1] -= step
                        return
                    top, sum_of = _loads(begin, end, bounds, loads)
                    near = largest * _ROUNDING
                    less = sum_of < squares * (1 - _ROUNDING)
                    if top < largest - near or (top <= largest and less):
                        largest, squares, moved = top, sum_of, True
                    else:
                        bounds[first : last + 1] -= step


@kernel
def shift(bounds: NDArray[np.int64], first: int, last: int, step: int) -> bool:
    """Move bounds first..last by `step`, unless that would leave a chunk without layers."""
    if bounds[first] + step <= bounds[first - 1] or bounds[last] + step >= bounds[last + 1]:
        return False
    bounds[first : last + 1] += step
    return True


@kernel
def _improve(
    begin: NDArray[np.float64],
    end: NDArray[np.float64],
    bounds: NDArray[np.int64],
    stages: int,
    least: float,
    nodes: int,
) -> bool:
    """Branch and bound over the ends of chunks, first to last: `bounds` becomes the best split
    found. Whether that is proven to be the best of all."""
    chunks = bounds.size - 1
    layers = begin.size - 1
    limit = _slowest(begin, end, bounds, stages)
    loads = np.zeros(stages)
    at = np.zeros(chunks + 1, np.int64)  # at[c + 1] is where chunk c ends, in the split on trial
    at[1] = layers - chunks + 2  # one past the first end that is tried, which then falls
    c = 0
    while c >= 0:
        if limit <= least * (1 + _ROUNDING):
            return True
        nodes -= 1
        if nodes < 0:
            return False
        device = c % stages
        tried = at[c + 1] <= layers - chunks + c + 1
        if tried:  # take the chunk of the trial before off its device
            loads[device] -= begin[at[c]] + end[at[c + 1]]
        at[c + 1] -= 1
        if at[c + 1] <= at[c] or (c == chunks - 1 and at[c + 1] < layers):
            c -= 1
            continue
        loads[device] += begin[at[c]] + end[at[c + 1]]
        if loads.max() >= limit * (1 - _ROUNDING):
            continue
        if c == chunks - 1:
            limit = loads.max()
            bounds[:] = at
            continue
        room = 0.0  # of the devices that still have a chunk to come
        for later in range(c + 1, min(chunks, c + 1 + stages)):
            room += limit - loads[later % stages]
        if end[layers] + begin[at[c + 1]] > room:
            continue
        c += 1
        at[c + 1] = layers - chunks + c + 2
    return True
