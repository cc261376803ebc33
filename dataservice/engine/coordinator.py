"""The coordinator: attempts of jobs, and who is in which.

Contract. Attempts are durable before anyone is told of them. A rank opens a session
and waits until its attempt is complete; a newer complete attempt fences the older one, whose
ranks get FencedError. After a restart of the coordinator the last attempt of each job is
restored complete, and its ranks rejoin it one by one where they were.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    ConflictError,
    FencedError,
    NotFoundError,
    ServiceError,
)
from dataservice.core.job import AttemptRecord, CostRecord, QuarantineEntry
from dataservice.core.orders import EVERYTHING, RankShard, WantedParts
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Metrics, NoMetrics, StateStore, WorkerLink, WorkerPool
from dataservice.core.topology import Topology
from dataservice.engine.api import EndOfData, JobStatus, SessionOpened, StepExplanation
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.jobs import JobTable, OpenJob, ReadJob, RunningJob
from dataservice.engine.loop import AttemptLoop
from dataservice.engine.planner import check_fits, in_order
from dataservice.engine.setup import JobSetup

log = logging.getLogger(__name__)


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
        self._secret = ticket_secret
        self._attempt_timeout_s = attempt_timeout_s
        self._metrics = metrics or NoMetrics()
        self._table = JobTable(
            store=store,
            read_job=read_job,
            open_job=open_job,
            restore=self._restore,
            metrics=self._metrics,
        )
        self._dispatcher = Dispatcher(
            pool, link, on_receipt=self._table.note_receipt, metrics=self._metrics
        )
        self._sessions: dict[str, Session] = {}

    async def start(self) -> None:
        """Restore every stored job and the attempt that was running."""
        await self._table.start()

    async def stop(self) -> None:
        """Stop every loop; the store keeps all that is needed to go on."""
        for job in self._table.running.values():
            if job.loop is not None:
                await job.loop.stop()

    # ---- jobs: the table answers ----------------------------------------------------------

    async def submit(self, spec_yaml: str, base_directory: str) -> JobStatus:
        """Register a job; the same file again changes nothing but is checked again."""
        return await self._table.submit(spec_yaml, base_directory)

    async def jobs(self) -> list[JobStatus]:
        """All jobs by name."""
        return await self._table.statuses()

    async def job(self, name: str) -> JobStatus:
        """One job and where it stands."""
        return await self._table.status(name)

    async def drain(self, name: str) -> JobStatus:
        """Refuse new attempts; the one that runs may finish."""
        return await self._table.drain(name)

    async def delete(self, name: str) -> None:
        """Forget a job that no trainer is using."""
        await self._table.delete(name)

    async def recost(self, job: str, cost_json: str, from_step: int | None) -> CostRecord:
        """Plan by another cost model from a step on that is not planned yet."""
        return await self._table.recost(job, cost_json, from_step)

    async def quarantine(self, name: str) -> list[QuarantineEntry]:
        """The job's samples that were masked, and why."""
        return await self._table.quarantine(name)

    async def explain(self, job: str, step: int, attempt: int | None) -> StepExplanation:
        """Plan a step of the ledger again."""
        return await self._table.explain(job, step, attempt)

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
        running = self._table.get(job)
        setup = await self._table.setup(running)
        topology = setup.topology(world_size)
        topology.replica_of(rank)
        if rejoin_attempt:
            return self._rejoin(running, rank, world_size, client, rejoin_attempt)
        cursor = in_order(cursor, setup)
        await asyncio.to_thread(check_fits, setup, topology)
        await self._table.require_current(running, setup)
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
