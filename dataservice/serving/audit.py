"""The audit log: who changed what, and who was refused, a JSON object a line.

Contract. Lines are only ever appended, each by one write. A file that was moved away is opened
anew under its name, so any log rotation will do. A line that cannot be written costs no call:
the service's own log says so. No token is ever in it.
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
from dataservice.serving.identity import TOKEN_PREFIX

logger = logging.getLogger(__name__)

_TOKEN = re.compile(rf"{TOKEN_PREFIX}[A-Za-z0-9_-]{{8,}}")
REASON_CHARS = 500
# Whoever is refused may come again a thousand times a second, and must not fill the disk.
REFUSALS_PER_S = 50.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One line. `token` is its name; `outcome` is ok, opened, closed, or an error's class."""

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
        """Raises SpecError when the file cannot be written."""
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
        """Someone has changed something, or failed to."""
        with self._lock:
            self._write(event)

    def refusal(self, event: Event) -> None:
        """Someone was not let in. Beyond so many a second they are only counted."""
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
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

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
            logger.error("the audit log %s misses a line: %s", self._path, error.strerror)

    def _follow(self) -> None:
        """Open the path anew if it is no longer the file that we hold."""
        held = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (held.st_dev, held.st_ino):
            fresh = self._opened()
            os.close(self._file)
            self._file = fresh
