"""A processor of the operator's own that is slow with clips or images, all the time or from the
moment that a file appears: what makes one source the culprit."""

import time
from pathlib import Path

from dataservice.decode.processors.base import VideoHeader, VisionPlan
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor

NAME = "moody"
IMPORT_PATH = f"{__name__}:MoodyVision"


class MoodyVision:
    """Qwen2-VL's plans, after `image_s` or `clip_s`; with `once`, only while that file is there.
    It sleeps, or `works`."""

    def __init__(
        self, image_s: float = 0.0, clip_s: float = 0.0, once: str = "", works: bool = False
    ) -> None:
        self._inner = Qwen2VLProcessor(video_min_pixels=3136)
        self._image_s = image_s
        self._clip_s = clip_s
        self._once = once
        self._works = works

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        self._wait(self._image_s)
        return self._inner.plan_image(width=width, height=height)

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        self._wait(self._clip_s)
        return self._inner.plan_video(header)

    def _wait(self, seconds: float) -> None:
        if self._once and not Path(self._once).exists():
            return
        if not self._works:
            time.sleep(seconds)
            return
        until_s = time.process_time() + seconds
        while time.process_time() < until_s:
            pass
