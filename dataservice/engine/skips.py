"""Which steps an attempt passes over.

Pure. A record holds for the attempts that begin after it was made, so the steps that an attempt
skips are settled when it begins: its plans, its ledger and their replays never change.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from dataservice.core.job import SkipRecord

Run = tuple[int, int, SkipRecord]
"""First step, last step, and the record that says so."""


class Skips:
    """The steps that one attempt skips, as disjoint runs in order."""

    def __init__(self, records: Iterable[SkipRecord] = (), *, attempt: int = 0) -> None:
        """Of a job's `records`, by number; those count that hold for `attempt`. O(n log n)."""
        runs = _runs([record for record in records if record.from_attempt <= attempt])
        self._records = [record for _, _, record in runs]
        self._firsts = [first for first, _, _ in runs]
        self._lasts = [last for _, last, _ in runs]
        sizes = (last - first + 1 for first, last, _ in runs)
        self._skipped = [0, *accumulate(sizes)]  # steps in the runs before each
        self._behind = [last + 1 for last in self._lasts]  # first step that is trained
        for place in range(len(runs) - 2, -1, -1):
            if self._behind[place] == self._firsts[place + 1]:
                self._behind[place] = self._behind[place + 1]

    def record(self, step: int) -> SkipRecord | None:
        """The record by which a step is skipped; None if it is trained. O(log n)."""
        place = self._run_of(step)
        return None if place is None else self._records[place]

    def next_trained(self, step: int) -> int:
        """The first step from this one on that is not skipped. O(log n)."""
        place = self._run_of(step)
        return step if place is None else self._behind[place]

    def trained_between(self, first: int, last: int) -> int:
        """The number of steps from `first` to `last`, both included, that are not skipped. O(log
        n)."""
        if last < first:
            return 0
        return last - first + 1 - (self._skipped_before(last + 1) - self._skipped_before(first))

    def _run_of(self, step: int) -> int | None:
        place = bisect_right(self._firsts, step) - 1
        return place if place >= 0 and step <= self._lasts[place] else None

    def _skipped_before(self, step: int) -> int:
        runs = bisect_left(self._firsts, step)
        beyond = max(0, self._lasts[runs - 1] + 1 - step) if runs else 0
        return self._skipped[runs] - beyond


def _runs(records: Sequence[SkipRecord]) -> list[Run]:
    """What is skipped by records of which later ones count more. Steps between two that any record
    names are alike; the last record takes its own, and each before it what is left."""
    edges = sorted({edge for each in records for edge in (each.first_step, each.last_step + 1)})
    place_of = {edge: place for place, edge in enumerate(edges)}
    taken_by: list[SkipRecord | None] = [None] * len(edges)
    left = list(range(len(edges)))  # from each place, where to look for the next that none has
    for record in reversed(records):
        end, place = place_of[record.last_step + 1], place_of[record.first_step]
        while (place := _find(left, place)) < end:
            taken_by[place], left[place] = record, place + 1
    runs: list[Run] = []
    for first, behind, last in zip(edges, edges[1:], taken_by, strict=False):
        if last is None or last.action != "skip":
            continue
        if runs and runs[-1][2] is last and runs[-1][1] == first - 1:
            runs[-1] = runs[-1][0], behind - 1, last
        else:
            runs.append((first, behind - 1, last))
    return runs


def _find(left: list[int], place: int) -> int:
    while left[place] != place:
        left[place] = left[left[place]]  # halves the way for the next one
        place = left[place]
    return place
