"""Pages of state.db that are of use no more: given back to the file system.

    entries archived, jobs deleted ─▶ free pages ─▶ give_back, some at a time while the service runs
    a file that was never given any back          ─▶ compact, once at a start

A page is given back by moving the file's last page into it, which a file allows from its beginning
or from a VACUUM on. Both are transactions: whoever is killed at any moment loses nothing.
"""

import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

# Free pages that stay, 16 MiB: the ledger grows into them until the next visit.
KEPT_PAGES = 4096
# Given back in one turn, while all other calls wait.
PAGES_A_TURN = 500
# From here on it is worth a start's time to make a file anew, of which more than half is free: 10 s
# a gigabyte of what it holds, where a start reads and copies the free pages at 3 s a gigabyte.
LEAST_COMPACTED_BYTES = 64 * 2**20
_INCREMENTAL = 2
_TEMPORARY = "SQLITE_TMPDIR"


def allow_giving_back(connection: sqlite3.Connection) -> None:
    """Have a database that has no table yet give pages back, or one that has from its next VACUUM
    on."""
    connection.execute(f"PRAGMA auto_vacuum = {_INCREMENTAL}")


def give_back(connection: sqlite3.Connection) -> int:
    """Give back some free pages, in a transaction of its own. Returns how many bytes; 0 where none
    are left that are worth it, or the file was made before it allowed this. Raises sqlite3.Error.
    """
    free = _number(connection, "freelist_count")
    if free <= KEPT_PAGES or _number(connection, "auto_vacuum") != _INCREMENTAL:
        return 0
    some = min(free - KEPT_PAGES, PAGES_A_TURN)
    # By `execute` Python takes the first step of this statement alone, which is one page.
    connection.executescript(f"PRAGMA incremental_vacuum({some});")
    left = _number(connection, "freelist_count")
    return (free - left) * _number(connection, "page_size")


def compact(connection: sqlite3.Connection, path: Path) -> None:
    """Make the file anew without its free pages, if more than half of it is free and that is much.
    Where it cannot be done, the file stays as it is, which is logged."""
    page_bytes = _number(connection, "page_size")
    pages, free = _number(connection, "page_count"), _number(connection, "freelist_count")
    if free * 2 <= pages or free * page_bytes < LEAST_COMPACTED_BYTES:
        return
    held_bytes = (pages - free) * page_bytes
    try:
        if shutil.disk_usage(path.parent).free < 3 * held_bytes:
            raise OSError("its disk has too little room left")
        with _temporary_files_in(path.parent):
            connection.execute("VACUUM")
        log.info("%s was made anew without %d free pages", path, free)
    except (OSError, sqlite3.Error) as error:
        log.warning("%s keeps %d MB of free pages: %s", path, free * page_bytes >> 20, error)
    with suppress(sqlite3.Error):  # the log is as large as the new file
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


@contextmanager
def _temporary_files_in(folder: Path) -> Iterator[None]:
    """Have SQLite make its copy on the disk whose room is known."""
    before = os.environ.get(_TEMPORARY)
    os.environ[_TEMPORARY] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_TEMPORARY]
        else:
            os.environ[_TEMPORARY] = before


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    (number,) = connection.execute(f"PRAGMA {pragma}").fetchone()
    return int(number)
