"""The jobs that the coordinator knows: registered, opened, costed, explained.

Contract. A job is durable before anyone is told of it. A job, and the attempt of it that ran last,
is opened when it is first asked for; one that cannot be opened (because its index is stale, say)
stays listed, and opening is tried again each time that it is asked for.
"""

import asyncio
import json
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
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
from dataservice.core.orders import PackReceipt
from dataservice.core.plan_options import CostModel
from dataservice.core.ports import Metrics
from dataservice.core.state_store import StateStore
from dataservice.core.team import NO_TEAM, team_of
from dataservice.engine.api import (
    FoundSample,
    JobStatus,
    JobVersion,
    ReplayedStep,
    StepExplanation,
)
from dataservice.engine.attempt import Attempt
from dataservice.engine.explain import Explainer
from dataservice.engine.fair_threads import FairThreads
from dataservice.engine.launches import Launches
from dataservice.engine.loop import AttemptLoop
from dataservice.engine.opening import Openings
from dataservice.engine.placement import DispatchedStep
from dataservice.engine.planner import check_fits
from dataservice.engine.redecode import Redecoder
from dataservice.engine.spec_changes import in_words, spec_changes
from dataservice.engine.tasks import cancel_all, detach
from dataservice.engine.threads import in_store
from dataservice.engine.versions import (
    SetupOf,
    job_versions,
    mixture_changes,
    other_data,
    revised,
    with_changes,
)

log = logging.getLogger(__name__)

ReadJob = Callable[[str, str, str], JobRecord]
"""Validate a job file (YAML text, base directory, its team) into a record under the job's full
name. Raises SpecError where the file is not valid."""
OpenJob = Callable[[JobRecord], JobSetup]
"""Open a stored job's index. Raises SourceError where it cannot be read, IndexStaleError where it
no longer describes its sources."""


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """A job with its attempts: those that form, by launch, and the one that runs. `setups` has the
    job under each version of its file that is in use. `checking` checks whether the index is
    current, once for all ranks that ask meanwhile. `deleted` is for ranks that still ask then."""

    record: JobRecord
    setups: dict[int, JobSetup] = field(default_factory=dict)
    forming: dict[str, Attempt] = field(default_factory=dict)
    launches: Launches = field(default_factory=Launches)
    attempt: Attempt | None = None
    loop: AttemptLoop | None = None
    restored: bool = False
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)
    checking: asyncio.Task[None] | None = None
    deleted: bool = False

    @property
    def setup(self) -> JobSetup | None:
        """The job under the newest version of its file, if it is open."""
        return self.setups.get(self.record.spec_version)

    def forming_of(self, launch: str) -> Attempt | None:
        """The attempt that a launch's ranks wait for."""
        attempt = self.forming.get(launch)
        return None if attempt is None or attempt.over else attempt

    @property
    def newest_forming(self) -> Attempt | None:
        """The attempt that began to form last, of those that still form."""
        return next((each for each in reversed(self.forming.values()) if not each.over), None)

    def keep_setups(self, running: int) -> None:
        """Forget the versions that no attempt uses, but for the newest."""
        kept = {running, self.record.spec_version}
        kept.update(each.spec_version for each in self.forming.values())
        self.setups = {v: setup for v, setup in self.setups.items() if v in kept}


MOST_RANGES = 1000

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
        planners: FairThreads,
    ) -> None:
        self._store = store
        self._read_job = read_job
        self._open_job = open_job
        self._restore = restore
        self._metrics = metrics
        self._planners = planners
        self._explainer = Explainer(store, planners)
        self._openings = Openings()
        self._restoring: set[asyncio.Task[None]] = set()
        self.running: dict[str, RunningJob] = {}
        self._registering: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def start(self) -> None:
        """Know every stored job, and begin to open those that ran. A team's slow files delay its
        own jobs, and no other team's."""
        for record in await in_store(self._store.jobs):
            job = self.running[record.name] = RunningJob(record=record)
            if await in_store(self._store.last_attempt, record.name) is not None:
                task = asyncio.create_task(self._restored(job))
                self._restoring.add(task)
                task.add_done_callback(self._restoring.discard)

    async def restored(self) -> None:
        """Wait until every job that ran is open, or known to be closed for now."""
        await asyncio.gather(*self._restoring)

    async def stop(self) -> None:
        """Open no job any more."""
        self._openings.close()
        await cancel_all(*self._restoring)

    async def _restored(self, job: RunningJob) -> None:
        try:
            await self.setup(job)
        except ServiceError as error:
            about = {"job": job.record.name}
            log.error("the job cannot be opened for now: %s", error, extra=about)

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
        """The job under the newest version of its file; with it the attempt that ran last is
        restored. Opening that failed is tried again each time."""
        async with job.opening:
            record = job.record
            setup = job.setups.get(record.spec_version)
            if setup is None:
                opened = await self._openings.run(team_of(record.name), self._open_job, record)
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
        """The job under a version of its file."""
        if version == newest.record.spec_version:
            return newest
        setup = job.setups.get(version)
        if setup is None:
            setup = job.setups[version] = revised(newest, version, self._store, cost_model)
        return setup

    async def _by_attempt(self, job: RunningJob) -> SetupOf:
        """The job as each attempt had it."""
        newest = await self.setup(job)
        attempts = await in_store(self._store.attempts, job.record.name)
        versions = {each.attempt: each.spec_version for each in attempts}
        return lambda attempt: self._under(job, newest, versions[attempt])

    async def submit(
        self,
        spec_yaml: str,
        base_directory: str,
        *,
        team: str = NO_TEAM,
        max_jobs: int | None = None,
    ) -> JobStatus:
        """Register a team's job. The same file again changes nothing, but its index is checked
        again; another file over the same samples in the same order is the job's next version, for
        attempts that are yet to begin. Raises ConflictError where the samples are others,
        QuotaError where the team has `max_jobs` already."""
        record = await self._openings.run(team, self._read_job, spec_yaml, base_directory, team)
        async with self._registering[team]:  # two at a time would pass one quota
            return await self._register(record, max_jobs)

    async def _register(self, record: JobRecord, max_jobs: int | None) -> JobStatus:
        known = self.running.get(record.name)
        if known is not None:
            if known.record.spec_json == record.spec_json:
                setup = await self.setup(known)
                await self._openings.run(team_of(record.name), setup.require_current)
            else:
                await self._take_version(known, record)
            return await self.status(record.name)
        team = team_of(record.name)
        count = sum(team_of(name) == team for name in self.running)
        if max_jobs is not None and count >= max_jobs:
            raise QuotaError(
                f"team {team!r} has {count} jobs, and may have {max_jobs}. Delete one that is "
                "done with `dataservice job delete JOB`, or ask the operator for a higher "
                "max_jobs."
            )
        setup = await self._openings.run(team, self._open_job, record)
        await in_store(self._store.put_job, setup.record)
        self.running[record.name] = RunningJob(
            record=setup.record, setups={setup.record.spec_version: setup}, restored=True
        )
        return await self.status(record.name)

    async def _take_version(self, known: RunningJob, submitted: JobRecord) -> None:
        """Take another job file over the same samples in the same order, or with more sources that
        wait behind them, as the next version. Raises ConflictError where its samples are others,
        QuotaError or PlanningError where an added sample is too long for the last attempt."""
        team = team_of(submitted.name)
        async with known.changing:
            record = replace(
                known.record,
                spec_json=submitted.spec_json,
                spec_version=known.record.spec_version + 1,
            )
            changes = spec_changes(known.record.spec_json, submitted.spec_json)
            if any(change.of_data for change in changes):
                opened = await self._openings.run(team, self._open_job, submitted)
                order = known.record.order
                if order != opened.order and order not in opened.earlier_orders:
                    raise ConflictError(other_data(known.record, submitted, changes))
                if order != opened.order and known.attempt is not None:
                    check_fits(opened, known.attempt.topology)
                    _require_weights_read(opened, known.attempt)
                record = replace(
                    record, order=opened.order, index_fingerprint=opened.record.index_fingerprint
                )
                revision = replace(opened, record=record)
            else:
                current = await self.setup(known)
                await self._openings.run(team, current.require_current)
                revising = partial(current.revise, current, record)
                revision = await self._planners.run(record.name, revising)
            setup = await in_store(with_changes, revision, self._store, cost_model)
            await self._put_version(known, setup)
        await self.setup(known)  # the last attempt may not have been restored for want of data
        log.info(
            "version %d: %s", record.spec_version, in_words(changes), extra={"job": record.name}
        )

    async def _put_version(self, known: RunningJob, newest: JobSetup) -> None:
        """Make a version durable. Where it has grown, attempts that run or form go on over its
        catalog, in which the added sources wait, so that a change of the mixture finds them."""
        record = newest.record
        async with known.opening, known.planning:
            setups = dict(known.setups)
            if record.order != known.record.order:
                for version in setups:
                    older = partial(revised, newest, version, self._store, cost_model)
                    setups[version] = await in_store(older)
            await in_store(self._store.put_job, record)
            known.record, known.setups = record, {**setups, record.spec_version: newest}
            if known.loop is not None and known.attempt is not None:
                known.loop.use(known.setups[known.attempt.spec_version])

    async def statuses(self) -> list[JobStatus]:
        """All jobs by name, without their mixtures, of which some are long."""
        names = sorted(self.running)
        return [replace(await self.status(name), mixture=None) for name in names]

    async def status(self, name: str) -> JobStatus:
        """One job and its progress."""
        job = self.get(name)
        quarantined = await in_store(self._store.quarantined_samples, name)
        skips = await in_store(self._store.skips, name)
        last = job.newest_forming or job.attempt
        mixture = job.setup.mixture if job.setup is not None else None
        if mixture is not None:
            recorded = mixture_changes(await in_store(self._store.mixtures, name)).values()
            mixture = replace(mixture, changes=(*mixture.changes, *recorded))
        versions: tuple[JobVersion, ...] = ()
        if job.record.spec_version > 1:
            versions = await in_store(job_versions, self._store, name)
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
            versions=versions,
            mixture=mixture,
        )

    async def drain(self, name: str) -> JobStatus:
        """Refuse new attempts; the one that runs may finish."""
        job = self.get(name)
        async with job.changing:
            record = replace(job.record, state="draining")
            await in_store(self._store.put_job, record)
            job.record = record
        return await self.status(name)

    async def delete(self, name: str) -> None:
        """Forget a job that no trainer is using."""
        job = self.get(name)
        attempts = [a for a in _attempts_of(job) if not a.over]
        if clients := [client for attempt in attempts for client in attempt.clients]:
            raise ConflictError(
                f"job {name!r} is in use by {', '.join(clients[:8])}. Stop its trainers, or "
                f"drain it first with `dataservice job drain {name}`."
            )
        if job.loop is not None:
            await job.loop.stop()
        await in_store(self._store.delete_job, name)
        del self.running[name]
        job.deleted = True
        for attempt in _attempts_of(job):  # a rank may have come meanwhile
            attempt.end(was_deleted(name))
        self._metrics.job_deleted(name)

    async def recost(self, job: str, cost_json: str, from_step: int | None) -> CostRecord:
        """Plan with other coefficients, from a step on that no attempt has planned. The change is
        durable before any step is planned by it, so that a restart plans every step as before."""
        running = self.get(job)
        cost = cost_model(cost_json)
        await self.setup(running)
        async with running.changing, running.planning:
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
            await in_store(self._store.put_cost, record)
            await self._use_changes(running)
        log.info("cost %s from step %d on", cost.version, record.from_step, extra={"job": job})
        return record

    async def change_mixture(
        self, job: str, weights: Mapping[str, float], from_step: int | None
    ) -> MixtureChange:
        """Draw by other weights from a step on; durable before any step is drawn by them. Steps
        that trainers may still ask for stay as they were planned, so an earlier step may be named
        only while no trainer is there."""
        running = self.get(job)
        setup = await self.setup(running)
        async with running.changing, running.planning:
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
            changing = partial(setup.stream.changed, mixture_changes([*known, new]))
            stream = await self._planners.run(job, changing)
            setup.job_limits.check("max_samples", stream.largest_epoch, "samples of an epoch")
            await in_store(self._store.add_mixture, new)
            await self._use_changes(running)
        about = ", ".join(f"{source} {weight:g}" for source, weight in change.weights.items())
        log.info("weights %s from step %d on", about, change.from_step, extra={"job": job})
        return change

    def _require_unplanned(self, running: RunningJob, step: int, planned: int) -> None:
        attempt = running.attempt
        if step > planned or attempt is None or attempt.over or not attempt.clients:
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

    async def quarantine(self, name: str) -> list[QuarantineEntry]:
        """The job's samples that were masked, and why."""
        return await in_store(self._store.quarantine, self.get(name).record.name)

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
        """Have attempts that are yet to begin pass over these steps, or train them after all."""
        name = self.get(job).record.name
        require_ranges(ranges)
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
        if job.checking is None or job.checking.done():
            job.checking = detach(
                self._openings.run(team_of(job.record.name), setup.require_current)
            )
        await asyncio.shield(job.checking)

    async def note_receipt(self, step: DispatchedStep, receipt: PackReceipt) -> None:
        """A worker has decoded a pack: tell the attempt that ordered it."""
        job = self.running.get(receipt.key.job)
        if job is None:  # deleted meanwhile, or it was decoded again to be compared
            return
        self._metrics.pack_prepared(receipt)
        if job.loop is not None:
            await job.loop.note_receipt(step, receipt)


def _require_weights_read(grown: JobSetup, attempt: Attempt) -> None:
    """Raises ConflictError where ranks at work would train the samples of a source that was added
    without their loss weights."""
    if grown.loss_weights and not attempt.reads_loss_weights and attempt.clients:
        raise ConflictError(
            f"job {attempt.job!r} would weigh its loss with this file, and trainers of a release "
            f"that does not are at work ({', '.join(attempt.clients[:8])}). Stop them and submit "
            "it again, then start them with this release's client."
        )


def was_deleted(name: str) -> NotFoundError:
    """What ranks of a deleted job are told."""
    return NotFoundError(f"job {name!r} was deleted. Submit it again to train.")


def _attempts_of(job: RunningJob) -> list[Attempt]:
    running = [] if job.attempt is None else [job.attempt]
    return [*job.forming.values(), *running]


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
