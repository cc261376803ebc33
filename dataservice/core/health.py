"""What can be seen of a running job at one moment, and what is concluded from it.

Rates are over the last steps that every rank has trained: `steps` of them. Seconds are means
a step, of one slot where decoding is meant.
"""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["info", "slow", "stalled"]
"""info: as it should be. slow: trainers lose time. stalled: nothing moves until someone acts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankHealth:
    """One rank. `wait_s` is how long its training loop stood without data, a step, as it tells;
    `quiet_s` since it was last heard, until now or until its client went. The steps are the
    last it has received, and trained."""

    rank: int
    client: str
    live: bool
    received_step: int
    committed_step: int
    quiet_s: float
    wait_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceHealth:
    """One source of a job: what a step asks of it. `read_s` and `decode_s` are slot seconds;
    `usual_s` is what a sample of it took in all, before the last steps; 0 when unknown."""

    source: str
    samples: float
    read_s: float
    decode_s: float
    usual_s: float = 0.0
    quarantined: int = 0
    budget_used: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHealth:
    """A job. Of the `ready_steps` planned ahead, which not every rank has received, the first
    `decoded_steps` are decoded whole; the window has room for `window_steps`. `step_s` is a
    step's training without waits, `plan_s` its planning. `share_slots` are the slots it gets
    while every team, and every job of its team, wants its own. `failure` is why its last attempt
    ended, if that is over. Ranks speak every `report_every_s`; `plan_gap` is the worst stage of
    its last plan over its bound."""

    job: str
    attempt: int
    world_size: int
    missing_ranks: tuple[int, ...]
    forming_s: float
    draining: bool
    ended: bool
    committed_step: int
    planned_step: int
    ready_steps: int
    decoded_steps: int
    window_steps: int
    steps: int
    step_s: float
    plan_s: float
    share_slots: float
    ranks: tuple[RankHealth, ...]
    sources: tuple[SourceHealth, ...]
    failure: str = ""
    report_every_s: float = 0.0
    steps_per_s: float = 0.0
    samples_per_s: float = 0.0
    plan_gap: float = 0.0

    @property
    def window_is_full(self) -> bool:
        """Whether no step is planned before the rank that is furthest behind has its next."""
        return self.ready_steps >= self.window_steps > 0

    def waits_for_ranks(self, rank: RankHealth) -> bool:
        """Whether the rank has all that is planned, and more is not until others have it too."""
        return self.window_is_full and rank.received_step >= self.planned_step

    @property
    def exposed_wait_s(self) -> float:
        """What the rank that waits most for data loses, a step."""
        waiting = (rank for rank in self.ranks if rank.live and not self.waits_for_ranks(rank))
        return max((rank.wait_s for rank in waiting), default=0.0)

    @property
    def demand_slots(self) -> float:
        """Slots that must decode all the time for the trainers never to wait."""
        seconds = sum(source.read_s + source.decode_s for source in self.sources)
        return seconds / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetHealth:
    """The workers of the service. `busy_slots` have decoded of late, as a mean; `waiting_teams`
    have packs in line. A team that must not be named is OTHERS."""

    workers: int
    wanted_workers: int
    slots: int
    slots_per_worker: int
    busy_slots: float
    waiting_teams: tuple[str, ...] = ()


OTHERS = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What a rank tells of itself: the step in hand; how many it has begun, what it waited for
    their data, the first left out; and how long it waits for the next now."""

    step: int
    steps: int
    waited_s: float
    waiting_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """A job and what is concluded, the cause first."""

    health: JobHealth
    findings: tuple["Finding", ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceHealth:
    """All jobs of a service, or those that a caller may see."""

    jobs: tuple[Diagnosed, ...]
    fleet: FleetHealth


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One sentence about a job: who waits for whom, why, and what would help."""

    severity: Severity
    text: str
