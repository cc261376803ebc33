"""What the coordinator offers, as serving and the CLI see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dataservice.core.cursor import Cursor
from dataservice.core.job import CostRecord, JobRecord, LedgerEntry, QuarantineEntry
from dataservice.core.orders import EVERYTHING, RankShard, WantedParts
from dataservice.core.plan import StepPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """A job and where it stands. Steps are -1 before the first."""

    record: JobRecord
    samples: int
    attempt: int = 0
    world_size: int = 0
    planned_step: int = -1
    committed_step: int = -1
    quarantined: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExplanation:
    """A step of the ledger, planned again. `sample_keys` are aligned with the plan's samples."""

    entry: LedgerEntry
    plan: StepPlan
    sample_keys: tuple[str, ...]
    quarantined: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfData:
    """The last epoch is over: the job has this many steps."""

    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOpened:
    """A claimed rank of an attempt whose ranks have all opened."""

    session: str
    attempt: int
    start: Cursor


class CoordinatorApi(Protocol):
    """Jobs, sessions and shards. Every method raises the ServiceError that fits."""

    async def submit(self, spec_yaml: str, base_directory: str) -> JobStatus:
        """Validate and register a job; the same file again changes nothing."""
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
        """Plan a step of the ledger again."""
        ...

    async def recost(self, job: str, cost_json: str, from_step: int | None) -> CostRecord:
        """Plan with other coefficients from a step on, by default the first never planned;
        ConflictError for one that was planned. The step it begins at is in the answer."""
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
        wanted: WantedParts = EVERYTHING,
    ) -> tuple[RankShard, StepPlan] | EndOfData:
        """This session's part of a step, with tickets for what is `wanted` of it; waits until
        the step is planned."""
        ...

    async def commit(self, session: str, step: int, *, measured_s: float | None = None) -> None:
        """The session's rank has trained this step, in so many seconds if it tells."""
        ...
