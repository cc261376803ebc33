import json

import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import CursorMismatchError

INSIDE = Cursor(step=7, epoch=1, position=96, step_in_window=3, order="a1", window="batch 8")


def test_a_cursor_survives_its_checkpoint_form():
    assert Cursor.from_json(INSIDE.to_json()) == INSIDE
    assert Cursor.from_json(Cursor().to_json()) == Cursor()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", 8),
        ("epoch", 0),
        ("position", 97),
        ("step_in_window", 2),
        ("order", "a2"),
        ("window", ""),
        ("digest", "0" * 16),
    ],
)
def test_a_cursor_that_was_altered_is_refused_and_named(name, value):
    plain = json.loads(INSIDE.to_json())
    altered = json.dumps({**plain, name: value})
    with pytest.raises(CursorMismatchError, match="was changed after it was saved"):
        Cursor.from_json(altered)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"version": 99}, "version 99"),
        ({"version": 1}, "has version 1; this service reads version 3. Resume with the release"),
        ({"steps": 1}, "other fields"),
        ({"step": None}, "other fields"),
        ({"step": -1}, "other values"),
        ({"step": True}, "other values"),
        ({"epoch": float("inf")}, "other values"),
        ({"position": 10**40}, "other values"),
        ({"step": 2**63 - 1}, "other values"),
        ({"order": 3}, "other values"),
    ],
)
def test_what_no_release_writes_is_refused_with_what_to_do(changes, says):
    text = json.dumps({**json.loads(INSIDE.to_json()), **changes})
    with pytest.raises(CursorMismatchError, match=says):
        Cursor.from_json(text)


@pytest.mark.parametrize("text", ["not json", "[]", '{"step": 1}', "[" * 5000])
def test_what_is_not_a_cursor_is_refused(text):
    with pytest.raises(CursorMismatchError, match="not a cursor"):
        Cursor.from_json(text)


def test_a_cursor_without_its_digest_is_refused():
    plain = json.loads(INSIDE.to_json())
    del plain["digest"]
    with pytest.raises(CursorMismatchError, match="other fields"):
        Cursor.from_json(json.dumps(plain))
