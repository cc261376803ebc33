"""Qwen3-VL: Qwen2-VL's smart resize with patches of 16 pixels, and clips with their times in text.

Source: Qwen3-VL (arXiv:2511.21631) §2 and the constants published with its processors. A patch is
16 × 16 pixels over 2 frames; 2 × 2 patches merge into one LLM token.

    image  h × w     encoder h/16 · w/16             LLM  encoder / 4
    video  T frames  encoder T/2 · h/16 · w/16       LLM  encoder / 4, and the times

The vision encoder attends within one patch in time, so each pair of frames is an item of its own,
of grid [1, h, w]. Before each stands its time, the mean of its two frames' in seconds; around the
clip stand the tokens that the chat template writes, as transformers has them since its release 5:

    <|vision_start|><0.3 seconds><|vision_start|>…<|vision_end|><1.3 seconds>…<|vision_end|>
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT
from dataservice.core.positions import PositionRule
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan
from dataservice.decode.processors.frames import MOST_FRAMES, evenly_spaced
from dataservice.decode.processors.qwen2_vl import check_ratio, smart_resize

PATCH = 16
MERGE = 2
TEMPORAL_PATCH = 2
FACTOR = PATCH * MERGE
# One LLM token of a clip is 2 frames of 32 × 32 pixels: its published limits are 2 and 12,288.
START, END = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3VLProcessor:
    """Qwen3-VL's smart resize, and clips as pairs of frames behind their times."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    literals: ClassVar[tuple[str, ...]] = (START, END)

    kind: Literal["qwen3_vl"] = "qwen3_vl"
    """Chooses this processor."""
    min_pixels: int = 64 * 32 * 32
    """Smaller images are enlarged to this area."""
    max_pixels: int = 16384 * 32 * 32
    """Larger images are reduced to this area; 32 × 32 pixels make one LLM token."""
    video_fps: float = 2.0
    """Frames sampled for each second of video."""
    video_min_frames: int = 4
    """Frames of a short clip, if it has them."""
    video_max_frames: int = 768
    """Frames of a long clip."""
    video_min_pixels: int = 4 * 32 * 32
    """Area of all frames of a clip together, below which they are enlarged."""
    video_max_pixels: int = 24576 * 32 * 32
    """Area of all frames of a clip together, above which they are reduced."""
    video_frame_pixels: int | None = None
    """Largest area of one frame: 786432 with qwen-vl-utils, or `cap_pixels_per_frame`. By default
    only the clip's whole area has a limit."""

    def __post_init__(self) -> None:
        for name in ("min_pixels", "video_min_pixels", "video_frame_pixels"):
            value = getattr(self, name)
            if value is not None and value < FACTOR * FACTOR:
                raise SpecError(
                    f"qwen3_vl {name} is {value}; it must be at least {FACTOR * FACTOR}, the area "
                    "of one token."
                )
        for low, high in (("min_pixels", "max_pixels"), ("video_min_pixels", "video_max_pixels")):
            if getattr(self, low) > getattr(self, high):
                raise SpecError(
                    f"qwen3_vl {low} is {getattr(self, low)}, above {high} "
                    f"{getattr(self, high)}. Raise the second or lower the first."
                )
        if not TEMPORAL_PATCH <= self.video_min_frames <= self.video_max_frames <= MOST_FRAMES:
            raise SpecError(
                f"qwen3_vl video_min_frames is {self.video_min_frames} and video_max_frames "
                f"{self.video_max_frames}; they must be in {TEMPORAL_PATCH}..{MOST_FRAMES:,}, in "
                "this order."
            )
        if not self.video_fps > 0:
            raise SpecError(f"qwen3_vl video_fps is {self.video_fps}; it must be above 0.")

    @property
    def positions(self) -> PositionRule:
        """Patches are counted; each pair of frames is a grid of its own, with its time in text."""
        return PositionRule(scheme="mrope")

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """One grid of h/16 × w/16 patches."""
        rows, columns = smart_resize(
            height, width, min_pixels=self.min_pixels, max_pixels=self.max_pixels, factor=FACTOR
        )
        patches = (rows // PATCH) * (columns // PATCH)
        return VisionPlan(
            encoder_tokens=patches,
            llm_tokens=patches // (MERGE * MERGE),
            views=(View.whole(columns, rows),),
            grid=(1, rows // PATCH, columns // PATCH, MERGE),
        )

    def frame_count(self, header: VideoHeader) -> int:
        """Frames sampled: duration × `video_fps` rounded down, at least `video_min_frames`, at most
        `video_max_frames` and what the clip has."""
        wanted = int(header.frames / header.frames_per_s * self.video_fps)
        return min(max(wanted, self.video_min_frames), self.video_max_frames, header.frames)

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """Frames at even distances, in pairs; the last of an odd number is shown twice. A clip of
        a single frame shows it twice too, where the published code refuses it."""
        sampled = evenly_spaced(header.frames, self.frame_count(header))
        indices = (*sampled, *sampled[-1:][: len(sampled) % TEMPORAL_PATCH])
        rows, columns = self._frame_size(max(len(sampled), TEMPORAL_PATCH), header)
        pairs = len(indices) // TEMPORAL_PATCH
        patches = pairs * (rows // PATCH) * (columns // PATCH)
        times = [
            (first / header.frames_per_s + second / header.frames_per_s) / 2
            for first, second in zip(indices[::2], indices[1::2], strict=True)
        ]
        written = [f"<{time_s:.1f} seconds>" for time_s in times]
        return VisionPlan(
            encoder_tokens=patches,
            llm_tokens=patches // (MERGE * MERGE),
            views=(View.whole(columns, rows),),
            frame_indices=indices,
            texts=(START + written[0], *written[1:], END),
            grid=(1, rows // PATCH, columns // PATCH, MERGE),
            seconds_per_patch=TEMPORAL_PATCH * header.frames / header.frames_per_s / len(sampled),
        )

    def _frame_size(self, frames: int, header: VideoHeader) -> tuple[int, int]:
        """(height, width) of each frame, so that the areas of all together lie within limits.

        Frames under one factor a side count as enlarged to it; the area is that of the sampled
        frames, rounded to a whole number of pairs.
        """
        height, width = header.height, header.width
        if min(height, width) < FACTOR:
            scale = max(FACTOR / height, FACTOR / width)
            height, width = int(height * scale), int(width * scale)
        check_ratio(height, width)
        most = self.video_max_pixels
        if self.video_frame_pixels is not None:
            share = min(self.video_frame_pixels, most // frames)
            most = max(share, int(self.video_min_pixels * 1.05)) * frames
        rows, columns = (round(side / FACTOR) * FACTOR for side in (height, width))
        area = round(frames / TEMPORAL_PATCH) * TEMPORAL_PATCH * rows * columns
        if area > most:
            shrink = math.sqrt(frames * height * width / most)
            rows, columns = (
                max(FACTOR, math.floor(side / shrink / FACTOR) * FACTOR) for side in (height, width)
            )
        elif area < self.video_min_pixels:
            grow = math.sqrt(self.video_min_pixels / (frames * height * width))
            rows, columns = (math.ceil(side * grow / FACTOR) * FACTOR for side in (height, width))
        return rows, columns
