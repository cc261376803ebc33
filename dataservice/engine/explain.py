"""Plan steps again: to show one, to compare a range with the ledger, to see what was skipped."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from dataservice.core.cursor import Cursor
from dataservice.core.errors import NotFoundError
from dataservice.core.job import AttemptRecord, LedgerEntry, SkipRecord
from dataservice.core.state_store import StateStore
from dataservice.engine.api import ReplayedStep, StepExplanation, StepFate
from dataservice.engine.planner import PlannedStep, pass_over, plan_step
from dataservice.engine.setup import JobSetup
from dataservice.engine.skips import Skips


class Explainer:
    """Answers from the ledger of one store; O(log ledger) reads a step."""

    def __init__(self, store: StateStore) -> None:
        self._store = store

    async def explain(
        self, setup: JobSetup, job: str, step: int, attempt: int | None
    ) -> StepExplanation:
        """A step as an attempt planned or skipped it, by default the newest that came to it."""
        return await asyncio.to_thread(self._explain, setup, job, step, attempt)

    async def replay(
        self, setup: JobSetup, job: str, first_step: int, last_step: int, attempt: int | None
    ) -> AsyncIterator[ReplayedStep]:
        """The steps of a range, as far as the ledger goes. Raises NotFoundError where that is
        nowhere."""
        last = min(last_step, await asyncio.to_thread(self._store.last_planned_step, job))
        if last < first_step:
            raise NotFoundError(
                f"no step from {first_step} to {last_step} of job {job!r} has been planned; the "
                f"last planned is {last}. Name a range up to there."
            )
        for step in range(first_step, last + 1):
            yield await asyncio.to_thread(self._replay, setup, job, step, attempt)

    def _explain(
        self, setup: JobSetup, job: str, step: int, attempt: int | None
    ) -> StepExplanation:
        entries = {entry.attempt: entry for entry in self._store.ledger_of_step(job, step)}
        skipped = self._skipped(job, step)
        came = sorted(entries.keys() | skipped.keys())
        number = attempt or (came[-1] if came else 0)
        if number not in came:
            of_attempt = "" if attempt is None else f" in attempt {attempt}"
            raise NotFoundError(
                f"step {step} of job {job!r} has not been planned{of_attempt}. See "
                f"`dataservice job show {job}` for the last planned step."
            )
        entry = entries.get(number)
        if entry is not None:
            planned, world_size = self._planned(setup, entry), entry.world_size
        else:
            record = next(a for a in self._store.attempts(job) if a.attempt == number)
            planned, world_size = self._passed(setup, record, step), record.world_size
        return StepExplanation(
            attempt=number,
            cursor=planned.cursor,
            topology=setup.topology(world_size),
            plan=planned.plan,
            sample_keys=tuple(
                f"{ref.source}/{ref.key}"
                for ref, _ in setup.catalog.details(planned.plan.sample_ids)
            ),
            quarantined=tuple(
                f"{bad.source}/{bad.key}: {bad.reason}"
                for bad in self._store.quarantine_of_step(job, number, step)
            ),
            fates=tuple(_fate(each, entries.get(each)) for each in came),
            entry=entry,
            skipped_by=skipped.get(number) if entry is None else None,
        )

    def _replay(self, setup: JobSetup, job: str, step: int, attempt: int | None) -> ReplayedStep:
        entry = self._store.ledger_entry(job, step, attempt)
        if entry is not None:
            return ReplayedStep(
                step=step,
                attempt=entry.attempt,
                ledger_digest=entry.plan_digest,
                plan_digest=self._planned(setup, entry).plan.digest,
            )
        skipped = self._skipped(job, step)
        if attempt in skipped or (attempt is None and skipped):
            return ReplayedStep(step=step, attempt=attempt or max(skipped), skipped=True)
        raise NotFoundError(
            f"step {step} of job {job!r} is in no ledger"
            + (f" of attempt {attempt}" if attempt else "")
            + ": no attempt began before it and came so far. Name a range behind it."
        )

    def _skipped(self, job: str, step: int) -> dict[int, SkipRecord]:
        """The attempts that skip a step and have come to it, and by which record."""
        records = self._store.skips(job)
        if not any(record.first_step <= step <= record.last_step for record in records):
            return {}
        skipped = {}
        attempts = self._store.attempts(job)
        for attempt in attempts:
            record = Skips(records, attempt=attempt.attempt).record(step)
            if record is not None and self._came_to(attempt, step, attempts):
                skipped[attempt.attempt] = record
        return skipped

    def _came_to(
        self, attempt: AttemptRecord, step: int, attempts: Sequence[AttemptRecord]
    ) -> bool:
        if Cursor.from_json(attempt.start_cursor).step > step:
            return False
        last = self._store.last_entry(attempt.job, attempt.attempt)
        return attempt == attempts[-1] or (last is not None and last.step > step)

    def _planned(self, setup: JobSetup, entry: LedgerEntry) -> PlannedStep:
        topology = setup.topology(entry.world_size)
        planned = plan_step(setup, Cursor.from_json(entry.cursor), topology)
        assert planned is not None, "a step of the ledger is never past the end"
        return planned

    def _passed(self, setup: JobSetup, attempt: AttemptRecord, step: int) -> PlannedStep:
        """A skipped step, from the cursor of the nearest step before it that is known."""
        known = self._store.last_entry(attempt.job, attempt.attempt, before=step)
        nearest = Cursor.from_json(known.cursor if known is not None else attempt.start_cursor)
        cursor = pass_over(setup, nearest, to_step=step)
        topology = setup.topology(attempt.world_size)
        planned = plan_step(setup, cursor, topology) if cursor.step == step else None
        if planned is None:
            raise NotFoundError(f"the data of job {attempt.job!r} ends before step {step}.")
        return planned


def _fate(attempt: int, entry: LedgerEntry | None) -> StepFate:
    if entry is None:
        return StepFate(attempt=attempt, fate="skipped")
    committed = entry.committed_unix_s is not None
    return StepFate(attempt=attempt, fate="committed" if committed else "planned")
