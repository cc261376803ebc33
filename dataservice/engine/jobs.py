"""The jobs that the coordinator knows: registered, opened, costed, explained.

Contract. A job is durable before anyone is told of it. It is opened, and the attempt that ran
last with it, when it is first asked for; one that cannot be opened (its index is stale, say)
stays listed and is tried again each time.
"""

import asyncio
import json
import logging
import operator
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from dataservice.core.errors import (
    ConflictError,
    NotFoundError,
    PlanningError,
    QuotaError,
    ServiceError,
    SpecError,
)
from dataservice.core.job import (
    AttemptRecord,
    CostRecord,
    JobRecord,
    QuarantineEntry,
    SkipAction,
    SkipRecord,
)
from dataservice.core.orders import PackReceipt
from dataservice.core.ports import Metrics
from dataservice.core.state_store import StateStore
from dataservice.core.team import NO_TEAM, team_of
from dataservice.engine.api import JobStatus, ReplayedStep, StepExplanation
from dataservice.engine.attempt import Attempt
from dataservice.engine.explain import Explainer
from dataservice.engine.loop import AttemptLoop
from dataservice.engine.setup import CostChange, JobSetup
from dataservice.planning.options import CostModel

log = logging.getLogger(__name__)

ReadJob = Callable[[str, str, str], JobRecord]
"""Validate a job file (YAML text, base directory, its team) into a record under the job's full
name. Raises SpecError."""
SameJob = Callable[[JobRecord, JobRecord], bool]
"""Whether a job file submitted again is that of the stored job: all but its error budgets."""
OpenJob = Callable[[JobRecord], JobSetup]
"""Open a stored job's index. Raises SourceError or IndexStaleError."""


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """A job with its attempts: the one forming, and the one that runs. `checking` looks
    whether the index is current, for all ranks that ask meanwhile."""

    record: JobRecord
    setup: JobSetup | None = None
    forming: Attempt | None = None
    attempt: Attempt | None = None
    loop: AttemptLoop | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)
    checking: asyncio.Task[None] | None = None


MOST_RANGES = 1000
LAST_STEP = 2**53

Restore = Callable[[RunningJob, JobSetup, AttemptRecord], Awaitable[None]]
"""Bring back the attempt that ran last, now that its job is open."""


class JobTable:
    """Every job by name, in `running`; what can be asked of jobs apart from training."""

    def __init__(
        self,
        *,
        store: StateStore,
        read_job: ReadJob,
        open_job: OpenJob,
        restore: Restore,
        metrics: Metrics,
        same_job: SameJob = operator.eq,
    ) -> None:
        self._store = store
        self._same_job = same_job
        self._read_job = read_job
        self._open_job = open_job
        self._restore = restore
        self._metrics = metrics
        self._explainer = Explainer(store)
        self.running: dict[str, RunningJob] = {}
        self._registering: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(self) -> None:
        """Restore every stored job and the attempt that was running."""
        for record in await asyncio.to_thread(self._store.jobs):
            job = self.running[record.name] = RunningJob(record=record)
            try:
                if await asyncio.to_thread(self._store.last_attempt, record.name) is not None:
                    await self.setup(job)
            except ServiceError as error:
                log.error("the job cannot be opened for now: %s", error, extra={"job": record.name})

    def get(self, name: str) -> RunningJob:
        job = self.running.get(name)
        if job is None:
            team = team_of(name)
            known = ", ".join(sorted(n for n in self.running if team_of(n) == team)) or "none"
            raise NotFoundError(
                f"no job {name!r}; registered: {known}. Submit its job file with "
                "`dataservice job submit JOB.yaml`."
            )
        return job

    async def setup(self, job: RunningJob) -> JobSetup:
        """The job, opened, and with it the attempt that ran last. A job that could not be
        opened (its index was stale, say) is tried again each time it is asked for."""
        async with job.opening:
            if job.setup is None:
                opened = await asyncio.to_thread(self._open_job, job.record)
                setup = await asyncio.to_thread(self._with_costs, opened)
                last = await asyncio.to_thread(self._store.last_attempt, job.record.name)
                if last is not None:
                    await self._restore(job, setup, last)
                job.setup = setup
        return job.setup

    async def submit(
        self,
        spec_yaml: str,
        base_directory: str,
        *,
        team: str = NO_TEAM,
        max_jobs: int | None = None,
    ) -> JobStatus:
        """Register a team's job. The same file again changes nothing but is checked again;
        another under its name is refused, and so is one more than `max_jobs`."""
        record = await asyncio.to_thread(self._read_job, spec_yaml, base_directory, team)
        async with self._registering[team]:  # two at a time would pass one quota
            return await self._register(record, max_jobs)

    async def _register(self, record: JobRecord, max_jobs: int | None) -> JobStatus:
        known = self.running.get(record.name)
        if known is not None:
            if not self._same_job(known.record, record):
                raise ConflictError(
                    f"job {record.name!r} is registered with another job file. Delete it with "
                    f"`dataservice job delete {record.name}`, or give this one another name."
                )
            setup = await self.setup(known)
            await asyncio.to_thread(setup.require_current)
            if known.record.spec_json != record.spec_json:
                await self._take_budgets(known, record)
            return await self.status(record.name)
        team = team_of(record.name)
        count = sum(team_of(name) == team for name in self.running)
        if max_jobs is not None and count >= max_jobs:
            raise QuotaError(
                f"team {team!r} has {count} jobs, and may have {max_jobs}. Delete one that is "
                "done with `dataservice job delete JOB`, or ask the operator for a higher "
                "max_jobs."
            )
        setup = await asyncio.to_thread(self._open_job, record)
        await asyncio.to_thread(self._store.put_job, setup.record)
        self.running[record.name] = RunningJob(record=setup.record, setup=setup)
        return await self.status(record.name)

    async def _take_budgets(self, known: RunningJob, record: JobRecord) -> None:
        """The same job under other error budgets, which the next attempt has."""
        record = replace(known.record, spec_json=record.spec_json)
        opened = await asyncio.to_thread(self._open_job, record)
        await asyncio.to_thread(self._store.put_job, record)
        known.record = record
        assert known.setup is not None, "it was opened before"
        known.setup = replace(known.setup, record=record, budgets=opened.budgets)

    async def statuses(self) -> list[JobStatus]:
        """All jobs by name."""
        return [await self.status(name) for name in sorted(self.running)]

    async def status(self, name: str) -> JobStatus:
        """One job and where it stands."""
        job = self.get(name)
        quarantined = await asyncio.to_thread(self._store.quarantined_samples, name)
        skips = await asyncio.to_thread(self._store.skips, name)
        last = job.forming or job.attempt
        return JobStatus(
            record=job.record,
            samples=job.setup.catalog.samples if job.setup is not None else -1,
            attempt=job.attempt.number if job.attempt is not None else 0,
            world_size=job.attempt.topology.world_size if job.attempt is not None else 0,
            planned_step=job.loop.planned_step if job.loop is not None else -1,
            committed_step=job.loop.committed_step if job.loop is not None else -1,
            quarantined=quarantined,
            skips=tuple(skips),
            failure=last.failure if last is not None else "",
        )

    async def drain(self, name: str) -> JobStatus:
        """Refuse new attempts; the one that runs may finish."""
        job = self.get(name)
        record = replace(job.record, state="draining")
        await asyncio.to_thread(self._store.put_job, record)
        job.record = record
        return await self.status(name)

    async def delete(self, name: str) -> None:
        """Forget a job that no trainer is using."""
        job = self.get(name)
        attempts = [a for a in (job.forming, job.attempt) if a is not None and not a.over]
        if clients := [client for attempt in attempts for client in attempt.clients]:
            raise ConflictError(
                f"job {name!r} is in use by {', '.join(clients[:8])}. Stop its trainers, or "
                f"drain it first with `dataservice job drain {name}`."
            )
        if job.loop is not None:
            await job.loop.stop()
        await asyncio.to_thread(self._store.delete_job, name)
        del self.running[name]
        for attempt in (job.forming, job.attempt):  # a rank may have come meanwhile
            if attempt is not None:
                attempt.end(NotFoundError(f"job {name!r} was deleted. Submit it again to train."))
        self._metrics.job_deleted(name)

    async def recost(self, job: str, cost_json: str, from_step: int | None) -> CostRecord:
        """Plan with other coefficients from a step on that no attempt has planned. Durable
        before any step is planned by it, so that a restart plans every step as it was."""
        running = self.get(job)
        cost = cost_model(cost_json)
        await self.setup(running)
        async with running.planning:
            planned = await asyncio.to_thread(self._store.last_planned_step, job)
            record = CostRecord(
                job=job,
                from_step=planned + 1 if from_step is None else from_step,
                cost_json=json.dumps(cost.to_dict(), sort_keys=True),
                cost_version=cost.version,
                recorded_unix_s=time.time(),
            )
            if record.from_step <= planned:
                raise ConflictError(
                    f"step {record.from_step} of job {job!r} was planned already, as was every "
                    f"step up to {planned}. Begin at step {planned + 1} or later, or leave the "
                    "step out."
                )
            await asyncio.to_thread(self._store.put_cost, record)
            assert running.setup is not None, "it was opened above"
            running.setup = await asyncio.to_thread(self._with_costs, running.setup)
            if running.loop is not None:
                running.loop.use(running.setup)
        log.info("cost %s from step %d on", cost.version, record.from_step, extra={"job": job})
        return record

    def _with_costs(self, setup: JobSetup) -> JobSetup:
        """The setup with what the store has on costs that take over."""
        changes = tuple(
            CostChange(from_step=record.from_step, cost=cost_model(record.cost_json))
            for record in self._store.costs(setup.record.name)
        )
        return replace(setup, cost_changes=changes)

    async def quarantine(self, name: str) -> list[QuarantineEntry]:
        """The job's samples that were masked, and why."""
        return await asyncio.to_thread(self._store.quarantine, self.get(name).record.name)

    async def explain(self, job: str, step: int, attempt: int | None) -> StepExplanation:
        """Plan a step of the ledger again, or one that was skipped."""
        setup = await self.setup(self.get(job))
        return await self._explainer.explain(setup, job, step, attempt)

    async def replay(
        self, job: str, first_step: int, last_step: int, attempt: int | None
    ) -> AsyncIterator[ReplayedStep]:
        """Plan the steps of a range again, as far as the ledger goes."""
        running = self.get(job)
        require_ranges([(first_step, last_step)])
        setup = await self.setup(running)
        async for step in self._explainer.replay(setup, job, first_step, last_step, attempt):
            yield step

    async def skip(
        self, job: str, ranges: Sequence[tuple[int, int]], action: SkipAction
    ) -> list[SkipRecord]:
        """Have attempts that are yet to begin pass over these steps, or train them after all."""
        name = self.get(job).record.name
        require_ranges(ranges)
        records = await asyncio.to_thread(self._store.add_skips, name, ranges, action, time.time())
        for record in records:
            log.info(
                "%s steps %d to %d from attempt %d on",
                record.action,
                record.first_step,
                record.last_step,
                record.from_attempt,
                extra={"job": job},
            )
        return records

    async def require_current(self, job: RunningJob, setup: JobSetup) -> None:
        """The first rank of an attempt has the index compared with its sources."""
        if job.forming is not None and not job.forming.over:
            return
        if job.checking is None or job.checking.done():
            job.checking = asyncio.create_task(asyncio.to_thread(setup.require_current))
            # Read the error even if all who wait are gone, or asyncio reports it as lost.
            job.checking.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(job.checking)

    async def note_receipt(self, receipt: PackReceipt) -> None:
        """A worker has decoded a pack: tell the attempt that ordered it."""
        self._metrics.pack_prepared(receipt)
        job = self.running.get(receipt.key.job)
        if job is not None and job.loop is not None:
            await job.loop.note_receipt(receipt)


def require_ranges(ranges: Sequence[tuple[int, int]]) -> None:
    """Raises SpecError unless each is a range of steps, first and last included."""
    if not 1 <= len(ranges) <= MOST_RANGES:
        raise SpecError(f"{len(ranges)} ranges of steps were given; give 1 to {MOST_RANGES}.")
    for first, last in ranges:
        if not 0 <= first <= last <= LAST_STEP:
            raise SpecError(
                f"{first}-{last} is no range of steps: the first must be at least 0, and the last "
                f"from it to {LAST_STEP}. Name both ends, as 1200-1210."
            )


def cost_model(cost_json: str) -> CostModel:
    """Coefficients from JSON. Raises SpecError, PlanningError."""
    try:
        return CostModel.from_dict(json.loads(cost_json))
    except PlanningError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SpecError(
            f"the cost is no JSON object of coefficients by phase: {error}. Send what "
            "`dataservice calibrate` wrote."
        ) from error
