"""Which layers each pipeline stage holds (OmniBal §4.2).

The anchor is the split whose slowest device is fastest. Splits near it are ranked by what a step
takes in the exact simulator, over microbatches as they come, and by OmniBal's metric; the best few
may then be measured.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import algorithm_named
from dataservice.planning.invariants import require
from dataservice.planning.layout.stage_anchor import anchor_split
from dataservice.planning.layout.stage_bound import bounded_split
from dataservice.planning.layout.stage_search import (
    Shortlist,
    Simulation,
    best_by_metric,
    near,
    search_by_shifts,
    simulate_all,
    simulation,
    step_seconds_of,
)
from dataservice.planning.layout.stage_times import (
    MeanTimes,
    at_least,
    check_bounds,
    check_chunks,
    cut_table,
    mean_times,
    stage_times,
)
from dataservice.planning.pipeline_parallel.simulator import make_program

Ranking = Literal["step", "metric"]

# Operations simulated around each anchor. Sets the time of a search, not its clock.
_OPERATIONS = 8_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StageSplit:
    """Layers cut into chunks: chunk c holds layers bounds[c]..bounds[c+1] and runs on device c mod
    p. `bounds` int32[chunks + 1].

    `device_s` float64[p]: what a device works on a mean microbatch, forward and backward, transfers
    included. `sent_bytes`: what a mean microbatch sends forward over all cuts. `metric`: OmniBal's
    VAR + SUM, each as a share of a device's work. `step_s`: the simulated step. `measured_s`: what
    the callback said, if asked.
    """

    bounds: NDArray[np.int32]
    device_s: NDArray[np.float64]
    sent_bytes: float
    metric: float
    step_s: float
    measured_s: float | None = None

    @property
    def slowest_s(self) -> float:
        """What the slowest device works on a mean microbatch."""
        return float(self.device_s.max())

    @property
    def layers(self) -> tuple[int, ...]:
        """How many layers each chunk holds."""
        return tuple(int(count) for count in np.diff(self.bounds))


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePartition:
    """Candidate splits, best first, and how good any split can get.

    `anchor`: the split whose slowest device is fastest; no split's slowest device goes below
    `device_bound_s`. No split's simulated step goes below `lower_bound_s`. `complete`: every
    candidate within the radius of the anchor was simulated.
    """

    splits: tuple[StageSplit, ...]
    anchor: StageSplit
    device_bound_s: float
    lower_bound_s: float
    complete: bool

    @property
    def best(self) -> StageSplit:
        """The first of the splits."""
        return self.splits[0]

    @property
    def gap(self) -> float:
        """Certified relative distance of the best simulated step to any split's."""
        step_s = min(split.step_s for split in self.splits)
        return step_s / self.lower_bound_s - 1.0 if self.lower_bound_s > 0 else 0.0


Measure = Callable[[StageSplit], float]
RANKINGS: dict[Ranking, Callable[[StageSplit], tuple[float, ...]]] = {
    "step": lambda split: (split.step_s, split.metric, split.sent_bytes, *split.bounds.tolist()),
    "metric": lambda split: (split.metric, split.sent_bytes, split.step_s, *split.bounds.tolist()),
}


def partition_stages(
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    stages: int,
    virtual_stages: int = 1,
    microbatches: int | None = None,
    cut_bytes: ArrayLike | None = None,
    gradient_bytes: ArrayLike | None = None,
    bytes_per_s: float = np.inf,
    radius: int = 3,
    top: int = 15,
    rank_by: Ranking = "step",
    measure: Measure | None = None,
) -> StagePartition:
    """Cut layers into `stages` · `virtual_stages` chunks; chunk c runs on device c mod `stages`.

    `forward_s`, `backward_s` [microbatch, layer], of microbatches as the index gives them and in
    the order in which they enter, or [layer] for `microbatches` equal ones (default: 4 a stage).
    Layers are in model order, encoders' before the decoder's. `cut_bytes` [layer] or [microbatch,
    layer]: activations sent on if a chunk ends after that layer; `gradient_bytes` sent back over
    the same cut (default: as many; 0 behind what is frozen). A transfer at `bytes_per_s` keeps its
    sender busy. Candidates have every bound within `radius` of the anchor's; the `top` of them by
    `rank_by` come back, reordered by `measure(split)` in seconds where that is given.
    Raises PlanningError on bad input. O(layers² · chunks) and a fixed number of simulations.
    """
    times = stage_times(
        forward_s,
        backward_s,
        stages=stages,
        microbatches=microbatches,
        cut_bytes=cut_bytes,
        gradient_bytes=gradient_bytes,
        bytes_per_s=bytes_per_s,
    )
    count, layers = times.forward.shape[0], times.forward.shape[1] - 1
    chunks = check_chunks(layers, stages, virtual_stages)
    key = algorithm_named(RANKINGS, rank_by, "rank_by")
    at_least("radius", radius, 0)
    at_least("top", top, 1)
    mean = mean_times(times)
    program = make_program(count, stages, virtual_stages)
    trial = simulation(times, program, chunks)
    anchor, device_bound = anchor_split(mean, stages, virtual_stages)
    filled, step_bound = bounded_split(times, stages, virtual_stages)
    shortlist = Shortlist(np.zeros((top, chunks + 1), np.int64), np.full(top, np.inf))
    by_metric = _by_metric(mean, anchor, radius, stages, virtual_stages, top)
    complete = _search(trial, anchor, radius, np.vstack([anchor, by_metric]), shortlist)
    if (filled != anchor).any():
        _search(trial, filled, radius, filled[None], shortlist)
    sent = cut_table(cut_bytes, "cut_bytes", (count, layers)).mean(axis=0)
    candidates = np.vstack([shortlist.bounds[shortlist.step_s < np.inf], by_metric, anchor])
    judged = [_judge(bounds, trial, mean, sent, stages) for bounds in np.unique(candidates, axis=0)]
    splits = sorted(judged, key=key)[:top]
    if measure is not None:
        splits = _measured(splits, measure)
    _check(splits, layers, device_bound, step_bound)
    return StagePartition(
        splits=tuple(splits),
        anchor=_judge(anchor, trial, mean, sent, stages),
        device_bound_s=device_bound,
        lower_bound_s=step_bound,
        complete=complete,
    )


def time_stages(
    bounds: ArrayLike,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    *,
    stages: int,
    virtual_stages: int = 1,
    microbatches: int | None = None,
    cut_bytes: ArrayLike | None = None,
    gradient_bytes: ArrayLike | None = None,
    bytes_per_s: float = np.inf,
) -> StageSplit:
    """A given split, judged like those of `partition_stages`: `bounds` [chunks + 1] rise from 0 to
    the number of layers. Raises PlanningError on bad input."""
    times = stage_times(
        forward_s,
        backward_s,
        stages=stages,
        microbatches=microbatches,
        cut_bytes=cut_bytes,
        gradient_bytes=gradient_bytes,
        bytes_per_s=bytes_per_s,
    )
    count, layers = times.forward.shape[0], times.forward.shape[1] - 1
    cuts = check_bounds(bounds, layers, stages, virtual_stages)
    trial = simulation(times, make_program(count, stages, virtual_stages), cuts.size - 1)
    sent = cut_table(cut_bytes, "cut_bytes", (count, layers)).mean(axis=0)
    return _judge(cuts, trial, mean_times(times), sent, stages)


def _by_metric(
    mean: MeanTimes,
    anchor: NDArray[np.int64],
    radius: int,
    stages: int,
    virtual_stages: int,
    top: int,
) -> NDArray[np.int64]:
    """The best candidates by the metric, int64[k, chunks + 1]: exactly with one chunk a device; by
    how even chunks are where a device has several."""
    share = max(float(mean.work[-1]) / stages, np.finfo(np.float64).tiny)
    return best_by_metric(
        near(anchor, radius),
        -mean.work / share,
        mean.work / share,
        1.0 / virtual_stages,
        1.0 / share,
        mean.send + mean.send_back,
        top,
    )


def _search(
    trial: Simulation,
    anchor: NDArray[np.int64],
    radius: int,
    starts: NDArray[np.int64],
    shortlist: Shortlist,
) -> bool:
    """Fill the shortlist with candidates near the anchor; whether all of them were simulated."""
    around = near(anchor, radius)
    trials = _OPERATIONS // trial.program.kind.size
    if around.splits <= trials:
        simulate_all(trial, around, shortlist)
        return True
    search_by_shifts(trial, around, starts, shortlist, trials)
    return False


def _judge(
    bounds: NDArray[np.int64],
    trial: Simulation,
    mean: MeanTimes,
    sent_bytes: NDArray[np.float64],
    stages: int,
) -> StageSplit:
    cuts = bounds[1:-1]
    device = np.arange(bounds.size - 1) % stages
    work = np.bincount(device, np.diff(mean.work[bounds]), minlength=stages)
    sending = np.diff(mean.work[bounds]) + mean.send[bounds[1:]] + mean.send_back[bounds[:-1]]
    share = max(float(mean.work[-1]) / stages, np.finfo(np.float64).tiny)
    crossing = float((mean.send + mean.send_back)[cuts].sum())
    return StageSplit(
        bounds=bounds.astype(np.int32),
        device_s=np.bincount(device, sending, minlength=stages).astype(np.float64),
        sent_bytes=float(sent_bytes[cuts - 1].sum()) if stages > 1 else 0.0,
        metric=(float(((work / share - 1.0) ** 2).sum()) + crossing / share) / stages,
        step_s=float(step_seconds_of(trial, bounds)),
    )


def _measured(splits: list[StageSplit], measure: Measure) -> list[StageSplit]:
    """Each split with the seconds that the callback gives it, fastest first."""
    timed = []
    for split in splits:
        seconds = float(measure(split))
        if not 0 <= seconds < np.inf:
            raise PlanningError(
                f"measure gave {seconds} for layers {split.layers}; it returns finite seconds ≥ 0: "
                "leave out what failed by a large number"
            )
        timed.append(replace(split, measured_s=seconds))
    return sorted(timed, key=lambda split: split.measured_s or 0.0)


def _check(splits: list[StageSplit], layers: int, device_bound: float, step_bound: float) -> None:
    rounded = 1 - 1e-9
    for split in splits:
        ends = split.bounds[0] == 0 and split.bounds[-1] == layers
        require(bool(ends and (np.diff(split.bounds) > 0).all()), "a split leaves out a layer")
        above = split.slowest_s >= device_bound * rounded and split.step_s >= step_bound * rounded
        require(above, "a split of the layers is below its lower bound")
