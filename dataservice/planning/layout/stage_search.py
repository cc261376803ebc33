"""Splits near an anchor: the best by OmniBal's metric, and the best by simulated step time.

A candidate has each of its bounds within the radius of the anchor's. Where all of them are few,
each is simulated; else the search shifts runs of neighbouring bounds by a layer while the step
becomes shorter, from the anchor and from the best by the metric.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel
from dataservice.planning.layout.stage_anchor import shift
from dataservice.planning.layout.stage_times import StageTimes, chunk_durations
from dataservice.planning.pipeline_parallel.simulator import Program, makespan, operation_offsets


class Near(NamedTuple):
    """Which splits are candidates: bound b lies in low[b]..high[b], int64[chunks + 1]."""

    low: NDArray[np.int64]
    high: NDArray[np.int64]

    @property
    def splits(self) -> int:
        """At most so many splits."""
        return math.prod((self.high - self.low + 1).tolist())


def near(anchor: NDArray[np.int64], radius: int) -> Near:
    """Within `radius` of the anchor, with room for a layer in every chunk."""
    chunks, layers = anchor.size - 1, int(anchor[-1])
    place = np.arange(chunks + 1)
    low = np.maximum(anchor - radius, place)
    high = np.minimum(anchor + radius, layers - chunks + place)
    low[0] = high[0] = 0
    low[-1] = high[-1] = layers
    return Near(low, high)


@kernel
def best_by_metric(
    near: Near,
    begin: NDArray[np.float64],
    end: NDArray[np.float64],
    target: float,
    weight: float,
    send: NDArray[np.float64],
    keep: int,
) -> NDArray[np.int64]:
    """The `keep` candidates with the least Σ over chunks (t − target)² + weight · Σ send over cuts,
    a chunk i..j taking t = begin[i] + end[j]: int64[found, chunks + 1], best first, exactly.

    A dynamic program that keeps as many ways to each cut. O(chunks · (2·radius + 1)² · keep²).
    """
    chunks = near.low.size - 1
    width = int((near.high - near.low).max()) + 1
    value = np.full((chunks + 1, width, keep), np.inf)  # [bound, place in its range, way]
    came = np.full((chunks + 1, width, keep), -1)  # place · keep + way of the bound before
    value[0, 0, 0] = 0.0
    for c in range(1, chunks + 1):
        for j in range(near.low[c], near.high[c] + 1):
            row, origin = value[c, j - near.low[c]], came[c, j - near.low[c]]
            for i in range(near.low[c - 1], min(near.high[c - 1], j - 1) + 1):
                place = i - near.low[c - 1]
                off = begin[i] + end[j] - target
                step = off * off + weight * send[j]
                for way in range(keep):
                    total = value[c - 1, place, way] + step
                    if not total < row[keep - 1]:
                        break
                    _insert(row, origin, total, place * keep + way)
    found = 0
    while found < keep and value[chunks, 0, found] < np.inf:
        found += 1
    splits = np.empty((found, chunks + 1), np.int64)
    for k in range(found):
        place, way = 0, k
        for c in range(chunks, -1, -1):
            splits[k, c] = near.low[c] + place
            before = came[c, place, way]
            place, way = before // keep, before % keep
    return splits


@kernel
def _insert(row: NDArray[np.float64], origin: NDArray[np.int64], total: float, source: int) -> None:
    """Put a way in its place of a rising row; the last falls out."""
    at = row.size - 1
    while at > 0 and row[at - 1] > total:
        row[at] = row[at - 1]
        origin[at] = origin[at - 1]
        at -= 1
    row[at] = total
    origin[at] = source


class Simulation(NamedTuple):
    """What simulating any split takes; `durations` and `ends` are written anew each time."""

    times: StageTimes
    program: Program
    offsets: NDArray[np.int64]
    order: NDArray[np.int64]
    durations: NDArray[np.float64]
    ends: NDArray[np.float64]


def simulation(times: StageTimes, program: Program, chunks: int) -> Simulation:
    """Of a program for as many microbatches as `times` has."""
    count = times.forward.shape[0]
    return Simulation(
        times=times,
        program=program,
        offsets=operation_offsets(program, count, chunks),
        order=np.arange(count),
        durations=np.empty(2 * count * chunks),
        ends=np.zeros(program.kind.size + 1),
    )


@kernel
def step_seconds_of(simulation: Simulation, bounds: NDArray[np.int64]) -> float:
    """Simulated seconds of the step under that split."""
    chunk_durations(simulation.times, bounds, simulation.durations)
    return makespan(
        simulation.durations,
        simulation.offsets,
        simulation.order,
        bounds.size - 1,
        simulation.program,
        simulation.ends,
    )


class Shortlist(NamedTuple):
    """The best splits so far: `bounds` int64[keep, chunks + 1], `step_s` float64[keep], rising and
    infinite where there is none yet."""

    bounds: NDArray[np.int64]
    step_s: NDArray[np.float64]


@kernel
def remember(shortlist: Shortlist, bounds: NDArray[np.int64], step_s: float) -> None:
    """Put a split in its place, unless it is there already or none is worse."""
    kept, times = shortlist
    at = times.size - 1
    if not step_s < times[at]:
        return
    for k in range(times.size):
        if times[k] == step_s and (kept[k] == bounds).all():
            return
    while at > 0 and times[at - 1] > step_s:
        times[at] = times[at - 1]
        kept[at] = kept[at - 1]
        at -= 1
    times[at] = step_s
    kept[at] = bounds


@kernel
def simulate_all(simulation: Simulation, near: Near, shortlist: Shortlist) -> None:
    """Every candidate, in lexicographic turn."""
    chunks = near.low.size - 1
    bounds = near.low.copy()
    while True:
        if (bounds[1:] > bounds[:-1]).all():
            remember(shortlist, bounds, step_seconds_of(simulation, bounds))
        b = chunks
        while b >= 0 and bounds[b] == near.high[b]:
            bounds[b] = near.low[b]
            b -= 1
        if b < 0:
            return
        bounds[b] += 1


@kernel
def search_by_shifts(
    simulation: Simulation,
    near: Near,
    starts: NDArray[np.int64],
    shortlist: Shortlist,
    trials: int,
) -> None:
    """From the best of `starts` [k, chunks + 1]; each shift that shortens the step is kept, and the
    search ends where none does, or after so many simulations."""
    chunks = starts.shape[1] - 1
    best, bounds = np.inf, starts[0].copy()
    for start in starts:
        step = step_seconds_of(simulation, start)
        remember(shortlist, start, step)
        if step < best:
            best = step
            bounds[:] = start
    trials -= starts.shape[0]
    moved = True
    while moved:
        moved = False
        for length in range(chunks - 1):
            for first in range(1, chunks - length):
                for step in (-1, 1):
                    last = first + length
                    if not _inside(near, bounds, first, last, step):
                        continue
                    trials -= 1
                    if trials < 0:
                        return
                    shift(bounds, first, last, step)
                    value = step_seconds_of(simulation, bounds)
                    remember(shortlist, bounds, value)
                    if value < best:
                        best, moved = value, True
                    else:
                        bounds[first : last + 1] -= step


@kernel
def _inside(near: Near, bounds: NDArray[np.int64], first: int, last: int, step: int) -> bool:
    """Whether bounds first..last may all move by `step`."""
    if bounds[first] + step <= bounds[first - 1] or bounds[last] + step >= bounds[last + 1]:
        return False
    inside = True
    for b in range(first, last + 1):
        inside = inside and near.low[b] <= bounds[b] + step <= near.high[b]
    return inside
