"""A processor of the operator's own that takes its time: what makes a job decode-bound."""

import time

from dataservice.decode.processors.base import VideoHeader, VisionPlan
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor

NAME = "slow"
IMPORT_PATH = f"{__name__}:SlowVision"
SLEEP_S = 0.02


class SlowVision:
    """Qwen2-VL's plans, after a while."""

    def __init__(self) -> None:
        self._inner = Qwen2VLProcessor(video_min_pixels=3136, video_fps=8.0)

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        time.sleep(SLEEP_S)
        return self._inner.plan_image(width=width, height=height)

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        time.sleep(SLEEP_S)
        return self._inner.plan_video(header)
