"""Log lines: one a record, for people or, as JSON, for a log store.

What a record is about travels in `extra=`: `log.info("fenced", extra={"job": job})`.
"""

import json as jsonlib
import logging
import sys
from datetime import UTC, datetime

FIELDS = ("job", "attempt", "step", "rank", "worker", "trace_id")
"""What a record may be about, in this order. A step's `trace_id` is its plan's digest: the same at
coordinator, workers and ranks."""


def configure_logging(*, json: bool) -> None:
    """Log everything from INFO up to stderr, in place of any handler set before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if json else PlainLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)


class PlainLines(logging.Formatter):
    """`2026-01-31T12:00:00.000Z WARNING logger: message [job=a step=3]`; a traceback follows
    on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as text."""
        about = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname} {record.name}: {record.getMessage()}"
        if about:
            line = f"{line} [{about}]"
        # A message may quote a sample's key or a codec; neither may forge a line of its own.
        parts = [" ".join(line.splitlines())]
        if record.exc_info:
            parts.append(self.formatException(record.exc_info))
        return "\n".join(parts)


class JsonLines(logging.Formatter):
    """An object a line: time, level, logger, message; FIELDS where given; `traceback` of an
    exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        plain: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            plain["traceback"] = self.formatException(record.exc_info)
        return jsonlib.dumps(plain, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    given = vars(record)
    return {name: given[name] for name in FIELDS if name in given}


def _time(record: logging.LogRecord) -> str:
    """UTC, to the millisecond."""
    made = datetime.fromtimestamp(record.created, tz=UTC)
    return made.isoformat(timespec="milliseconds").replace("+00:00", "Z")
