"""Files that processes of a machine keep on its disk for one another, within a limit.

    key, parts ──HMAC of GMAC──► name: salt │ GMAC │ bytes

A name is a keyed digest of all that decides what the bytes are. A file counts only with a MAC by a
key that processes with a team's own code do not have: neither damage nor such code can put other
bytes into a sample. Such processes use no such files.

The MAC is GMAC (NIST SP 800-38D), which takes a fifteenth of the time of an HMAC with SHA-256. It
gives its key away if it is used twice with one nonce and its tags are seen; so each file has a key
of its own, which an HMAC makes of its name and a random salt. A name is an HMAC of a GMAC by one
key, whose tags nobody sees: a pseudo-random function of a secret universal hash. Two names are the
same with a chance of 2^-100, and nobody without the key can look for two.

Contract.
  Found      the bytes are those that were kept under this name. A file is renamed into its place
             when it is whole, so a process that is killed leaves none that is torn.
  Damaged    a file that is not whole is removed, and counts as not found.
  Full       files that were used least recently go, so that about `limit_bytes` are kept. Where
             the folder cannot be written, nothing is kept for OFF_S, and a warning says so.

Safe for several threads and processes.
"""

import hmac
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

log = logging.getLogger(__name__)

NAME_BYTES = 24
SALT_BYTES = TAG_BYTES = 16
PIECE_BYTES = 2**30  # for the MAC, which takes less than 2 GiB at a time
LOOKS = 64  # at the whole folder, while as many bytes are written as are kept
KEPT = 0.9  # of the limit, after such a look
LEAST_BYTES = 4096  # that a file takes on a disk
OFF_S = 60.0
FOLDER_NAME = "name"

Lend = Callable[[int], NDArray[np.uint8] | None]
"""Memory of so many bytes to write to, if there is some to spare."""


def nothing_lent(_size_bytes: int) -> None:
    """There is none to spare."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """Where files are kept, about how many bytes of them, and the key of their MACs in
    hexadecimal."""

    folder: str
    limit_bytes: int
    key: str


class KeptFiles:
    """The files of one folder, of `what`."""

    def __init__(self, spec: CacheSpec, what: str) -> None:
        """Makes the folder, for this user alone, where it can."""
        self._what = what
        self._folder = Path(spec.folder)
        self._limit_bytes = spec.limit_bytes
        self._key = bytes.fromhex(spec.key)
        self._names_key = hmac.digest(self._key, b"names", "sha256")
        self._unseen_bytes = spec.limit_bytes  # written since the last look: look at the first
        self._looking = threading.Lock()
        self._off_until_s = 0.0
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def name(self, parts: Sequence[bytes]) -> str:
        """The name of the file that these parts decide. O(bytes)."""
        lengths = b"".join(len(part).to_bytes(8, "little") for part in (b"", *parts))
        tag = _gmac(self._names_key, [lengths, *parts])
        return hmac.digest(self._key, b"name" + tag, "sha256").hex()[: 2 * NAME_BYTES]

    def find(
        self, name: str, size_bytes: int, lend: Lend = nothing_lent
    ) -> NDArray[np.uint8] | None:
        """The bytes of this name, uint8[size_bytes], which may be written to: in the memory that
        `lend` gives for them, or in their own."""
        path = self._path(name)
        try:
            with path.open("rb", buffering=0) as stream:
                salt, told = stream.read(SALT_BYTES), stream.read(TAG_BYTES)
                lent = lend(size_bytes)
                data = np.empty(size_bytes, "u1") if lent is None else lent
                whole = stream.readinto(data.data) == size_bytes and not stream.read(1)
                os.utime(stream.fileno())
        except OSError:
            return None
        if whole and hmac.compare_digest(told, self._mac(name, salt, [data.data])):
            return data
        log.warning("a file of the cache of %s is damaged: %s is removed", self._what, name)
        with suppress(OSError):
            path.unlink()
        return None

    def keep(self, name: str, buffers: Sequence[memoryview | bytes]) -> None:
        """Keep these bytes, end to end."""
        if time.monotonic() < self._off_until_s:
            return
        path, salt = self._path(name), os.urandom(SALT_BYTES)
        part = path.with_name(f"{name}.{salt.hex()}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(part, "xb", buffering=0, opener=_for_this_user) as stream:
                for buffer in (salt, self._mac(name, salt, buffers), *buffers):
                    if stream.write(buffer) != len(buffer):
                        raise OSError("it was not written whole")
            part.replace(path)
        except OSError as error:
            self._off_until_s = time.monotonic() + OFF_S
            reason = error.strerror or error
            log.warning("no %s can be kept, for the next %g s: %s", self._what, OFF_S, reason)
            with suppress(OSError):
                part.unlink()
            return
        self._unseen_bytes += sum(map(len, buffers))
        if self._unseen_bytes > self._limit_bytes // LOOKS and self._looking.acquire(False):
            try:
                self._unseen_bytes = 0
                self._make_room()
            finally:
                self._looking.release()

    def _make_room(self) -> None:
        """Remove the files that were used least recently. O(files · log(files))."""
        files = []
        for path in self._folder.glob("*/*"):
            with suppress(OSError):
                found = path.stat()
                files.append((found.st_mtime_ns, max(found.st_size, LEAST_BYTES), path))
        left_bytes = sum(size_bytes for _, size_bytes, _ in files)
        if left_bytes <= self._limit_bytes:
            return
        for _, size_bytes, path in sorted(files):
            if left_bytes <= KEPT * self._limit_bytes:
                return
            left_bytes -= size_bytes
            with suppress(OSError):  # another process was quicker
                path.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / name

    def _mac(self, name: str, salt: bytes, buffers: Iterable[memoryview | bytes]) -> bytes:
        """Of the bytes of these buffers under this name. O(bytes)."""
        return _gmac(hmac.digest(self._key, salt + name.encode(), "sha256"), buffers)


def name_of_folder(folder: str) -> str:
    """A name that all workers with this folder find in it, and no others: "" where it can neither
    be read nor made. Whoever may write to the folder may change it; nothing but time hangs on it.
    """
    path = Path(folder) / FOLDER_NAME
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            part = path.with_name(f"{FOLDER_NAME}.{os.urandom(8).hex()}")
            part.write_text(os.urandom(8).hex())
            with suppress(FileExistsError):
                os.link(part, path)
            part.unlink()
        return path.read_text()[:32]
    except (OSError, ValueError) as error:
        log.warning("%s has no name by which its packs are placed: %s", folder, error)
        return ""


def _gmac(key: bytes, buffers: Iterable[memoryview | bytes]) -> bytes:
    mac = Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()
    for buffer in buffers:
        view = memoryview(buffer)
        for at in range(0, len(view), PIECE_BYTES):
            mac.authenticate_additional_data(view[at : at + PIECE_BYTES])
    mac.finalize()
    return mac.tag


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
