"""What the coordinator offers, as serving and the CLI see it."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dataservice.core.cursor import Cursor
from dataservice.core.health import RankReport, ServiceHealth
from dataservice.core.index_orders import IndexAnswer
from dataservice.core.job import (
    CostRecord,
    JobRecord,
    LedgerEntry,
    MixtureChange,
    QuarantineEntry,
    SkipAction,
    SkipRecord,
)
from dataservice.core.mixture_tree import MixtureTree
from dataservice.core.orders import EVERYTHING, RankShard, StepSummary, WantedParts
from dataservice.core.plan import StepPlan
from dataservice.core.ports import WorkerInfo
from dataservice.core.sample import SampleRef
from dataservice.core.team import NO_TEAM
from dataservice.core.topology import Topology
from dataservice.core.whereabouts import ANYWHERE, Whereabouts

Fate = Literal["planned", "committed", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobVersion:
    """A version of a job's file: its `changes` in words, and the first and last attempt that began
    with it, 0 where none did."""

    version: int
    submitted_unix_s: float
    changes: str
    first_attempt: int = 0
    last_attempt: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobStatus:
    """A job and its progress. Steps are -1 before the first. `failure` says why its last attempt
    ended, as far as this coordinator knows; empty while it runs. `attempt_version` is the version
    of the job file that the attempt began with, 0 without an attempt; `versions` are given where
    there is more than one. `notes` say what its owner should know, a sentence each, as far as the
    job is open. `mixture` is given where one job is asked for and is open, and so is the status of
    its `validation`, if it has one."""

    record: JobRecord
    samples: int
    attempt: int = 0
    world_size: int = 0
    planned_step: int = -1
    committed_step: int = -1
    quarantined: int = 0
    skips: tuple[SkipRecord, ...] = ()
    failure: str = ""
    attempt_version: int = 0
    versions: tuple[JobVersion, ...] = ()
    notes: tuple[str, ...] = ()
    mixture: MixtureTree | None = None
    validation: "JobStatus | None" = None

    @property
    def pending(self) -> bool:
        """The newest version of the job file waits for the next attempt."""
        return 0 < self.attempt_version < self.record.spec_version

    @property
    def with_validation(self) -> "list[JobStatus]":
        """The job, and its validation where it is given."""
        return [self, *([self.validation] if self.validation is not None else [])]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFate:
    """The fate of a step in one attempt."""

    attempt: int
    fate: Fate


@dataclass(frozen=True, kw_only=True, slots=True)
class StepExplanation:
    """A step planned again, as in `attempt`. `sample_keys` are aligned with the plan's samples.

    `entry` is its ledger entry; None where the attempt skipped it, by the record `skipped_by`.
    `fates` has an item for every attempt that came to the step.
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
class SampleStep:
    """A step that a sample was in, in one attempt. `masked` is the reason where its labels were
    masked, so that it was not learnt."""

    step: int
    attempt: int
    fate: Fate
    masked: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundSample:
    """A sample's place, and steps of the ledger that it was in, by step and attempt. Later ones are
    found from `next_step` on; None at the ledger's end."""

    ref: SampleRef
    steps: tuple[SampleStep, ...]
    next_step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedPack:
    """A pack of a step and its samples as source/key, the first of them where there are many."""

    pack: int
    samples: tuple[str, ...]


ContentVerdict = Literal["", "same", "differs", "unknown"]
"""Whether a step decoded again has the bytes of before: "" where it was not decoded again,
"unknown" where there is nothing to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedStep:
    """A step of a range that was planned again; or one that its attempt skipped, without digests.

    `content` says whether workers deliver the same bytes again, where they were asked to; `note`
    says what differs, or why that is not known, and `packs` where to look.
    """

    step: int
    attempt: int
    skipped: bool = False
    ledger_digest: str = ""
    plan_digest: str = ""
    content: ContentVerdict = ""
    note: str = ""
    packs: tuple[NamedPack, ...] = ()

    @property
    def differs(self) -> bool:
        """Its plan or its bytes are not the recorded ones."""
        return self.plan_digest != self.ledger_digest or self.content == "differs"


@dataclass(frozen=True, kw_only=True, slots=True)
class SkippedSteps:
    """The step asked for is skipped by this attempt; `next_step` is the next that is not."""

    next_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EndOfData:
    """The last epoch is over: `steps` is the number of steps of the job."""

    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOpened:
    """A claimed rank of an attempt whose ranks have all opened. By `ticket_key` it proves to
    workers that its tickets are its own; it is to report every `report_every_s`."""

    session: str
    attempt: int
    start: Cursor
    ticket_key: bytes = field(default=b"", repr=False)
    report_every_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """A worker, the number of packs that steps have there, and the work of those that are not yet
    decoded, in tokens."""

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
        """Validate and register a job of a team, and its validation; the same file again changes
        nothing. Another file over the same samples in the same order is its next version, for
        attempts that are yet to begin. Either lets a draining job take new attempts again. Raises
        ConflictError where the samples are others, QuotaError where the team has `max_jobs`
        already."""
        ...

    async def jobs(self) -> list[JobStatus]:
        """All jobs by name."""
        ...

    def job_names(self) -> list[str]:
        """The names of all jobs, from memory, without waiting."""
        ...

    async def job(self, name: str) -> JobStatus:
        """One job. Raises NotFoundError where there is none."""
        ...

    async def drain(self, name: str) -> JobStatus:
        """Refuse new attempts of the job until it is submitted again; the running one may
        finish."""
        ...

    async def delete(self, name: str) -> None:
        """Forget a job, and its validation. Raises ConflictError while trainers use it."""
        ...

    async def quarantine(
        self, name: str, behind: QuarantineEntry | None = None
    ) -> list[QuarantineEntry]:
        """Of the job's samples that were trained with their labels masked, by attempt and step, the
        next behind one; none where there are no more."""
        ...

    async def explain(self, job: str, step: int, attempt: int | None) -> StepExplanation:
        """Plan a step of the ledger again, or one that was skipped; by default as in the newest
        attempt that came to it."""
        ...

    async def find_sample(self, job: str, sample_id: int, from_step: int) -> FoundSample:
        """Where a sample lies, and which steps it was in, a bounded way along the ledger. Raises
        NotFoundError where there is no such sample."""
        ...

    def replay(
        self,
        job: str,
        first_step: int,
        last_step: int,
        attempt: int | None,
        *,
        content: bool = False,
    ) -> AsyncGenerator[ReplayedStep, None]:
        """Plan the steps of a range again, one after another, as far as the ledger goes; with
        `content` have workers decode them again too."""
        ...

    async def skip(
        self, job: str, ranges: Sequence[tuple[int, int]], action: SkipAction
    ) -> list[SkipRecord]:
        """Have attempts that are yet to begin pass over these steps, both ends included, or
        train them after all. Raises SpecError where a range is none."""
        ...

    async def recost(self, job: str, cost_json: str, from_step: int | None) -> CostRecord:
        """Plan with other coefficients from a step on, by default the first that was never planned;
        the answer has that step. Raises ConflictError where the step was planned already."""
        ...

    async def change_mixture(
        self, job: str, weights: Mapping[str, float], from_step: int | None
    ) -> MixtureChange:
        """Draw by other weights from a step on, by default the first that was never planned; the
        answer has that step. Raises SpecError where a source or a weight is none, ConflictError
        where the step was planned already and trainers are at work."""
        ...

    async def workers(self) -> list[WorkerStatus]:
        """The workers as they are now."""
        ...

    async def restart_workers(self, workers: Sequence[str]) -> list[str]:
        """Begin to replace these workers, all by default, without delaying any step by more than
        its decoding. Returns their names. Raises NotFoundError where there is no such worker,
        ConflictError while others are being replaced."""
        ...

    def index(
        self, spec_yaml: str, base_directory: str, *, team: str, source: str, errand: str
    ) -> AsyncGenerator[IndexAnswer, None]:
        """Have a worker do something for an index of a source of a team's job file, when there is a
        place. Raises SpecError where the file is not valid, WorkerLostError where another try may
        succeed, and what the errand raises. To close it ends the errand."""
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
        launch: str = "",
        reads_loss_weights: bool = True,
        where: Whereabouts = ANYWHERE,
    ) -> SessionOpened:
        """Claim a rank, which is `where` it says. Returns once all ranks of the attempt, which are
        of one launch, have claimed theirs. Cancelling gives the claim up. Raises ConflictError
        where the job weighs its loss and the client does not read weights."""
        ...

    async def session_ended(self, session: str) -> None:
        """Wait until the session is over. Raises FencedError where a newer attempt fences it,
        NotFoundError where its job is deleted."""
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
    ) -> RankShard | SkippedSteps | EndOfData:
        """This session's part of a step, with a ticket for what is `wanted` of it; waits until
        the step is planned."""
        ...

    async def summary(self, session: str, step: int) -> StepSummary:
        """The groups of a whole step that the session's attempt has planned. Raises NotFoundError
        where it never has."""
        ...

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
        ...

    async def report(self, session: str, report: RankReport) -> None:
        """The session's rank is alive, and reports its waits for data."""
        ...

    async def health(self, jobs: Sequence[str], *, team: str | None) -> ServiceHealth:
        """These jobs and their validations as they can be seen now, and what is concluded about
        them. Teams other than `team` are not named, unless it is None. Raises NotFoundError where
        there is no such job."""
        ...
