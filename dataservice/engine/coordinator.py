"""The coordinator: sessions of ranks, and what else the service is asked.

Contract. A rank opens a session and waits until its attempt is complete; the session lives as
long as its client's stream. How attempts begin, end and come back is in `attempts.py`, what may
be asked of jobs in `jobs.py`.
"""

import asyncio
import logging
import operator
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    NotFoundError,
)
from dataservice.core.health import RankReport, ServiceHealth
from dataservice.core.job import (
    AttemptRecord,
    CostRecord,
    QuarantineEntry,
    SkipAction,
    SkipRecord,
)
from dataservice.core.orders import EVERYTHING, RankShard, WantedParts
from dataservice.core.plan import StepPlan
from dataservice.core.ports import Metrics, NoMetrics, WorkerLink, WorkerPool
from dataservice.core.state_store import StateStore
from dataservice.core.team import NO_TEAM, TeamSpec
from dataservice.engine.api import (
    EndOfData,
    JobStatus,
    ReplayedStep,
    SessionOpened,
    SkippedSteps,
    StepExplanation,
    WorkerStatus,
)
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.attempts import Attempts
from dataservice.engine.crew import Crew
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.health import Diagnose, HealthView, report_every_s
from dataservice.engine.jobs import JobTable, OpenJob, ReadJob, RunningJob, SameJob
from dataservice.engine.loop import AttemptLoop, LoopPorts
from dataservice.engine.planner import check_fits, in_order
from dataservice.engine.ready_bytes import ReadyBytes
from dataservice.engine.setup import JobSetup
from dataservice.engine.shares import Shares
from dataservice.engine.unfailing import unfailing
from dataservice.engine.vitals import Vitals

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
        idle_release_s: float = 60.0,
        metrics: Metrics | None = None,
        teams: Callable[[], Mapping[str, TeamSpec]] = dict,
        same_job: SameJob = operator.eq,
        diagnose: Diagnose = lambda job, fleet: (),
        wanted_workers: int = 0,
    ) -> None:
        """`teams` gives the limits of the teams as they are now; `wanted_workers` should be
        there; `diagnose` puts in words what can be seen of a job."""
        self._store = store
        self._attempt_timeout_s = attempt_timeout_s
        self._vitals = Vitals(unfailing(metrics or NoMetrics()))
        self._metrics = unfailing(self._vitals)
        self._table = JobTable(
            store=store,
            read_job=read_job,
            open_job=open_job,
            restore=self._restore,
            metrics=self._metrics,
            same_job=same_job,
        )
        self._dispatcher = Dispatcher(
            pool, link, on_receipt=self._table.note_receipt, metrics=self._metrics
        )
        self._ports = LoopPorts(
            store=store,
            dispatcher=self._dispatcher,
            metrics=self._metrics,
            ready_bytes=ReadyBytes(teams),
            shares=Shares(teams=teams, pool=pool),
            idle_release_s=idle_release_s,
            ticket_secret=ticket_secret,
        )
        self._attempts = Attempts(self._ports, self._vitals)
        self._view = HealthView(
            vitals=self._vitals,
            pool=pool,
            dispatcher=self._dispatcher,
            shares=self._ports.shares,
            diagnose=diagnose,
            wanted_workers=wanted_workers,
        )
        self._crew = Crew(pool, self._dispatcher)
        self._sessions: dict[str, Session] = {}

    async def start(self) -> None:
        """Restore every stored job and the attempt that was running."""
        await self._dispatcher.start()
        await self._table.start()

    async def stop(self) -> None:
        """Stop every loop; the store keeps all that is needed to go on. Workers keep what they
        hold: they end with us, or serve it until a successor takes them over."""
        await self._crew.stop()
        self._dispatcher.let_be()
        for job in self._table.running.values():
            if job.loop is not None:
                await job.loop.stop()
        await self._dispatcher.stop()

    # ---- workers --------------------------------------------------------------------------

    async def workers(self) -> list[WorkerStatus]:
        """The workers as they are now."""
        return self._crew.status()

    async def restart_workers(self, workers: Sequence[str]) -> list[str]:
        """Begin to replace these workers, all by default."""
        return self._crew.restart(workers)

    # ---- jobs: the table answers ----------------------------------------------------------

    async def submit(
        self,
        spec_yaml: str,
        base_directory: str,
        *,
        team: str = NO_TEAM,
        max_jobs: int | None = None,
    ) -> JobStatus:
        """Register a team's job; the same file again changes nothing but is checked again."""
        return await self._table.submit(spec_yaml, base_directory, team=team, max_jobs=max_jobs)

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

    def replay(
        self, job: str, first_step: int, last_step: int, attempt: int | None
    ) -> AsyncIterator[ReplayedStep]:
        """Plan the steps of a range again, as far as the ledger goes."""
        return self._table.replay(job, first_step, last_step, attempt)

    async def skip(
        self, job: str, ranges: Sequence[tuple[int, int]], action: SkipAction
    ) -> list[SkipRecord]:
        """Have attempts that are yet to begin pass over these steps, or train them after all."""
        return await self._table.skip(job, ranges, action)

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
            return self._remember(
                running, *self._attempts.rejoin(running, rank, world_size, client, rejoin_attempt)
            )
        cursor = in_order(cursor, setup)
        await asyncio.to_thread(check_fits, setup, topology)
        await self._table.require_current(running, setup)
        attempt = self._attempts.forming(running, rank, client, topology, cursor)
        claim = attempt.join(rank, client, world_size=world_size, cursor=cursor)
        session = self._remember(running, attempt, claim)
        try:
            if attempt.full:
                running.forming = None  # whoever comes now is of the next attempt
                await self._attempts.begin_for_all(running, attempt)
            await attempt.wait_complete(self._attempt_timeout_s)
        except BaseException:
            self.close_session(claim.session)
            raise
        return replace(session, attempt=attempt.number)  # settled once it is durable

    async def session_ended(self, session: str) -> None:
        """Wait until the session's attempt is over; raises why."""
        await self._session(session).attempt.ended()

    def close_session(self, session: str) -> None:
        """The client is gone: its rank is free, and a forming attempt without ranks is over."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        known.claim.live = False
        if (
            known.attempt is known.job.attempt
            and known.attempt.claims.get(known.claim.rank) is known.claim
        ):
            self._vitals.rank_left(known.job.record.name, known.claim.rank)
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
        slow_workers: Sequence[str] = (),
        wanted: WantedParts = EVERYTHING,
    ) -> tuple[RankShard, StepPlan] | SkippedSteps | EndOfData:
        """The session's part of a step."""
        known = self._session(session)
        loop = await self._loop_of(known)
        return await loop.shard(
            known.claim,
            step,
            received_step=received_step,
            failed_workers=failed_workers,
            slow_workers=slow_workers,
            wanted=wanted,
        )

    async def commit(
        self,
        session: str,
        step: int,
        *,
        measured_s: float | None = None,
        phase_s: Mapping[str, float] | None = None,
    ) -> None:
        """The session's rank has trained this step, in so many seconds if it tells, and what
        they went to by phase."""
        known = self._session(session)
        loop = await self._loop_of(known)
        await loop.commit(known.claim, step, measured_s, phase_s)

    # ---- health ---------------------------------------------------------------------------

    async def report(self, session: str, report: RankReport) -> None:
        """The session's rank lives, and has waited so long for data."""
        known = self._session(session)
        if known.attempt is known.job.attempt and known.claim.live:
            self._vitals.reported(known.job.record.name, known.claim.rank, report)

    async def health(self, jobs: Sequence[str], *, team: str | None) -> ServiceHealth:
        """These jobs as they can be seen now, and what is concluded."""
        chosen = [self._table.get(name) for name in jobs]
        return self._view.of(chosen, self._table.running.values(), team=team)

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
        return SessionOpened(
            session=claim.session,
            attempt=attempt.number,
            start=attempt.start,
            report_every_s=report_every_s(attempt.topology.world_size),
        )

    async def _restore(self, job: RunningJob, setup: JobSetup, last: AttemptRecord) -> None:
        await self._attempts.restore(job, setup, last)

    async def _loop_of(self, session: Session) -> AttemptLoop:
        if session.attempt.over:
            await session.attempt.ended()
        loop = session.job.loop
        assert loop is not None, "a session is open only once its attempt's loop exists"
        return loop
