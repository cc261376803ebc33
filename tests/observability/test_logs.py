import json
import logging
from collections.abc import Iterator
from datetime import datetime

import pytest

from dataservice.observability.logs import configure_logging

log = logging.getLogger("dataservice.engine.loop")


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    # Taken off, or configure_logging would close pytest's own handlers.
    root.handlers = []
    yield
    root.handlers, root.level = handlers, level


def test_a_record_is_a_json_object_with_the_fields_it_was_given(capsys):
    configure_logging(json=True)
    log.warning("quarantined %s", "ocr/7", extra={"job": "a", "step": 3, "rank": 0})
    plain = json.loads(capsys.readouterr().err)
    assert datetime.fromisoformat(plain.pop("time")).utcoffset() is not None
    assert plain == {
        "level": "WARNING",
        "logger": "dataservice.engine.loop",
        "message": "quarantined ocr/7",
        "job": "a",
        "step": 3,
        "rank": 0,
    }


def test_a_traceback_stays_in_the_json_line_of_its_record(capsys):
    configure_logging(json=True)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("planning failed", extra={"job": "a"})
    log.info("next")
    first, second = capsys.readouterr().err.splitlines()
    assert "ValueError: two\nlines" in json.loads(first)["traceback"]
    assert json.loads(second)["message"] == "next"


def test_people_read_the_fields_behind_the_message(capsys):
    configure_logging(json=False)
    log.info("planned", extra={"job": "a", "attempt": 2, "step": 3})
    line = capsys.readouterr().err
    assert line.endswith("Z INFO dataservice.engine.loop: planned [job=a attempt=2 step=3]\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_no_text_can_forge_a_second_record(capsys, as_json):
    configure_logging(json=as_json)
    log.warning("key %s", "a\n2026-01-01 ERROR forged\r\u2028x", extra={"job": "b\nc"})
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_configuring_again_replaces_and_debug_records_are_left_out(capsys):
    configure_logging(json=False)
    configure_logging(json=True)
    log.debug("too fine")
    log.info("once")
    assert [json.loads(line)["message"] for line in capsys.readouterr().err.splitlines()] == [
        "once"
    ]


ACTING = "\x1b]0;owned\x07\x1b[2J\u202eevil\x9b31m\x00"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_record_is_bounded_whatever_it_quotes_and_says_what_was_cut(capsys, as_json):
    configure_logging(json=as_json)
    try:
        raise ValueError("x" * 5_000_000)
    except ValueError as error:
        log.exception("planning failed: %s", error, extra={"job": "y" * 5_000_000})
    written = capsys.readouterr().err
    assert len(written) < 40_000
    assert "cut, of 5,000," in written
    assert written.rstrip('"}\n').endswith("xxx")  # the end of the traceback, with the error


@pytest.mark.parametrize("as_json", [False, True])
def test_nothing_that_a_record_quotes_acts_on_a_terminal(capsys, as_json):
    configure_logging(json=as_json)
    try:
        raise ValueError(ACTING)
    except ValueError as error:
        log.exception("key %s", error, extra={"job": ACTING})
    written = capsys.readouterr().err
    assert all(char.isprintable() or char == "\n" for char in written)
    assert "evil" in written
    assert ("\\\\x1b[2J" if as_json else "\\x1b[2J") in written
