"""A processor of the operator's own that takes its process along."""

import os

NAME = "dies"
IMPORT_PATH = f"{__name__}:DeadlyVision"


class DeadlyVision:
    def __init__(self) -> None:
        os.abort()

    def plan_image(self) -> None: ...

    def plan_video(self) -> None: ...
