"""Log lines: one for each record, for people or, as JSON, for a log store.

What a record is about is given in `extra=`: `log.info("fenced", extra={"job": job})`.

A record may quote anyone's text: a sample's key, a codec, a client. Whatever that text is, the
record is bounded and cannot act on a terminal; a record that was cut says so.
"""

import json as jsonlib
import logging
import sys
from datetime import UTC, datetime

from dataservice.core.visible import LINE_BREAKS, visible, visible_traceback

FIELDS = ("job", "attempt", "step", "rank", "worker", "trace_id")
"""The fields of a record that say what it is about, in this order. A step's `trace_id` is its
plan's digest: the same at coordinator, workers and ranks."""

MESSAGE_CHARS = 8192
FIELD_CHARS = 512


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
        # Nobody's text may forge a line of its own.
        message = " ".join(_message(record).splitlines())
        line = f"{_time(record)} {record.levelname} {record.name}: {message}"
        if about:
            line = f"{line} [{about}]"
        if record.exc_info:
            line = f"{line}\n{_traceback(record)}"
        return line


class JsonLines(logging.Formatter):
    """One object on each line: time, level, logger, message; FIELDS where given; `traceback` of an
    exception."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        plain: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
            **_fields(record),
        }
        if record.exc_info:
            plain["traceback"] = _traceback(record)
        return jsonlib.dumps(plain, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    given = vars(record)
    return {
        name: visible(given[name], FIELD_CHARS) if isinstance(given[name], str) else given[name]
        for name in FIELDS
        if name in given
    }


def _message(record: logging.LogRecord) -> str:
    """The message, of one line or several."""
    return visible(record.getMessage(), MESSAGE_CHARS, keep=LINE_BREAKS)


def _traceback(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return "" if error is None else visible_traceback(error)


def _time(record: logging.LogRecord) -> str:
    """UTC, to the millisecond."""
    made = datetime.fromtimestamp(record.created, tz=UTC)
    return made.isoformat(timespec="milliseconds").replace("+00:00", "Z")
