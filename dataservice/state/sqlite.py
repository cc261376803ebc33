"""The durable store: one SQLite file, `state.db`, in a directory that one process holds.

Contract. Every method is one transaction: it is on disk when the method returns (WAL with
synchronous=FULL), and has not happened at all when it raises. Threads of one process take
turns. A second process is refused, since a coordinator's memory would not see its writes; the
kernel drops the lock when the holder dies, however it dies.
"""

import fcntl
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, fields
from pathlib import Path
from typing import IO, Any, TypeVar

from dataservice.core.errors import ConflictError, NotFoundError, StateError
from dataservice.core.job import (
    AttemptRecord,
    CostRecord,
    JobRecord,
    LedgerEntry,
    QuarantineEntry,
)
from dataservice.state.refusals import never_planned, no_such_job, not_the_next_attempt
from dataservice.state.schema import migrate

_FILE = "state.db"
_LOCK = "state.lock"

_Record = TypeVar("_Record", JobRecord, AttemptRecord, LedgerEntry, QuarantineEntry, CostRecord)


class SqliteStateStore:
    """The port StateStore in `directory`/state.db."""

    def __init__(self, directory: Path) -> None:
        """Open or make the store, and bring its schema up to date.

        Raises:
            StateError: the directory cannot be written, another process holds it, or the file
                is damaged or of a newer release.
        """
        self._path = directory / _FILE
        self._turn = threading.RLock()
        self._lock_file = _hold(directory)
        try:
            with self._translated():
                self._connection = _connect(self._path)
        except BaseException:
            self._lock_file.close()
            raise

    def close(self) -> None:
        """Flush, close and let another process have the directory. May be called twice."""
        with self._turn, self._translated():
            self._connection.close()
            self._lock_file.close()

    # ---- jobs -----------------------------------------------------------------------------

    def put_job(self, job: JobRecord) -> None:
        """Insert or replace a job by name; its attempts and ledger stay."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO jobs VALUES (?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET "
                "spec_json = excluded.spec_json, index_fingerprint = excluded.index_fingerprint, "
                "state = excluded.state, created_unix_s = excluded.created_unix_s",
                astuple(job),
            )

    def job(self, name: str) -> JobRecord | None:
        """One job, or None."""
        return _first(self._select(JobRecord, "FROM jobs WHERE name = ?", name))

    def jobs(self) -> list[JobRecord]:
        """All jobs by name."""
        return self._select(JobRecord, "FROM jobs ORDER BY name")

    def delete_job(self, name: str) -> None:
        """Remove a job with all its records; no such job is no error."""
        with self._transaction() as db:
            db.execute("DELETE FROM jobs WHERE name = ?", (name,))  # the rest by foreign key

    # ---- attempts -------------------------------------------------------------------------

    def put_attempt(self, attempt: AttemptRecord) -> None:
        """Insert. Raises ConflictError if not the next number, NotFoundError without its job."""
        with self._transaction() as db:
            self._require_job(db, attempt.job)
            (last,) = db.execute(
                "SELECT COALESCE(MAX(attempt), 0) FROM attempts WHERE job = ?", (attempt.job,)
            ).fetchone()
            if attempt.attempt != last + 1:
                raise ConflictError(not_the_next_attempt(attempt, last))
            db.execute("INSERT INTO attempts VALUES (?, ?, ?, ?, ?)", astuple(attempt))

    def last_attempt(self, job: str) -> AttemptRecord | None:
        """The newest attempt of a job."""
        return _first(
            self._select(
                AttemptRecord, "FROM attempts WHERE job = ? ORDER BY attempt DESC LIMIT 1", job
            )
        )

    # ---- ledger ---------------------------------------------------------------------------

    def put_ledger(self, entry: LedgerEntry) -> None:
        """Insert, or replace the entry of the same (job, attempt, step). Raises NotFoundError
        without its job."""
        with self._transaction() as db:
            self._require_job(db, entry.job)
            db.execute(
                "INSERT OR REPLACE INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
        """Mark a step as trained by all ranks; NotFoundError if it was never planned."""
        with self._transaction() as db:
            changed = db.execute(
                "UPDATE ledger SET committed_unix_s = ?, measured_s = COALESCE(?, measured_s) "
                "WHERE job = ? AND attempt = ? AND step = ?",
                (committed_unix_s, measured_s, job, attempt, step),
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

    def ledger(self, job: str) -> list[LedgerEntry]:
        """All entries of a job by (attempt, step)."""
        return self._select(LedgerEntry, "FROM ledger WHERE job = ? ORDER BY attempt, step", job)

    def last_planned_step(self, job: str) -> int:
        """The last step of the ledger in any attempt; -1 if it is empty."""
        with self._turn, self._translated():
            (last,) = self._connection.execute(
                "SELECT COALESCE(MAX(step), -1) FROM ledger WHERE job = ?", (job,)
            ).fetchone()
            return int(last)

    # ---- costs ----------------------------------------------------------------------------

    def put_cost(self, cost: CostRecord) -> None:
        """Insert; it replaces those of its job that begin at its step or later. Raises
        NotFoundError without its job."""
        with self._transaction() as db:
            self._require_job(db, cost.job)
            db.execute(
                "DELETE FROM costs WHERE job = ? AND from_step >= ?", (cost.job, cost.from_step)
            )
            db.execute("INSERT INTO costs VALUES (?, ?, ?, ?, ?)", astuple(cost))

    def costs(self, job: str) -> list[CostRecord]:
        """The job's cost records by the step they begin at."""
        return self._select(CostRecord, "FROM costs WHERE job = ? ORDER BY from_step", job)

    # ---- quarantine -----------------------------------------------------------------------

    def add_quarantine(self, entries: Sequence[QuarantineEntry]) -> None:
        """Append; the first entry of a (job, attempt, step, sample_id) is kept. All or none.
        Raises NotFoundError without their job."""
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

    # ---- transactions ---------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._turn, self._translated():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # a full disk has rolled back by itself
                    self._connection.execute("ROLLBACK")
                raise

    def _select(self, kind: type[_Record], rest: str, *values: object) -> list[_Record]:
        """Rows as records: the tables' columns have the names of the records' fields."""
        columns = ", ".join(f.name for f in fields(kind))
        with self._turn, self._translated():
            cursor = self._connection.execute(f"SELECT {columns} {rest}", values)
            names = [column[0] for column in cursor.description]
            return [kind(**dict(zip(names, row, strict=True))) for row in cursor]

    @staticmethod
    def _require_job(db: sqlite3.Connection, name: str) -> None:
        if db.execute("SELECT 1 FROM jobs WHERE name = ?", (name,)).fetchone() is None:
            raise NotFoundError(no_such_job(name))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateError(f"{self._path}: {_explain(error)}") from error


def _hold(directory: Path) -> IO[str]:
    """Make the directory and lock it for this process."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock_file = (directory / _LOCK).open("a+", encoding="ascii")
    except OSError as error:
        raise StateError(_unwritable(directory, error)) from error
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock_file.truncate(0)
        lock_file.write(f"{os.getpid()}\n")
        lock_file.flush()
    except BlockingIOError as error:
        lock_file.seek(0)
        holder = lock_file.read(20).strip() or "unknown"
        lock_file.close()
        raise StateError(
            f"state directory {directory} is held by another service (process {holder}). Stop "
            "that one first, or choose another directory with --state-dir."
        ) from error
    except OSError as error:
        lock_file.close()
        raise StateError(_unwritable(directory, error)) from error
    return lock_file


def _unwritable(directory: Path, error: OSError) -> str:
    return (
        f"state directory {directory} cannot be written: {error.strerror}. Make it writable for "
        "this user, free space on its disk, or choose another with --state-dir."
    )


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise sqlite3.DatabaseError(f"database disk image is malformed: {verdict}")
        migrate(connection, str(path))
    except BaseException:
        connection.close()
        raise
    return connection


def _explain(error: sqlite3.Error) -> str:
    """What SQLite says, and what to do about it."""
    remedies: dict[int, str] = {
        sqlite3.SQLITE_FULL: "Nothing of this change was kept. Free space on its disk.",
        sqlite3.SQLITE_READONLY: "Make the file and its directory writable for this user.",
        sqlite3.SQLITE_CANTOPEN: "Make the file and its directory writable for this user.",
        sqlite3.SQLITE_IOERR: "Nothing of this change was kept. Check the disk (space, health).",
        sqlite3.SQLITE_CORRUPT: _DAMAGED,
        sqlite3.SQLITE_NOTADB: _DAMAGED,
    }
    code: Any = getattr(error, "sqlite_errorcode", None)
    if code is None and isinstance(error, sqlite3.DatabaseError) and "malformed" in str(error):
        return f"{error}. {_DAMAGED}"
    remedy = remedies.get(code & 0xFF if code is not None else -1, "Restart the service.")
    return f"{error}. {remedy}"


_DAMAGED = (
    "The file is damaged: move it (and its -wal and -shm) away to keep what can be salvaged, "
    "restore a backup, or start anew; trainers' checkpoints hold their own positions."
)


def _first(records: list[_Record]) -> _Record | None:
    return records[0] if records else None
