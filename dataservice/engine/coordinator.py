"""The coordinator: jobs, their attempts, and who is in which.

Contract. Jobs and attempts are durable before anyone is told of them. A rank opens a session
and waits until its attempt is complete; a newer complete attempt fences the older one, whose
ranks get FencedError. After a restart of the coordinator the last attempt of each job is
restored complete, and its ranks rejoin it one by one where they were.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    ServiceError,
    SpecError,
)
from dataservice.core.job import AttemptRecord, CostRecord, JobRecord, QuarantineEntry
from dataservice.core.orders import EVERYTHING, PackReceipt, RankShard, WantedParts
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Metrics, NoMetrics, StateStore, WorkerLink, WorkerPool
from dataservice.core.topology import Topology
from dataservice.engine.api import EndOfData, JobStatus, SessionOpened, StepExplanation
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.loop import AttemptLoop
from dataservice.engine.planner import check_fits, in_order, plan_step
from dataservice.engine.setup import CostChange, JobSetup
from dataservice.planning.options import CostModel

log = logging.getLogger(__name__)

ReadJob = Callable[[str, str], JobRecord]
"""Validate a job file (YAML text, base directory) into a record. Raises SpecError."""
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
    planning: asyncio.Lock = field(default_factory=asyncio.Lock)
    checking: asyncio.Task[None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A claim and the attempt it belongs to."""

    job: RunningJob
    attempt: Attempt
    claim: Claim


class Coordinator:
    """Implements `CoordinatorApi` over a store, a worker pool and a link to its workers."""

    def __init__(
        self,
        *,
        store: StateStore,
        pool: WorkerPool,
        link: WorkerLink,
        read_job: ReadJob,
        open_job: OpenJob,
        ticket_secret: bytes,
        attempt_timeout_s: float = 300.0,
        metrics: Metrics | None = None,
    ) -> None:
        self._store = store
        self._read_job = read_job
        self._open_job = open_job
        self._secret = ticket_secret
        self._attempt_timeout_s = attempt_timeout_s
        self._metrics = metrics or NoMetrics()
        self._dispatcher = Dispatcher(
            pool, link, on_receipt=self._note_receipt, metrics=self._metrics
        )
        self._jobs: dict[str, RunningJob] = {}
        self._sessions: dict[str, Session] = {}

    async def start(self) -> None:
        """Restore every stored job and the attempt that was running."""
        for record in await asyncio.to_thread(self._store.jobs):
            job = self._jobs[record.name] = RunningJob(record=record)
            try:
                if await asyncio.to_thread(self._store.last_attempt, record.name) is not None:
                    await self._setup(job)
            except ServiceError as error:
                log.error("the job cannot be opened for now: %s", error, extra={"job": record.name})

    async def stop(self) -> None:
        """Stop every loop; the store keeps all that is needed to go on."""
        for job in self._jobs.values():
            if job.loop is not None:
                await job.loop.stop()

    # ---- jobs -----------------------------------------------------------------------------

    async def submit(self, spec_yaml: str, base_directory: str) -> JobStatus:
        """Register a job. The same file again changes nothing but is checked again; another
        under its name is refused."""
        record = await asyncio.to_thread(self._read_job, spec_yaml, base_directory)
        known = self._jobs.get(record.name)
        if known is not None:
            if known.record.spec_json != record.spec_json:
                raise ConflictError(
                    f"job {record.name!r} is registered with another job file. Delete it with "
                    f"`dataservice job delete {record.name}`, or give this one another name."
                )
            setup = await self._setup(known)
            await asyncio.to_thread(setup.require_current)
            return await self.job(record.name)
        setup = await asyncio.to_thread(self._open_job, record)
        await asyncio.to_thread(self._store.put_job, setup.record)
        self._jobs[record.name] = RunningJob(record=setup.record, setup=setup)
        return await self.job(record.name)

    async def jobs(self) -> list[JobStatus]:
        """All jobs by name."""
        return [await self.job(name) for name in sorted(self._jobs)]

    async def job(self, name: str) -> JobStatus:
        """One job and where it stands."""
        job = self._job(name)
        quarantined = await asyncio.to_thread(self._store.quarantine, name)
        return JobStatus(
            record=job.record,
            samples=job.setup.catalog.samples if job.setup is not None else -1,
            attempt=job.attempt.number if job.attempt is not None else 0,
            world_size=job.attempt.topology.world_size if job.attempt is not None else 0,
            planned_step=job.loop.planned_step if job.loop is not None else -1,
            committed_step=job.loop.committed_step if job.loop is not None else -1,
            quarantined=len({entry.sample_id for entry in quarantined}),
        )

    async def drain(self, name: str) -> JobStatus:
        """Refuse new attempts; the one that runs may finish."""
        job = self._job(name)
        job.record = replace(job.record, state="draining")
        await asyncio.to_thread(self._store.put_job, job.record)
        return await self.job(name)

    async def delete(self, name: str) -> None:
        """Forget a job that no trainer is using."""
        job = self._job(name)
        attempts = [a for a in (job.forming, job.attempt) if a is not None and not a.over]
        if clients := [client for attempt in attempts for client in attempt.clients]:
            raise ConflictError(
                f"job {name!r} is in use by {', '.join(clients[:8])}. Stop its trainers, or "
                f"drain it first with `dataservice job drain {name}`."
            )
        if job.loop is not None:
            await job.loop.stop()
        await asyncio.to_thread(self._store.delete_job, name)
        del self._jobs[name]
        self._metrics.job_deleted(name)

    async def recost(self, job: str, cost_json: str, from_step: int | None) -> CostRecord:
        """Plan with other coefficients from a step on that no attempt has planned. Durable
        before any step is planned by it, so that a restart plans every step as it was."""
        running = self._job(job)
        cost = cost_model(cost_json)
        await self._setup(running)
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

    async def quarantine(self, name: str) -> list[QuarantineEntry]:
        """The job's samples that were masked, and why."""
        return await asyncio.to_thread(self._store.quarantine, self._job(name).record.name)

    async def explain(self, job: str, step: int, attempt: int | None) -> StepExplanation:
        """Plan a step of the ledger again."""
        setup = await self._setup(self._job(job))
        entry = await asyncio.to_thread(self._store.ledger_entry, job, step, attempt)
        if entry is None:
            of_attempt = "" if attempt is None else f" in attempt {attempt}"
            raise NotFoundError(
                f"step {step} of job {job!r} has not been planned{of_attempt}. See "
                f"`dataservice job show {job}` for the last planned step."
            )
        topology = setup.topology(entry.world_size)
        planned = await asyncio.to_thread(
            plan_step, setup, Cursor.from_json(entry.cursor), topology
        )
        assert planned is not None, "a step of the ledger is never past the end"
        details = await asyncio.to_thread(setup.catalog.details, planned.plan.sample_ids)
        bad = await asyncio.to_thread(self._store.quarantine, job)
        return StepExplanation(
            entry=entry,
            plan=planned.plan,
            sample_keys=tuple(f"{ref.source}/{ref.key}" for ref, _ in details),
            quarantined=tuple(
                f"{e.source}/{e.key}: {e.reason}"
                for e in bad
                if (e.attempt, e.step) == (entry.attempt, step)
            ),
        )

    # ---- sessions -------------------------------------------------------------------------

    async def open_session(
        self,
        *,
        job: str,
        rank: int,
        world_size: int,
        cursor: Cursor,
        client: str,
        rejoin_attempt: int,
    ) -> SessionOpened:
        """Claim a rank; returns once every rank of the attempt has opened."""
        running = self._job(job)
        setup = await self._setup(running)
        topology = setup.topology(world_size)
        topology.replica_of(rank)
        if rejoin_attempt:
            return self._rejoin(running, rank, world_size, client, rejoin_attempt)
        cursor = in_order(cursor, setup)
        await asyncio.to_thread(check_fits, setup, topology)
        await self._require_current(running, setup)
        attempt = self._forming_attempt(running, rank, client, topology, cursor)
        claim = attempt.join(rank, client, world_size=world_size, cursor=cursor)
        session = self._remember(running, attempt, claim)
        try:
            if attempt.full:
                await self._begin(running, attempt)
            await attempt.wait_complete(self._attempt_timeout_s)
        except BaseException:
            self.close_session(claim.session)
            raise
        return session

    async def session_ended(self, session: str) -> None:
        """Wait until the session's attempt is over; raises why."""
        await self._session(session).attempt.ended()

    def close_session(self, session: str) -> None:
        """The client is gone: its rank is free, and a forming attempt without ranks is over."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        known.claim.live = False
        if known.job.forming is known.attempt:
            known.attempt.claims.pop(known.claim.rank, None)
            if not known.attempt.claims:
                known.job.forming = None

    async def shard(
        self,
        session: str,
        step: int,
        *,
        received_step: int,
        failed_workers: Sequence[str],
        wanted: WantedParts = EVERYTHING,
    ) -> tuple[RankShard, StepPlan] | EndOfData:
        """The session's part of a step."""
        known = self._session(session)
        loop = await self._loop_of(known)
        return await loop.shard(
            known.claim,
            step,
            received_step=received_step,
            failed_workers=failed_workers,
            wanted=wanted,
        )

    async def commit(self, session: str, step: int, *, measured_s: float | None = None) -> None:
        """The session's rank has trained this step, in so many seconds if it tells."""
        known = self._session(session)
        loop = await self._loop_of(known)
        await loop.commit(known.claim, step, measured_s)

    # ---- inside ---------------------------------------------------------------------------

    def _job(self, name: str) -> RunningJob:
        job = self._jobs.get(name)
        if job is None:
            known = ", ".join(sorted(self._jobs)) or "none"
            raise NotFoundError(
                f"no job {name!r}; registered: {known}. Submit its job file with "
                "`dataservice job submit JOB.yaml`."
            )
        return job

    async def _setup(self, job: RunningJob) -> JobSetup:
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

    def _with_costs(self, setup: JobSetup) -> JobSetup:
        """The setup with what the store has on costs that take over."""
        changes = tuple(
            CostChange(from_step=record.from_step, cost=cost_model(record.cost_json))
            for record in self._store.costs(setup.record.name)
        )
        return replace(setup, cost_changes=changes)

    async def _require_current(self, job: RunningJob, setup: JobSetup) -> None:
        """The first rank of an attempt has the index compared with its sources."""
        if job.forming is not None and not job.forming.over:
            return
        if job.checking is None or job.checking.done():
            job.checking = asyncio.create_task(asyncio.to_thread(setup.require_current))
            # Read the error even if all who wait are gone, or asyncio reports it as lost.
            job.checking.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(job.checking)

    def _session(self, session: str) -> Session:
        known = self._sessions.get(session)
        if known is None:
            raise NotFoundError(
                "no such session: the coordinator restarted, or its stream has closed. Open it "
                "again with the attempt it belonged to."
            )
        return known

    def _remember(self, job: RunningJob, attempt: Attempt, claim: Claim) -> SessionOpened:
        self._sessions[claim.session] = Session(job=job, attempt=attempt, claim=claim)
        return SessionOpened(session=claim.session, attempt=attempt.number, start=attempt.start)

    def _forming_attempt(
        self, job: RunningJob, rank: int, client: str, topology: Topology, cursor: Cursor
    ) -> Attempt:
        if job.record.state == "draining":
            raise ConflictError(
                f"job {job.record.name!r} is draining and takes no new attempt. Submit it under "
                "another name to train again."
            )
        if job.attempt is not None and not job.attempt.over:
            job.attempt.refuse_if_claimed(rank, client)
        if job.forming is None or job.forming.over:
            number = job.attempt.number + 1 if job.attempt is not None else 1
            job.forming = Attempt(
                job=job.record.name, number=number, topology=topology, start=cursor
            )
        return job.forming

    async def _begin(self, job: RunningJob, attempt: Attempt) -> None:
        """All ranks are here: make the attempt durable, fence the older, start its loop."""
        record = AttemptRecord(
            job=attempt.job,
            attempt=attempt.number,
            world_size=attempt.topology.world_size,
            start_cursor=attempt.start.to_json(),
            opened_unix_s=time.time(),
        )
        try:
            await asyncio.to_thread(self._store.put_attempt, record)
        except ServiceError as error:
            raise attempt.end(error) from error
        log.info(
            "attempt opened by %d ranks at step %d",
            attempt.topology.world_size,
            attempt.start.step,
            extra=attempt.about,
        )
        older, old_loop = job.attempt, job.loop
        job.attempt, job.forming = attempt, None
        assert job.setup is not None, "an attempt forms only for a job that is open"
        job.loop = self._make_loop(job, job.setup, attempt)
        if older is not None:
            log.info("fenced by attempt %d", attempt.number, extra=older.about)
            older.end(
                FencedError(
                    f"attempt {older.number} of job {attempt.job!r} was replaced by attempt "
                    f"{attempt.number}. Only the newest start of a job may train; stop this one."
                )
            )
        if old_loop is not None:
            await old_loop.stop()
        job.loop.start(attempt.start)
        attempt.complete_now()

    async def _restore(self, job: RunningJob, setup: JobSetup, last: AttemptRecord) -> None:
        attempt = Attempt(
            job=job.record.name,
            number=last.attempt,
            topology=setup.topology(last.world_size),
            start=Cursor.from_json(last.start_cursor),
        )
        attempt.complete_now()
        ledger = await asyncio.to_thread(self._store.ledger, job.record.name)
        entries = [entry for entry in ledger if entry.attempt == last.attempt]
        cursor = Cursor.from_json(entries[-1].cursor) if entries else attempt.start
        job.attempt = attempt
        job.loop = self._make_loop(job, setup, attempt)
        committed = [e.step for e in entries if e.committed_unix_s is not None]
        job.loop.start(cursor, committed_step=max(committed, default=None))

    def _make_loop(self, job: RunningJob, setup: JobSetup, attempt: Attempt) -> AttemptLoop:
        return AttemptLoop(
            setup,
            attempt,
            store=self._store,
            dispatcher=self._dispatcher,
            metrics=self._metrics,
            ticket_secret=self._secret,
            planning=job.planning,
        )

    def _rejoin(
        self, job: RunningJob, rank: int, world_size: int, client: str, number: int
    ) -> SessionOpened:
        attempt = job.attempt
        if attempt is None or attempt.number != number or attempt.over:
            newest = 0 if attempt is None else attempt.number
            raise FencedError(
                f"{client} comes back to attempt {number} of job {job.record.name!r}, which is "
                f"over; the newest is {newest}. Restart the trainers from their checkpoint."
            )
        if world_size != attempt.topology.world_size:
            raise ConflictError(
                f"attempt {number} has world size {attempt.topology.world_size}, {client} came "
                f"back with {world_size}."
            )
        held = attempt.claims.get(rank)
        if held is not None and held.client != client:
            attempt.refuse_if_claimed(rank, client)
        return self._remember(job, attempt, attempt.claim(rank, client))

    async def _loop_of(self, session: Session) -> AttemptLoop:
        if session.attempt.over:
            await session.attempt.ended()
        loop = session.job.loop
        assert loop is not None, "a session is open only once its attempt's loop exists"
        return loop

    async def _note_receipt(self, receipt: PackReceipt) -> None:
        self._metrics.pack_prepared(receipt)
        if not receipt.bad_samples:
            return
        job = self._jobs.get(receipt.key.job)
        attempt = job.attempt.number if job is not None and job.attempt is not None else 0
        entries = [
            QuarantineEntry(
                job=receipt.key.job,
                attempt=attempt,
                step=receipt.key.step,
                sample_id=bad.sample_id,
                source=bad.source,
                key=bad.key,
                reason=bad.reason,
            )
            for bad in receipt.bad_samples
        ]
        about = {"job": receipt.key.job, "attempt": attempt, "step": receipt.key.step}
        for entry in entries:
            log.warning("quarantined %s/%s: %s", entry.source, entry.key, entry.reason, extra=about)
        await asyncio.to_thread(self._store.add_quarantine, entries)


def cost_model(cost_json: str) -> CostModel:
    """Coefficients from JSON. Raises SpecError, PlanningError."""
    try:
        return CostModel.from_dict(json.loads(cost_json))
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise SpecError(
            f"the cost is no JSON object of coefficients by phase: {error}. Send what "
            "`dataservice calibrate` wrote."
        ) from error
