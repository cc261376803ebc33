"""Reads the small files that a job names: its tokenizer, its templates, its layout and its costs.

A service that opens them for a team checks their paths first. By the time that a file is opened, a
folder on the way may have become a link to where the team may not read, so that what was opened is
judged once more, by its own path, before a byte of it is used.
"""

import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

MOST_COPIED_BYTES = 16 * 2**20
"""Of a file that is copied where its library opens it by its name: descriptions of models, which
have some KiB, or a MiB or two with the names of twenty thousand classes."""

Holds = Callable[[str], bool]
"""Whether the file of a real path may be read."""
_holds: ContextVar[Holds | None] = ContextVar("holds", default=None)


@contextmanager
def judged_by(holds: Holds | None) -> Iterator[None]:
    """Within, whatever `read_named` opens in this thread is judged; None allows all."""
    token = _holds.set(holds)
    try:
        yield
    finally:
        _holds.reset(token)


def read_named(path: Path) -> bytes:
    """The bytes of a file. Raises OSError, a PermissionError where it may not be read."""
    holds = _holds.get()
    if holds is None:
        return path.read_bytes()
    # Otherwise opening a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as stream:
        if not holds(path_of(descriptor, str(path))):
            raise PermissionError(errno.EACCES, "this service does not read there", str(path))
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file", str(path))
        return stream.read()


@contextmanager
def named_folder(folder: str, names: Sequence[str]) -> Iterator[str]:
    """A folder with these files of `folder`, as far as they are there, for libraries that open them
    by their names: a copy where files are judged, for as long as the context lasts. Raises OSError
    where one cannot be read, or is too large to be copied."""
    if _holds.get() is None:
        yield folder
        return
    copy = tempfile.mkdtemp(prefix="dataservice-named-")
    try:
        for name in names:
            if (path := Path(folder) / name).exists():
                size_bytes = len(data := read_named(path))
                if size_bytes > MOST_COPIED_BYTES:
                    raise OSError(errno.EFBIG, f"it has {size_bytes:,} bytes", str(path))
                (Path(copy) / name).write_bytes(data)
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def path_of(descriptor: int, path: str) -> str:
    """The real path of an open file, if the system tells it."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return os.path.realpath(path)
