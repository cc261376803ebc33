"""Damaged pictures, clips and recordings decode to their measured shape, or are refused."""

import pytest

from tests.fuzz import seeds
from tests.fuzz.campaign import campaign, damaged


@pytest.mark.parametrize("part", range(3))
def test_a_damaged_picture_takes_its_measured_shape_or_is_refused(part: int) -> None:
    inputs = damaged(seeds.images(), 1000, f"images {part}")
    campaign(f"image-{part}", inputs, "tests.fuzz.tasks:media", lambda _, d: ("image", d))


@pytest.mark.parametrize("part", range(3))
def test_a_damaged_clip_takes_its_measured_shape_or_is_refused(part: int) -> None:
    inputs = damaged(seeds.videos(), 500, f"videos {part}")
    campaign(f"video-{part}", inputs, "tests.fuzz.tasks:media", lambda _, d: ("video", d))


@pytest.mark.parametrize("part", range(3))
def test_a_damaged_recording_takes_its_measured_shape_or_is_refused(part: int) -> None:
    inputs = damaged(seeds.recordings(), 500, f"recordings {part}")
    campaign(f"audio-{part}", inputs, "tests.fuzz.tasks:media", lambda _, d: ("audio", d))
