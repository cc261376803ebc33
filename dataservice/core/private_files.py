"""Files with secrets: readable by this user alone, whatever the umask is, and seen to change."""

import os
import stat
from pathlib import Path

OWNER_ONLY = 0o600
OTHERS = 0o007


def make_private(path: Path) -> None:
    """Make an empty file that its owner alone may read and write, or leave the one that is
    there. Raises OSError where it cannot be made."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, OWNER_ONLY))


def tighten(path: Path, allowed: int = OWNER_ONLY) -> int | None:
    """Take from a file's mode what goes beyond `allowed`. Returns the mode that it had, or None
    where nothing had to be taken or there is no file. Raises OSError where it cannot be changed."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return None
    if not mode & ~allowed:
        return None
    path.chmod(mode & allowed)
    return mode


def others_may(path: Path) -> bool:
    """Whether every user of this machine may read or write the file. Raises OSError where there is
    none."""
    return bool(path.stat().st_mode & OTHERS)


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file does, by being written or replaced; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
