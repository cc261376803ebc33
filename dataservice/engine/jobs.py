"""The jobs that the coordinator knows: registered, opened, costed, explained.

Contract. A job is durable before anyone is told of it. A job, and the attempt of it that ran last,
is opened when it is first asked for; one that cannot be opened (because its index is stale, say)
stays listed, and opening is tried again each time that it is asked for. A change of a job goes on
where whoever asked for it is gone, or the store would hold what the service does not know.
"""

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, replace
from functools import partial

from dataservice.core.errors import (
    ConflictError,
    NotFoundError,
    PlanningError,
    QuotaError,
    ServiceError,
    SpecError,
)
from dataservice.core.job import (
    LAST_STEP,
    MOST_CHANGES,
    AttemptRecord,
    CostRecord,
    JobRecord,
    MixtureChange,
    MixtureRecord,
    QuarantineEntry,
    SkipAction,
    SkipRecord,
)
from dataservice.core.job_setup import JobSetup
from dataservice.core.plan_options import CostModel
from dataservice.core.ports import Metrics
from dataservice.core.receipts import PackReceipts
from dataservice.core.state_store import StateStore
from dataservice.core.team import NO_TEAM, team_of
from dataservice.core.validation import validated_by, validation_of
from dataservice.engine.api import (
    FoundSample,
    JobStatus,
    JobVersion,
    ReplayedStep,
    StepExplanation,
)
from dataservice.engine.explain import Explainer
from dataservice.engine.opening import Openings
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.redecode import Redecoder
from dataservice.engine.registration import OpenJob, Registration
from dataservice.engine.running_job import RunningJob, was_deleted
from dataservice.engine.step_threads import StepThreads
from dataservice.engine.tasks import cancel_all, to_its_end
from dataservice.engine.threads import in_store
from dataservice.engine.versions import (
    SetupOf,
    mixture_changes,
    revised,
    with_changes,
)

log = logging.getLogger(__name__)

ReadJob = Callable[[str, str, str], Sequence[JobRecord]]
"""Validate a job file (YAML text, base directory, its team) into records under full names: of the
job, and of its validation where it has one. Raises SpecError where the file is not valid."""
MOST_RANGES = 1000
MOST_SKIPS = 10_000
"""Ranges that are kept for a job, of all calls: each attempt looks through them as it begins."""
MOST_COSTS = 1000
"""Changes of its costs that are kept for a job."""
QUARANTINE_PAGE = 5000
"""Entries of a quarantine that are read from the store in one turn."""

Restore = Callable[[RunningJob, JobSetup, AttemptRecord], Awaitable[None]]
"""Bring back the attempt that ran last, now that its job is open."""


class JobTable:
    """Every job by name, in `running`, and all requests about jobs but those of training."""

    def __init__(
        self,
        *,
        store: StateStore,
        read_job: ReadJob,
        open_job: OpenJob,
        restore: Restore,
        metrics: Metrics,
        threads: StepThreads,
        openings: Openings,
    ) -> None:
        """`openings` ends with it."""
        self._store = store
        self._read_job = read_job
        self._open_job = open_job
        self._restore = restore
        self._metrics = metrics
        self._planners = threads.planners
        self._explainer = Explainer(store, threads)
        self._openings = openings
        self._restoring: list[asyncio.Task[None]] = []
        self.running: dict[str, RunningJob] = {}
        self._registering: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._registration = Registration(
            running=self.running,
            store=store,
            openings=openings,
            open_job=open_job,
            setup=self.setup,
            planners=threads.planners,
            read_cost=cost_model,
        )

    async def start(self, quiet: Callable[[], Awaitable[None]]) -> None:
        """Know every stored job, and begin to open those that ran, once it is `quiet`. A team's
        slow files delay its own jobs, and no other team's; a job that a rank asks for comes before
        those that wait."""
        ran: dict[str, list[RunningJob]] = defaultdict(list)
        for record in await in_store(self._store.jobs):
            job = self.running[record.name] = RunningJob(record=record)
            if await in_store(self._store.last_attempt, record.name) is not None:
                ran[team_of(record.name)].append(job)
        for team, jobs in ran.items():
            left, most = iter(jobs), self._openings.most_of(team)
            self._restoring += [
                asyncio.create_task(self._restore_each(left, quiet)) for _ in range(most)
            ]

    async def restored(self) -> None:
        """Wait until every job that ran is open, or known to be closed for now."""
        await asyncio.gather(*self._restoring)

    async def stop(self) -> None:
        """Open no job any more."""
        self._openings.close()
        await cancel_all(*self._restoring)

    async def _restore_each(
        self, left: Iterator[RunningJob], quiet: Callable[[], Awaitable[None]]
    ) -> None:
        """Restore jobs of a team as long as some are `left`."""
        await quiet()
        for job in left:
            async with self._openings.gap(job.record.name):
                await self._restored(job)

    async def _restored(self, job: RunningJob) -> None:
        about = {"job": job.record.name}
        try:
            await self.setup(job)
        except ServiceError as error:
            log.error("the job cannot be opened for now: %s", error, extra=about)
        except Exception:  # the jobs behind it are to be opened all the same
            log.exception("the job cannot be opened for now", extra=about)

    def get(self, name: str) -> RunningJob:
        job = self.running.get(name)
        if job is None:
            if (trained := validated_by(name)) in self.running:
                raise NotFoundError(
                    f"job {trained!r} has no validation. Write `validation: {{sources: [...]}}` "
                    "with its held-out sources into the job file, index and submit it again."
                )
            team = team_of(name)
            known = ", ".join(sorted(n for n in self.running if team_of(n) == team)) or "none"
            raise NotFoundError(
                f"no job {name!r}; registered: {known}. Submit its job file with "
                "`dataservice job submit JOB.yaml`."
            )
        return job

    async def setup(self, job: RunningJob) -> JobSetup:
        """The job under the newest version of its file; with it the attempt that ran last is
        restored. Opening that failed is tried again for who asks then."""
        while True:
            if job.restored and job.setup is not None and not job.opening.locked():
                return job.setup
            version = job.record.spec_version
            setup = await job.setting_up.result(version, partial(self._set_up, job))
            if setup.record.spec_version == job.record.spec_version:  # else it changed meanwhile
                return setup

    async def _set_up(self, job: RunningJob) -> JobSetup:
        async with job.opening:
            record = job.record
            setup = job.setups.get(record.spec_version)
            if setup is None:
                opened = await self._openings.run_registered(
                    record.name, partial(self._open_job, record)
                )
                setup = await in_store(with_changes, opened, self._store, cost_model)
            if not job.restored:
                last = await in_store(self._store.last_attempt, record.name)
                if last is not None:
                    older = await in_store(self._under, job, setup, last.spec_version)
                    await self._restore(job, older, last)
                job.restored = True
            job.setups[record.spec_version] = setup
        return setup

    async def setup_for(self, job: RunningJob, launch: str) -> JobSetup:
        """The job as a rank of this launch would begin with it now."""
        newest = await self.setup(job)
        forming = job.forming_of(launch)
        return newest if forming is None else job.setups[forming.spec_version]

    def _under(self, job: RunningJob, newest: JobSetup, version: int) -> JobSetup:
        """The job under a version of its file. Its lock `opening` is held."""
        if version == newest.record.spec_version:
            return newest
        setup = job.setups.get(version)
        if setup is None:
            setup = job.setups[version] = revised(newest, version, self._store, cost_model)
        return setup

    async def _by_attempt(self, job: RunningJob) -> SetupOf:
        """The job as each attempt had it; to be called in threads, which keep nothing in the job:
        it may have other sources, versions and attempts before they are done."""
        opened, name = await self.setup(job), job.record.name
        versions: dict[int, int] = {}
        made: dict[tuple[int, int], JobSetup] = {}

        def setup_of(attempt: int) -> JobSetup:
            if attempt not in versions:
                recorded = self._store.attempts(name)
                versions.update({each.attempt: each.spec_version for each in recorded})
            version, newest = versions[attempt], job.setup or opened
            if (known := job.setups.get(version)) is not None:
                return known
            over = (newest.record.spec_version, version)
            if over not in made:
                made[over] = revised(newest, version, self._store, cost_model)
            return made[over]

        return setup_of

    async def submit(
        self,
        spec_yaml: str,
        base_directory: str,
        *,
        team: str = NO_TEAM,
        max_jobs: int | None = None,
    ) -> JobStatus:
        """Register a team's job, and its validation where the file has one. The same file again
        changes nothing, but its index is checked again; another file over the same samples in the
        same order is the job's next version, for attempts that are yet to begin. One that was
        draining takes new attempts again, as a note says. Raises ConflictError where the samples
        are others, QuotaError where the team has `max_jobs` already."""
        records = await self._openings.run(team, self._read_job, spec_yaml, base_directory, team)

        @to_its_end
        async def register() -> list[JobRecord]:
            async with self._registering[team]:  # two at a time would pass one quota
                return await self._registration.submit(records, max_jobs)

        again = tuple(
            f"{'its validation' if validated_by(record.name) else 'the job'} was draining, and "
            "takes new attempts again"
            for record in await register()
        )
        status = await self.status(records[0].name)
        return replace(status, notes=(*again, *status.notes))

    async def statuses(self) -> list[JobStatus]:
        """All jobs by name, without their mixtures and versions, of which some are long."""
        return [
            replace(await self._status(name), mixture=None)
            for name in sorted(self.running)
            if name in self.running  # else it was deleted meanwhile
        ]

    async def status(self, name: str) -> JobStatus:
        """One job and its progress, with that of its validation."""
        status, held_out = await self._with_versions(name), validation_of(name)
        if held_out not in self.running:
            return status
        return replace(status, validation=await self._with_versions(held_out))

    async def _with_versions(self, name: str) -> JobStatus:
        job = self.get(name)
        versions: tuple[JobVersion, ...] = ()
        if job.record.spec_version > 1:  # to compare them may take long
            comparing = partial(job.history.versions, self._store, name)
            versions = await self._planners.run(name, comparing)
        return replace(await self._status(name), versions=versions)

    def with_validation(self, name: str) -> list[RunningJob]:
        """The job, and its validation where it has one."""
        held_out = self.running.get(validation_of(name))
        return [self.get(name), *([held_out] if held_out is not None else [])]

    async def _status(self, name: str) -> JobStatus:
        job = self.get(name)
        quarantined = await in_store(self._store.quarantined_samples, name)
        skips = await in_store(self._store.skips, name)
        last = job.newest_forming or job.attempt
        mixture = job.setup.mixture if job.setup is not None else None
        if mixture is not None:
            recorded = mixture_changes(await in_store(self._store.mixtures, name)).values()
            mixture = replace(mixture, changes=(*mixture.changes, *recorded))
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
            attempt_version=job.attempt.spec_version if job.attempt is not None else 0,
            notes=job.setup.notes if job.setup is not None else (),
            mixture=mixture,
        )

    @to_its_end
    async def drain(self, name: str) -> JobStatus:
        """Refuse new attempts until the job is submitted again; the one that runs may finish."""
        job = self.get(name)
        async with job.change():
            record = replace(job.record, state="draining")
            await in_store(self._store.put_job, record)
            job.record = record
        return await self.status(name)

    @to_its_end
    async def delete(self, name: str) -> None:
        """Forget a job that no trainer is using, and its validation, once no change of them is on
        its way to the store: it would bring back what is deleted here. Nor does an attempt begin
        meanwhile: nobody would stop its loop."""
        async with self._registering[team_of(name)], AsyncExitStack() as held:
            jobs = self.with_validation(name)
            for job in jobs:
                await held.enter_async_context(job.changing)
                await held.enter_async_context(job.beginning)
            await self._deleted(jobs)

    async def _deleted(self, jobs: Sequence[RunningJob]) -> None:
        for job in jobs:
            if clients := job.clients:
                way = f"drain it first with `dataservice job drain {job.record.name}`"
                if job.record.state == "draining":
                    way = "delete it once they have finished: it is draining, so no others begin"
                raise ConflictError(
                    f"job {job.record.name!r} is in use by {', '.join(clients[:8])}. Stop its "
                    f"trainers, or {way}."
                )
        for job in jobs:
            if job.loop is not None:
                await job.loop.stop()
        try:
            await in_store(self._store.delete_job, *(job.record.name for job in jobs))
        except ServiceError as error:
            for job in jobs:
                if job.attempt is not None:  # ranks that come back to it would wait for its loop
                    job.attempt.end(error)
            raise
        for job in jobs:
            del self.running[job.record.name]
            job.forget(was_deleted(job.record.name))
            self._metrics.job_deleted(job.record.name)

    @to_its_end
    async def recost(self, job: str, cost_json: str, from_step: int | None) -> CostRecord:
        """Plan with other coefficients, from a step on that no attempt has planned. The change is
        durable before any step is planned by it, so that a restart plans every step as before."""
        running = self.get(job)
        cost = cost_model(cost_json)
        if from_step is not None and from_step > LAST_STEP:
            raise SpecError(f"from_step is {from_step}; the last step is {LAST_STEP}.")
        await self.setup(running)
        async with running.change(), running.planning:
            planned = await in_store(self._store.last_planned_step, job)
            record = CostRecord(
                job=job,
                from_step=planned + 1 if from_step is None else from_step,
                cost_json=json.dumps(cost.to_dict(), sort_keys=True),
                cost_version=cost.version,
                recorded_unix_s=time.time(),
                spec_version=running.record.spec_version,
            )
            if record.from_step <= planned:
                raise ConflictError(
                    f"step {record.from_step} of job {job!r} was planned already, as was every "
                    f"step up to {planned}. Begin at step {planned + 1} or later, or leave the "
                    "step out."
                )
            known = await in_store(self._store.costs, job)
            kept = sum(change.from_step < record.from_step for change in known)
            if kept >= MOST_COSTS:
                raise QuotaError(
                    f"the costs of job {job!r} were changed {kept:,} times, and no more changes "
                    "are kept. Submit the job under another name, with the costs that it has now."
                )
            await in_store(self._store.put_cost, record)
            await self._use_changes(running)
        log.info("cost %s from step %d on", cost.version, record.from_step, extra={"job": job})
        return record

    @to_its_end
    async def change_mixture(
        self, job: str, weights: Mapping[str, float], from_step: int | None
    ) -> MixtureChange:
        """Draw by other weights from a step on; durable before any step is drawn by them. Steps
        that trainers may still ask for stay as they were planned, so an earlier step may be named
        only while no trainer is there."""
        running = self.get(job)
        await self.setup(running)  # which may take long: nothing waits for it yet
        async with running.change(), running.planning:
            setup = await self.setup(running)  # sources may have been added meanwhile
            planned = await in_store(self._store.last_planned_step, job)
            if running.loop is not None and running.attempt is not None:
                planned = running.loop.planned_step  # replays of other attempts go by their ledger
            change = MixtureChange(
                weights=dict(weights), from_step=planned + 1 if from_step is None else from_step
            )
            self._require_unplanned(running, change.from_step or 0, planned)
            known = await in_store(self._store.mixtures, job)
            if len(known) >= MOST_CHANGES:
                raise QuotaError(
                    f"the mixture of job {job!r} was changed {len(known)} times, and no more "
                    "changes are kept. Submit the job under another name, with the weights that "
                    "it has now."
                )
            new = MixtureRecord(
                job=job,
                number=len(known) + 1,
                change_json=json.dumps(asdict(change)),
                recorded_unix_s=time.time(),
            )
            weights_of = mixture_changes([*known, new])
            stream = await self._planners.run(job, partial(setup.stream.changed, weights_of))
            stream.require_weights()
            _require_weights_left(running, weights_of)
            setup.job_limits.check("max_samples", stream.largest_epoch, "samples of an epoch")
            await in_store(self._store.add_mixture, new)
            await self._use_changes(running)
        about = ", ".join(f"{source} {weight:g}" for source, weight in change.weights.items())
        log.info("weights %s from step %d on", about, change.from_step, extra={"job": job})
        return change

    def _require_unplanned(self, running: RunningJob, step: int, planned: int) -> None:
        attempt = running.attempt
        if step > planned or attempt is None or attempt.over or not attempt.connected:
            return
        raise ConflictError(
            f"step {step} of job {running.record.name!r} was planned already, as was every step "
            f"up to {planned}, and trainers are at work ({', '.join(attempt.clients[:8])}). Begin "
            f"at step {planned + 1} or later; or stop them, change the mixture, and start them "
            f"from a checkpoint at step {step} or before."
        )

    async def _use_changes(self, running: RunningJob) -> None:
        """Plan the steps to come with the changes that are on record."""
        for version, setup in list(running.setups.items()):
            changed = await in_store(with_changes, setup, self._store, cost_model)
            running.setups[version] = changed
        if running.loop is not None and running.attempt is not None:
            running.loop.use(running.setups[running.attempt.spec_version])

    async def quarantine(self, name: str, behind: QuarantineEntry | None) -> list[QuarantineEntry]:
        """The next of the job's samples that were masked, and why: few enough that other jobs'
        steps hardly wait for the store."""
        job = self.get(name).record.name
        return await in_store(self._store.quarantine, job, behind=behind, most=QUARANTINE_PAGE)

    async def explain(self, job: str, step: int, attempt: int | None) -> StepExplanation:
        """Plan a step of the ledger again, or one that was skipped."""
        setups = await self._by_attempt(self.get(job))
        return await self._explainer.explain(setups, job, step, attempt)

    async def find_sample(self, job: str, sample_id: int, from_step: int) -> FoundSample:
        """A sample's place, and the steps that it was in."""
        running = self.get(job)
        setups, newest = await self._by_attempt(running), await self.setup(running)
        return await self._explainer.find_sample(setups, newest, sample_id, from_step)

    async def replay(
        self,
        job: str,
        first_step: int,
        last_step: int,
        attempt: int | None,
        redecoder: Redecoder | None = None,
    ) -> AsyncGenerator[ReplayedStep, None]:
        """Plan the steps of a range again, as far as the ledger goes; decode them again too if
        there is a `redecoder`."""
        running = self.get(job)
        require_ranges([(first_step, last_step)])
        setups = await self._by_attempt(running)
        steps = self._explainer.replay(setups, job, first_step, last_step, attempt, redecoder)
        async with aclosing(steps):  # whoever asked may be gone in the middle
            async for step in steps:
                yield step

    async def skip(
        self, job: str, ranges: Sequence[tuple[int, int]], action: SkipAction
    ) -> list[SkipRecord]:
        """Have attempts that are yet to begin pass over these steps, or train them after all.
        Raises QuotaError where that would be more ranges than are kept for a job."""
        running = self.get(job)
        name = running.record.name
        require_ranges(ranges)
        async with running.change():
            known = len(await in_store(self._store.skips, name))
            if known + len(ranges) > MOST_SKIPS:
                raise QuotaError(
                    f"{len(ranges):,} ranges of steps were given, job {job!r} has {known:,}, and "
                    f"{MOST_SKIPS:,} in all are kept. Name few long ones, as 1200-1210; or submit "
                    "the job under another name, which has none yet."
                )
            records = await in_store(self._store.add_skips, name, ranges, action, time.time())
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

    async def require_current(self, job: RunningJob, setup: JobSetup, launch: str) -> None:
        """Compare the index with its sources, once for all ranks of an attempt."""
        if job.forming_of(launch) is not None:
            return
        checking = partial(self._openings.run_registered, job.record.name, setup.require_current)
        await job.checking.result(setup.record.spec_version, checking)

    async def note_receipts(self, step: DispatchedStep, receipts: PackReceipts) -> None:
        """A worker has decoded packs of a step: tell the attempt that ordered them."""
        job = self.running.get(receipts.job)
        if job is None:  # deleted meanwhile, or it was decoded again to be compared
            return
        self._metrics.packs_prepared(receipts)
        if job.loop is not None:
            await job.loop.note_receipts(step, receipts)


def _require_weights_left(job: RunningJob, changes: Mapping[str, MixtureChange]) -> None:
    """Raises SpecError where the trainers at work would be left with no source: an attempt keeps
    the file that it began with, without the changes that a newer one has."""
    attempt = job.attempt
    if attempt is None or attempt.over or not attempt.connected:
        return
    try:
        job.setups[attempt.spec_version].stream.changed(changes).require_weights()
    except SpecError as error:
        raise SpecError(
            f"attempt {attempt.number} trains by version {attempt.spec_version} of the job file, "
            f"and version {job.record.spec_version} holds from the next start on. Until then "
            f"{error} Or start the trainers again first."
        ) from error


def require_ranges(ranges: Sequence[tuple[int, int]]) -> None:
    """Raises SpecError where there are too many ranges, or one is not a range of steps."""
    if not 1 <= len(ranges) <= MOST_RANGES:
        raise SpecError(f"{len(ranges)} ranges of steps were given; give 1 to {MOST_RANGES}.")
    for first, last in ranges:
        if not 0 <= first <= last <= LAST_STEP:
            raise SpecError(
                f"{first}-{last} is no range of steps: the first must be at least 0, and the last "
                f"from it to {LAST_STEP}. Name both ends, as 1200-1210."
            )


def cost_model(cost_json: str) -> CostModel:
    """Coefficients from JSON. Raises SpecError where it is not valid JSON of coefficients,
    PlanningError where a coefficient is impossible."""
    try:
        return CostModel.from_dict(json.loads(cost_json))
    except PlanningError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SpecError(
            f"the cost is no JSON object of coefficients by phase: {error}. Send what "
            "`dataservice calibrate` wrote."
        ) from error
