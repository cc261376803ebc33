"""A disk of its own for the state directory, small enough to be filled."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

DISK_BYTES = 64 * 2**20
BALLAST = "ballast"
BLOCK_BYTES = 4096


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system at `folder`; where that is not allowed it is a plain folder."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte free. Skips the test where the folder is not on a disk of its own."""
    if not folder.is_mount():
        pytest.skip("mounting a small disk needs root, which this process is not")
    with (folder / BALLAST).open("ab", buffering=0) as ballast:
        try:
            while True:
                ballast.write(bytes(BLOCK_BYTES))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


def free(folder: Path) -> None:
    """Give the space back."""
    (folder / BALLAST).unlink(missing_ok=True)
