import pytest

from dataservice.core.cursor import Cursor
from dataservice.core.errors import CursorMismatchError


def test_a_cursor_survives_its_checkpoint_form():
    cursor = Cursor(step=7, epoch=1, position=96, step_in_window=3, order="a1")
    assert Cursor.from_json(cursor.to_json()) == cursor


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not json", "not a cursor"),
        ("[]", "not a cursor"),
        ('{"step": 1}', "not a cursor"),
        ('{"version": 99, "step": 1}', "version 99"),
        ('{"version": 1, "steps": 1}', "other fields"),
        ('{"version": 1, "step": null}', "other fields"),
        ("[" * 5000, "not a cursor"),
        ('{"version": 1, "step": -1, "order": ""}', "other values"),
        ('{"version": 1, "epoch": 1e400, "order": ""}', "other values"),
        ('{"version": 1, "position": 1' + "0" * 40 + ', "order": ""}', "other values"),
    ],
)
def test_what_is_not_a_cursor_is_refused_with_what_to_do(text, says):
    with pytest.raises(CursorMismatchError, match=says):
        Cursor.from_json(text)
