"""The audit log: who changed what, and who was refused, one JSON object a line.

Contract. Lines are only ever appended, each by one write. After the file was moved away it is
opened anew under its name, so every kind of log rotation works. When a line cannot be written, or
not whole, the call goes on and the service's own log says so. No token is ever in the file. A new
file belongs to its owner alone; an existing one keeps its group permissions, which a log collector
may need, but none for others.

No team floods the file, or leaves others no room to be recorded: each has so many lines at once,
and so many a second in the long run. Of refusals and of sessions more are only counted; changes
are recorded all, so that more are refused before they are made.
"""

import errno
import json
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from dataservice.core.errors import SpecError
from dataservice.core.private_files import OWNER_ONLY, tighten
from dataservice.core.tokens import TOKEN_PREFIX

log = logging.getLogger(__name__)

_TOKEN = re.compile(rf"{TOKEN_PREFIX}[A-Za-z0-9_-]{{8,}}")
REASON_CHARS = 500
# Of each team, at once and a second. A refused client may retry a thousand times a second; a job of
# 10,000 ranks opens as many sessions at each of its starts.
REFUSALS = (50, 1.0)
SESSIONS = (50_000, 10.0)
CHANGES = (1_000, 5.0)


class Allowance:
    """So many at once, and so many a second in the long run."""

    def __init__(self, at_once: int, per_s: float, clock: Callable[[], float]) -> None:
        self._most, self._per_s, self._clock = at_once, per_s, clock
        self._left, self._seen_s = float(at_once), clock()

    def take(self) -> bool:
        """Whether one more may be; then it is counted."""
        now_s = self._clock()
        gained = max(0.0, now_s - self._seen_s) * self._per_s
        self._left, self._seen_s = min(self._most, self._left + gained), now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line. `token` is the token's name; `outcome` is ok, opened, closed, or the class of an
    error."""

    request: str
    token: str
    team: str
    role: str
    peer: str
    method: str
    job: str
    outcome: str
    reason: str = ""


class AuditLog:
    """Appends to a file; see the module's contract. Safe for use from several threads."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Raises SpecError where the file cannot be written."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._allowances: dict[tuple[str, str], Allowance] = {}
        self._left_out: Counter[tuple[str, str]] = Counter()
        self._torn = False  # the last line, where the disk was full
        try:
            self._file = self._opened()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            raise SpecError(
                f"the audit log {path} cannot be written: {error.strerror}. "
                f"{'Make its folder' if missing else 'Make it writable for this user'}, or choose "
                "another with audit_log."
            ) from error

    def change(self, event: Event) -> None:
        """Record a change."""
        with self._lock:
            self._write(event)

    def allows_change(self, team: str) -> bool:
        """Whether a team may make one more change; then it is counted."""
        with self._lock:
            return self._takes(team, "changes", *CHANGES)

    def refusal(self, event: Event) -> None:
        """Record a refusal, or a change that failed. Those above `REFUSALS` are only counted."""
        self._bounded(event, "refusals", *REFUSALS)

    def session(self, event: Event) -> None:
        """Record that a session opened or closed. Those above `SESSIONS` are only counted."""
        self._bounded(event, "sessions", *SESSIONS)

    def _bounded(self, event: Event, kind: str, at_once: int, per_s: float) -> None:
        with self._lock:
            if self._takes(event.team, kind, at_once, per_s):
                self._write(event)
            else:
                self._left_out[event.team, kind] += 1

    def _takes(self, team: str, kind: str, at_once: int, per_s: float) -> bool:
        key = team, kind
        if key not in self._allowances:
            self._allowances[key] = Allowance(at_once, per_s, self._clock)
        return self._allowances[key].take()

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            os.close(self._file)

    def _opened(self) -> int:
        tighten(self._path, allowed=0o660)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, OWNER_ONLY)

    def _write(self, event: Event) -> None:
        made = datetime.fromtimestamp(self._clock(), tz=UTC).isoformat(timespec="milliseconds")
        plain: dict[str, object] = {"time": made.replace("+00:00", "Z"), **asdict(event)}
        plain["reason"] = event.reason[:REASON_CHARS]
        untold = [key for key in self._left_out if key[0] == event.team]
        plain |= {f"{kind}_left_out": self._left_out[team, kind] for team, kind in untold}
        line = _TOKEN.sub(f"{TOKEN_PREFIX}...", json.dumps(plain)) + "\n"
        try:
            self._follow()
            data = f"\n{line}".encode() if self._torn else line.encode()
            self._torn = os.write(self._file, data) < len(data)
            if self._torn:
                raise OSError(errno.ENOSPC, "it was written in part")
            for key in untold:
                del self._left_out[key]
        except OSError as error:
            log.error("the audit log %s misses a line: %s", self._path, error.strerror)

    def _follow(self) -> None:
        """Open the path anew if it no longer names the open file."""
        held = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            fresh = self._opened()
            os.close(self._file)
            self._file, self._torn = fresh, False
