"""The durable store: one SQLite file, `state.db`, in a directory that one process holds.

Contract. Every method is one transaction: when the method returns, it is on disk (WAL with
synchronous=FULL); when it raises, nothing has changed. Threads of one process take turns. A second
process is refused, since a coordinator's memory would not see its writes; the kernel drops the lock
when the holder dies, however it dies.
"""

import sqlite3
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields
from pathlib import Path
from typing import TypeVar

from dataservice.core.errors import ConflictError, NotFoundError, StateError
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
from dataservice.state import directory as folder
from dataservice.state.refusals import never_planned, no_such_job, not_the_next_attempt

# Milliseconds that `check` waits for a file that another process has locked.
CHECK_BUSY_MS = 1000

_Record = TypeVar(
    "_Record",
    JobRecord,
    AttemptRecord,
    LedgerEntry,
    QuarantineEntry,
    CostRecord,
    MixtureRecord,
    SkipRecord,
    SpecRecord,
)


class SqliteStateStore:
    """The port StateStore in `directory`/state.db."""

    def __init__(self, directory: Path) -> None:
        """Open or make the store, and bring its schema up to date.

        Raises:
            StateError: the directory cannot be written, another process holds it, or the file
                is damaged or of a newer release.
        """
        self._path = directory / folder.FILE
        self._turn = threading.RLock()
        self._lock_file = folder.hold(directory)
        try:
            folder.tighten_files(directory)
            with self._translated():
                self._connection = folder.connect(self._path)
        except BaseException:
            self._lock_file.close()
            raise

    def close(self) -> None:
        """Flush, close and release the directory for other processes. May be called twice."""
        with self._turn, self._translated():
            self._connection.close()
            self._lock_file.close()

    def check(self) -> None:
        """Returns if the store can be read and written; changes nothing. It waits for the call in
        progress, and takes the same lock as writing."""
        with self._turn, self._translated():
            self._connection.execute(f"PRAGMA busy_timeout = {CHECK_BUSY_MS}")
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                self._connection.execute("ROLLBACK")
            finally:
                self._connection.execute(f"PRAGMA busy_timeout = {folder.BUSY_MS}")

    # ---- jobs -----------------------------------------------------------------------------

    def put_job(self, *jobs: JobRecord, forget: Collection[str] = ()) -> None:
        """Insert or replace jobs by name, all of them or none; their attempts and ledgers stay. The
        first job file of each version is kept. The jobs to `forget` are removed before."""
        with self._transaction() as db:
            _delete_jobs(db, forget)
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

    def specs(self, job: str) -> list[SpecRecord]:
        """Every version of a job's file, by version."""
        return self._select(SpecRecord, "FROM specs WHERE job = ? ORDER BY version", job)

    def job(self, name: str) -> JobRecord | None:
        """One job, or None."""
        return _first(self._select(JobRecord, "FROM jobs WHERE name = ?", name))

    def jobs(self) -> list[JobRecord]:
        """All jobs by name."""
        return self._select(JobRecord, "FROM jobs ORDER BY name")

    def delete_job(self, *names: str) -> None:
        """Remove jobs with all their records, all of them or none; it is no error if there is no
        such job."""
        with self._transaction() as db:
            _delete_jobs(db, names)

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
        return _first(
            self._select(
                AttemptRecord, "FROM attempts WHERE job = ? ORDER BY attempt DESC LIMIT 1", job
            )
        )

    def attempts(self, job: str) -> list[AttemptRecord]:
        """All attempts of a job, by number."""
        return self._select(AttemptRecord, "FROM attempts WHERE job = ? ORDER BY attempt", job)

    # ---- ledger ---------------------------------------------------------------------------

    def put_ledger(self, entry: LedgerEntry) -> None:
        """Insert, or replace the entry of the same (job, attempt, step). Raises NotFoundError when
        there is no such job."""
        with self._transaction() as db:
            self._require_job(db, entry.job)
            db.execute(
                "INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                astuple(entry),
            )

    def commit_step(
        self,
        job: str,
        attempt: int,
        step: int,
        committed_unix_s: float,
        measured_s: float | None = None,
    ) -> None:
        """Mark a step as trained by all ranks. Raises NotFoundError when it was never planned."""
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE ledger SET committed_unix_s = ?, measured_s = COALESCE(?, measured_s) "
                "WHERE job = ? AND attempt = ? AND step = ?",
                (committed_unix_s, measured_s, job, attempt, step),
            )
            if not changed.rowcount:
                raise NotFoundError(never_planned(job, attempt, step))

    def put_content(self, job: str, attempt: int, step: int, content: bytes) -> None:
        """Record the digest of what a step delivered. Raises NotFoundError when it was never
        planned."""
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE ledger SET content = ? WHERE job = ? AND attempt = ? AND step = ?",
                (content, job, attempt, step),
            )
            if not changed.rowcount:
                raise NotFoundError(never_planned(job, attempt, step))

    def ledger_entry(self, job: str, step: int, attempt: int | None = None) -> LedgerEntry | None:
        """The entry of this step in this attempt, or in the newest attempt that has it."""
        which = "FROM ledger WHERE job = ? AND step = ?"
        if attempt is not None:
            return _first(self._select(LedgerEntry, f"{which} AND attempt = ?", job, step, attempt))
        newest = f"{which} ORDER BY attempt DESC LIMIT 1"
        return _first(self._select(LedgerEntry, newest, job, step))

    def ledger_of_step(self, job: str, step: int) -> list[LedgerEntry]:
        """The entries of one step, by attempt."""
        rest = "FROM ledger WHERE job = ? AND step = ? ORDER BY attempt"
        return self._select(LedgerEntry, rest, job, step)

    def last_entry(
        self, job: str, attempt: int, *, before: int | None = None
    ) -> LedgerEntry | None:
        """The attempt's entry of its highest step, or of its highest step below `before`."""
        rest = "FROM ledger WHERE job = ? AND attempt = ?"
        last = "ORDER BY step DESC LIMIT 1"
        if before is None:
            return _first(self._select(LedgerEntry, f"{rest} {last}", job, attempt))
        return _first(
            self._select(LedgerEntry, f"{rest} AND step < ? {last}", job, attempt, before)
        )

    def last_committed_step(self, job: str, attempt: int) -> int:
        """The attempt's highest committed step; -1 when none is committed."""
        # Few steps are planned ahead of the committed ones, so the search ends soon.
        return self._number(
            "SELECT COALESCE((SELECT step FROM ledger WHERE job = ? AND attempt = ? "
            "AND committed_unix_s IS NOT NULL ORDER BY step DESC LIMIT 1), -1)",
            job,
            attempt,
        )

    def last_planned_step(self, job: str) -> int:
        """The highest step in the ledger, over all attempts; -1 when the ledger is empty."""
        return self._number("SELECT COALESCE(MAX(step), -1) FROM ledger WHERE job = ?", job)

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

    # ---- quarantine -----------------------------------------------------------------------

    def add_quarantine(self, entries: Sequence[QuarantineEntry]) -> None:
        """Append all entries or none; the first entry of a (job, attempt, step, sample_id) is kept.
        Raises NotFoundError when there is no such job."""
        with self._transaction() as db:
            for name in {entry.job for entry in entries}:
                self._require_job(db, name)
            db.executemany(
                "INSERT OR IGNORE INTO quarantine VALUES (?, ?, ?, ?, ?, ?, ?)",
                [astuple(entry) for entry in entries],
            )

    def quarantine(self, job: str) -> list[QuarantineEntry]:
        """All entries of a job by (attempt, step, sample_id)."""
        return self._select(
            QuarantineEntry,
            "FROM quarantine WHERE job = ? ORDER BY attempt, step, sample_id",
            job,
        )

    def quarantine_of_step(self, job: str, attempt: int, step: int) -> list[QuarantineEntry]:
        """The entries of one step of one attempt by sample_id."""
        return self._select(
            QuarantineEntry,
            "FROM quarantine WHERE job = ? AND attempt = ? AND step = ? ORDER BY sample_id",
            job,
            attempt,
            step,
        )

    def quarantined_by_source(self, job: str, attempt: int, *, last_step: int) -> dict[str, int]:
        """The number of entries of each source in an attempt's steps up to this one, of sources
        that have any."""
        query = (
            "SELECT source, COUNT(*) FROM quarantine WHERE job = ? AND attempt = ? AND step <= ? "
            "GROUP BY source"
        )
        with self._turn, self._translated():
            return dict(self._connection.execute(query, (job, attempt, last_step)))

    def quarantined_samples(self, job: str) -> int:
        """Number of samples that have an entry."""
        return self._number("SELECT COUNT(DISTINCT sample_id) FROM quarantine WHERE job = ?", job)

    # ---- transactions ---------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._turn, self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite itself rolls back on a full disk
                    self._connection.execute("ROLLBACK")
                raise

    def _select(self, kind: type[_Record], rest: str, *values: object) -> list[_Record]:
        """Rows as records: the columns of the tables are named after the records' fields."""
        columns = ", ".join(f'"{f.name}"' for f in fields(kind))
        with self._turn, self._translated():
            cursor = self._connection.execute(f"SELECT {columns} {rest}", values)
            names = [column[0] for column in cursor.description]
            return [kind(**dict(zip(names, row, strict=True))) for row in cursor]

    def _number(self, query: str, *values: object) -> int:
        with self._turn, self._translated():
            (number,) = self._connection.execute(query, values).fetchone()
            return int(number)

    @staticmethod
    def _require_job(db: sqlite3.Connection, name: str) -> None:
        if db.execute("SELECT 1 FROM jobs WHERE name = ?", (name,)).fetchone() is None:
            raise NotFoundError(no_such_job(name))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateError(folder.explain(error, self._path)) from error


def _delete_jobs(db: sqlite3.Connection, names: Collection[str]) -> None:
    # Foreign keys remove the rest.
    db.executemany("DELETE FROM jobs WHERE name = ?", [(name,) for name in names])


def _first(records: list[_Record]) -> _Record | None:
    return records[0] if records else None
