"""The state directory: one process holds it, a damaged file is left unchanged, a backup is kept.

    hold DIR/state.lock ─▶ sound? (log, then every page, read-only) ─▶ compact ─▶ back up ─▶ migrate

Nothing is written before the file has been found sound, so a refused file can still be salvaged.
The backup is the file as this start found it, before any migration; of free pages, only where they
were many, it is rid as the file is.

The files hold the jobs of all teams, so only their owner may read them from the moment they are
made. Files that an older release left readable to others are made private.
"""

import fcntl
import logging
import os
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from typing import IO

from dataservice.core.errors import StateError
from dataservice.core.private_files import make_private, tighten
from dataservice.state.free_pages import allow_giving_back, compact
from dataservice.state.schema import migrate, require_known
from dataservice.state.wal import lost_transactions

log = logging.getLogger(__name__)

FILE = "state.db"
BACKUP = "state.backup.db"
SECRET = "secret"
_LOCK = "state.lock"
_FILES = (FILE, f"{FILE}-wal", f"{FILE}-shm", BACKUP, _LOCK, SECRET)
# Milliseconds that a call waits for a file that another process (such as a backup) has locked.
BUSY_MS = 5000


def hold(directory: Path) -> IO[str]:
    """Make the directory and lock it for this process, until the returned file is closed.

    Raises StateError when it cannot be written, holds a folder in place of a file, or another
    process holds it.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        for path in (directory / name for name in _FILES):
            if path.is_dir():
                raise StateError(
                    f"{path} is a folder, where the service keeps a file. Move it away, or choose "
                    "another directory with --state-dir."
                )
        make_private(directory / _LOCK)
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


def tighten_files(directory: Path) -> None:
    """Remove other users' permissions from the files, which an older release may have left."""
    for name in _FILES:
        path = directory / name
        try:
            mode = tighten(path)
        except OSError as error:
            log.warning("%s keeps a mode that others may use: %s", path, error.strerror)
        else:
            if mode is not None:
                log.warning("%s had mode %04o and is now its owner's alone", path, mode)


def connect(path: Path) -> sqlite3.Connection:
    """Open a sound state file, back it up and bring it up to date; make one if there is none.

    Raises StateError or sqlite3.Error when it cannot; the file is then unchanged.
    """
    backup = path.with_name(BACKUP)
    there = path.exists() and path.stat().st_size > 0
    if there:
        _require_sound(path)
    elif backup.exists():
        raise StateError(
            f"{path} is {'empty' if path.exists() else 'missing'}, but its backup {backup} is "
            f"there. {restoring(path)}, or move the backup away too to start anew."
        )
    try:
        make_private(path)  # SQLite gives the log and its index the mode of this file
    except OSError as error:
        raise StateError(_unwritable(path.parent, error)) from error
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    try:
        connection.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
        allow_giving_back(connection)  # before anything is written
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        if there:
            compact(connection, path)
            _back_up(connection, backup)
        migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def explain(error: sqlite3.Error, path: Path, *, opening: bool) -> str:
    """SQLite's error in words, and what to do about it; `opening` is when the service starts."""
    then = "start the service again" if opening else "the service need not be restarted"
    code = getattr(error, "sqlite_errorcode", None)
    remedies: dict[int | None, str] = {
        sqlite3.SQLITE_FULL: "Nothing of this change was kept, and nothing else is lost. Free "
        f"space on its disk; {then}.",
        sqlite3.SQLITE_READONLY: "Make the file and its directory writable for this user.",
        sqlite3.SQLITE_CANTOPEN: "Make the file and its directory writable for this user.",
        sqlite3.SQLITE_IOERR: "Nothing of this change was kept. Check the disk (space, health); "
        f"{then} once it can be written.",
        sqlite3.SQLITE_CORRUPT: _damaged(path),
        sqlite3.SQLITE_NOTADB: _damaged(path),
    }
    remedy = remedies.get(None if code is None else code & 0xFF, "Restart the service.")
    return f"{path}: {error}. {remedy}"


def restoring(path: Path) -> str:
    """How to replace the file by its backup."""
    return (
        f"Stop all trainers, move {path.name}, {path.name}-wal and {path.name}-shm away, and "
        f"`cp {path.with_name(BACKUP)} {path}`"
    )


def _require_sound(path: Path) -> None:
    """Raises StateError when the file or its log is damaged. Opens the file read-only, so that
    closing it does not write its log into it."""
    wal = path.with_name(f"{path.name}-wal")
    try:
        wrong = lost_transactions(wal)
        logged = wal.exists() and wal.stat().st_size > 0
    except OSError as error:
        raise StateError(f"{wal} cannot be read: {error.strerror}. Check the disk.") from error
    if wrong:
        raise StateError(f"{wal}: {wrong}. {_damaged(path)}")
    # Only this process uses the directory. Without a log, the file is complete, and no log may be
    # made.
    query = "mode=ro" if logged else "mode=ro&immutable=1"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{query}", uri=True)) as reader:
        (verdict,) = reader.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            detail = " ".join(verdict.split())
            raise StateError(f"{path}: {detail}. {_damaged(path)}")
        require_known(reader, str(path))


def _damaged(path: Path) -> str:
    way = "there is no backup: move it (and its -wal and -shm) away and start anew"
    if path.with_name(BACKUP).exists():
        way = (
            f"restore the backup of the service's last start. {restoring(path)}: what was "
            "recorded since then is gone"
        )
    return (
        f"The file is damaged and was left as it is; {way}. Trainers' checkpoints hold their own "
        "positions."
    )


def _back_up(connection: sqlite3.Connection, backup: Path) -> None:
    """Writes the backup whole or not at all. A disk without room for it does not stop the
    service."""
    making = backup.with_name(f"{BACKUP}.part")
    try:
        making.unlink(missing_ok=True)
        make_private(making)
        with closing(sqlite3.connect(making)) as copy:
            connection.backup(copy)
        with making.open("rb") as made:
            os.fsync(made.fileno())
        making.replace(backup)
    except (OSError, sqlite3.Error) as error:
        with suppress(OSError):
            making.unlink()
        log.warning("the state was not backed up to %s: %s", backup, error)


def _unwritable(directory: Path, error: OSError) -> str:
    return (
        f"state directory {directory} cannot be written: {error.strerror}. Make it writable for "
        "this user, free space on its disk, or choose another with --state-dir."
    )
