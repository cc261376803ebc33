"""What every vision processor is: pure rules from a header's numbers to tokens and geometry.

A processor never touches pixels. It says how many tokens an item costs and how to cut it
from its source (`View`); `image.py` and `video.py` then do the same resize and cut for all.
"""

from dataclasses import dataclass
from typing import Protocol

from dataservice.core.errors import SampleError


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Resize the whole picture to `width` × `height`, then cut tiles out of it.

    Each origin (left, top) gives one tile of `tile_width` × `tile_height`; what lies outside
    the resized picture is filled with the colour `fill`.
    """

    width: int
    height: int
    tile_width: int
    tile_height: int
    origins: tuple[tuple[int, int], ...] = ((0, 0),)
    fill: tuple[int, int, int] = (0, 0, 0)

    @staticmethod
    def whole(width: int, height: int) -> "View":
        """Resize only: one tile that is the whole picture."""
        return View(width=width, height=height, tile_width=width, tile_height=height)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionPlan:
    """One image or clip: what it costs, and how its pixels are made.

    An image gives the tiles of all its `views`, in order, as frames. A clip gives the frames
    at `frame_indices` (in presentation order, repeats allowed), each through the one tile of
    its one view. All tiles have the same size. SampleError when made otherwise.
    """

    encoder_tokens: int
    llm_tokens: int
    views: tuple[View, ...]
    frame_indices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        tiles = {(view.tile_width, view.tile_height) for view in self.views}
        sizes = [side for view in self.views for side in (view.width, view.height)]
        sizes += [side for tile in tiles for side in tile]
        if self.frame_indices and (len(self.views) != 1 or len(self.views[0].origins) != 1):
            problem = f"{len(self.views)} views of a clip; a clip has one view of one tile"
        elif len(tiles) != 1 or min(sizes) < 1 or not all(view.origins for view in self.views):
            problem = f"tiles of {sorted(tiles)} pixels; all tiles must have one size, above 0"
        elif min(self.encoder_tokens, self.llm_tokens) < 1:
            problem = (
                f"{self.encoder_tokens} encoder and {self.llm_tokens} LLM tokens; both must be "
                "at least 1"
            )
        else:
            return
        raise SampleError(f"the vision processor plans {problem}. Mend the processor.")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[frames, height, width, 3] of the uint8 pixels."""
        frames = len(self.frame_indices) or sum(len(view.origins) for view in self.views)
        return (frames, self.views[0].tile_height, self.views[0].tile_width, 3)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHeader:
    """What a clip's container says of it. Rotation flags are ignored, here and in decoding."""

    width: int
    height: int
    frames: int
    frames_per_s: float


class VisionProcessor(Protocol):
    """The contract of a vision processor; a user's own class meets it too.

    A custom class is made with the job's `options` as keyword arguments, is used from many
    threads, and must be pure: the same numbers in give the same plan, always and everywhere.
    Either method raises SampleError for an item that it cannot take.
    """

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """Cost and cut of an image of this size in pixels, orientation already applied."""
        ...

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """Cost, sampled frames and cut of a clip."""
        ...
