"""What a job file stands for is registered: a job, and its validation where the file has one.

Contract. Everything is opened and judged before anything is stored, and all is stored together: a
file of which one job is refused changes nothing. A job is durable before anyone is told of it.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from dataservice.core.errors import ConflictError, NotFoundError, QuotaError, ServiceError
from dataservice.core.job import JobRecord
from dataservice.core.job_setup import JobSetup
from dataservice.core.state_store import StateStore
from dataservice.core.team import team_of
from dataservice.core.validation import validated_by
from dataservice.engine.fair_threads import FairThreads
from dataservice.engine.opening import Openings
from dataservice.engine.planner import check_fits
from dataservice.engine.running_job import RunningJob
from dataservice.engine.spec_changes import SpecChange, in_words, spec_changes
from dataservice.engine.threads import in_store
from dataservice.engine.versions import MOST_VERSIONS, ReadCost, other_data, revised, with_changes

log = logging.getLogger(__name__)

OpenJob = Callable[[JobRecord], JobSetup]
"""Open a stored job's index. Raises SourceError where it cannot be read, IndexStaleError where it
no longer describes its sources."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What becomes of one job once it is stored: a new job, the next version of the one that is
    `known`, or, with `anew`, another job in its place. Where sources were added, `older` has the
    versions in use over the new catalog."""

    setup: JobSetup
    known: RunningJob | None = None
    anew: bool = False
    older: Mapping[int, JobSetup] = field(default_factory=dict)
    changes: Sequence[SpecChange] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """Registers records among the jobs that are `running`, for one submission of a team at a
    time. `setup` opens a job that is known."""

    running: dict[str, RunningJob]
    store: StateStore
    openings: Openings
    open_job: OpenJob
    setup: Callable[[RunningJob], Awaitable[JobSetup]]
    planners: FairThreads
    read_cost: ReadCost

    async def submit(self, records: Sequence[JobRecord], max_jobs: int | None) -> list[JobRecord]:
        """Register these records of one team, all of them or none. Returns those of jobs that were
        draining and take new attempts again. Raises ConflictError where a job's samples are others
        than before, QuotaError where there would be more than `max_jobs`, and the error of a job
        that cannot be opened."""
        self._require_quota(records, max_jobs)
        async with AsyncExitStack() as held:
            made = []
            for record in records:
                with _told_of(record):
                    made.append(await self._judged(record, held))
            changes = []  # what takes long is behind us: planning may wait from here on
            for change in filter(None, made):
                with _told_of(change.setup.record):
                    changes.append(await self._grown(change, held))
            if changes:
                await in_store(
                    self.store.put_job,
                    *(change.setup.record for change in changes),
                    forget=[change.setup.record.name for change in changes if change.anew],
                )
            drained = [change.setup.record for change in changes if _drained(change.known)]
            for change in changes:
                self._take(change)
        for record in drained:
            log.info("takes new attempts again", extra={"job": record.name})
        for change in changes:
            await self._note_version(change)
        return drained

    def _require_quota(self, records: Sequence[JobRecord], max_jobs: int | None) -> None:
        """Raises QuotaError where the new ones among these are more than the team may have."""
        team = team_of(records[0].name)
        new = [record for record in records if record.name not in self.running]
        count = sum(team_of(name) == team for name in self.running)
        if max_jobs is None or not new or count + len(new) <= max_jobs:
            return
        wants = "" if len(new) == 1 else f", this file is {len(new)} with its validation"
        raise QuotaError(
            f"team {team!r} has {count} jobs{wants}, and may have {max_jobs}. Delete one that is "
            "done with `dataservice job delete JOB`, or ask the operator for a higher max_jobs."
        )

    async def _judged(self, record: JobRecord, held: AsyncExitStack) -> Change | None:
        """What would become of the job; None where it stays as it is. What it must not change
        meanwhile is held."""
        team, known = team_of(record.name), self.running.get(record.name)
        if known is None:
            return Change(setup=await self.openings.run(team, self.open_job, record))
        if known.record.spec_json == record.spec_json:
            drained = _drained(known)
            if drained:
                await held.enter_async_context(known.changing)
            setup = await self.setup(known)
            await self.openings.run(team, setup.require_current)
            if not drained:
                return None
            active = replace(known.record, state="active")
            return Change(setup=replace(setup, record=active), known=known)
        await held.enter_async_context(known.changing)
        return await self._next_version(known, record, held)

    async def _next_version(
        self, known: RunningJob, submitted: JobRecord, held: AsyncExitStack
    ) -> Change:
        """Another job file over the same samples in the same order, or with more sources that wait
        behind them, as the next version. Raises ConflictError where its samples are others."""
        team = team_of(submitted.name)
        record = replace(
            known.record,
            spec_json=submitted.spec_json,
            state="active",
            spec_version=known.record.spec_version + 1,
        )
        if known.record.spec_version >= MOST_VERSIONS:
            raise QuotaError(
                f"job {known.record.name!r} has {MOST_VERSIONS} versions of its job file, and no "
                "more are kept. Submit the file under another name, as a run from the beginning."
            )
        changes = spec_changes(known.record.spec_json, submitted.spec_json)
        if any(change.of_data for change in changes):
            opened = await self.openings.run(team, self.open_job, submitted)
            order = known.record.order
            if order != opened.order and order not in opened.earlier_orders:
                await held.enter_async_context(known.beginning)
                if await self._may_begin_anew(known):
                    return Change(setup=opened, known=known, anew=True)
                raise ConflictError(other_data(known.record, submitted, changes))
            record = replace(
                record, order=opened.order, index_fingerprint=opened.record.index_fingerprint
            )
            revision = replace(opened, record=record)
        else:
            current = await self.setup(known)
            await self.openings.run(team, current.require_current)
            revising = partial(current.revise, current, record)
            revision = await self.planners.run(record.name, revising)
        setup = await in_store(with_changes, revision, self.store, self.read_cost)
        setup.stream.require_weights()
        return Change(setup=setup, known=known, changes=changes)

    async def _grown(self, change: Change, held: AsyncExitStack) -> Change:
        """The change; where its job has grown, with the versions in use over the newest one's
        catalog, in which the added sources wait, so that a change of the mixture finds them. Until
        it is taken nobody opens or plans the job. Raises QuotaError or PlanningError where an added
        sample is too long for the last attempt."""
        known, newest = change.known, change.setup
        if known is None or change.anew or newest.record.order == known.record.order:
            return change
        await held.enter_async_context(known.opening)
        await held.enter_async_context(known.planning)
        older = {}
        for version in known.setups:
            revising = partial(revised, newest, version, self.store, self.read_cost)
            older[version] = await in_store(revising)
        await self._require_trained(known, newest, older)
        return replace(change, older=older)

    async def _require_trained(
        self, known: RunningJob, newest: JobSetup, older: Mapping[int, JobSetup]
    ) -> None:
        """Raises PlanningError, QuotaError or ConflictError where the last attempt, or one that
        forms, could not train the samples of a source that was added. Every sample may have to be
        looked at."""
        name = known.record.name
        if known.attempt is not None:
            checking = partial(check_fits, newest, known.attempt.topology)
            await self.planners.run(name, checking)
        for attempt in known.attempts:
            if attempt.over or not attempt.connected:
                continue
            # It goes on by its own version, with as much memory as that one says.
            checking = partial(check_fits, older[attempt.spec_version], attempt.topology)
            await self.planners.run(name, checking)
            if newest.loss_weights and not attempt.reads_loss_weights:
                raise ConflictError(
                    f"job {attempt.job!r} would weigh its loss with this file, and trainers of a "
                    f"release that does not are at work ({', '.join(attempt.clients[:8])}). Stop "
                    "them and submit it again, then start them with this release's client."
                )

    async def _may_begin_anew(self, known: RunningJob) -> bool:
        """Whether it is a validation that no pass has begun of: no checkpoint can be of it."""
        name = known.record.name
        if validated_by(name) is None or known.clients:
            return False
        return await in_store(self.store.last_attempt, name) is None

    def _take(self, change: Change) -> None:
        """What is stored now, in memory."""
        record, known = change.setup.record, change.known
        if known is not None and not change.anew:
            # Threads that plan steps again look at both: the setups come first.
            known.setups = {**known.setups, **change.older, record.spec_version: change.setup}
            known.record = record
            if change.older and known.loop is not None and known.attempt is not None:
                known.loop.use(known.setups[known.attempt.spec_version])
            return
        self.running[record.name] = RunningJob(
            record=record, setups={record.spec_version: change.setup}, restored=True
        )
        if known is not None:
            known.forget(
                NotFoundError(f"job {record.name!r} has other sources now. Begin the pass again.")
            )

    async def _note_version(self, change: Change) -> None:
        if change.known is None or change.anew or not change.changes:
            return
        # The last attempt may not have been restored for want of data.
        await self.setup(change.known)
        record = change.setup.record
        words = in_words(change.changes)
        log.info("version %d: %s", record.spec_version, words, extra={"job": record.name})


def _drained(known: RunningJob | None) -> bool:
    return known is not None and known.record.state == "draining"


@contextmanager
def _told_of(record: JobRecord) -> Iterator[None]:
    """Errors say that they are about the validation, where the job is one."""
    try:
        yield
    except ServiceError as error:
        trained = validated_by(record.name)
        if trained is None:
            raise
        plain = trained.rpartition("/")[2]
        raise type(error)(f"the validation of job {plain!r}: {error}") from error
