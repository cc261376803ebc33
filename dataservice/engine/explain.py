"""Plan steps again: to show one, to compare a range with the ledger, to see what was skipped.
A range may also be decoded again, to compare what is delivered.

A request takes its team's turn at the planners, behind steps that ranks may wait for; so a team may
make only a few requests at once. What must be read of an index for it is read in other threads, see
`step_threads.py`.
"""

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataservice.core.content import StepContent
from dataservice.core.cursor import Cursor
from dataservice.core.errors import NotFoundError, QuotaError, ServiceError, WorkerLostError
from dataservice.core.job import AttemptRecord, LedgerEntry, SkipRecord
from dataservice.core.job_setup import JobSetup
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Catalog
from dataservice.core.state_store import StateStore
from dataservice.core.team import team_of
from dataservice.engine.api import FoundSample, ReplayedStep, StepExplanation, StepFate
from dataservice.engine.find_sample import find_sample
from dataservice.engine.planner import PlannedStep, drawn_ids, pass_over, plan_step
from dataservice.engine.redecode import Redecoder
from dataservice.engine.skips import Skips
from dataservice.engine.step_threads import StepThreads
from dataservice.engine.threads import in_store
from dataservice.engine.versions import SetupOf

NOTHING_RECORDED = (
    "what it delivered is not in the ledger: not every pack was told to the coordinator, or a "
    "release before this one trained it"
)
MOST_OF_TEAM = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _CameTo:
    """A step as an attempt came to it: the job as it was then, and what is planned from there. It
    has no `entry` where the attempt skipped it; `fates` has those of all attempts."""

    attempt: int
    setup: JobSetup
    cursor: Cursor
    world_size: int
    fates: tuple[StepFate, ...]
    entry: LedgerEntry | None
    skipped_by: SkipRecord | None


class Explainer:
    """Answers from the ledger of one store, by O(log ledger) reads for each step."""

    def __init__(self, store: StateStore, threads: StepThreads) -> None:
        self._store = store
        self._threads = threads
        self._asked: Counter[str] = Counter()

    async def explain(
        self, setups: SetupOf, job: str, step: int, attempt: int | None
    ) -> StepExplanation:
        """A step as an attempt planned or skipped it, by default the newest that came to it."""
        with self._admitted(job):
            finding = partial(self._came, setups, job, step, attempt)
            came = await self._threads.planners.run(job, finding)
            planning = partial(_planned, came.setup, came.cursor, came.world_size)
            planned = await self._threads.plan(came.setup, came.cursor, planning)
            naming = partial(_keys, came.setup.catalog, planned.plan.sample_ids)
            keys = await self._threads.look_up(came.setup, naming)
            return await in_store(self._explained, came, planned, keys)

    async def find_sample(
        self, setups: SetupOf, newest: JobSetup, sample_id: int, from_step: int
    ) -> FoundSample:
        """A sample's place, and the steps that it was in, from a step on. Raises NotFoundError
        where there is no such sample."""
        job, catalog = newest.record.name, newest.catalog
        with self._admitted(job):
            looking = partial(catalog.details, np.array([sample_id]))
            ((ref, _),) = await self._threads.look_up(newest, looking)
            finding = partial(find_sample, self._store, setups, job, ref, from_step)
            return await self._threads.planners.run(job, finding)

    async def replay(
        self,
        setups: SetupOf,
        job: str,
        first_step: int,
        last_step: int,
        attempt: int | None,
        redecoder: Redecoder | None,
    ) -> AsyncGenerator[ReplayedStep, None]:
        """The steps of a range, as far as the ledger goes; those that plan as recorded are
        decoded again if there is a `redecoder`. Raises NotFoundError where none was planned."""
        with self._admitted(job):
            planned = await in_store(self._store.last_planned_step, job)
            if planned < 0:
                raise NotFoundError(
                    f"no step of job {job!r} has been planned. Start its trainers first."
                )
            last = min(last_step, planned)
            if last < first_step:
                raise NotFoundError(
                    f"no step from {first_step} to {last_step} of job {job!r} has been planned; "
                    f"the last planned is {planned}. Name a range up to there."
                )
            for step in range(first_step, last + 1):
                yield await self._replayed(setups, job, step, attempt, redecoder)

    async def _replayed(
        self,
        setups: SetupOf,
        job: str,
        step: int,
        attempt: int | None,
        redecoder: Redecoder | None,
    ) -> ReplayedStep:
        entry = await in_store(self._store.ledger_entry, job, step, attempt)
        if entry is None:
            return await in_store(self._replay_skipped, job, step, attempt)
        setup = await in_store(setups, entry.attempt)
        cursor = Cursor.from_json(entry.cursor)
        planning = partial(_planned, setup, cursor, entry.world_size)
        plan = (await self._threads.plan(setup, cursor, planning)).plan
        replayed = ReplayedStep(
            step=step,
            attempt=entry.attempt,
            ledger_digest=entry.plan_digest,
            plan_digest=plan.digest,
        )
        if redecoder is not None and not replayed.differs:
            return await self._decoded_again(redecoder, setup, entry, plan, replayed)
        return replayed

    async def _decoded_again(
        self,
        redecoder: Redecoder,
        setup: JobSetup,
        entry: LedgerEntry,
        plan: StepPlan,
        replayed: ReplayedStep,
    ) -> ReplayedStep:
        """The step, with the verdict on its content."""
        if not plan.packs:
            return replace(replayed, content="same")
        if entry.content is None:
            return replace(replayed, content="unknown", note=NOTHING_RECORDED)
        orders = await redecoder.orders(setup, plan)
        try:
            delivered = await redecoder.decode(setup, plan, orders)
        except WorkerLostError:
            raise
        except ServiceError as error:
            return replace(replayed, content="differs", note=f"workers refuse it: {error}")
        bad = await in_store(self._store.quarantine_of_step, entry.job, entry.attempt, entry.step)
        recorded = StepContent.from_bytes(entry.content)
        found = delivered.compared(recorded, {each.sample_id for each in bad})
        verdict = "differs" if found.verdict == "masked" else found.verdict
        return replace(replayed, content=verdict, note=found.note, packs=found.packs)

    @contextlib.contextmanager
    def _admitted(self, job: str) -> Iterator[None]:
        """Raises QuotaError where the job's team has too many requests at once."""
        team = team_of(job)
        if self._asked[team] >= MOST_OF_TEAM:
            raise QuotaError(
                f"{self._asked[team]} requests of the team have steps planned again; at most "
                f"{MOST_OF_TEAM} may at once. Wait for one of them to end."
            )
        self._asked[team] += 1
        try:
            yield
        finally:
            self._asked[team] -= 1
            self._asked += Counter()  # forget those that ask for nothing

    def _came(self, setups: SetupOf, job: str, step: int, attempt: int | None) -> _CameTo:
        """The step as that attempt, by default the newest, came to it. Raises NotFoundError where
        none did."""
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
        entry, setup = entries.get(number), setups(number)
        if entry is not None:
            cursor, world_size = Cursor.from_json(entry.cursor), entry.world_size
        else:
            record = next(a for a in self._store.attempts(job) if a.attempt == number)
            cursor, world_size = self._passed(setup, record, step), record.world_size
        return _CameTo(
            attempt=number,
            setup=setup,
            cursor=cursor,
            world_size=world_size,
            fates=tuple(_fate(each, entries.get(each)) for each in came),
            entry=entry,
            skipped_by=skipped.get(number) if entry is None else None,
        )

    def _explained(
        self, came: _CameTo, planned: PlannedStep, keys: tuple[str, ...]
    ) -> StepExplanation:
        job, step = came.setup.record.name, planned.plan.step
        return StepExplanation(
            attempt=came.attempt,
            cursor=planned.cursor,
            topology=came.setup.topology(came.world_size),
            plan=planned.plan,
            sample_keys=keys,
            quarantined=tuple(
                f"{bad.source}/{bad.key}: {bad.reason}"
                for bad in self._store.quarantine_of_step(job, came.attempt, step)
            ),
            fates=came.fates,
            entry=came.entry,
            skipped_by=came.skipped_by,
        )

    def _replay_skipped(self, job: str, step: int, attempt: int | None) -> ReplayedStep:
        skipped = self._skipped(job, step)
        if attempt in skipped or (attempt is None and skipped):
            return ReplayedStep(step=step, attempt=attempt or max(skipped), skipped=True)
        raise NotFoundError(
            f"step {step} of job {job!r} is in no ledger"
            + (f" of attempt {attempt}" if attempt else "")
            + ": no attempt began before it and came so far. Name a range behind it."
        )

    def _skipped(self, job: str, step: int) -> dict[int, SkipRecord]:
        """The attempts that skip a step and have come to it, each with the record it goes by."""
        records = [r for r in self._store.skips(job) if r.first_step <= step <= r.last_step]
        if not records:
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

    def _passed(self, setup: JobSetup, attempt: AttemptRecord, step: int) -> Cursor:
        """The cursor of a skipped step, from that of the nearest step before it that is known.
        Raises NotFoundError where the data end before it."""
        known = self._store.last_entry(attempt.job, attempt.attempt, before=step)
        if known is not None:
            nearest = Cursor.from_json(known.cursor)
        else:  # the place where the attempt began, and the changes that were due by then
            nearest = setup.stream.begin_changes(Cursor.from_json(attempt.start_cursor))
        cursor = pass_over(setup, nearest, to_step=step)
        begun = setup.stream.begin_changes(cursor)
        if cursor.step < step or not len(drawn_ids(setup, begun)):
            raise NotFoundError(f"the data of job {attempt.job!r} ends before step {step}.")
        return begun


def _planned(setup: JobSetup, cursor: Cursor, world_size: int) -> PlannedStep:
    planned = plan_step(setup, cursor, setup.topology(world_size))
    assert planned is not None, "no attempt came to a step past the end"
    return planned


def _keys(catalog: Catalog, sample_ids: NDArray[np.int64]) -> tuple[str, ...]:
    return tuple(f"{ref.source}/{ref.key}" for ref, _ in catalog.details(sample_ids))


def _fate(attempt: int, entry: LedgerEntry | None) -> StepFate:
    if entry is None:
        return StepFate(attempt=attempt, fate="skipped")
    committed = entry.committed_unix_s is not None
    return StepFate(attempt=attempt, fate="committed" if committed else "planned")
