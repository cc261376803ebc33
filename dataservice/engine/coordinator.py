"""The coordinator: sessions of ranks, and what else the service is asked.

Contract. A rank opens a session and waits until its attempt is complete; the session lives as
long as its client's stream. How attempts begin, end and come back is in `attempts.py`, what may
be asked of jobs in `jobs.py`.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dataservice.core.cursor import Cursor
from dataservice.core.errors import (
    ConflictError,
    NotFoundError,
    SpecError,
)
from dataservice.core.health import RankReport, ServiceHealth
from dataservice.core.index_orders import IndexAnswer
from dataservice.core.job import (
    AttemptRecord,
    CostRecord,
    MixtureChange,
    QuarantineEntry,
    SkipAction,
    SkipRecord,
)
from dataservice.core.job_setup import JobSetup
from dataservice.core.orders import EVERYTHING, RankShard, StepSummary, WantedParts
from dataservice.core.ports import Metrics, NoMetrics, WorkerLink, WorkerPool
from dataservice.core.state_store import StateStore
from dataservice.core.team import NO_TEAM, TeamSpec
from dataservice.core.tickets import holder_key, holder_of
from dataservice.core.topology import Topology
from dataservice.core.whereabouts import ANYWHERE, Whereabouts
from dataservice.engine.api import (
    EndOfData,
    FoundSample,
    JobStatus,
    ReplayedStep,
    SessionOpened,
    SkippedSteps,
    StepExplanation,
    WorkerStatus,
)
from dataservice.engine.attempt import Attempt, Claim
from dataservice.engine.attempts import Attempts
from dataservice.engine.connection_capacity import ConnectionCapacity
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.fair_threads import FairThreads
from dataservice.engine.health import Diagnose, HealthView, report_every_s
from dataservice.engine.index_desk import IndexDesk, ReadSources
from dataservice.engine.job_statistics import JobStatistics
from dataservice.engine.jobs import JobTable, ReadJob
from dataservice.engine.loop import AttemptLoop, LoopPorts
from dataservice.engine.metrics_fan_out import fan_out
from dataservice.engine.opening import Openings
from dataservice.engine.planner import check_fits, find_without_room, in_order
from dataservice.engine.progress import ProgressView
from dataservice.engine.ready_bytes import ReadyBytes
from dataservice.engine.redecode import Redecoder
from dataservice.engine.registration import OpenJob
from dataservice.engine.running_job import RunningJob
from dataservice.engine.shares import Shares
from dataservice.engine.step_threads import StepThreads
from dataservice.engine.tasks import cancel_all
from dataservice.engine.worker_admin import WorkerAdmin

log = logging.getLogger(__name__)

# Jobs that ran are opened again, with no rank waiting, by then at the latest.
RESTORED_WITHIN_S = 20.0
LOOKED_AT_EVERY_S = 15.0  # jobs, for metrics
FETCHING_THREADS = 4  # of which each waits for a process that reads an index


def _none_indexed(spec_yaml: str, base_directory: str, team: str) -> Mapping[str, str]:
    raise SpecError("this service does not index.")


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
        read_sources: ReadSources = _none_indexed,
        ticket_secret: bytes,
        attempt_timeout_s: float = 300.0,
        idle_release_s: float = 60.0,
        metrics: Metrics | None = None,
        teams: Callable[[], Mapping[str, TeamSpec]] = dict,
        diagnose: Diagnose = lambda job, fleet: (),
        wanted_workers: int = 0,
        planning_threads: int = 2,
        opened_at_once: int = 4,
        troubles: Callable[[], tuple[str, ...]] = tuple,
        descriptors: int | None = None,
    ) -> None:
        """`teams` gives the limits of the teams as they are now; `wanted_workers` is the number of
        workers that there should be; `diagnose` puts in words what can be seen of a job;
        `planning_threads` is the number of steps planned at once, `opened_at_once` that of jobs
        opened; `troubles` tells what in the
        service itself does not work; `descriptors` is the number of files and sockets that this
        process may have open."""
        self._store = store
        self._attempt_timeout_s = attempt_timeout_s
        shown = metrics or NoMetrics()
        self._statistics = JobStatistics(fan_out(shown))
        self._metrics = fan_out(self._statistics, shown)
        self._threads = StepThreads(
            planners=FairThreads("planning", threads=planning_threads, teams=teams),
            # They wait for storage, which may be a team's own.
            fetchers=FairThreads(
                "fetching", threads=FETCHING_THREADS, teams=teams, for_all=False, may_hang=True
            ),
        )
        openings = Openings(at_once=opened_at_once, teams=teams)
        self._table = JobTable(
            store=store,
            read_job=read_job,
            open_job=open_job,
            restore=self._restore,
            metrics=self._metrics,
            threads=self._threads,
            openings=openings,
        )
        self._dispatcher = Dispatcher(
            pool, link, on_receipts=self._table.note_receipts, metrics=self._metrics
        )
        self._ports = LoopPorts(
            store=store,
            dispatcher=self._dispatcher,
            metrics=self._metrics,
            ready_bytes=ReadyBytes(teams),
            shares=Shares(teams=teams, pool=pool),
            threads=self._threads,
            idle_release_s=idle_release_s,
            ticket_secret=ticket_secret,
        )
        self._redecoder = Redecoder(self._dispatcher, pool, self._ports.shares, self._threads)
        self._attempts = Attempts(self._ports, self._statistics)
        self._connections = ConnectionCapacity(
            descriptors, pool=pool, jobs=lambda: self._table.running.values()
        )
        self._view = HealthView(
            statistics=self._statistics,
            pool=pool,
            dispatcher=self._dispatcher,
            shares=self._ports.shares,
            ready_bytes=self._ports.ready_bytes,
            diagnose=diagnose,
            wanted_workers=wanted_workers,
            troubles=troubles,
            connections=self._connections,
        )
        self._progress = ProgressView(store)
        self._index_desk = IndexDesk(
            pool=pool,
            link=link,
            read_sources=read_sources,
            shares=self._ports.shares,
            openings=openings,
        )
        self._worker_admin = WorkerAdmin(pool, self._dispatcher)
        self._sessions: dict[str, Session] = {}
        self._showing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Know every stored job, and begin to restore the attempts that were running."""
        await self._dispatcher.start()
        await self._table.start(self._soon_staffed)
        running = self._table.running
        self._showing = asyncio.create_task(
            self._view.show(running.values, self._metrics, every_s=LOOKED_AT_EVERY_S)
        )

    async def _soon_staffed(self) -> None:
        """Wait until a worker is there, or has been long in coming: what starts workers needs the
        processors first, as ranks wait for it, and the jobs are opened for nobody."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._dispatcher.until_a_worker_is_there(), RESTORED_WITHIN_S)

    async def restored(self) -> None:
        """Wait until every job that ran is open again, or known to be closed for now."""
        await self._table.restored()

    async def stop(self) -> None:
        """Stop every loop; the store keeps all that is needed to go on. Workers keep what they
        hold: they end with us, or serve it until a successor takes them over."""
        await cancel_all(self._showing)
        await self._worker_admin.stop()
        await self._progress.stop()
        await self._table.stop()
        self._dispatcher.let_be()
        for job in self._table.running.values():
            if job.loop is not None:
                await job.loop.stop()
        await self._dispatcher.stop()
        self._threads.close()

    # ---- workers --------------------------------------------------------------------------

    async def workers(self) -> list[WorkerStatus]:
        """The workers as they are now."""
        return self._worker_admin.status()

    async def restart_workers(self, workers: Sequence[str]) -> list[str]:
        """Begin to replace these workers, all by default."""
        return self._worker_admin.restart(workers)

    def index(
        self, spec_yaml: str, base_directory: str, *, team: str, source: str, errand: str
    ) -> AsyncGenerator[IndexAnswer, None]:
        """Have a worker do something for an index."""
        return self._index_desk.index(
            spec_yaml, base_directory, team=team, source=source, errand=errand
        )

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

    def job_names(self) -> list[str]:
        """The names of all jobs, from memory: nothing is waited for."""
        return sorted(self._table.running)

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

    async def change_mixture(
        self, job: str, weights: Mapping[str, float], from_step: int | None
    ) -> MixtureChange:
        """Draw by other weights from a step on."""
        return await self._table.change_mixture(job, weights, from_step)

    async def quarantine(
        self, name: str, behind: QuarantineEntry | None = None
    ) -> list[QuarantineEntry]:
        """The next of the job's samples that were masked, and why."""
        return await self._table.quarantine(name, behind)

    async def explain(self, job: str, step: int, attempt: int | None) -> StepExplanation:
        """Plan a step of the ledger again."""
        return await self._table.explain(job, step, attempt)

    async def find_sample(self, job: str, sample_id: int, from_step: int) -> FoundSample:
        """A sample's place, and the steps that it was in."""
        return await self._table.find_sample(job, sample_id, from_step)

    def replay(
        self,
        job: str,
        first_step: int,
        last_step: int,
        attempt: int | None,
        *,
        content: bool = False,
    ) -> AsyncGenerator[ReplayedStep, None]:
        """Plan the steps of a range again, as far as the ledger goes, or decode them too."""
        redecoder = self._redecoder if content else None
        return self._table.replay(job, first_step, last_step, attempt, redecoder)

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
        launch: str = "",
        reads_loss_weights: bool = True,
        where: Whereabouts = ANYWHERE,
    ) -> SessionOpened:
        """Claim a rank. Returns once every rank of the attempt has opened. Raises ConflictError
        where the job weighs its loss and the client does not read weights."""
        running = self._table.get(job)
        if rejoin_attempt:
            await self._table.setup(running)
            if (joined := running.attempt) is not None and joined.number == rejoin_attempt:
                # A source that weighs its loss may have been added while the rank was away.
                setup = running.setups[joined.spec_version]
                _require_weights_read(setup, rank, client, reads_loss_weights)
                joined.reads_loss_weights &= reads_loss_weights
            return self._remember(
                running,
                *self._attempts.rejoin(
                    running, rank, world_size, client, rejoin_attempt, launch, where
                ),
            )
        setup, topology, cursor = await self._checked(running, rank, world_size, cursor, launch)
        _require_weights_read(setup, rank, client, reads_loss_weights)
        attempt = self._attempts.forming(running, rank, client, setup, topology, cursor, launch)
        claim = attempt.join(rank, client, world_size=world_size, cursor=cursor, where=where)
        attempt.reads_loss_weights &= reads_loss_weights
        session = self._remember(running, attempt, claim)
        try:
            if attempt.full:
                del running.forming[launch]  # whoever comes now is of the next attempt
                await self._attempts.begin_for_all(running, attempt)
            await attempt.wait_complete(self._attempt_timeout_s)
        except BaseException:
            self.close_session(claim.session)
            raise
        return replace(session, attempt=attempt.number)  # settled once it is durable

    async def _checked(
        self, running: RunningJob, rank: int, world_size: int, cursor: Cursor, launch: str
    ) -> tuple[JobSetup, Topology, Cursor]:
        """The setup, topology and cursor that a rank would begin with, under the version of the job
        file that its launch's attempt forms with, or else the newest. Raises the ServiceError that
        says why it cannot begin."""
        while True:
            setup = await self._table.setup_for(running, launch)
            topology = setup.topology(world_size)
            topology.replica_of(rank)
            if cursor.step_in_window:  # what splits its window may be yet to be found
                finding = partial(setup.limits_at, cursor.begun)
                await self._threads.planners.run(running.record.name, finding)
            if setup.options.memory is not None:  # every sample may have to be looked at
                looking = partial(find_without_room, setup, topology)
                await self._threads.planners.run(running.record.name, looking)
            placed = in_order(cursor, setup)
            check_fits(setup, topology)
            await self._table.require_current(running, setup, launch)
            if await self._table.setup_for(running, launch) is setup:  # no newer one meanwhile
                return setup, topology, placed

    async def session_ended(self, session: str) -> None:
        """Wait until the session's attempt is over. Raises its reason."""
        await self._session(session).attempt.ended()

    def close_session(self, session: str) -> None:
        """The client is gone: its rank is free, and a forming attempt without ranks is over."""
        known = self._sessions.pop(session, None)
        if known is None:
            return
        known.attempt.leave(known.claim)
        if (
            known.attempt is known.job.attempt
            and known.attempt.claims.get(known.claim.rank) is known.claim
        ):
            self._statistics.rank_left(known.job.record.name, known.claim.rank)
        if known.job.forming.get(known.attempt.launch) is known.attempt:
            known.attempt.claims.pop(known.claim.rank, None)
            if not known.attempt.claims:
                del known.job.forming[known.attempt.launch]

    async def shard(
        self,
        session: str,
        step: int,
        *,
        received_step: int,
        failed_workers: Sequence[str],
        slow_workers: Sequence[str] = (),
        wanted: WantedParts = EVERYTHING,
    ) -> RankShard | SkippedSteps | EndOfData:
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

    async def summary(self, session: str, step: int) -> StepSummary:
        """The groups of a whole step of the session's attempt."""
        loop = await self._loop_of(self._session(session))
        return await loop.summary(step)

    async def commit(
        self,
        session: str,
        step: int,
        *,
        measured_s: float | None = None,
        phase_s: Mapping[str, float] | None = None,
    ) -> None:
        """The session's rank has trained this step; `measured_s` and, by phase, `phase_s` are the
        seconds that it took, if it measured them."""
        known = self._session(session)
        loop = await self._loop_of(known)
        await loop.commit(known.claim, step, measured_s, phase_s)

    # ---- health ---------------------------------------------------------------------------

    async def report(self, session: str, report: RankReport) -> None:
        """The session's rank is alive, and reports its waits for data."""
        known = self._session(session)
        if known.attempt is known.job.attempt and known.claim.live:
            self._statistics.reported(known.job.record.name, known.claim.rank, report)

    async def health(self, jobs: Sequence[str], *, team: str | None) -> ServiceHealth:
        """These jobs as they can be seen now, and what is concluded."""
        named = [job for name in jobs for job in self._table.with_validation(name)]
        chosen = [*{job.record.name: job for job in named}.values()]
        progress = await self._progress.of(chosen, self._table.running)
        return self._view.of(chosen, self._table.running.values(), progress, team=team)

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
        if len(attempt.claims) == 1:
            self._connections.note_first_rank()
        return SessionOpened(
            session=claim.session,
            attempt=attempt.number,
            start=attempt.start,
            ticket_key=holder_key(holder_of(claim.session), self._ports.ticket_secret),
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


def _require_weights_read(setup: JobSetup, rank: int, client: str, reads: bool) -> None:
    """Raises ConflictError where the job weighs its loss and the client does not read weights."""
    if setup.loss_weights and not reads:
        raise ConflictError(
            f"job {setup.record.name!r} weighs its loss (loss_weight of a source, or of its "
            f"columns), and the client of rank {rank} ({client}) is of a release that would train "
            "all samples alike. Install this release's client on the ranks; or take loss_weight "
            "out of the job file."
        )
