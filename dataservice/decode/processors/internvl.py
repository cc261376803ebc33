"""InternVL: a picture becomes a grid of square tiles and a thumbnail.

Source: InternVL 1.5 (arXiv:2404.16821) §3.2 and its published `dynamic_preprocess`.
A 448 × 448 tile has 32 × 32 patches of 14 pixels: 1,024 ViT tokens (its class token is not
counted), which pixel shuffle turns into 256 LLM tokens.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, Literal

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan
from dataservice.decode.processors.frames import require_frames, segment_midpoints

TILE = 448
ENCODER_TOKENS_PER_TILE = 1024
LLM_TOKENS_PER_TILE = 256


@lru_cache(maxsize=64)
def tile_grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Every (columns, rows) of min_tiles..max_tiles tiles, by number of tiles.

    The published code leaves grids of one size in the order of a set; here they are in
    order of columns, so that the choice never depends on hashing.
    """
    grids = {
        (columns, rows)
        for columns in range(1, max_tiles + 1)
        for rows in range(1, max_tiles // columns + 1)
        if min_tiles <= columns * rows
    }
    return tuple(sorted(grids, key=lambda grid: (grid[0] * grid[1], grid)))


def closest_grid(width: int, height: int, grids: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """The grid whose shape is nearest to the picture's.

    Of equally near grids (2 × 2 and 1 × 1) a larger one wins when the picture covers more
    than half of its area.
    """
    shape, best, best_gap = width / height, (1, 1), float("inf")
    for columns, rows in grids:
        gap = abs(shape - columns / rows)
        covered = width * height > 0.5 * TILE * TILE * columns * rows
        if gap < best_gap or (gap == best_gap and covered):
            best, best_gap = (columns, rows), gap
    return best


@dataclass(frozen=True, kw_only=True, slots=True)
class InternVLProcessor:
    """InternVL's dynamic tiles: 256 LLM tokens and 1,024 ViT tokens each."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    unit_frames: ClassVar[int] = 1  # tiles are encoded one by one

    kind: Literal["internvl", "internvl2", "internvl2_5", "internvl3"] = "internvl"
    """Chooses this processor."""
    min_tiles: int = 1
    """Fewest tiles of an image, its thumbnail not counted (`min_num`)."""
    max_tiles: int = 12
    """Most tiles of an image, its thumbnail not counted (`max_num`)."""
    thumbnail: bool = True
    """Add the whole picture as one more tile when there are several."""
    video_frames: int = 8
    """Frames sampled from a clip; each is one tile."""

    def __post_init__(self) -> None:
        if not 1 <= self.min_tiles <= self.max_tiles <= 256:
            raise SpecError(
                f"internvl min_tiles is {self.min_tiles} and max_tiles {self.max_tiles}; they "
                "must be in 1..256, in this order."
            )
        require_frames("internvl", self.video_frames)

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """Tiles row by row, then the thumbnail."""
        columns, rows = closest_grid(width, height, tile_grids(self.min_tiles, self.max_tiles))
        grid = View(
            width=columns * TILE,
            height=rows * TILE,
            tile_width=TILE,
            tile_height=TILE,
            origins=tuple((c * TILE, r * TILE) for r in range(rows) for c in range(columns)),
        )
        has_thumbnail = self.thumbnail and columns * rows > 1
        views = (grid, View.whole(TILE, TILE)) if has_thumbnail else (grid,)
        return _plan(columns * rows + has_thumbnail, views)

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """The middle frames of equal segments, one tile and one item each, on lines of their own:
        `Frame1: `, its tokens, and so on."""
        indices = segment_midpoints(header.frames, self.video_frames)
        names = [f"Frame{number + 1}: " for number in range(len(indices))]
        return replace(
            _plan(len(indices), (View.whole(TILE, TILE),)),
            frame_indices=indices,
            texts=(names[0], *(f"\n{name}" for name in names[1:]), ""),
        )


def _plan(tiles: int, views: tuple[View, ...]) -> VisionPlan:
    return VisionPlan(
        encoder_tokens=tiles * ENCODER_TOKENS_PER_TILE,
        llm_tokens=tiles * LLM_TOKENS_PER_TILE,
        views=views,
    )
