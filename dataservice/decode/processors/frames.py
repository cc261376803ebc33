"""Rules about frames: which of a clip are taken, and how many an encoder takes together."""

import numpy as np

from dataservice.core.errors import SpecError

MOST_FRAMES = 65_536


def require_frames(processor: str, video_frames: int) -> None:
    """Raises SpecError when no model takes this number of frames: every frame gets tokens, whatever
    the clip."""
    if not 1 <= video_frames <= MOST_FRAMES:
        raise SpecError(
            f"{processor} video_frames is {video_frames}; it must be in 1..{MOST_FRAMES:,}."
        )


def require_unit_frames(unit_frames: int) -> None:
    """Raises SpecError on a number of frames that no encoder takes together."""
    if not 0 <= unit_frames <= MOST_FRAMES:
        raise SpecError(
            f"vision unit_frames is {unit_frames}; it must be in 0..{MOST_FRAMES:,}: 1 where each "
            "tile is encoded by itself, 0 where pictures and clips are to stay whole."
        )


def evenly_spaced(total: int, count: int) -> tuple[int, ...]:
    """`count` indices from the first frame to the last: round(linspace(0, total−1, count)).

    The rule of Qwen2-VL's `fetch_video`. Ties round to even; a clip with fewer frames than
    `count` repeats some.
    """
    return tuple(int(index) for index in np.linspace(0, total - 1, count).round())


def segment_midpoints(total: int, count: int) -> tuple[int, ...]:
    """The middle frame of each of `count` equal segments (InternVL's `get_index`)."""
    length = (total - 1) / count
    return tuple(int(length / 2 + np.round(length * place)) for place in range(count))
