"""Running jobs as they can be seen now, and what is concluded from it.

attempts, windows ─┐
vitals (last steps) ├─► JobHealth, FleetHealth ─► diagnose ─► findings
pool, team shares ─┘
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dataservice.core.health import (
    OTHERS,
    Diagnosed,
    Finding,
    FleetHealth,
    JobHealth,
    RankHealth,
    ServiceHealth,
)
from dataservice.core.ports import WorkerPool
from dataservice.core.team import team_of
from dataservice.engine.attempt import Attempt
from dataservice.engine.dispatch import Dispatcher
from dataservice.engine.jobs import RunningJob
from dataservice.engine.shares import Shares
from dataservice.engine.vitals import Vitals

Diagnose = Callable[[JobHealth, FleetHealth], Sequence[Finding]]
"""What holds a job up, the cause first."""

# Reports of all ranks together, a second; and how often one rank speaks at most.
REPORTS_PER_S = 200.0
REPORT_EVERY_S = 2.0


def report_every_s(world_size: int) -> float:
    """How often a rank of such a job tells of itself."""
    return max(REPORT_EVERY_S, world_size / REPORTS_PER_S)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthView:
    """Looks at the service on its event loop; changes nothing."""

    vitals: Vitals
    pool: WorkerPool
    dispatcher: Dispatcher
    shares: Shares
    diagnose: Diagnose
    wanted_workers: int

    def of(
        self, jobs: Iterable[RunningJob], running: Iterable[RunningJob], *, team: str | None
    ) -> ServiceHealth:
        """These `jobs`, among all that are `running`, for a caller of `team`, who is not told
        the names of others; None may know all. O(ranks)."""
        competing = [job.record.name for job in running if _is_trained(job)]
        fleet = self._fleet()
        if team is not None:
            names = {name if name == team else OTHERS for name in fleet.waiting_teams}
            fleet = replace(fleet, waiting_teams=tuple(sorted(names)))
        found = []
        for job in jobs:
            health = self._job(job, fleet.slots, competing)
            found.append(Diagnosed(health=health, findings=tuple(self.diagnose(health, fleet))))
        return ServiceHealth(jobs=tuple(found), fleet=fleet)

    def _fleet(self) -> FleetHealth:
        infos = [info for info in self.pool.workers() if info.state == "serving"]
        slots = sum(info.slots for info in infos)
        return FleetHealth(
            workers=len(infos),
            wanted_workers=max(self.wanted_workers, len(infos)),
            slots=slots,
            slots_per_worker=max((info.slots for info in infos), default=1),
            busy_slots=min(float(slots), self.vitals.busy_slots()),
            waiting_teams=tuple(sorted({team_of(job) for job in self.dispatcher.waiting_jobs()})),
        )

    def _job(self, job: RunningJob, slots: int, competing: Sequence[str]) -> JobHealth:
        name, loop = job.record.name, job.loop
        attempt, forming = job.attempt, job.forming
        lately = self.vitals.lately(name)
        shown = forming or attempt
        now = loop.window if loop is not None else None
        seen = JobHealth(
            job=name,
            attempt=shown.number if shown is not None else 0,
            world_size=shown.topology.world_size if shown is not None else 0,
            missing_ranks=forming.missing if forming is not None and not forming.over else (),
            forming_s=forming.age_s if forming is not None and not forming.over else 0.0,
            draining=job.record.state == "draining",
            ended=now is not None and now.ended,
            committed_step=loop.committed_step if loop is not None else -1,
            planned_step=loop.planned_step if loop is not None else -1,
            ready_steps=now.ready_steps if now is not None else 0,
            decoded_steps=now.decoded_steps if now is not None else 0,
            window_steps=job.setup.ready_steps if job.setup is not None else 0,
            steps=lately.steps,
            step_s=lately.measured_s,
            plan_s=lately.plan_s,
            share_slots=self._share_slots(name, slots, competing),
            ranks=_ranks(attempt, lately.wait_s, lately.quiet_s),
            sources=lately.sources,
            failure=shown.failure if shown is not None else "",
            report_every_s=report_every_s(shown.topology.world_size) if shown is not None else 0.0,
            steps_per_s=lately.steps_per_s,
            samples_per_s=lately.samples_per_s,
            plan_gap=lately.plan_gap,
        )
        if lately.measured_s > 0:
            return seen
        return replace(seen, step_s=max(0.0, lately.interval_s - seen.exposed_wait_s))

    def _share_slots(self, job: str, slots: int, competing: Sequence[str]) -> float:
        """Between teams by weight, between the jobs of one equally."""
        jobs_of_team = Counter(team_of(name) for name in {*competing, job})
        share = self.shares(job)
        weights = {team_of(name): self.shares(name).weight for name in {*competing, job}}
        of_team = min(share.limit, share.weight / sum(weights.values()))
        return slots * of_team / jobs_of_team[team_of(job)]


def _is_trained(job: RunningJob) -> bool:
    return job.attempt is not None and not job.attempt.over and bool(job.attempt.clients)


def _ranks(
    attempt: Attempt | None, wait_s: Mapping[int, float], quiet_s: Mapping[int, float]
) -> tuple[RankHealth, ...]:
    """A rank that has never told of itself is of a client that does not, and not judged."""
    if attempt is None or attempt.over:
        return ()
    return tuple(
        RankHealth(
            rank=rank,
            client=claim.client,
            live=claim.live,
            received_step=claim.received_step,
            committed_step=claim.committed_step,
            quiet_s=quiet_s.get(rank, 0.0),
            wait_s=wait_s.get(rank, 0.0),
        )
        for rank, claim in sorted(attempt.claims.items())
    )
