"""state.db: one SQLite file in a directory that one process holds, and its transactions.

Contract. Every method is one transaction: when the method returns, it is on disk (WAL with
synchronous=FULL); when it raises, nothing has changed. Threads of one process take turns. A second
process is refused, since a coordinator's memory would not see its writes; the kernel drops the lock
when the holder dies, however it dies.
"""

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, TypeVar

from dataservice.core.errors import NotFoundError, StateError
from dataservice.core.job import (
    AttemptRecord,
    CostRecord,
    JobRecord,
    LedgerEntry,
    MixtureRecord,
    QuarantineEntry,
    SkipRecord,
    SpecRecord,
)
from dataservice.state import directory as folder
from dataservice.state import free_pages
from dataservice.state.refusals import no_such_job

# Milliseconds that `check` waits for a file that another process has locked.
CHECK_BUSY_MS = 1000

Record = TypeVar(
    "Record",
    JobRecord,
    AttemptRecord,
    LedgerEntry,
    QuarantineEntry,
    CostRecord,
    MixtureRecord,
    SkipRecord,
    SpecRecord,
)
_NAMES: dict[Any, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in Record.__constraints__
}
# The names of a record's fields, and the same as columns of a query.
_COLUMNS = {kind: (names, ", ".join(f'"{n}"' for n in names)) for kind, names in _NAMES.items()}


class SqliteFile:
    """`directory`/state.db, with the tables of this release."""

    def __init__(self, directory: Path, *, held: IO[str] | None = None) -> None:
        """Open or make the store, and bring its schema up to date. A directory that is `held`, as
        `directory.hold` does it, stays so after the store is closed.

        Raises:
            StateError: the directory cannot be written, another process holds it, or the file
                is damaged or of a newer release.
        """
        self._path = directory / folder.FILE
        self._turn = threading.RLock()
        self._lock = contextlib.ExitStack()
        if held is None:
            self._lock.enter_context(folder.hold(directory))
        try:
            folder.tighten_files(directory)
            with self._translated(opening=True):
                self._connection = folder.connect(self._path)
        except BaseException:
            self._lock.close()
            raise

    def close(self) -> None:
        """Flush and close. Releases the directory for other processes, unless somebody else holds
        it. May be called twice."""
        with self._turn, self._translated():
            self._connection.close()
            self._lock.close()

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

    def trim(self) -> int:
        """Give some room that nothing is in any more back to the file system, in a short turn.
        Returns how many bytes; 0 once no more is worth it."""
        with self._turn, self._translated():
            return free_pages.give_back(self._connection)

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

    def _select(self, kind: type[Record], rest: str, *values: object) -> list[Record]:
        """Rows as records: the columns of the tables are named after the records' fields."""
        names, columns = _COLUMNS[kind]
        with self._turn, self._translated():
            rows = self._connection.execute(f"SELECT {columns} {rest}", values).fetchall()
        return [kind(**dict(zip(names, row, strict=True))) for row in rows]

    def _rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._turn, self._translated():
            return self._connection.execute(query, values).fetchall()

    def _number(self, query: str, *values: object) -> int:
        with self._turn, self._translated():
            (number,) = self._connection.execute(query, values).fetchone()
            return int(number)

    @staticmethod
    def _require_job(db: sqlite3.Connection, name: str) -> None:
        if db.execute("SELECT 1 FROM jobs WHERE name = ?", (name,)).fetchone() is None:
            raise NotFoundError(no_such_job(name))

    @contextmanager
    def _translated(self, *, opening: bool = False) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateError(folder.explain(error, self._path, opening=opening)) from error


def first(records: list[Record]) -> Record | None:
    """The first record, if any."""
    return records[0] if records else None
