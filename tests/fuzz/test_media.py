"""Damaged pictures, clips and recordings decode to their measured shape, each time to the same
bytes, or are refused. What a wrong sample is: see campaign.py."""

from tests.fuzz import seeds
from tests.fuzz.campaign import Tally, campaign, damaged


def test_a_damaged_picture_takes_its_measured_shape_or_is_refused(tally: Tally) -> None:
    inputs = damaged(seeds.images(), 3000, "images")
    campaign(tally, "image", inputs, "tests.fuzz.tasks:media", lambda _, d: ("image", d))


def test_a_damaged_clip_takes_its_measured_shape_or_is_refused(tally: Tally) -> None:
    inputs = damaged(seeds.videos(), 1750, "videos")
    campaign(tally, "video", inputs, "tests.fuzz.tasks:media", lambda _, d: ("video", d))


def test_a_damaged_recording_takes_its_measured_shape_or_is_refused(tally: Tally) -> None:
    inputs = damaged(seeds.recordings(), 1750, "recordings")
    campaign(tally, "audio", inputs, "tests.fuzz.tasks:media", lambda _, d: ("audio", d))
