"""Running jobs as they can be seen now, and what is concluded from that.

attempts, windows ──────┐
statistics (last steps) ├─► JobHealth, FleetHealth ─► diagnose ─► findings
pool, team shares ──────┘
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dataservice.core.health import (
    OTHERS,
    Diagnosed,
    Finding,
    FleetHealth,
    JobHealth,
    JobProgress,
    RankHealth,
    ServiceHealth,
)
from dataservice.core.ports import Metrics, WorkerPool
from dataservice.core.team import team_of
from dataservice.engine.attempt import Attempt
from dataservice.engine.connection_capacity import ConnectionCapacity, ranks_of
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.job_statistics import JobStatistics, RecentSteps
from dataservice.engine.ready_bytes import ReadyBytes
from dataservice.engine.running_job import RunningJob
from dataservice.engine.shares import Shares

Diagnose = Callable[[JobHealth, FleetHealth], Sequence[Finding]]
"""What holds a job up, the cause first."""

# Reports a second of all ranks together, and the shortest time between two of one rank.
REPORTS_PER_S = 200.0
REPORT_EVERY_S = 2.0


def report_every_s(world_size: int) -> float:
    """Seconds between two reports of a rank, in a job of this world size."""
    return max(REPORT_EVERY_S, world_size / REPORTS_PER_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthView:
    """Looks at the service on its event loop; changes nothing."""

    statistics: JobStatistics
    pool: WorkerPool
    dispatcher: Dispatcher
    shares: Shares
    ready_bytes: ReadyBytes
    diagnose: Diagnose
    wanted_workers: int
    connections: ConnectionCapacity
    troubles: Callable[[], tuple[str, ...]] = tuple

    def of(
        self,
        jobs: Iterable[RunningJob],
        running: Iterable[RunningJob],
        progress: Mapping[str, JobProgress],
        *,
        team: str | None,
    ) -> ServiceHealth:
        """The health of these `jobs`, among all that are `running`, for a caller of `team`, who is
        not told the names of other teams; None may know all. `progress` has what is known of it by
        job. O(ranks)."""
        competing = [job.record.name for job in running if _is_trained(job)]
        fleet = self._fleet()
        if team is not None:
            names = {name if name == team else OTHERS for name in fleet.waiting_teams}
            # Why a worker does not start may quote its host.
            fleet = replace(
                fleet,
                waiting_teams=tuple(sorted(names)),
                shortfall="",
                grpc_bytes=0,
                same_node_bytes=0,
            )
        found = []
        for job in jobs:
            health = self._job(job, fleet.slots, competing)
            health = replace(health, progress=progress.get(job.record.name))
            findings = [*self.diagnose(health, fleet)]
            if ranks_of(job) and (short := self.connections.shortage()):
                findings.append(Finding(severity="slow", text=short))
            found.append(Diagnosed(health=health, findings=tuple(findings)))
        return ServiceHealth(jobs=tuple(found), fleet=fleet, troubles=self.troubles())

    async def show(
        self, running: Callable[[], Iterable[RunningJob]], metrics: Metrics, *, every_s: float
    ) -> None:
        """Tell metrics again and again which jobs are stalled, those without trainers too, until
        cancelled."""
        while True:
            jobs = [*running()]
            for found in self.of(jobs, jobs, {}, team=None).jobs:
                stalled = any(each.severity == "stalled" for each in found.findings)
                metrics.job_looked_at(found.health.job, stalled=stalled)
            await asyncio.sleep(every_s)

    def _fleet(self) -> FleetHealth:
        infos = [info for info in self.pool.workers() if info.state == "serving"]
        slots = sum(info.slots for info in infos)
        grpc_bytes, same_node_bytes = self.dispatcher.sent_bytes
        return FleetHealth(
            workers=len(infos),
            wanted_workers=max(self.wanted_workers, len(infos)),
            slots=slots,
            slots_per_worker=max((info.slots for info in infos), default=1),
            busy_slots=min(float(slots), self.statistics.busy_slots()),
            waiting_teams=tuple(sorted({team_of(job) for job in self.dispatcher.waiting_jobs()})),
            shortfall=self.pool.shortfall(),
            grpc_bytes=grpc_bytes,
            same_node_bytes=same_node_bytes,
        )

    def _job(self, job: RunningJob, slots: int, competing: Sequence[str]) -> JobHealth:
        name, loop = job.record.name, job.loop
        attempt, forming = job.attempt, job.newest_forming
        recent = self.statistics.recent_steps(name)
        shown = forming or attempt
        now = loop.window if loop is not None else None
        seen = JobHealth(
            job=name,
            attempt=shown.number if shown is not None else 0,
            world_size=shown.topology.world_size if shown is not None else 0,
            missing_ranks=forming.missing if forming is not None else (),
            forming_s=forming.age_s if forming is not None else 0.0,
            draining=job.record.state == "draining",
            ended=now is not None and now.ended,
            committed_step=loop.committed_step if loop is not None else -1,
            planned_step=loop.planned_step if loop is not None else -1,
            ready_steps=now.ready_steps if now is not None else 0,
            decoded_steps=now.decoded_steps if now is not None else 0,
            window_steps=job.setup.ready_steps if job.setup is not None else 0,
            steps=recent.steps,
            step_s=recent.measured_s,
            plan_s=recent.plan_s,
            share_slots=self._share_slots(name, slots, competing),
            ranks=_ranks(attempt, recent),
            sources=recent.sources,
            failure=shown.failure if shown is not None else "",
            report_every_s=report_every_s(shown.topology.world_size) if shown is not None else 0.0,
            steps_per_s=recent.steps_per_s,
            samples_per_s=recent.samples_per_s,
            plan_gap=recent.plan_gap,
            room_s=recent.room_s,
            bytes_full=self.ready_bytes.holds_back(name),
            outages=self.dispatcher.outages(name),
        )
        if recent.measured_s > 0:
            return seen
        return replace(seen, step_s=max(0.0, recent.interval_s - seen.exposed_wait_s))

    def _share_slots(self, job: str, slots: int, competing: Sequence[str]) -> float:
        """Slots are shared between teams by weight, and equally between the jobs of a team."""
        jobs_of_team = Counter(team_of(name) for name in {*competing, job})
        share = self.shares(job)
        weights = {team_of(name): self.shares(name).weight for name in {*competing, job}}
        of_team = min(share.limit, share.weight / sum(weights.values()))
        return slots * of_team / jobs_of_team[team_of(job)]


def _is_trained(job: RunningJob) -> bool:
    return job.attempt is not None and not job.attempt.over and job.attempt.connected


def _ranks(attempt: Attempt | None, recent: RecentSteps) -> tuple[RankHealth, ...]:
    """A rank that has never reported has a client that does not report, and is not judged."""
    if attempt is None or attempt.over:
        return ()
    return tuple(
        RankHealth(
            rank=rank,
            client=claim.client,
            live=claim.live,
            received_step=claim.received_step,
            committed_step=claim.committed_step,
            quiet_s=recent.quiet_s.get(rank, 0.0),
            wait_s=recent.wait_s.get(rank, 0.0),
            untrained_steps=(
                recent.begun_steps.get(rank, 0)
                if claim.committed_step <= attempt.trained_step
                else 0
            ),
        )
        for rank, claim in sorted(attempt.claims.items())
    )
