"""How a model counts the positions of its tokens."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionRule:
    """sequence: tokens are counted from the start of their sample. mrope: three numbers a token
    (time, height, width), which differ within an image or a clip (Qwen2-VL, arXiv:2409.12191,
    section 2.1). With `tokens_per_second` above 0, the time of a clip's patches is counted in
    seconds times this number (Qwen2.5-VL, arXiv:2502.13923, section 2.1.1), else in patches. With
    `past_time`, the text behind a clip begins past its last time, as in the paper and in
    transformers 4; else past its height and width alone, as in transformers 5."""

    scheme: Literal["sequence", "mrope"] = "sequence"
    tokens_per_second: float = 0.0
    past_time: bool = False


IN_SEQUENCE = PositionRule()
