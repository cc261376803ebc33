"""The contract of vision processors: pure rules from a header's numbers to tokens and geometry.

A processor need not touch pixels. It gives the number of tokens of an item, and how to cut the item
from its source (`View`); `image.py` and `video.py` then resize and cut for all processors. One that
makes the pixels of pictures itself is a `PixelMaker` besides.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import SampleError

Filter = Literal["bicubic", "bilinear", "lanczos"]


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """Resize the whole picture to `width` × `height`, then cut tiles out of it.

    Each origin (left, top) gives one tile of `tile_width` × `tile_height`; the area outside the
    resized picture is filled with the colour `fill`. With `square`, the picture is first centred on
    a square of that colour, and the whole square is resized. `filter` is the one that the family's
    own processor resizes with, antialiased; one that resizes several times has the earlier sizes
    (width, height) in `via`.
    """

    width: int
    height: int
    tile_width: int
    tile_height: int
    origins: tuple[tuple[int, int], ...] = ((0, 0),)
    fill: tuple[int, int, int] = (0, 0, 0)
    square: bool = False
    filter: Filter = "bicubic"
    via: tuple[tuple[int, int], ...] = ()

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """(width, height) of each resize, in turn."""
        return (*self.via, (self.width, self.height))

    @staticmethod
    def whole(width: int, height: int, filter: Filter = "bicubic") -> "View":
        """Resize only: one tile that is the whole picture."""
        return View(width=width, height=height, tile_width=width, tile_height=height, filter=filter)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionPlan:
    """One image or clip: its cost, and how its pixels are made.

    An image gives the tiles of all its `views`, in order, as frames. A clip gives the frames at
    `frame_indices` (in presentation order, repeats allowed), each through the one tile of its one
    view. All tiles have the same size. Raises SampleError when these rules are broken.

    Between the `texts` lie the medium's runs of tokens, one fewer than texts, each written as the
    placeholder tokens `start pad end`. All runs are alike: each is an encoder item of its own, with
    an equal share of the frames and tokens. A medium without texts is one run.

    If the model places tokens by a grid, `grid` is [t, h, w, merge] of each run: the number of
    patches in time, height and width, together its encoder tokens, and the number of patches per
    side that merge into one token; where none merge, some may be left out of the grid.
    `seconds_per_patch` is the time that a patch of a clip spans.
    """

    encoder_tokens: int
    llm_tokens: int
    views: tuple[View, ...]
    frame_indices: tuple[int, ...] = ()
    texts: tuple[str, ...] = ("", "")
    grid: tuple[int, int, int, int] | None = None
    seconds_per_patch: float | None = None

    def __post_init__(self) -> None:
        tiles = {(view.tile_width, view.tile_height) for view in self.views}
        sizes = [side for view in self.views for size in view.sizes for side in size]
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
        elif self.runs < 1 or any(n % self.runs for n in self._shared):
            problem = (
                f"{len(self.texts)} texts around {self.shape[0]} frames, {self.encoder_tokens} "
                f"encoder and {self.llm_tokens} LLM tokens; the runs between them must have equal "
                "shares"
            )
        elif not self._is_placed:  # else an index of it would not open
            problem = (
                f"a grid of {self.grid} and {self.seconds_per_patch} seconds a patch for runs of "
                f"{self.encoder_tokens // self.runs} encoder tokens; a grid is [t, h, w, merge], "
                "each at least 1, and t · h · w are a run's encoder tokens unless merge is 1; "
                "seconds are above 0"
            )
        else:
            return
        raise SampleError(f"the vision processor plans {problem}. Mend the processor.")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[frames, height, width, 3] of the uint8 pixels."""
        frames = len(self.frame_indices) or sum(len(view.origins) for view in self.views)
        return (frames, self.views[0].tile_height, self.views[0].tile_width, 3)

    @property
    def runs(self) -> int:
        """Number of runs of tokens, which is the number of encoder items."""
        return len(self.texts) - 1

    @property
    def _is_placed(self) -> bool:
        """Whether the grid, where there is one, can be that of a run, and patches span time."""
        if self.seconds_per_patch is not None and not 0 < self.seconds_per_patch < math.inf:
            return False
        if self.grid is None:
            return True
        *patches, merge = self.grid
        whole = len(self.grid) == 4 and min(self.grid) >= 1
        return whole and (merge == 1 or math.prod(patches) * self.runs == self.encoder_tokens)

    @property
    def _shared(self) -> tuple[int, int, int]:
        return (self.shape[0], self.encoder_tokens, self.llm_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHeader:
    """A clip as its container describes it. Rotation flags are ignored, here and in decoding."""

    width: int
    height: int
    frames: int
    frames_per_s: float


def no_clips(processor: str) -> SampleError:
    """The error of a family whose own processor takes pictures only."""
    return SampleError(
        f"the sample has a clip, and {processor} takes pictures only: its own processor has no "
        "rule for clips. Cut the clip into pictures, or leave the sample out."
    )


class VisionProcessor(Protocol):
    """The contract of a vision processor, which a user's own class must meet too.

    A custom class is made with the job's `options` as keyword arguments, is used from many threads,
    and must be pure: the same numbers always give the same plan. Both methods raise SampleError
    when they cannot take an item.
    """

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """Cost and cut of an image of this size in pixels, orientation already applied."""
        ...

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """Cost, sampled frames and cut of a clip."""
        ...


class PixelMaker(Protocol):
    """What a vision processor may do besides: make the pixels of pictures itself. The views of its
    plans then only state the number and size of the tiles; clips are cut by views as ever."""

    def make_pixels(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The tiles uint8[tiles, height, width, 3] of a picture uint8[h, w, 3], upright: exactly
        as many and as large as `plan_image` says for its size. Raises SampleError."""
        ...
