"""LLaVA-1.5: every picture becomes one 336 × 336 square of 576 tokens.

Source: LLaVA-1.5 (arXiv:2310.03744) with CLIP ViT-L/14-336: 24 × 24 patches of 14 pixels, its
class token dropped, each patch one LLM token.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dataservice.core.errors import SampleError
from dataservice.core.job import STRICT
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan
from dataservice.decode.processors.frames import require_frames, segment_midpoints

SIDE = 336
TOKENS_PER_IMAGE = 576
MAX_ASPECT_RATIO = 200
# CLIP's mean colour, which LLaVA's `expand2square` pads with.
CLIP_MEAN = (122, 116, 104)


@dataclass(frozen=True, kw_only=True, slots=True)
class LlavaProcessor:
    """LLaVA's fixed square: 576 tokens an image, in the encoder and in the LLM."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    unit_frames: ClassVar[int] = 1  # squares are encoded one by one

    kind: Literal["llava", "llava1_5"] = "llava"
    """Chooses this processor."""
    aspect: Literal["crop", "pad"] = "crop"
    """crop: shortest side to 336, then the centre, as CLIP does. pad: first centred on a square
    of CLIP's mean colour, which is then resized (LLaVA-1.5's `image_aspect_ratio: pad`)."""
    video_frames: int = 8
    """Frames sampled from a clip; each is one square."""

    def __post_init__(self) -> None:
        require_frames("llava", self.video_frames)

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """One square."""
        return VisionPlan(
            encoder_tokens=TOKENS_PER_IMAGE,
            llm_tokens=TOKENS_PER_IMAGE,
            views=(square_view(width, height, self.aspect),),
        )

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """The middle frames of equal segments, one square each."""
        indices = segment_midpoints(header.frames, self.video_frames)
        return VisionPlan(
            encoder_tokens=len(indices) * TOKENS_PER_IMAGE,
            llm_tokens=len(indices) * TOKENS_PER_IMAGE,
            views=(square_view(header.width, header.height, self.aspect),),
            frame_indices=indices,
        )


def square_view(width: int, height: int, aspect: Literal["crop", "pad"]) -> View:
    """crop: scale the shorter side to 336 (the longer rounds down) and take a centred tile of
    336 × 336. pad: see `View.square`.

    Raises:
        SampleError: a picture to crop is more than 200 times longer than wide; nearly all of
            it would be enlarged only to be thrown away.
    """
    if aspect == "pad":
        return View(
            width=SIDE, height=SIDE, tile_width=SIDE, tile_height=SIDE, fill=CLIP_MEAN, square=True
        )
    shorter, longer = sorted((width, height))
    ratio = longer / shorter
    if ratio > MAX_ASPECT_RATIO:
        raise SampleError(
            f"{width}×{height} pixels has an aspect ratio of {ratio:.0f}; llava crops at most "
            f"{MAX_ASPECT_RATIO}. Use aspect: pad, or leave the picture out."
        )
    resized_width, resized_height = width * SIDE // shorter, height * SIDE // shorter
    return View(
        width=resized_width,
        height=resized_height,
        tile_width=SIDE,
        tile_height=SIDE,
        origins=(((resized_width - SIDE) // 2, (resized_height - SIDE) // 2),),
    )
