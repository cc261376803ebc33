"""Which encoder pipeline takes which microbatches, and when its kernels run.

Forward alone is feasible iff Σ_i n_i(F_j) ≥ j for every j, where n_i(t) counts the microbatches
that pipeline i can finish by t: the pipelines' ends, merged and sorted, are compared with the
dependency points F_1 ≤ F_2 ≤ …, and no split is enumerated. The least time before the backbone
for which that holds is found by bisection, and its matching is a split. Backward passes must run
where the forward did; `bubble_search.py` therefore goes on from there. Forwards run as late as
their microbatches allow, backwards as early.

    pipeline 0   E0 E1    E4    │                          ends  0 1 2 3 4
    pipeline 1   E2    E3       │                          F_j   0  1  2  3  4    each end ≤ its F
                 ├ before ┤├──── backbone ────┤├ after ┤
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.layout.bubble_placement import (
    Gaps,
    Stream,
    gaps_without,
    most_held,
    place,
    reversed_gaps,
    reversed_stream,
)

# Bisection steps for the time before the backbone: to 2⁻²⁰ of what all encoding takes.
_BISECTIONS = 20

Members = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Encoder pipelines over a fixed timeline. `gaps` one for each block; pipeline i lies in block
    i div `slices`. `need_s`, `gradient_s` float64[microbatch], rising. `kept` float64[hop]:
    bytes of activations of a microbatch; `room` float64[block, hop] for them. `floor_s`: time
    outside the step that no split goes below."""

    forward: Stream
    backward: Stream
    gaps: tuple[Gaps, ...]
    slices: int
    need_s: NDArray[np.float64]
    gradient_s: NDArray[np.float64]
    step_s: float
    kept: NDArray[np.float64]
    room: NDArray[np.float64]
    floor_s: float = 0.0
    reversed_forward: Stream = field(init=False)
    reversed_gaps: tuple[Gaps, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reversed_forward", reversed_stream(self.forward))
        object.__setattr__(self, "reversed_gaps", tuple(map(reversed_gaps, self.gaps)))

    @property
    def pipelines(self) -> int:
        return len(self.gaps) * self.slices

    @property
    def microbatches(self) -> int:
        return self.need_s.size


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRun:
    """One pipeline's kernels, `forward_s` and `backward_s` float64[member, kernel of the stream],
    by how much they begin before the backbone's step and end after it, the most bytes of
    activations held on each hop, and by how many they are too much for some device."""

    members: Members
    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    before_s: float
    after_s: float
    peak_bytes: NDArray[np.float64]
    excess_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """What all pipelines do, `runs` by pipeline."""

    runs: tuple[PipelineRun, ...]

    @property
    def excess_bytes(self) -> float:
        """By how much some device holds too much; 0 where all is well."""
        return max(run.excess_bytes for run in self.runs)

    @property
    def owner(self) -> NDArray[np.int64]:
        """The pipeline of each microbatch, int64[microbatch]."""
        owner = np.empty(sum(len(run.members) for run in self.runs), np.int64)
        for pipeline, run in enumerate(self.runs):
            owner[list(run.members)] = pipeline
        return owner

    @property
    def before_s(self) -> float:
        return max(run.before_s for run in self.runs)

    @property
    def after_s(self) -> float:
        return max(run.after_s for run in self.runs)

    @property
    def outside_s(self) -> float:
        return self.before_s + self.after_s

    @property
    def rank(self) -> tuple[float, float, float]:
        """Less is better: bytes too many, seconds outside, and of the pipelines one by one."""
        each = sum(run.before_s + run.after_s for run in self.runs)
        return self.excess_bytes, self.outside_s, each


def ends_by(problem: Problem, before_s: float) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """When the pipelines, begun `before_s` before the step, end forwards up to the last F_j:
    ends float64[n], rising, and the pipeline of each int64[n]."""
    most = -(-problem.microbatches // problem.slices)
    releases = np.full(most, -before_s)
    ends, owners = [], []
    for block, gaps in enumerate(problem.gaps):
        _, end_s, done = place(problem.forward, gaps, releases, float(problem.need_s[-1]), False)
        for part in range(problem.slices):
            ends.append(end_s[:done])
            owners.append(np.full(done, block * problem.slices + part))
    merged, owner = np.concatenate(ends), np.concatenate(owners)
    order = np.lexsort((owner, merged))
    return merged[order], owner[order]


def is_feasible(problem: Problem, ends: NDArray[np.float64]) -> bool:
    """Whether Σ n_i(F_j) ≥ j for every j, of ends sorted."""
    count = problem.microbatches
    return ends.size >= count and bool((ends[:count] <= problem.need_s).all())


def least_before(problem: Problem) -> tuple[float, NDArray[np.int64]]:
    """Least seconds before the step with which all forwards can be in time, and the pipeline of
    each microbatch, int64[microbatch]. At most some sixty feasibility tests."""
    ends, owner = ends_by(problem, 0.0)
    if is_feasible(problem, ends):
        return 0.0, owner[: problem.microbatches]
    low = 0.0
    high = float(problem.forward.seconds.sum() + problem.forward.transfer_s.sum()) or 1.0
    while not is_feasible(problem, (found := ends_by(problem, high))[0]):
        low, high = high, 2 * high
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        tried = ends_by(problem, middle)
        if is_feasible(problem, tried[0]):
            high, found = middle, tried
        else:
            low = middle
    return high, found[1][: problem.microbatches]


def run_pipeline(problem: Problem, pipeline: int, members: Members) -> PipelineRun:
    """Place a pipeline's kernels: forwards as late as they may."""
    block = pipeline // problem.slices
    need_s = problem.need_s[np.array(members, np.int64)]
    releases = np.ascontiguousarray(-need_s[::-1])
    stream, gaps = problem.reversed_forward, problem.reversed_gaps[block]
    late, _, _ = place(stream, gaps, releases, np.inf, True)
    starts = np.ascontiguousarray(-(late[::-1, ::-1] + problem.forward.seconds))
    return _with_backwards(problem, block, members, starts)


def run_pipeline_early(
    problem: Problem, pipeline: int, members: Members, before_s: float
) -> PipelineRun | None:
    """The same with forwards as early as they can be when they begin `before_s` before the step;
    None where rounding makes one of them late."""
    block = pipeline // problem.slices
    releases = np.full(len(members), -before_s)
    starts, ends, _ = place(problem.forward, problem.gaps[block], releases, np.inf, False)
    if (ends > problem.need_s[np.array(members, np.int64)]).any():
        return None
    return _with_backwards(problem, block, members, starts)


def _with_backwards(
    problem: Problem, block: int, members: Members, forward_s: NDArray[np.float64]
) -> PipelineRun:
    """Forwards as they are placed, and backwards as early as they can in what is left."""
    chosen = np.array(members, np.int64)
    backward_s = np.empty((chosen.size, problem.backward.seconds.size))
    last_s = 0.0
    if backward_s.size:
        left = gaps_without(problem.gaps[block], problem.forward, forward_s)
        backward_s, _, _ = place(
            problem.backward, _for_backward(left), problem.gradient_s[chosen], np.inf, True
        )
        last_s = float((backward_s + problem.backward.seconds).max())
    held = most_held(problem.forward, problem.backward, forward_s, backward_s)
    peak_bytes = held * problem.kept
    return PipelineRun(
        members=members,
        forward_s=forward_s,
        backward_s=backward_s,
        before_s=max(0.0, -float(forward_s.min(initial=0.0))),
        after_s=max(0.0, last_s - problem.step_s),
        peak_bytes=peak_bytes,
        excess_bytes=max(0.0, float((peak_bytes - problem.room[block]).max())),
    )


def _for_backward(gaps: Gaps) -> Gaps:
    """Hops in the order in which a backward pass takes them."""
    return Gaps(gaps.start_s, gaps.end_s, np.ascontiguousarray(gaps.bounds[::-1]))
