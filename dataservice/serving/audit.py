"""The audit log: who changed what, and who was refused, one JSON object a line.

Contract. Lines are only ever appended, each by one write. After the file was moved away it is
opened anew under its name, so every kind of log rotation works. When a line cannot be written, the
call goes on and the service's own log says so. No token is ever in the file. A new file belongs to
its owner alone; an existing one keeps its group permissions, which a log collector may need, but
none for others.
"""

import json
import logging
import os
import re
import threading
import time
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
# A refused client may retry a thousand times a second, and must not fill the disk.
REFUSALS_PER_S = 50.0


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
        self._allowance = REFUSALS_PER_S
        self._refilled_s = clock()
        self._left_out = 0
        try:
            self._file = self._opened()
        except OSError as error:
            raise SpecError(
                f"the audit log {path} cannot be written: {error.strerror}. Make its folder, or "
                "choose another with audit_log."
            ) from error

    def change(self, event: Event) -> None:
        """Record a change, or a change that failed."""
        with self._lock:
            self._write(event)

    def refusal(self, event: Event) -> None:
        """Record a refusal. Those above `REFUSALS_PER_S` are only counted."""
        with self._lock:
            now_s = self._clock()
            gained = (now_s - self._refilled_s) * REFUSALS_PER_S
            self._allowance = min(REFUSALS_PER_S, self._allowance + max(0.0, gained))
            self._refilled_s = now_s
            if self._allowance < 1:
                self._left_out += 1
                return
            self._allowance -= 1
            self._write(event)

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
        if self._left_out:
            plain["refusals_left_out"] = self._left_out
        line = _TOKEN.sub(f"{TOKEN_PREFIX}...", json.dumps(plain)) + "\n"
        try:
            self._follow()
            os.write(self._file, line.encode())
            self._left_out = 0
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
            self._file = fresh
