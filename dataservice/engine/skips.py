"""Which steps an attempt passes over.

Pure. A record holds for the attempts that begin after it was made, so the steps that an attempt
skips are settled when it begins: its plans, its ledger and their replays never change.
"""

from bisect import bisect_right
from collections.abc import Iterable

from dataservice.core.job import SkipRecord

Run = tuple[int, int, SkipRecord]
"""First step, last step, and the record that says so."""


class Skips:
    """The steps that one attempt skips, as disjoint runs in order."""

    def __init__(self, records: Iterable[SkipRecord] = (), *, attempt: int = 0) -> None:
        """Of a job's `records`, by number; those count that hold for `attempt`."""
        runs: list[Run] = []
        for record in records:
            if record.from_attempt > attempt:
                continue
            runs = _without(runs, record.first_step, record.last_step)
            if record.action == "skip":
                runs.append((record.first_step, record.last_step, record))
        self._runs = sorted(runs, key=lambda run: run[0])
        self._firsts = [first for first, _, _ in self._runs]

    def record(self, step: int) -> SkipRecord | None:
        """The record by which a step is skipped; None if it is trained."""
        place = bisect_right(self._firsts, step) - 1
        if place < 0 or step > self._runs[place][1]:
            return None
        return self._runs[place][2]

    def next_trained(self, step: int) -> int:
        """The first step from this one on that is not skipped."""
        place = max(0, bisect_right(self._firsts, step) - 1)
        for first, last, _ in self._runs[place:]:
            if step < first:
                break
            step = max(step, last + 1)
        return step

    def trained_between(self, first: int, last: int) -> int:
        """The number of steps from `first` to `last`, both included, that are not skipped."""
        skipped = sum(max(0, min(last, b) - max(first, a) + 1) for a, b, _ in self._runs)
        return max(0, last - first + 1) - skipped


def _without(runs: Iterable[Run], first: int, last: int) -> list[Run]:
    """The runs with these steps cut out."""
    kept: list[Run] = []
    for begins, ends, record in runs:
        if begins < first:
            kept.append((begins, min(ends, first - 1), record))
        if ends > last:
            kept.append((max(begins, last + 1), ends, record))
    return kept
