"""What can be seen of a running job at one moment, and what is concluded from it.

Rates are over the last `steps` steps that every rank has trained. Seconds are a mean per step;
those of reading and decoding are seconds of slots.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from dataservice.core.orders import StorageOutage

Severity = Literal["info", "slow", "stalled"]
"""info: as it should be. slow: trainers lose time. stalled: nothing moves until someone acts."""


class RankHealth(NamedTuple):
    """One rank. `wait_s` are the seconds that its training waited for data, mean of its last steps;
    `quiet_s` the seconds since its last report, until now or until its client left.
    `received_step` and `committed_step` are the last that it has received and trained;
    `untrained_steps` is how many it has begun while it has trained none of the attempt.

    A tuple, as thousands are made each time that someone looks."""

    rank: int
    client: str
    live: bool
    received_step: int
    committed_step: int
    quiet_s: float
    wait_s: float = 0.0
    untrained_steps: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceHealth:
    """What a step costs at one source of a job. `read_s` and `decode_s` are seconds of slots, and
    `read_cpu_s` and `decode_cpu_s` the part of them that a CPU worked. `usual_s` is what reading
    and decoding one sample took before the last steps; 0 when unknown."""

    source: str
    samples: float
    read_s: float
    decode_s: float
    read_cpu_s: float = 0.0
    decode_cpu_s: float = 0.0
    usual_s: float = 0.0
    quarantined: int = 0
    budget_used: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceProgress:
    """How many of a source's samples are drawn: `epoch_drawn` of the `epoch_samples` of the epoch
    that is under way, `drawn` of the `samples` of all epochs. `masked` of those drawn in all epochs
    were bad, and trained with their labels masked. A sample counts each time that it is drawn."""

    source: str
    epoch_drawn: int
    epoch_samples: int
    drawn: int
    samples: int
    masked: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobProgress:
    """How far a job is through its mixture once `step`, the last that every rank has trained, is
    behind it; -1 before the first. Samples of skipped steps count as drawn; where steps are planned
    in windows of several, those of a window count once its last step is trained. `epoch` counts
    from 0 and is the last one at the end of data."""

    step: int
    epoch: int
    epochs: int
    sources: tuple[SourceProgress, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHealth:
    """A job. `ready_steps` are planned and not yet received by every rank; the first
    `decoded_steps` of them are decoded whole, and the window has room for `window_steps`. `step_s`
    is the training time of a step without waits, `plan_s` the time to plan one. `share_slots` are
    the slots that the job gets while all teams, and all jobs of its team, want theirs. `failure`
    says why its last attempt ended, if it is over. Ranks report every `report_every_s`. `plan_gap`
    is how far the worst stage of the last plan is over its lower bound. `room_s` is the mean time
    that a pack waits for room in its worker's memory; `bytes_full` says that no step is planned
    ahead because of the bytes that the team holds. `outages` are of its sources' storage, as
    workers last told. `progress` is absent before the first attempt,
    and while it is counted for the first time."""

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
    room_s: float = 0.0
    bytes_full: bool = False
    progress: JobProgress | None = None
    outages: tuple[StorageOutage, ...] = ()

    @property
    def window_is_full(self) -> bool:
        """Whether no step is planned until the rank that is furthest behind has received one."""
        return self.ready_steps >= self.window_steps > 0

    def waits_for_ranks(self, rank: RankHealth) -> bool:
        """Whether the rank has every step that is planned, and the next is planned only once
        other ranks have them too."""
        return self.window_is_full and rank.received_step >= self.planned_step

    @property
    def exposed_wait_s(self) -> float:
        """Seconds a step that the rank which waits longest for data waits."""
        waiting = (rank for rank in self.ranks if rank.live and not self.waits_for_ranks(rank))
        return max((rank.wait_s for rank in waiting), default=0.0)

    @property
    def demand_slots(self) -> float:
        """The slots that would have to decode all the time so that trainers never wait."""
        seconds = sum(source.read_s + source.decode_s for source in self.sources)
        return seconds / self.step_s if self.step_s > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetHealth:
    """The workers of the service. `busy_slots` is the mean number of slots that were decoding over
    the last seconds; `waiting_teams` have packs that are not decoded. A team that must not be named
    is OTHERS. `shortfall` tells admins why workers are missing, `grpc_bytes` and `same_node_bytes`
    what these workers have sent to ranks, over gRPC and through memory, as they last said."""

    workers: int
    wanted_workers: int
    slots: int
    slots_per_worker: int
    busy_slots: float
    waiting_teams: tuple[str, ...] = ()
    shortfall: str = ""
    grpc_bytes: int = 0
    same_node_bytes: int = 0


OTHERS = "*"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What a rank tells of itself: the `step` that it is at, the number of `steps` that it has
    begun, the seconds that it waited for their data (the first left out), and those that it has
    waited for the next one now."""

    step: int
    steps: int
    waited_s: float
    waiting_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """A job and what is concluded about it, the cause first."""

    health: JobHealth
    findings: tuple["Finding", ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceHealth:
    """All jobs of a service, or those that a caller may see. `troubles` say what in the service
    itself does not work."""

    jobs: tuple[Diagnosed, ...]
    fleet: FleetHealth
    troubles: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One sentence about a job: who waits for whom, why, and what would help."""

    severity: Severity
    text: str
