"""Which encoder pipeline takes which microbatches, and when its kernels run.

Forward alone is feasible iff Σ_i n_i(F_j) ≥ j for every j, where n_i(t) counts the microbatches
that pipeline i can finish by t: the pipelines' ends, merged and sorted, are compared with the
dependency points F_1 ≤ F_2 ≤ …, and no split is enumerated. The least time before the backbone
for which that holds is found by bisection, and its matching is a split. Backward passes must run
where the forward did, so splits are then improved by moves and swaps of microbatches, each
judged by placing the kernels of the two pipelines that change; few splits are all tried. Forwards
run as late as their microbatches allow, backwards as early.

    pipeline 0   E0 E1    E4    │                          ends  0 1 2 3 4
    pipeline 1   E2    E3       │                          F_j   0  1  2  3  4    each end ≤ its F
                 ├ before ┤├──── backbone ────┤├ after ┤
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, product

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.layout.bubble_placement import (
    Gaps,
    Stream,
    gaps_without,
    place,
    reversed_gaps,
    reversed_stream,
)

# Bisection steps for the time before the backbone: to 2⁻²⁰ of what all encoding takes.
_BISECTIONS = 20
# Pipelines whose kernels are placed in one search, cached ones not counted, and splits compared.
PLACEMENTS = 400
SPLITS = 4000
# Searches begun anew from the best split with a few microbatches dealt anew.
_ROUNDS = 12
_DEALT_ANEW = 3
# Up to this many splits all are tried.
_ALL_SPLITS = 512

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


def run_pipeline(
    problem: Problem, pipeline: int, members: Members, before_s: float | None = None
) -> PipelineRun:
    """Place a pipeline's kernels: forwards as late as they may, or from −`before_s` on as early as
    they can; then backwards, as early as they can in what is left."""
    block = pipeline // problem.slices
    gaps = problem.gaps[block]
    chosen = np.array(members, np.int64)
    if before_s is None:
        late, _, _ = place(
            problem.reversed_forward,
            problem.reversed_gaps[block],
            np.ascontiguousarray(-problem.need_s[chosen][::-1]),
            np.inf,
            True,
        )
        forward_s = -(late[::-1, ::-1] + problem.forward.seconds)
    else:
        releases = np.full(chosen.size, -before_s)
        forward_s, _, _ = place(problem.forward, gaps, releases, np.inf, False)
    backward_s = np.empty((chosen.size, problem.backward.seconds.size))
    last_s = 0.0
    if backward_s.size:
        left = gaps_without(gaps, problem.forward, np.ascontiguousarray(forward_s))
        backward_s, _, _ = place(
            problem.backward, _for_backward(left), problem.gradient_s[chosen], np.inf, True
        )
        last_s = float((backward_s + problem.backward.seconds).max())
    peak_bytes = _peak_bytes(problem, forward_s, backward_s)
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


def _peak_bytes(
    problem: Problem, forward_s: NDArray[np.float64], backward_s: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Bytes of activations on each hop when most are held, float64[hop]: of a microbatch from its
    first forward kernel there to its last backward kernel, or forward kernel where none follows."""
    hops = problem.kept.size
    peak = np.zeros(hops)
    if not problem.kept.any() or not len(forward_s):
        return peak
    encoders = problem.forward.transfer_s.size
    for hop in range(hops):
        first, last = problem.forward.offsets[[hop * encoders, (hop + 1) * encoders]]
        if first == last:
            continue
        taken = forward_s[:, first]
        freed = forward_s[:, last - 1] + problem.forward.seconds[last - 1]
        back = hops - 1 - hop
        first, last = problem.backward.offsets[[back * encoders, (back + 1) * encoders]]
        if first < last:
            freed = backward_s[:, last - 1] + problem.backward.seconds[last - 1]
        held = np.arange(1, taken.size + 1) - np.searchsorted(np.sort(freed), taken, side="right")
        peak[hop] = held.max() * problem.kept[hop]
    return peak


class SplitSearch:
    """Looks for the split with the least time outside the backbone's step."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.placed = self.compared = 0
        self._known: dict[tuple[int, Members], PipelineRun] = {}

    def best(self) -> Split:
        """Of few splits the best; of many the better of two starts, each improved: the matching
        of the forwards, and equal counts."""
        count, pipelines = self.problem.microbatches, self.problem.pipelines
        if pipelines**count <= _ALL_SPLITS:
            tried = map(self.split, product(range(pipelines), repeat=count))
            best = min(tried, key=lambda split: split.rank)
        else:
            best = self._searched()
        return self._with_early_forwards(best)

    def _searched(self) -> Split:
        count, pipelines = self.problem.microbatches, self.problem.pipelines
        _, matched = least_before(self.problem)
        starts = [self.split(owner) for owner in (matched.tolist(), np.arange(count) % pipelines)]
        best = min(map(self.improved, starts), key=lambda split: split.rank)
        rng = np.random.default_rng(0)
        for _ in range(_ROUNDS):
            if self._is_done(best):
                break
            owner = best.owner
            owner[rng.integers(count, size=_DEALT_ANEW)] = rng.integers(pipelines, size=_DEALT_ANEW)
            tried = self.improved(self.split(owner.tolist()))
            best = min(best, tried, key=lambda split: split.rank)
        return best

    def _is_done(self, split: Split) -> bool:
        """Whether nothing better can be found, or the work allowed is used up."""
        fits = split.excess_bytes == 0 and split.outside_s <= self.problem.floor_s * (1 + 1e-9)
        return fits or self.placed >= PLACEMENTS or self.compared >= SPLITS

    def split(self, owner: Iterable[int]) -> Split:
        """The split in which microbatch j is encoded by pipeline owner[j]."""
        members: list[Members] = [()] * self.problem.pipelines
        for microbatch, pipeline in enumerate(owner):
            members[pipeline] += (microbatch,)
        return Split(runs=tuple(self._run(i, chosen) for i, chosen in enumerate(members)))

    def improved(self, split: Split) -> Split:
        """Take the first change that helps, until none does or the work allowed is used up."""
        changed = True
        rank = split.rank
        while changed and not self._is_done(split):
            changed = False
            for one, other, first, second in self._changes(split):
                runs = list(split.runs)
                runs[one], runs[other] = self._run(one, first), self._run(other, second)
                tried = Split(runs=tuple(runs))
                self.compared += 1
                if tried.rank < rank:
                    split, rank, changed = tried, tried.rank, True
                    break
                if self.placed >= PLACEMENTS or self.compared >= SPLITS:
                    return split
        return split

    def _changes(self, split: Split) -> Iterator[tuple[int, int, Members, Members]]:
        """Moves and swaps out of the pipelines that begin first and end last, to all others, least
        loaded first: (pipeline, other, new members of each)."""
        runs = split.runs
        everyone = range(len(runs))
        before = max(everyone, key=lambda i: runs[i].before_s)
        after = max(everyone, key=lambda i: runs[i].after_s)
        full = max(everyone, key=lambda i: (runs[i].excess_bytes, i == before))
        others = sorted(everyone, key=lambda i: (runs[i].before_s + runs[i].after_s, i))
        empty: set[int] = set()
        for one in dict.fromkeys((full, after, before)):
            mine = runs[one].members
            for other in others:
                if other == one or not mine:
                    continue
                theirs = runs[other].members
                gone = [({j}, empty) for j in mine]
                near = [({j}, {k}) for j in mine for k in theirs if abs(j - k) <= len(runs)]
                for out, back in chain(gone, near):
                    yield (
                        one,
                        other,
                        tuple(sorted(({*mine} - out) | back)),
                        tuple(sorted(({*theirs} - back) | out)),
                    )

    def _with_early_forwards(self, split: Split) -> Split:
        """Where backwards end last, let forwards begin as early as the slowest pipeline's do: they
        leave later bubbles to the backwards."""
        runs = list(split.runs)
        for i, run in enumerate(runs):
            if run.after_s > 0:
                early = run_pipeline(self.problem, i, run.members, split.before_s)
                if early.after_s < run.after_s:
                    runs[i] = early
        tried = Split(runs=tuple(runs))
        return tried if tried.rank[:2] < split.rank[:2] else split

    def _run(self, pipeline: int, members: Members) -> PipelineRun:
        key = pipeline // self.problem.slices, members
        if key not in self._known:
            self.placed += 1
            self._known[key] = run_pipeline(self.problem, pipeline, members)
        return self._known[key]
