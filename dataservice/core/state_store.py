"""The port behind which the service's durable state lies; see ports.py for the others."""

from collections.abc import Collection, Sequence
from typing import Protocol

from dataservice.core.job import (
    AttemptRecord,
    CostRecord,
    JobRecord,
    LedgerEntry,
    MixtureRecord,
    QuarantineEntry,
    SkipAction,
    SkipRecord,
    SpecRecord,
)

MOST_QUARANTINED = 50_000
"""Entries of the quarantine that are kept of a job: at 5 kB each a team that trains bad samples
again in every epoch would fill the disk of all."""


class StateStore(Protocol):
    """Durable state. Every method is atomic, and raises StateError where the store cannot be
    trusted."""

    def check(self) -> None:
        """Returns if the store can be read and written. Changes nothing."""
        ...

    def put_job(self, *jobs: JobRecord, forget: Collection[str] = ()) -> None:
        """Insert or replace jobs by name, all of them or none. The first job file that comes with a
        version is kept under that version for good. The jobs to `forget` are removed before."""
        ...

    def specs(self, job: str, behind: int = 0) -> list[SpecRecord]:
        """The versions of a job's file that come after this one, the oldest first."""
        ...

    def job(self, name: str) -> JobRecord | None:
        """One job, or None."""
        ...

    def jobs(self) -> list[JobRecord]:
        """All jobs by name."""
        ...

    def delete_job(self, *names: str) -> None:
        """Remove jobs with their attempts, ledger and quarantine, all of them or none."""
        ...

    def put_attempt(self, attempt: AttemptRecord) -> None:
        """Insert. Raises ConflictError where the attempt does not have the job's next number."""
        ...

    def last_attempt(self, job: str) -> AttemptRecord | None:
        """The newest attempt of a job."""
        ...

    def attempts(self, job: str) -> list[AttemptRecord]:
        """All attempts of a job, the oldest first."""
        ...

    def put_ledger(self, entry: LedgerEntry, contents: Sequence[tuple[int, bytes]] = ()) -> None:
        """Insert, or replace the entry of the same (job, attempt, step); record with it, all or
        nothing, what was delivered of other steps of the attempt: (step, content) of each. Raises
        NotFoundError where one of them was never planned."""
        ...

    def commit_step(
        self,
        job: str,
        attempt: int,
        step: int,
        committed_unix_s: float,
        measured_s: float | None = None,
    ) -> None:
        """Mark a step as trained by all ranks. Without `measured_s` an earlier one stays. Raises
        NotFoundError where the step was never planned."""
        ...

    def put_content(self, job: str, attempt: int, step: int, content: bytes) -> None:
        """Record what was delivered of a step. Raises NotFoundError where it was never planned."""
        ...

    def ledger_entry(self, job: str, step: int, attempt: int | None = None) -> LedgerEntry | None:
        """The entry of this step in this attempt, or in the newest attempt that has it."""
        ...

    def ledger_of_step(self, job: str, step: int) -> list[LedgerEntry]:
        """The entries of one step, by attempt."""
        ...

    def last_entry(
        self, job: str, attempt: int, *, before: int | None = None
    ) -> LedgerEntry | None:
        """The attempt's entry of the highest step, or of the highest below `before`."""
        ...

    def last_committed_step(self, job: str, attempt: int) -> int:
        """The attempt's highest step that is committed; -1 if none is."""
        ...

    def last_planned_step(self, job: str) -> int:
        """The last step of the ledger in any attempt; -1 if it is empty."""
        ...

    def archive_ledger(self, planned_before_unix_s: float) -> int:
        """Move some entries that were planned before then to where they take less room, if there
        are many; all methods answer as before. Returns how many were moved; 0 once none are left
        that are worth it."""
        ...

    def trim(self) -> int:
        """Give back some room on disk that nothing is in any more. Returns how many bytes; 0 once
        none are left that are worth it."""
        ...

    def put_cost(self, cost: CostRecord) -> None:
        """Insert. It replaces the job's records that begin at its step or later."""
        ...

    def costs(self, job: str) -> list[CostRecord]:
        """The job's cost records by the step they begin at."""
        ...

    def add_mixture(self, change: MixtureRecord) -> None:
        """Insert a change of the job's mixture."""
        ...

    def mixtures(self, job: str) -> list[MixtureRecord]:
        """The recorded changes of the job's mixture, by number."""
        ...

    def add_skips(
        self,
        job: str,
        ranges: Sequence[tuple[int, int]],
        action: SkipAction,
        recorded_unix_s: float,
    ) -> list[SkipRecord]:
        """Record these ranges of steps for every attempt that is yet to begin."""
        ...

    def skips(self, job: str) -> list[SkipRecord]:
        """The job's records of skipped steps by number."""
        ...

    def add_quarantine(self, entries: Sequence[QuarantineEntry]) -> None:
        """Append; an entry of the same (job, attempt, step, sample_id) is kept once. Of a job that
        has MOST_QUARANTINED, further samples are only counted."""
        ...

    def quarantine(
        self, job: str, *, behind: QuarantineEntry | None = None, most: int | None = None
    ) -> list[QuarantineEntry]:
        """Entries of a job by (attempt, step, sample_id): those behind one, at most so many."""
        ...

    def quarantine_of_step(self, job: str, attempt: int, step: int) -> list[QuarantineEntry]:
        """The entries of one step of one attempt by sample_id."""
        ...

    def quarantined_by_source(self, job: str, attempt: int, *, last_step: int) -> dict[str, int]:
        """The number of entries of each source in an attempt's steps up to this one, of sources
        that have any."""
        ...

    def quarantined_samples(self, job: str) -> int:
        """The number of samples that have an entry."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...
