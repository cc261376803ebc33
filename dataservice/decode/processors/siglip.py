"""SigLIP and SigLIP 2 of a fixed resolution: every picture becomes one square.

Source: SigLIP (arXiv:2303.15343), SigLIP 2 (arXiv:2502.14786) §2 and PaliGemma
(arXiv:2407.07726) §3, which gives each patch to the LLM as one token. The encoder has no class
token: a square of `side` pixels has (side // patch)² tokens, 27² = 729 at 384 and 14. SigLIP 2's
"NaFlex" variant, of variable shape, is another model and is not made here.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan, no_clips


@dataclass(frozen=True, kw_only=True, slots=True)
class SiglipProcessor:
    """SigLIP's fixed square: a token for each patch, in the encoder and in the LLM; no clips."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    kind: Literal["siglip", "siglip2"] = "siglip"
    """Chooses this processor. siglip2 resizes with a bilinear filter, siglip with a bicubic one."""
    side: int = 384
    """Side of the square, in pixels."""
    patch: int = 14
    """Side of a patch, in pixels."""

    def __post_init__(self) -> None:
        if not 1 <= self.patch <= self.side <= 4096:
            raise SpecError(
                f"{self.kind} patch is {self.patch} and side {self.side}; they must be in 1..4096, "
                "in this order."
            )

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """One square, whatever the picture's shape."""
        tokens = (self.side // self.patch) ** 2
        view = View.whole(
            self.side, self.side, filter="bilinear" if self.kind == "siglip2" else "bicubic"
        )
        return VisionPlan(encoder_tokens=tokens, llm_tokens=tokens, views=(view,))

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """Raises SampleError: the families that use this square take pictures only."""
        raise no_clips(self.kind)
