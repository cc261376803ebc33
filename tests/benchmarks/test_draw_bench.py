"""The benchmark of drawing measures what it says; its times are not judged."""

import pytest

from benchmarks.draw import SAMPLES, first_draws


@pytest.mark.long
def test_every_kind_of_draw_has_its_row() -> None:
    rows = first_draws([100_000, 200_000])
    assert len(rows) == 5
    assert all(f"{SAMPLES:,} samples of" in row.what for row in rows[:4])
    assert "counted in tokens" in rows[-1].what
