"""The store in memory: for tests, simulations, and a service without a state directory."""

import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from dataservice.core.errors import ConflictError, NotFoundError
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
from dataservice.core.state_store import MOST_QUARANTINED
from dataservice.state.refusals import never_planned, no_such_job, not_the_next_attempt


class MemoryStateStore:
    """The port StateStore in this process's memory. Threads take turns."""

    def __init__(self) -> None:
        self._turn = threading.RLock()
        self._jobs: dict[str, JobRecord] = {}
        self._attempts: dict[str, list[AttemptRecord]] = {}
        self._ledger: dict[str, dict[tuple[int, int], LedgerEntry]] = {}
        self._quarantine: dict[str, dict[tuple[int, int, int], QuarantineEntry]] = {}
        self._quarantined: dict[str, set[int]] = {}  # samples
        self._costs: dict[str, list[CostRecord]] = {}
        self._mixtures: dict[str, list[MixtureRecord]] = {}
        self._skips: dict[str, list[SkipRecord]] = {}
        self._specs: dict[str, dict[int, SpecRecord]] = {}

    def close(self) -> None:
        """Nothing to flush."""

    def check(self) -> None:
        """Returns if the store can be read and written; changes nothing."""
        with self._turn:
            return

    def put_job(self, *jobs: JobRecord, forget: Collection[str] = ()) -> None:
        """Insert or replace jobs by name; their attempts and ledgers stay. The first job file of
        each version is kept. The jobs to `forget` are removed before."""
        with self._turn:
            self._forget(forget)
            for job in jobs:
                self._jobs[job.name] = job
                spec = SpecRecord(
                    job=job.name,
                    version=job.spec_version,
                    spec_json=job.spec_json,
                    submitted_unix_s=time.time(),
                )
                self._specs.setdefault(job.name, {}).setdefault(spec.version, spec)

    def specs(self, job: str, behind: int = 0) -> list[SpecRecord]:
        """The versions of a job's file that come after this one, by version."""
        with self._turn:
            versions = self._specs.get(job, {})
            return [versions[number] for number in sorted(versions) if number > behind]

    def job(self, name: str) -> JobRecord | None:
        """One job, or None."""
        with self._turn:
            return self._jobs.get(name)

    def jobs(self) -> list[JobRecord]:
        """All jobs by name."""
        with self._turn:
            return [self._jobs[name] for name in sorted(self._jobs)]

    def delete_job(self, *names: str) -> None:
        """Remove jobs with all their records; it is no error if there is no such job."""
        with self._turn:
            self._forget(names)

    def _forget(self, names: Collection[str]) -> None:
        for name in names:
            for table in (
                self._jobs, self._attempts, self._ledger, self._quarantine, self._quarantined,
                self._costs, self._mixtures, self._skips, self._specs,
            ):  # fmt: skip
                table.pop(name, None)

    def put_attempt(self, attempt: AttemptRecord) -> None:
        """Insert. Raises ConflictError when its number is not the next one, NotFoundError when
        there is no such job."""
        with self._turn:
            self._require_job(attempt.job)
            attempts = self._attempts.setdefault(attempt.job, [])
            if attempt.attempt != len(attempts) + 1:
                raise ConflictError(not_the_next_attempt(attempt, len(attempts)))
            attempts.append(attempt)

    def last_attempt(self, job: str) -> AttemptRecord | None:
        """The newest attempt of a job."""
        with self._turn:
            attempts = self._attempts.get(job)
            return attempts[-1] if attempts else None

    def attempts(self, job: str) -> list[AttemptRecord]:
        """All attempts of a job, by number."""
        with self._turn:
            return list(self._attempts.get(job, []))

    def put_ledger(self, entry: LedgerEntry, contents: Sequence[tuple[int, bytes]] = ()) -> None:
        """Insert, or replace the entry of the same (job, attempt, step); record with it the
        `contents` of other steps of the attempt. Raises NotFoundError when there is no such job, or
        one of those steps was never planned."""
        with self._turn:
            self._require_job(entry.job)
            for step, _ in contents:
                self._planned(entry.job, entry.attempt, step)
            self._ledger.setdefault(entry.job, {})[(entry.attempt, entry.step)] = entry
            for step, content in contents:
                self.put_content(entry.job, entry.attempt, step, content)

    def commit_step(
        self,
        job: str,
        attempt: int,
        step: int,
        committed_unix_s: float,
        measured_s: float | None = None,
    ) -> None:
        """Mark a step as trained by all ranks. Raises NotFoundError when it was never planned."""
        with self._turn:
            entry = self._planned(job, attempt, step)
            self._ledger[job][attempt, step] = replace(
                entry,
                committed_unix_s=committed_unix_s,
                measured_s=entry.measured_s if measured_s is None else measured_s,
            )

    def put_content(self, job: str, attempt: int, step: int, content: bytes) -> None:
        """Record the digest of what a step delivered. Raises NotFoundError when it was never
        planned."""
        with self._turn:
            entry = self._planned(job, attempt, step)
            self._ledger[job][attempt, step] = replace(entry, content=content)

    def ledger_entry(self, job: str, step: int, attempt: int | None = None) -> LedgerEntry | None:
        """The entry of this step in this attempt, or in the newest attempt that has it."""
        with self._turn:
            entries = self._ledger.get(job, {})
            if attempt is None:
                attempt = max((a for a, s in entries if s == step), default=0)
            return entries.get((attempt, step))

    def ledger_of_step(self, job: str, step: int) -> list[LedgerEntry]:
        """The entries of one step, by attempt."""
        with self._turn:
            entries = self._ledger.get(job, {})
            return [entries[place] for place in sorted(entries) if place[1] == step]

    def last_entry(
        self, job: str, attempt: int, *, before: int | None = None
    ) -> LedgerEntry | None:
        """The attempt's entry of its highest step, or of its highest step below `before`."""
        with self._turn:
            entries = self._ledger.get(job, {})
            steps = [s for a, s in entries if a == attempt and (before is None or s < before)]
            return entries[attempt, max(steps)] if steps else None

    def last_committed_step(self, job: str, attempt: int) -> int:
        """The attempt's highest committed step; -1 when none is committed."""
        with self._turn:
            entries = self._ledger.get(job, {}).values()
            mine = [e for e in entries if e.attempt == attempt and e.committed_unix_s is not None]
            return max((entry.step for entry in mine), default=-1)

    def last_planned_step(self, job: str) -> int:
        """The highest step in the ledger, over all attempts; -1 when the ledger is empty."""
        with self._turn:
            return max((step for _, step in self._ledger.get(job, {})), default=-1)

    def archive_ledger(self, planned_before_unix_s: float) -> int:
        """Nothing: what is in memory ends with the process."""
        return 0

    def trim(self) -> int:
        """Nothing: there is no file."""
        return 0

    def put_cost(self, cost: CostRecord) -> None:
        """Insert; replaces the job's records that begin at its step or later. Raises NotFoundError
        when there is no such job."""
        with self._turn:
            self._require_job(cost.job)
            known = self._costs.get(cost.job, [])
            kept = [record for record in known if record.from_step < cost.from_step]
            self._costs[cost.job] = [*kept, cost]

    def costs(self, job: str) -> list[CostRecord]:
        """The job's cost records, by the step at which they begin."""
        with self._turn:
            return list(self._costs.get(job, []))

    def add_mixture(self, change: MixtureRecord) -> None:
        """Insert. Raises NotFoundError when there is no such job."""
        with self._turn:
            self._require_job(change.job)
            self._mixtures.setdefault(change.job, []).append(change)

    def mixtures(self, job: str) -> list[MixtureRecord]:
        """The recorded changes of the job's mixture, by number."""
        with self._turn:
            return list(self._mixtures.get(job, []))

    def add_skips(
        self,
        job: str,
        ranges: Sequence[tuple[int, int]],
        action: SkipAction,
        recorded_unix_s: float,
    ) -> list[SkipRecord]:
        """Record these ranges of steps for every future attempt: all of them or none. Raises
        NotFoundError when there is no such job."""
        with self._turn:
            self._require_job(job)
            known = self._skips.setdefault(job, [])
            records = [
                SkipRecord(
                    job=job,
                    number=len(known) + 1 + place,
                    first_step=first,
                    last_step=last,
                    action=action,
                    from_attempt=len(self._attempts.get(job, [])) + 1,
                    recorded_unix_s=recorded_unix_s,
                )
                for place, (first, last) in enumerate(ranges)
            ]
            known.extend(records)
            return records

    def skips(self, job: str) -> list[SkipRecord]:
        """The job's records of skipped steps by number."""
        with self._turn:
            return list(self._skips.get(job, []))

    def add_quarantine(self, entries: Sequence[QuarantineEntry]) -> None:
        """Append all entries or none; the first entry of a (job, attempt, step, sample_id) is kept.
        Raises NotFoundError when there is no such job."""
        with self._turn:
            for entry in entries:
                self._require_job(entry.job)
            for entry in entries:
                self._quarantined.setdefault(entry.job, set()).add(entry.sample_id)
                kept = self._quarantine.setdefault(entry.job, {})
                if len(kept) < MOST_QUARANTINED:
                    kept.setdefault(_place(entry), entry)

    def quarantine(
        self, job: str, *, behind: QuarantineEntry | None = None, most: int | None = None
    ) -> list[QuarantineEntry]:
        """Entries of a job by (attempt, step, sample_id): those behind one, at most so many."""
        with self._turn:
            entries = self._quarantine.get(job, {})
            places = sorted(p for p in entries if behind is None or p > _place(behind))
            return [entries[place] for place in places[:most]]

    def quarantine_of_step(self, job: str, attempt: int, step: int) -> list[QuarantineEntry]:
        """The entries of one step of one attempt by sample_id."""
        entries = self.quarantine(job)
        return [entry for entry in entries if (entry.attempt, entry.step) == (attempt, step)]

    def quarantined_by_source(self, job: str, attempt: int, *, last_step: int) -> dict[str, int]:
        """The number of entries of each source in an attempt's steps up to this one, of sources
        that have any."""
        entries = self.quarantine(job)
        return dict(
            Counter(e.source for e in entries if e.attempt == attempt and e.step <= last_step)
        )

    def quarantined_samples(self, job: str) -> int:
        """Number of samples that have an entry."""
        with self._turn:
            return len(self._quarantined.get(job, ()))

    def _planned(self, job: str, attempt: int, step: int) -> LedgerEntry:
        entry = self._ledger.get(job, {}).get((attempt, step))
        if entry is None:
            raise NotFoundError(never_planned(job, attempt, step))
        return entry

    def _require_job(self, name: str) -> None:
        if name not in self._jobs:
            raise NotFoundError(no_such_job(name))


def _place(entry: QuarantineEntry) -> tuple[int, int, int]:
    return entry.attempt, entry.step, entry.sample_id
