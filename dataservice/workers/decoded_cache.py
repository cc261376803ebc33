"""Decoded samples on a disk of this machine, for whoever decodes the same bytes in the same way.

    team, pipeline, sample as read, planned lengths ──digest──► file: salt │ GMAC │ arrays

Another job of the team, the next epoch, a replayed step and a resumed attempt find there what was
decoded before. All workers of a machine share the folder. What is kept is not yet augmented.

The name is a digest of the bytes that were read, and of nothing that an index says of them. A file
counts only with a MAC by a key that processes with a team's own code do not have: neither damage
nor such code can put other pixels into a sample. Such processes use no cache.

The MAC is GMAC (NIST SP 800-38D), which takes a fifteenth of the time of an HMAC with SHA-256. It
gives its key away if it is used twice with one nonce; so each file has a key of its own, which an
HMAC makes of its name and a random salt.

Contract.
  Found      the sample is the one that decoding gives, byte by byte.
  Damaged    a file that is not whole is removed, and the sample decoded.
  Full       files that were used least recently go, so that about `limit_bytes` are kept. What
             cannot be written is not kept, and nothing else comes of it.
"""

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dataservice.core.ports import SampleDecoder
from dataservice.core.sample import DecodedSample, RawSample, SampleLengths
from dataservice.workers.pack import check_planned_shape
from dataservice.workers.read_sample import raw_buffers
from dataservice.workers.sample_memory import sample_buffers, sample_bytes, sample_of_bytes

log = logging.getLogger(__name__)

NAME_BYTES = 24
# Part of a file's name: files of another format are not found, and go as those that nobody uses.
FORMAT = b"2"
SALT_BYTES = TAG_BYTES = 16
PIECE_BYTES = 2**30  # for the MAC, which takes less than 2 GiB at a time
LOOKS = 64  # at the whole folder, while as many bytes are written as are kept
KEPT = 0.9  # of the limit, after such a look


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """Where decoded samples are kept, about how many bytes of them, and the key of their MACs in
    hexadecimal."""

    folder: str
    limit_bytes: int
    key: str


class DecodedCache:
    """The files of one folder. Used by one thread; other processes may use the folder too."""

    def __init__(self, spec: CacheSpec) -> None:
        """Makes the folder, for this user alone, where it can."""
        self._folder = Path(spec.folder)
        self._limit_bytes = spec.limit_bytes
        self._key = bytes.fromhex(spec.key)
        self._unseen_bytes = spec.limit_bytes  # written since the last look: look at the first
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def name(self, identity: str, raw: RawSample, planned: SampleLengths) -> str:
        """The name of what this sample is decoded to. O(bytes)."""
        digest = hashlib.sha256()  # which CPUs have instructions for
        for part in (FORMAT, identity.encode(), repr(planned).encode(), *raw_buffers(raw)):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.hexdigest()[: 2 * NAME_BYTES]

    def load(self, name: str, planned: SampleLengths) -> DecodedSample | None:
        """The sample of this name, whose arrays may be written to."""
        path, size_bytes = self._path(name), sample_bytes(planned)
        try:
            with path.open("rb", buffering=0) as stream:
                salt, told = stream.read(SALT_BYTES), stream.read(TAG_BYTES)
                data = np.empty(size_bytes, "u1")
                whole = stream.readinto(data.data) == size_bytes and not stream.read(1)
                os.utime(stream.fileno())
        except OSError:
            return None
        if whole and hmac.compare_digest(told, self._mac(name, salt, [data.data])):
            return sample_of_bytes(data, planned)
        log.warning("a file of the cache of decoded samples is damaged: %s is removed", name)
        with suppress(OSError):
            path.unlink()
        return None

    def store(self, name: str, decoded: DecodedSample, planned: SampleLengths) -> None:
        """Keep this sample."""
        buffers, path = sample_buffers(decoded, planned), self._path(name)
        part = path.with_name(f"{name}.{os.getpid()}")
        salt = os.urandom(SALT_BYTES)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(part, "xb", buffering=0, opener=_for_this_user) as stream:
                for buffer in (salt, self._mac(name, salt, buffers), *buffers):
                    if stream.write(buffer) != len(buffer):
                        raise OSError("it was not written whole")
            part.replace(path)
        except OSError as error:
            log.warning("a decoded sample cannot be kept: %s", error.strerror or error)
            with suppress(OSError):
                part.unlink()
            return
        self._unseen_bytes += sample_bytes(planned)
        if self._unseen_bytes > self._limit_bytes // LOOKS:
            self._unseen_bytes = 0
            self._make_room()

    def _make_room(self) -> None:
        """Remove the files that were used least recently. O(files · log(files))."""
        files = []
        for path in self._folder.glob("*/*"):
            with suppress(OSError):
                found = path.stat()
                files.append((found.st_mtime_ns, found.st_size, path))
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
        key = hmac.digest(self._key, salt + name.encode(), "sha256")
        mac = Cipher(algorithms.AES(key), modes.GCM(bytes(12))).encryptor()
        for buffer in buffers:
            view = memoryview(buffer)
            for at in range(0, len(view), PIECE_BYTES):
                mac.authenticate_additional_data(view[at : at + PIECE_BYTES])
        mac.finalize()
        return mac.tag


class CachedDecoder(SampleDecoder):
    """Decodes with another decoder what is not in the cache. `identity` stands for all that decides
    what a sample is decoded to, and for whom."""

    def __init__(self, decoder: SampleDecoder, cache: DecodedCache, identity: str) -> None:
        self._decoder = decoder
        self._cache = cache
        self._identity = identity
        self.reused = 0
        """Samples that were found."""

    @property
    def pad_token_id(self) -> int:
        """The token that fills padding and masked samples."""
        return self._decoder.pad_token_id

    def decode(
        self, raw: RawSample, planned: SampleLengths, epoch: int | None = None
    ) -> DecodedSample:
        """The sample augmented as in this epoch. A sample without media is not looked for: its
        tokens are made as quickly."""
        if not planned.items:
            return self._decoder.decode(raw, planned, epoch)
        name = self._cache.name(self._identity, raw, planned)
        found = self._cache.load(name, planned)
        if found is None:
            found = self._decoder.decode(raw, planned)
            check_planned_shape(found, planned)
            self._cache.store(name, found, planned)
        else:
            self.reused += 1
        return found if epoch is None else self._decoder.augment(raw, found, epoch)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
