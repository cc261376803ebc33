"""What the coordinator offers, as serving and the CLI see it."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from dataservice.core.cursor import Cursor
from dataservice.core.health import RankReport, ServiceHealth
from dataservice.core.job import (
    CostRecord,
    JobRecord,
    LedgerEntry,
    QuarantineEntry,
    SkipAction,
    SkipRecord,
)
from dataservice.core.orders import EVERYTHING, RankShard, WantedParts
from dataservice.core.plan import StepPlan
from dataservice.core.ports import WorkerInfo
from dataservice.core.team import NO_TEAM
from dataservice.core.topology import Topology

Fate = Literal["planned", "committed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """A job and where it stands. Steps are -1 before the first. `failure` is why its last attempt
    ended, as far as this coordinator knows; empty while it runs."""

    record: JobRecord
    samples: int
    attempt: int = 0
    world_size: int = 0
    planned_step: int = -1
    committed_step: int = -1
    quarantined: int = 0
    skips: tuple[SkipRecord, ...] = ()
    failure: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFate:
    """What became of a step in one attempt."""

    attempt: int
    fate: Fate


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExplanation:
    """A step planned again, as in `attempt`. `sample_keys` are aligned with the plan's samples.

    `entry` is what the ledger says of it; None where the attempt skipped it, by the record
    `skipped_by`. `fates` tells of every attempt that came to the step.
    """

    attempt: int
    cursor: Cursor
    topology: Topology
    plan: StepPlan
    sample_keys: tuple[str, ...]
    quarantined: tuple[str, ...]
    fates: tuple[StepFate, ...]
    entry: LedgerEntry | None = None
    skipped_by: SkipRecord | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedStep:
    """A step of a range: planned again, or one that its attempt skipped, without digests."""

    step: int
    attempt: int
    skipped: bool = False
    ledger_digest: str = ""
    plan_digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSteps:
    """The step asked for is skipped by this attempt; this is the next that is not."""

    next_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfData:
    """The last epoch is over: the job has this many steps."""

    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOpened:
    """A claimed rank of an attempt whose ranks have all opened, and how often it is to tell of
    itself."""

    session: str
    attempt: int
    start: Cursor
    report_every_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """A worker, the packs that steps have there, and the work of those not decoded, in
    tokens."""

    info: WorkerInfo
    packs: int
    outstanding_tokens: float


class CoordinatorApi(Protocol):
    """Jobs, sessions and shards. Every method raises the ServiceError that fits."""

    async def submit(
        self,
        spec_yaml: str,
        base_directory: str,
        *,
        team: str = NO_TEAM,
        max_jobs: int | None = None,
    ) -> JobStatus:
        """Validate and register a job of a team; the same file again changes nothing.
        QuotaError when the team has `max_jobs` already."""
        ...

    async def jobs(self) -> list[JobStatus]:
        """All jobs by name."""
        ...

    async def job(self, name: str) -> JobStatus:
        """One job; NotFoundError if there is none."""
        ...

    async def drain(self, name: str) -> JobStatus:
        """Refuse new attempts of the job; the running one may finish."""
        ...

    async def delete(self, name: str) -> None:
        """Forget a job; ConflictError while trainers use it."""
        ...

    async def quarantine(self, name: str) -> list[QuarantineEntry]:
        """The job's samples that were trained with their labels masked, by attempt and step."""
        ...

    async def explain(self, job: str, step: int, attempt: int | None) -> StepExplanation:
        """Plan a step of the ledger again, or one that was skipped; by default as in the newest
        attempt that came to it."""
        ...

    def replay(
        self, job: str, first_step: int, last_step: int, attempt: int | None
    ) -> AsyncIterator[ReplayedStep]:
        """Plan the steps of a range again, one after another, as far as the ledger goes."""
        ...

    async def skip(
        self, job: str, ranges: Sequence[tuple[int, int]], action: SkipAction
    ) -> list[SkipRecord]:
        """Have attempts that are yet to begin pass over these steps, both ends included, or
        train them after all; SpecError for ranges that are none."""
        ...

    async def recost(self, job: str, cost_json: str, from_step: int | None) -> CostRecord:
        """Plan with other coefficients from a step on, by default the first never planned;
        ConflictError for one that was planned. The step it begins at is in the answer."""
        ...

    async def workers(self) -> list[WorkerStatus]:
        """The workers as they are now."""
        ...

    async def restart_workers(self, workers: Sequence[str]) -> list[str]:
        """Begin to replace these workers, all by default, without delaying any step by more
        than its decoding; gives their names. NotFoundError for one that is not there,
        ConflictError while others are being replaced."""
        ...

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
        """Claim a rank; returns once all ranks of the attempt have. Cancelling gives it up."""
        ...

    async def session_ended(self, session: str) -> None:
        """Wait until a newer attempt fences the session or its job is deleted; then raise
        FencedError or NotFoundError."""
        ...

    def close_session(self, session: str) -> None:
        """The client is gone: its rank may be claimed again."""
        ...

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
        """This session's part of a step, with tickets for what is `wanted` of it; waits until
        the step is planned."""
        ...

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
        ...

    async def report(self, session: str, report: RankReport) -> None:
        """The session's rank lives, and has waited so long for data."""
        ...

    async def health(self, jobs: Sequence[str], *, team: str | None) -> ServiceHealth:
        """These jobs as they can be seen now, and what is concluded; NotFoundError for one that
        is not there. Other teams than `team` are not named, unless it is None."""
        ...
