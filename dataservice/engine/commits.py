"""What the ranks of one attempt have trained, and in how many seconds.

A step is committed once every rank has trained it; its seconds are those of the slowest, and those
of its phases the mean of the ranks, which is what its plan predicts.
"""

import asyncio
from collections.abc import Mapping
from functools import partial

from dataservice.core.ports import Metrics
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.records import AttemptRecords
from dataservice.engine.skips import Skips
from dataservice.engine.tasks import SharedWork
from dataservice.engine.threads import in_store

SHOWN_AT_ONCE = 512  # ranks, in a millisecond


class Commits:
    """`through_step` is the last step that every rank has trained."""

    def __init__(
        self, attempt: Attempt, *, records: AttemptRecords, metrics: Metrics, skips: Skips
    ) -> None:
        self._attempt = attempt
        self._records = records
        self._metrics = metrics
        self._skips = skips
        self._measured_s: dict[int, list[float]] = {}
        self._phases: dict[int, _Phases] = {}
        self._writing: SharedWork[None] = SharedWork()
        self.through_step = attempt.trained_step

    async def note(
        self,
        claim: Claim,
        step: int,
        measured_s: float | None,
        phase_s: Mapping[str, float] | None,
    ) -> None:
        """A rank has trained a step, and all before it. Records the steps that every rank has
        trained now. Raises StateError where the store cannot be written."""
        told = step <= claim.committed_step  # a commit may come twice, along two ways
        if measured_s is not None and self.through_step < step and not told:
            self._note_seconds(step, measured_s, phase_s or {})
        claim.committed_step = max(claim.committed_step, step)
        done = self._attempt.committed_by_all
        # Ranks that tell of the next step meanwhile wait for the same write: one each would take
        # longer than the step, and the next step's ranks would come while they last.
        while (trained := self._skips.next_trained(self.through_step + 1)) <= done:
            await self._writing.result(trained, partial(self._write, trained))

    async def written(self) -> None:
        """Wait until nothing is being written."""
        while tasks := self._writing.tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0)  # who waited for one may begin the next

    async def _write(self, trained: int) -> None:
        """Every rank has trained this step."""
        measured_s = self._measured_s.pop(trained, [])
        slowest_s = max(measured_s, default=None)
        predicted = await in_store(self._records.trained, trained, slowest_s)
        self.through_step = trained
        self._metrics.step_committed(self._attempt.job)
        for first in range(0, len(measured_s), SHOWN_AT_ONCE):
            shown = measured_s[first : first + SHOWN_AT_ONCE]
            self._metrics.ranks_measured(self._attempt.job, shown)
            await asyncio.sleep(0)  # others have their turn
        phases = self._phases.pop(trained, None)
        if phases is not None:
            self._metrics.step_phases(
                self._attempt.job,
                predicted_s={} if predicted is None else predicted.phase_s,
                measured_s=phases.mean_s,
            )

    def _note_seconds(self, step: int, measured_s: float, phase_s: Mapping[str, float]) -> None:
        self._measured_s.setdefault(step, []).append(measured_s)
        if phase_s:
            self._phases.setdefault(step, _Phases()).add(phase_s)


class _Phases:
    """Sums of the seconds that some ranks report of a step."""

    def __init__(self) -> None:
        self._ranks = 0
        self._total_s: dict[str, float] = {}

    def add(self, phase_s: Mapping[str, float]) -> None:
        """One more rank."""
        self._ranks += 1
        for phase, seconds in phase_s.items():
            self._total_s[phase] = self._total_s.get(phase, 0.0) + seconds

    @property
    def mean_s(self) -> dict[str, float]:
        """The mean of the ranks; a phase that one of them did not name took none of its time."""
        return {phase: seconds / self._ranks for phase, seconds in self._total_s.items()}
