"""A vision processor that can be made to wait, so that a fault hits during decoding.

It plans exactly as Qwen2-VL's processor does. While the file `closed` exists in the folder that the
environment names, every process that decodes an image or a clip waits, and writes a file with its
process id so that the harness sees it.
"""

import os
import time
from pathlib import Path

from dataservice.decode.processors.base import VideoHeader, VisionPlan
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor

NAME = "held"
IMPORT_PATH = f"{__name__}:HeldVision"
GATE_VARIABLE = "SOAK_DECODING_GATE"
POLL_S = 0.02


class HeldVision:
    """Qwen2-VL's plans behind a gate."""

    def __init__(self, *, video_min_pixels: int) -> None:
        self._inner = Qwen2VLProcessor(video_min_pixels=video_min_pixels)

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """As Qwen2VLProcessor, when the gate is open."""
        wait_at_gate()
        return self._inner.plan_image(width=width, height=height)

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """As Qwen2VLProcessor, when the gate is open."""
        wait_at_gate()
        return self._inner.plan_video(header)


def wait_at_gate() -> None:
    """Wait until the gate is open; returns at once when no gate is named."""
    folder = os.environ.get(GATE_VARIABLE)
    if folder is None or not (closed := Path(folder) / "closed").exists():
        return
    (Path(folder) / f"waiting-{os.getpid()}").touch()
    while closed.exists():
        time.sleep(POLL_S)


class DecodingGate:
    """The harness's side of the gate."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    @property
    def environment(self) -> dict[str, str]:
        """The environment to start the service with."""
        return {GATE_VARIABLE: str(self._folder)}

    def close(self) -> None:
        """Make every process that decodes an image or clip from now on wait."""
        for left in self._folder.glob("waiting-*"):
            left.unlink()
        (self._folder / "closed").touch()

    def open(self) -> None:
        """Let all processes continue."""
        (self._folder / "closed").unlink(missing_ok=True)

    @property
    def waiting(self) -> list[int]:
        """Ids of processes that wait, or have waited since the gate was closed."""
        return sorted(int(path.name[8:]) for path in self._folder.glob("waiting-*"))
