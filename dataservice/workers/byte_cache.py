"""Byte ranges of files on other machines, kept on a disk of this one.

    team, address, version, ranges ──► file of their bytes (see kept_files.py)

All workers of a machine share the folder; teams share nothing. A version is what the storage
says of a file now, so that a changed file is read anew.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from dataservice.core.ports import RangeCache
from dataservice.workers.kept_files import CacheSpec, KeptFiles

FORMAT = b"1"


class KeptReads(NamedTuple):
    """How many ranges were found, how many were not, and the bytes of those that were found."""

    found: int = 0
    missed: int = 0
    found_bytes: int = 0

    def plus(self, other: "KeptReads") -> "KeptReads":
        """The sums."""
        return KeptReads(*map(sum, zip(self, other, strict=True)))


NOTHING_KEPT = KeptReads()


class _OfThread(threading.local):
    reads = NOTHING_KEPT
    passed_over = False


class ByteCache:
    """The ranges of one folder. Safe for several threads, each of which has its own counts."""

    def __init__(self, spec: CacheSpec) -> None:
        """Makes the folder, for this user alone, where it can."""
        self.files = KeptFiles(spec, "bytes")
        self.own = _OfThread()

    def of(self, team: str) -> RangeCache:
        """What it keeps for this team."""
        return _TeamRanges(self, team.encode())

    def reads(self) -> KeptReads:
        """What this thread has read since it last asked."""
        counted, self.own.reads = self.own.reads, NOTHING_KEPT
        return counted


class _TeamRanges(RangeCache):
    def __init__(self, cache: ByteCache, team: bytes) -> None:
        self._files, self._own, self._team = cache.files, cache.own, team

    @property
    def passed_over(self) -> bool:
        return self._own.passed_over

    def find(self, about: str, size_bytes: int) -> bytes | None:
        if self._own.passed_over:
            return None
        found = self._files.find(self._name(about), size_bytes)
        more = KeptReads(missed=1) if found is None else KeptReads(1, 0, size_bytes)
        self._own.reads = self._own.reads.plus(more)
        return None if found is None else found.tobytes()

    def keep(self, about: str, data: bytes) -> None:
        self._files.keep(self._name(about), [data])

    @contextmanager
    def anew(self) -> Iterator[None]:
        self._own.passed_over = True
        try:
            yield
        finally:
            self._own.passed_over = False

    def _name(self, about: str) -> str:
        return self._files.name([FORMAT, self._team, about.encode()])
