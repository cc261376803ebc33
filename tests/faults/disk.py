"""A disk of its own for the state directory, small enough to be filled."""

import contextlib
import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

DISK_BYTES = 8 * 2**20
BALLAST = "ballast"
BLOCK_BYTES = 4096


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mount a small file system at `folder`; skips the test where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small disk needs root, which this process is not")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Leave no byte free."""
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
