"""The text of a schedule: exact both ways, and refused by line where it is damaged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataservice.core.errors import PlanningError
from dataservice.planning import Actions, format_actions, parse_actions
from dataservice.planning.layout.actions import COLUMNS, KINDS

whole = st.integers(-1, 300)
times = st.floats(-1e6, 1e6, allow_nan=False)


@st.composite
def actions(draw):
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 99), st.integers(0, len(KINDS) - 1), *[whole] * 5, times, times
            ),
            max_size=8,
        )
    )
    columns = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    starts = np.minimum(np.array(columns[7], float), np.array(columns[8], float))
    ends = np.maximum(np.array(columns[7], float), np.array(columns[8], float))
    kinds = [np.array(column, np.int64) for column in columns[:7]]
    return Actions(**dict(zip(COLUMNS[:7], kinds, strict=True)), start_s=starts, end_s=ends)


@settings(deadline=None, max_examples=60)
@given(actions())
def test_a_list_of_actions_is_read_as_it_was_written_to_the_last_bit(made):
    read = parse_actions(format_actions(made))
    for name in COLUMNS:
        before, after = getattr(made, name), getattr(read, name)
        assert before.dtype == after.dtype
        assert (before == after).all()
    assert format_actions(read) == format_actions(made)


HEAD = "bubbles 1\ndevice kind encoder microbatch stage layer kernel start_s end_s\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must begin with 'bubbles 1'"),
        ("bubbles 2\n" + HEAD.split("\n", 1)[1], "bubbles 2"),
        (HEAD + "0 forward 0 0 0 0 0 0.0 1.0\n0 forward\n", "line 4 is '0 forward'"),
        (HEAD + "0 sideways 0 0 0 0 0 0.0 1.0\n", "sideways.*a kind of gather, forward"),
        (HEAD + "0 forward 0 0 0 0 0 2.0 1.0\n", "line 3"),
        (HEAD + "0 forward 0 0 0 0 0 0.0 nan\n", "line 3"),
        (HEAD + "0 forward 0 0 -2 0 0 0.0 1.0\n", "line 3"),
        (HEAD + "0 forward 0 0 x 0 0 0.0 1.0\n", "line 3"),
        (HEAD + "-1 forward 0 0 0 0 0 0.0 1.0\n", "line 3"),
    ],
)
def test_a_line_that_is_no_action_is_named(text, words):
    with pytest.raises(PlanningError, match=words):
        parse_actions(text)
