"""The durable store: `state.db`, and the ledger's old entries beside it; see `sqlite_file.py`."""

import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple

from dataservice.core.errors import ConflictError
from dataservice.core.job import (
    AttemptRecord,
    CostRecord,
    JobRecord,
    MixtureRecord,
    SkipAction,
    SkipRecord,
    SpecRecord,
)
from dataservice.state.refusals import not_the_next_attempt
from dataservice.state.sqlite_file import first
from dataservice.state.sqlite_ledger import SqliteLedger
from dataservice.state.sqlite_quarantine import SqliteQuarantine


class SqliteStateStore(SqliteLedger, SqliteQuarantine):
    """The port StateStore in `directory`/state.db."""

    # ---- jobs -----------------------------------------------------------------------------

    def put_job(self, *jobs: JobRecord, forget: Collection[str] = ()) -> None:
        """Insert or replace jobs by name, all of them or none; their attempts and ledgers stay. The
        first job file of each version is kept. The jobs to `forget` are removed before."""
        with self._forgetting(forget) as db:
            for job in jobs:
                db.execute(
                    "INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE "
                    "SET spec_json = excluded.spec_json, "
                    "index_fingerprint = excluded.index_fingerprint, state = excluded.state, "
                    "created_unix_s = excluded.created_unix_s, "
                    'spec_version = excluded.spec_version, "order" = excluded."order"',
                    astuple(job),
                )
                db.execute(
                    "INSERT OR IGNORE INTO specs VALUES (?, ?, ?, ?)",
                    (job.name, job.spec_version, job.spec_json, time.time()),
                )

    def specs(self, job: str, behind: int = 0) -> list[SpecRecord]:
        """The versions of a job's file that come after this one, by version."""
        rows = "FROM specs WHERE job = ? AND version > ? ORDER BY version"
        return self._select(SpecRecord, rows, job, behind)

    def job(self, name: str) -> JobRecord | None:
        """One job, or None."""
        return first(self._select(JobRecord, "FROM jobs WHERE name = ?", name))

    def jobs(self) -> list[JobRecord]:
        """All jobs by name."""
        return self._select(JobRecord, "FROM jobs ORDER BY name")

    def delete_job(self, *names: str) -> None:
        """Remove jobs with all their records: what their quarantines list at first, in pieces, then
        all else or none; it is no error if there is no such job."""
        for name in names:
            self.empty_quarantine(name)
        with self._forgetting(names):
            pass

    @contextmanager
    def _forgetting(self, jobs: Collection[str]) -> Iterator[sqlite3.Connection]:
        """A transaction that begins by removing these jobs; the files of their ledgers go once it
        is on disk."""
        with self._turn:
            files = self._files_of(jobs)
            with self._transaction() as db:  # foreign keys remove the rest of each job
                db.executemany("DELETE FROM jobs WHERE name = ?", [(name,) for name in jobs])
                yield db
            self._files.remove(files)
            for job in jobs:
                self._forget_counts(job)

    # ---- attempts -------------------------------------------------------------------------

    def put_attempt(self, attempt: AttemptRecord) -> None:
        """Insert. Raises ConflictError when its number is not the next one, NotFoundError when
        there is no such job."""
        with self._transaction() as db:
            self._require_job(db, attempt.job)
            (last,) = db.execute(
                "SELECT COALESCE(MAX(attempt), 0) FROM attempts WHERE job = ?", (attempt.job,)
            ).fetchone()
            if attempt.attempt != last + 1:
                raise ConflictError(not_the_next_attempt(attempt, last))
            db.execute("INSERT INTO attempts VALUES (?, ?, ?, ?, ?, ?, ?)", astuple(attempt))

    def last_attempt(self, job: str) -> AttemptRecord | None:
        """The newest attempt of a job."""
        return first(
            self._select(
                AttemptRecord, "FROM attempts WHERE job = ? ORDER BY attempt DESC LIMIT 1", job
            )
        )

    def attempts(self, job: str) -> list[AttemptRecord]:
        """All attempts of a job, by number."""
        return self._select(AttemptRecord, "FROM attempts WHERE job = ? ORDER BY attempt", job)

    # ---- costs ----------------------------------------------------------------------------

    def put_cost(self, cost: CostRecord) -> None:
        """Insert; replaces the job's records that begin at its step or later. Raises NotFoundError
        when there is no such job."""
        with self._transaction() as db:
            self._require_job(db, cost.job)
            db.execute(
                "DELETE FROM costs WHERE job = ? AND from_step >= ?", (cost.job, cost.from_step)
            )
            db.execute("INSERT INTO costs VALUES (?, ?, ?, ?, ?, ?)", astuple(cost))

    def costs(self, job: str) -> list[CostRecord]:
        """The job's cost records, by the step at which they begin."""
        return self._select(CostRecord, "FROM costs WHERE job = ? ORDER BY from_step", job)

    # ---- changes of the mixture -----------------------------------------------------------

    def add_mixture(self, change: MixtureRecord) -> None:
        """Insert. Raises NotFoundError when there is no such job."""
        with self._transaction() as db:
            self._require_job(db, change.job)
            db.execute("INSERT INTO mixtures VALUES (?, ?, ?, ?)", astuple(change))

    def mixtures(self, job: str) -> list[MixtureRecord]:
        """The recorded changes of the job's mixture, by number."""
        return self._select(MixtureRecord, "FROM mixtures WHERE job = ? ORDER BY number", job)

    # ---- skips ----------------------------------------------------------------------------

    def add_skips(
        self,
        job: str,
        ranges: Sequence[tuple[int, int]],
        action: SkipAction,
        recorded_unix_s: float,
    ) -> list[SkipRecord]:
        """Record these ranges of steps for every future attempt: all of them or none. Raises
        NotFoundError when there is no such job."""
        with self._transaction() as db:
            self._require_job(db, job)
            (attempt,) = db.execute(
                "SELECT COALESCE(MAX(attempt), 0) + 1 FROM attempts WHERE job = ?", (job,)
            ).fetchone()
            (number,) = db.execute(
                "SELECT COALESCE(MAX(number), 0) + 1 FROM skips WHERE job = ?", (job,)
            ).fetchone()
            records = [
                SkipRecord(
                    job=job,
                    number=number + place,
                    first_step=first,
                    last_step=last,
                    action=action,
                    from_attempt=attempt,
                    recorded_unix_s=recorded_unix_s,
                )
                for place, (first, last) in enumerate(ranges)
            ]
            db.executemany(
                "INSERT INTO skips VALUES (?, ?, ?, ?, ?, ?, ?)",
                [astuple(record) for record in records],
            )
            return records

    def skips(self, job: str) -> list[SkipRecord]:
        """The job's records of skipped steps by number."""
        return self._select(SkipRecord, "FROM skips WHERE job = ? ORDER BY number", job)
