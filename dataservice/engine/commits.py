"""What the ranks of one attempt have trained, and in how many seconds.

A step is committed once every rank has trained it; its seconds are those of the slowest.
"""

from collections.abc import Mapping

from dataservice.core.ports import Metrics
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.records import AttemptRecords
from dataservice.engine.skips import Skips
from dataservice.engine.threads import in_store


class Commits:
    """`through_step` is the last step that every rank has trained."""

    def __init__(
        self, attempt: Attempt, *, records: AttemptRecords, metrics: Metrics, skips: Skips
    ) -> None:
        self._attempt = attempt
        self._records = records
        self._metrics = metrics
        self._skips = skips
        self._measured_s: dict[int, float] = {}
        self._phase_s: dict[int, dict[str, float]] = {}
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
        if measured_s is not None and self.through_step < step:
            self._note_seconds(step, measured_s, phase_s or {})
        claim.committed_step = max(claim.committed_step, step)
        done = self._attempt.committed_by_all
        trained = self._skips.next_trained(self.through_step + 1)
        while trained <= done:
            slowest_s = self._measured_s.pop(trained, None)
            await in_store(self._records.trained, trained, slowest_s)
            if trained > self.through_step:  # else another rank's commit has been here
                self.through_step = trained
                self._metrics.step_committed(self._attempt.job)
                self._metrics.step_phases(self._attempt.job, self._phase_s.pop(trained, {}))
            trained = self._skips.next_trained(trained + 1)

    def _note_seconds(self, step: int, measured_s: float, phase_s: Mapping[str, float]) -> None:
        self._metrics.rank_measured(self._attempt.job, measured_s)
        self._measured_s[step] = max(measured_s, self._measured_s.get(step, 0.0))
        slowest = self._phase_s.setdefault(step, {})
        for phase, seconds in phase_s.items():
            slowest[phase] = max(seconds, slowest.get(phase, 0.0))
