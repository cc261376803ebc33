"""How long a stream may be silent: long enough for a slow line, not for a dead one."""

import pytest

from trainer_client.patience import FADING, MOST, Patience


def test_a_stream_is_given_up_after_the_base_at_first_and_after_one_stall():
    patience = Patience(4.0)
    assert patience.limit_s == 4.0
    patience.fetched(stalled=True)
    assert patience.limit_s == 4.0


def test_it_doubles_while_fetches_stall_in_a_row_up_to_a_bound():
    patience = Patience(1.0)
    limits = []
    for _ in range(40):
        patience.fetched(stalled=True)
        limits.append(patience.limit_s)
    assert limits[:6] == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0]
    assert max(limits) == MOST
    patience.fetched(stalled=False)
    assert patience.limit_s == 1.0


def test_a_line_that_went_on_after_a_pause_may_pause_thrice_as_long_for_a_while():
    patience = Patience(1.0)
    patience.paused(2.0)
    patience.paused(0.1)
    assert patience.limit_s == 6.0
    patience.fetched(stalled=False)
    assert patience.limit_s == pytest.approx(6.0 * FADING)
    for _ in range(60):
        patience.fetched(stalled=False)
    assert patience.limit_s == 1.0
