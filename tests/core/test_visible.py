import pickle

import pytest

from dataservice.core.errors import MESSAGE_CHARS, ServiceError, SpecError
from dataservice.core.visible import LINE_BREAKS, visible, visible_traceback


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a plain text, für alle: 数据", "a plain text, für alle: 数据"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("title\x07 \x00 \x7f \x9b", r"title\x07 \x00 \x7f \x9b"),
        ("\u202eturned\u2066", r"\u202eturned\u2066"),
        ("two\nlines\r\u2028", r"two\nlines\r\u2028"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_what_would_act_is_written_out(text, shown):
    assert visible(text, 100) == shown


def test_line_breaks_stay_where_they_are_wanted():
    assert visible("two\nlines\x1b", 100, keep=LINE_BREAKS) == "two\nlines\\x1b"


@pytest.mark.parametrize("text", ["x" * 10_000_000, "\x1b" * 10_000_000])
def test_what_is_cut_says_so_and_is_bounded_as_it_is_written(text):
    shown = visible(text, 100, ending=20)
    assert len(shown) == 100
    assert "cut, of 10,000,000 characters" in shown
    assert shown.endswith(visible(text[-20:], 1000)[-20:])


def test_a_traceback_keeps_its_lines_and_its_end():
    try:
        raise ValueError("y" * 1_000_000 + "the end")
    except ValueError as error:
        shown = visible_traceback(error)
    assert len(shown) < 20_000
    assert "\n" in shown
    assert shown.endswith("the end")


def test_errors_of_the_service_keep_bounded_messages_that_do_not_act():
    error = SpecError("no job \x1b[2J" + "z" * 10_000_000)
    assert len(str(error)) == MESSAGE_CHARS
    assert str(error).startswith(r"no job \x1b[2J")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(ServiceError("2 mistakes:\n  a\n  b")) == "2 mistakes:\n  a\n  b"
