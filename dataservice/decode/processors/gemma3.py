"""Gemma 3: every picture becomes one square of 896 × 896 pixels and 256 tokens.

Source: Gemma 3 (arXiv:2503.19786) §2.1 and its published processor. SigLIP's encoder has 64 × 64
patches of 14 pixels, and 4 × 4 of them are averaged into one LLM token. The tokens stand on lines
of their own, between `<start_of_image>` and `<end_of_image>`. Crops of long pictures ("pan and
scan") are off there by default, and not made here.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dataservice.core.job import STRICT
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan, no_clips

SIDE = 896
ENCODER_TOKENS_PER_IMAGE = 4096
LLM_TOKENS_PER_IMAGE = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemma3Processor:
    """Gemma 3's fixed square: 256 LLM tokens and 4,096 encoder tokens an image; no clips."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    kind: Literal["gemma3"] = "gemma3"
    """Chooses this processor."""

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """One square, between empty lines."""
        return VisionPlan(
            encoder_tokens=ENCODER_TOKENS_PER_IMAGE,
            llm_tokens=LLM_TOKENS_PER_IMAGE,
            views=(View.whole(SIDE, SIDE, filter="bilinear"),),
            texts=("\n\n", "\n\n"),
        )

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """Raises SampleError: Gemma 3 takes pictures only."""
        raise no_clips("gemma3")
