"""Files without a name: they are gone with their last descriptor, whatever becomes of a process."""

import os
import tempfile


def unnamed_file(folder: str | None = None) -> int:
    """A descriptor to read and write by, which the caller closes. The file lies in `folder`, where
    `named` can give it a name, if that folder can be written and its file system knows such files;
    else in `TMPDIR`. Raises OSError where none can be made."""
    if folder is not None:
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            pass
    with tempfile.TemporaryFile(prefix="dataservice-") as stream:
        return os.dup(stream.fileno())


def named(descriptor: int, path: str) -> None:
    """Give the file behind a descriptor this name. Raises OSError where the name is taken, or the
    file lies elsewhere."""
    table = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:  # with a folder's descriptor the system call is the one that can follow the link
        os.link(str(descriptor), path, src_dir_fd=table, follow_symlinks=True)
    finally:
        os.close(table)
