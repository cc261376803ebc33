"""The ledger in state.db, whose old entries are in Parquet files.

    put_ledger ─▶ table ledger ─▶ archive_ledger ─▶ ledger/N.parquet, and a row in archives
                       ▲                                   │
                       └── a change of an old entry ◀──────┘

An entry stands in the table or in a file; where it is in both, the table's is the newer. A file is
whole and on disk before a transaction names it and removes what it holds from the table.
"""

import secrets
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import IO

from dataservice.core.errors import NotFoundError
from dataservice.core.job import LedgerEntry
from dataservice.state.ledger_files import LedgerFiles, load_arrow
from dataservice.state.refusals import never_planned, no_such_job
from dataservice.state.sqlite_file import SqliteFile, first

# Entries of one job in a file: below the least the next visit takes them. All other calls wait
# while the most are moved.
LEAST_ROWS = 1024
MOST_ROWS = 4096
# Steps behind an attempt's newest commit that stay in the table while it may still train.
KEPT_STEPS = 1000
_NEVER = 2**62  # a step that none reaches
_row_of = attrgetter(*(field.name for field in fields(LedgerEntry)))
# In one statement: around each, other threads take the interpreter from whoever waits for it.
_INSERT = (
    f"INSERT OR REPLACE INTO ledger SELECT {', '.join('?' * len(fields(LedgerEntry)))} "
    "WHERE EXISTS (SELECT 1 FROM jobs WHERE name = ?1)"
)


@dataclass(frozen=True, slots=True)
class _Run:
    """Steps without a gap of one attempt, in one file from `first_row` on. Of two runs with the
    same step the one of the higher `number` holds."""

    job: str
    attempt: int
    first_step: int
    number: int
    last_step: int
    last_committed_step: int
    first_row: int
    file: str


class SqliteLedger(SqliteFile):
    """The ledger's part of the port StateStore."""

    def __init__(self, directory: Path, *, held: IO[str] | None = None) -> None:
        super().__init__(directory, held=held)
        self._files = LedgerFiles(directory)
        # Whether a job may have archives, once it was asked: most have none, and every step is
        # looked for.
        self._archived_jobs: dict[str, bool] = {}
        self._archived_last = ""  # the job whose entries went last: the next visit begins there

    def put_ledger(self, entry: LedgerEntry, contents: Sequence[tuple[int, bytes]] = ()) -> None:
        """Insert, or replace the entry of the same (job, attempt, step); record with it the
        `contents` of other steps of the attempt. Raises NotFoundError when there is no such job, or
        one of those steps was never planned."""
        with self._transaction() as db:
            if not db.execute(_INSERT, _row_of(entry)).rowcount:
                raise NotFoundError(no_such_job(entry.job))
            for step, content in contents:
                self._change(db, "content = ?", (content,), (entry.job, entry.attempt, step))

    def commit_step(
        self,
        job: str,
        attempt: int,
        step: int,
        committed_unix_s: float,
        measured_s: float | None = None,
    ) -> None:
        """Mark a step as trained by all ranks. Raises NotFoundError when it was never planned."""
        self._update(
            "committed_unix_s = ?, measured_s = COALESCE(?, measured_s)",
            (committed_unix_s, measured_s),
            (job, attempt, step),
        )

    def put_content(self, job: str, attempt: int, step: int, content: bytes) -> None:
        """Record the digest of what a step delivered. Raises NotFoundError when it was never
        planned."""
        self._update("content = ?", (content,), (job, attempt, step))

    def ledger_entry(self, job: str, step: int, attempt: int | None = None) -> LedgerEntry | None:
        """The entry of this step in this attempt, or in the newest attempt that has it."""
        with self._turn:
            if attempt is not None:
                rest = "FROM ledger WHERE job = ? AND step = ? AND attempt = ?"
                here = first(self._select(LedgerEntry, rest, job, step, attempt))
                return here or self._archived(job, attempt, step)
            entries = self.ledger_of_step(job, step)
            return entries[-1] if entries else None

    def ledger_of_step(self, job: str, step: int) -> list[LedgerEntry]:
        """The entries of one step, by attempt."""
        with self._turn:
            # By itself SQLite takes the primary key, and reads all steps of the job.
            rest = "FROM ledger INDEXED BY ledger_by_step WHERE job = ? AND step = ?"
            entries = {e.attempt: e for e in self._select(LedgerEntry, rest, job, step)}
            for run in self._runs(job, "? BETWEEN first_step AND last_step", step):
                if run.attempt not in entries:
                    entries[run.attempt] = self._read(run, step)
        return [entries[attempt] for attempt in sorted(entries)]

    def last_entry(
        self, job: str, attempt: int, *, before: int | None = None
    ) -> LedgerEntry | None:
        """The attempt's entry of its highest step, or of its highest step below `before`."""
        limit = _NEVER if before is None else before
        rest = "FROM ledger WHERE job = ? AND attempt = ? AND step < ? ORDER BY step DESC LIMIT 1"
        with self._turn:
            here = first(self._select(LedgerEntry, rest, job, attempt, limit))
            last = self._number(
                "SELECT COALESCE(MAX(MIN(last_step, ? - 1)), -1) FROM archives "
                "WHERE job = ? AND attempt = ? AND first_step < ?",
                *(limit, job, attempt, limit),
            )
            if last < 0 or (here is not None and here.step >= last):
                return here
            return self._archived(job, attempt, last)

    def last_committed_step(self, job: str, attempt: int) -> int:
        """The attempt's highest committed step; -1 when none is committed."""
        # Few steps are planned ahead of the committed ones, so the search ends soon.
        return self._number(
            "SELECT MAX(COALESCE((SELECT step FROM ledger WHERE job = ?1 AND attempt = ?2 "
            "AND committed_unix_s IS NOT NULL ORDER BY step DESC LIMIT 1), -1), "
            "COALESCE((SELECT MAX(last_committed_step) FROM archives WHERE job = ?1 "
            "AND attempt = ?2), -1))",
            job,
            attempt,
        )

    def last_planned_step(self, job: str) -> int:
        """The highest step in the ledger, over all attempts; -1 when the ledger is empty."""
        return self._number(
            "SELECT MAX(COALESCE((SELECT MAX(step) FROM ledger WHERE job = ?1), -1), "
            "COALESCE((SELECT MAX(last_step) FROM archives WHERE job = ?1), -1))",
            job,
        )

    # ---- old entries ----------------------------------------------------------------------

    def archive_ledger(self, planned_before_unix_s: float) -> int:
        """Move entries that were planned before then from the table to a file: at most MOST_ROWS of
        one job. Returns how many; 0 where no job has as many as LEAST_ROWS. Entries of an attempt
        that may still train stay until they are KEPT_STEPS behind its newest commit. Other calls
        wait while a job is looked at, and about .15 s while a file is written. Raises StateError
        where it cannot be."""
        load_arrow()
        names = [name for (name,) in self._rows("SELECT name FROM jobs ORDER BY name")]
        for job in sorted(names, key=lambda name: (name < self._archived_last, name)):
            with self._turn:
                moved = self._archive_job(job, planned_before_unix_s)
            if moved:
                self._archived_last = job
                return moved
        return 0

    def trim(self) -> int:
        """Give some room that nothing is in any more back to the file system, in a short turn:
        free pages, then files that a crash has left half written. Returns how many bytes; 0 once no
        more is worth it."""
        if given_bytes := super().trim():
            return given_bytes
        for half in self._files.half_written():
            with self._turn, suppress(OSError):  # one that was being written has its name by then
                given_bytes += half.stat().st_size
                half.unlink()
        return given_bytes

    def _archive_job(self, job: str, planned_before_unix_s: float) -> int:
        old = list(self._old_steps(job, planned_before_unix_s))
        if sum(rows for _, _, rows in old) < LEAST_ROWS:
            return 0
        rest = "FROM ledger WHERE job = ? AND attempt = ? AND step < ? ORDER BY step LIMIT ?"
        entries = [
            entry
            for attempt, end, rows in old
            for entry in self._select(LedgerEntry, rest, job, attempt, end, rows)
        ]
        self._archive(entries)
        return len(entries)

    def _old_steps(self, job: str, planned_before_unix_s: float) -> Iterator[tuple[int, int, int]]:
        """Of each attempt with old entries: the first step behind them, and their number; of all
        attempts at most MOST_ROWS. No entry is read, and of the others only the first."""
        newest = self._number("SELECT COALESCE(MAX(attempt), -1) FROM attempts WHERE job = ?", job)
        following = "SELECT COALESCE(MIN(attempt), -1) FROM ledger WHERE job = ? AND attempt > ?"
        attempt, room = self._number(following, job, -1), MOST_ROWS
        while attempt >= 0 and room:
            limit = self.last_committed_step(job, attempt) - KEPT_STEPS
            limit = limit if attempt == newest else _NEVER
            end = self._number(
                "SELECT COALESCE((SELECT step FROM (SELECT step, planned_unix_s FROM ledger "
                "WHERE job = ? AND attempt = ? AND step < ? ORDER BY step LIMIT ?) "
                "WHERE planned_unix_s >= ? LIMIT 1), ?)",
                *(job, attempt, limit, room, planned_before_unix_s, limit),
            )
            rows = self._number(
                "SELECT COUNT(*) FROM (SELECT 1 FROM ledger "
                "WHERE job = ? AND attempt = ? AND step < ? LIMIT ?)",
                *(job, attempt, end, room),
            )
            yield attempt, end, rows
            attempt, room = self._number(following, job, attempt), room - rows

    def _archive(self, entries: Sequence[LedgerEntry]) -> None:
        job, file = entries[0].job, secrets.token_hex(8)
        self._files.write(file, entries)
        self._archived_jobs[job] = True
        try:
            self._take_over(job, file, entries)
        except Exception:  # they stay in the table, and nobody knows of the file
            self._files.remove([file])
            raise

    def _take_over(self, job: str, file: str, entries: Sequence[LedgerEntry]) -> None:
        """Have these entries be those of a file that holds them, and no more in the table."""
        with self._transaction() as db:
            (number,) = db.execute(
                "SELECT COALESCE(MAX(number), 0) + 1 FROM archives WHERE job = ?", (job,)
            ).fetchone()
            db.executemany(
                "INSERT INTO archives VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [astuple(run) for run in runs_of(entries, number, file)],
            )
            db.executemany(
                "DELETE FROM ledger WHERE job = ? AND attempt = ? AND step = ?",
                [(entry.job, entry.attempt, entry.step) for entry in entries],
            )

    def _update(self, change: str, values: Sequence[object], place: tuple[str, int, int]) -> None:
        with self._transaction() as db:
            self._change(db, change, values, place)

    def _change(
        self,
        db: sqlite3.Connection,
        change: str,
        values: Sequence[object],
        place: tuple[str, int, int],
    ) -> None:
        """Change an entry; one that is in a file comes back to the table first."""
        query = f"UPDATE ledger SET {change} WHERE job = ? AND attempt = ? AND step = ?"
        if db.execute(query, (*values, *place)).rowcount:
            return
        entry = self._archived(*place)
        if entry is None:
            raise NotFoundError(never_planned(*place))
        db.execute(_INSERT, _row_of(entry))
        db.execute(query, (*values, *place))

    def _archived(self, job: str, attempt: int, step: int) -> LedgerEntry | None:
        covers = "attempt = ? AND ? BETWEEN first_step AND last_step"
        runs = self._runs(job, covers, attempt, step)
        return self._read(runs[0], step) if runs else None

    def _runs(self, job: str, where: str, *values: object) -> list[_Run]:
        """The runs of a job of which this is true, the newest first."""
        if job not in self._archived_jobs:
            any_of_it = "SELECT EXISTS (SELECT 1 FROM archives WHERE job = ?)"
            self._archived_jobs[job] = bool(self._number(any_of_it, job))
        if not self._archived_jobs[job]:
            return []
        columns = ", ".join(field.name for field in fields(_Run))
        query = f"SELECT {columns} FROM archives WHERE job = ? AND {where}"
        found = [_Run(*row) for row in self._rows(query, job, *values)]
        return sorted(found, key=lambda run: -run.number)

    def _read(self, run: _Run, step: int) -> LedgerEntry:
        row = run.first_row + step - run.first_step
        return self._files.entry(run.file, row, (run.job, run.attempt, step))

    def _files_of(self, jobs: Collection[str]) -> list[str]:
        query = "SELECT DISTINCT file FROM archives WHERE job = ?"
        return [file for job in jobs for (file,) in self._rows(query, job)]


def runs_of(entries: Sequence[LedgerEntry], number: int, file: str) -> Iterator[_Run]:
    """Entries of one job by attempt and step, as runs without a gap."""
    starts = [0] + [
        row
        for row, (left, right) in enumerate(pairwise(entries), start=1)
        if (right.attempt, right.step) != (left.attempt, left.step + 1)
    ]
    for start, stop in pairwise([*starts, len(entries)]):
        run = entries[start:stop]
        committed = (entry.step for entry in run if entry.committed_unix_s is not None)
        yield _Run(
            job=run[0].job,
            attempt=run[0].attempt,
            first_step=run[0].step,
            number=number,
            last_step=run[-1].step,
            last_committed_step=max(committed, default=-1),
            first_row=start,
            file=file,
        )
