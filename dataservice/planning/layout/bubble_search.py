"""The split of microbatches over encoder pipelines with the least time outside the backbone's step.

Pipelines lie on devices of their own, so a split is judged by its pipelines one by one, and a
change of two places the kernels of those two alone. Few splits are all tried. Else moves and swaps
out of the pipelines that begin first and end last improve the matching of the forwards, and equal
counts; then the best of both is dealt anew in part and improved again. Work is limited in
placements.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, product

import numpy as np

from dataservice.planning.layout.bubble_split import (
    Members,
    PipelineRun,
    Problem,
    Split,
    least_before,
    run_pipeline,
    run_pipeline_early,
)

# Pipelines whose kernels are placed in one search, cached ones not counted, and splits compared.
PLACEMENTS = 400
SPLITS = 4000
# Searches begun anew from the best split with a few microbatches dealt anew.
_ROUNDS = 12
_DEALT_ANEW = 3
# Up to this many splits all are tried.
_ALL_SPLITS = 512


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
        """The best that is found from both starts, and from what was best with a few dealt anew."""
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
        """Moves and swaps out of the pipelines that hold too much, end last and begin first, to
        all others, least loaded first: (pipeline, other, new members of each)."""
        runs = split.runs
        everyone = range(len(runs))
        before = max(everyone, key=lambda i: runs[i].before_s)
        after = max(everyone, key=lambda i: runs[i].after_s)
        full = max(everyone, key=lambda i: runs[i].excess_bytes)
        others = sorted(everyone, key=lambda i: (runs[i].before_s + runs[i].after_s, i))
        empty: set[int] = set()
        from_whom = (after, before) if split.excess_bytes == 0 else (full, after, before)
        for one in dict.fromkeys(from_whom):
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
                early = run_pipeline_early(self.problem, i, run.members, split.before_s)
                if early is not None and early.after_s < run.after_s:
                    runs[i] = early
        tried = Split(runs=tuple(runs))
        return tried if tried.rank[:2] < split.rank[:2] else split

    def _run(self, pipeline: int, members: Members) -> PipelineRun:
        key = pipeline // self.problem.slices, members
        if key not in self._known:
            self.placed += 1
            self._known[key] = run_pipeline(self.problem, pipeline, members)
        return self._known[key]
