"""Plans stay as good as they were: seconds of a frozen set, held to those recorded. No clock."""

import pytest

from tests.planning.record_quality import CASES, recorded

WORSE = 1.001  # a stage that gives less than this on every workload is not worth its code


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_no_worse_than_the_recorded_one(name):
    before, now = recorded()[name], CASES[name]()
    assert set(now) == set(before), "record again: python -m tests.planning.record_quality"
    worse = {
        part: f"{seconds / before[part]:.4f} of {before[part]:.4g} s"
        for part, seconds in now.items()
        if seconds > WORSE * before[part]
    }
    assert not worse, f"{name} is planned worse than recorded: {worse}"


def test_every_recorded_plan_is_still_made():
    assert set(recorded()) == set(CASES)
