"""A team's share of the workers, which they are told with each order: its weight and its limit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dataservice.core.ports import WorkerPool
from dataservice.core.team import TeamShare, TeamSpec, team_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """`teams` is asked each time, and so are the workers: both may change."""

    teams: Callable[[], Mapping[str, TeamSpec]]
    pool: WorkerPool

    def __call__(self, job: str) -> TeamShare:
        """The share of a job's team now. CPUs are counted over the slots of all workers, since
        any of them may decode for it."""
        spec = self.teams().get(team_of(job), TeamSpec())
        slots = sum(worker.slots for worker in self.pool.workers())
        limit = 1.0
        if spec.max_decode_cpus is not None:
            limit = min(1.0, spec.max_decode_cpus / max(1, slots))
        return TeamShare(weight=spec.weight, limit=limit)
