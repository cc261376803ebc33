"""Qwen2-VL and Qwen2.5-VL: any size, rounded to a grid of merged patches ("smart resize").

Source: Qwen2-VL (arXiv:2409.12191) §2.1, Qwen2.5-VL (arXiv:2502.13923) §2.1.1 and the constants
published with their processors. The two differ only in how they place the tokens of a clip: by the
count of its patches, or by the time that they span. A patch is 14 × 14 pixels over 2 frames; 2 × 2
patches merge into one LLM token.

    image  h × w     encoder h/14 · w/14             LLM  encoder / 4
    video  T frames  encoder T/2 · h/14 · w/14       LLM  encoder / 4
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.job import STRICT
from dataservice.core.positions import PositionRule
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan
from dataservice.decode.processors.frames import MOST_FRAMES, evenly_spaced

PATCH = 14
MERGE = 2
TEMPORAL_PATCH = 2
FACTOR = PATCH * MERGE
MAX_ASPECT_RATIO = 200
TOKENS_PER_SECOND = 2.0  # of Qwen2.5-VL's positions


def smart_resize(
    height: int, width: int, *, min_pixels: float, max_pixels: float, factor: int = FACTOR
) -> tuple[int, int]:
    """The (height, width) nearest to the given one in which both are multiples of `factor`
    and the area lies in [min_pixels, max_pixels].

    Sides round to the nearest multiple; when the area then leaves the range, both are scaled
    by one ratio and rounded down (too large) or up (too small). A side under half a factor rounds
    to 0, so that its picture counts as too small. Never below one factor a side, so a very long
    thin picture may stay above `max_pixels`.

    Raises:
        SampleError: one side is more than 200 times the other.
    """
    check_ratio(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows = math.ceil(height * grow / factor) * factor
        columns = math.ceil(width * grow / factor) * factor
    return rows, columns


def check_ratio(height: int, width: int) -> None:
    """Raises SampleError when one side is more than 200 times the other."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise SampleError(
            f"{width}×{height} pixels has an aspect ratio of {ratio:.0f}; Qwen's processors take "
            f"at most {MAX_ASPECT_RATIO}. Crop the picture, or leave it out."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2VLProcessor:
    """Qwen2-VL's smart resize. Items keep their shape; tokens follow their area."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    unit_frames: ClassVar[int] = TEMPORAL_PATCH  # patches attend to those of their own frames

    kind: Literal["qwen2_vl", "qwen2_5_vl"] = "qwen2_vl"
    """Chooses this processor. Both cut pictures alike; qwen2_5_vl places the tokens of clips by
    seconds."""
    min_pixels: int = 56 * 56
    """Smaller images are enlarged to this area."""
    max_pixels: int = 16384 * 28 * 28
    """Larger images are reduced to this area; 28 × 28 pixels make one LLM token."""
    video_fps: float = 2.0
    """Frames sampled for each second of video."""
    video_min_frames: int = 4
    """Frames of a short clip, if it has them."""
    video_max_frames: int = 768
    """Frames of a long clip."""
    video_min_pixels: int = 128 * 28 * 28
    """Smaller frames are enlarged to this area."""
    video_max_pixels: int = 768 * 28 * 28
    """Larger frames are reduced to this area."""
    video_total_pixels: int = 24576 * 28 * 28
    """Area of all pairs of frames of a clip together; long clips get smaller frames."""

    def __post_init__(self) -> None:
        unit = FACTOR * FACTOR
        for name in ("min_pixels", "video_min_pixels", "video_total_pixels"):
            if getattr(self, name) < unit:
                raise SpecError(
                    f"{self.kind} {name} is {getattr(self, name)}; it must be at least {unit}, the "
                    "area of one token."
                )
        for low, high in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise SpecError(
                    f"{self.kind} {low} is {getattr(self, low)}, above {high} "
                    f"{getattr(self, high)}. Raise the second or lower the first."
                )
        if not TEMPORAL_PATCH <= self.video_min_frames <= self.video_max_frames <= MOST_FRAMES:
            raise SpecError(
                f"{self.kind} video_min_frames is {self.video_min_frames} and video_max_frames "
                f"{self.video_max_frames}; they must be in {TEMPORAL_PATCH}..{MOST_FRAMES:,}, in "
                "this order."
            )
        if not self.video_fps > 0:
            raise SpecError(f"{self.kind} video_fps is {self.video_fps}; it must be above 0.")

    @property
    def positions(self) -> PositionRule:
        """Qwen2.5-VL's released models count two positions a second, Qwen2-VL counts patches."""
        seconds = TOKENS_PER_SECOND if self.kind == "qwen2_5_vl" else 0.0
        return PositionRule(scheme="mrope", tokens_per_second=seconds)

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """One grid of h/14 × w/14 patches. The model repeats the image to fill its temporal
        patch, which costs no token."""
        rows, columns = smart_resize(
            height, width, min_pixels=self.min_pixels, max_pixels=self.max_pixels
        )
        return _plan(rows, columns, groups=1)

    def frame_count(self, header: VideoHeader) -> int:
        """Frames sampled: duration × `video_fps`, at least `video_min_frames` (rounded up to
        even), at most `video_max_frames` and what the clip has, rounded down to even.

        A clip of a single frame shows it twice, where the published code refuses it.
        """
        low = math.ceil(self.video_min_frames / TEMPORAL_PATCH) * TEMPORAL_PATCH
        high = self.video_max_frames // TEMPORAL_PATCH * TEMPORAL_PATCH
        wanted = header.frames / header.frames_per_s * self.video_fps
        count = min(max(wanted, low), high, header.frames)
        return max(TEMPORAL_PATCH, math.floor(count / TEMPORAL_PATCH) * TEMPORAL_PATCH)

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """Frames at even distances, each within its share of `video_total_pixels`.

        A frame's area is at most min(video_max_pixels, total / frames · 2), but never less
        than 1.05 × video_min_pixels.
        """
        count = self.frame_count(header)
        share = self.video_total_pixels / count * TEMPORAL_PATCH
        max_pixels = max(min(self.video_max_pixels, share), int(self.video_min_pixels * 1.05))
        rows, columns = smart_resize(
            header.height, header.width, min_pixels=self.video_min_pixels, max_pixels=max_pixels
        )
        sampled_per_s = count / header.frames * header.frames_per_s
        return _plan(
            rows,
            columns,
            groups=count // TEMPORAL_PATCH,
            frame_indices=evenly_spaced(header.frames, count),
            seconds_per_patch=TEMPORAL_PATCH / sampled_per_s,
        )


def _plan(
    rows: int,
    columns: int,
    *,
    groups: int,
    frame_indices: tuple[int, ...] = (),
    seconds_per_patch: float | None = None,
) -> VisionPlan:
    patches = groups * (rows // PATCH) * (columns // PATCH)
    return VisionPlan(
        encoder_tokens=patches,
        llm_tokens=patches // (MERGE * MERGE),
        views=(View.whole(columns, rows),),
        frame_indices=frame_indices,
        grid=(groups, rows // PATCH, columns // PATCH, MERGE),
        seconds_per_patch=seconds_per_patch,
    )
