"""LLaVA-NeXT (1.6): squares of 336 pixels that cover a picture in its own shape ("AnyRes").

Source: LLaVA-NeXT (Liu et al., 2024) and its published processor. The picture is fitted into the
best of a few canvases of whole squares and centred there on black; each square is encoded alone,
24 × 24 patches of 14 pixels, CLIP's class token dropped. Before them stands the whole picture as
one square. The LLM gets

    24 · 24                  the whole picture
    rows · (columns + 1)     the patches of the canvas without the black border ("unpadded"), and
                             a learnt "newline" behind each row

all of them written as one run of `<image>`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from dataservice.core.errors import SampleError, SpecError
from dataservice.core.job import STRICT
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan, no_clips

SIDE = 336
PATCHES = 24  # of each side of a square
Size = tuple[int, int]
"""(rows, columns) or (height, width)."""


def best_canvas(height: int, width: int, canvases: tuple[Size, ...]) -> Size:
    """The canvas, in squares, on which the picture keeps most of its pixels; of equal ones the
    smaller, and of these the first."""

    def merit(canvas: Size) -> Size:
        rows, columns = canvas[0] * SIDE, canvas[1] * SIDE
        scale = min(columns / width, rows / height)
        shown = min(int(width * scale) * int(height * scale), width * height)
        return shown, -rows * columns

    return max(canvases, key=merit)


def fitted(height: int, width: int, canvas: Size) -> Size:
    """(height, width) in pixels of a picture that is fitted into a canvas of squares."""
    rows, columns = canvas[0] * SIDE, canvas[1] * SIDE
    if columns / width < rows / height:
        return min(math.ceil(height * (columns / width)), rows), columns
    return rows, min(math.ceil(width * (rows / height)), columns)


def unpadded(height: int, width: int, canvas: Size) -> Size:
    """(rows, columns) of patches of a canvas without the border, as `unpad_image` leaves them: an
    equal number is cut from both ends."""
    rows, columns = canvas[0] * PATCHES, canvas[1] * PATCHES
    # Rounding to 7 decimals comes first, as in the published code.
    if width / height > columns / rows:
        kept = int(round(height * (columns / width), 7))
        return rows - (rows - kept) // 2 * 2, columns
    kept = int(round(width * (rows / height), 7))
    return rows, columns - (columns - kept) // 2 * 2


@dataclass(frozen=True, kw_only=True, slots=True)
class LlavaNextProcessor:
    """LLaVA-NeXT's AnyRes squares: 576 encoder tokens each; LLM tokens follow the shape. No
    clips."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    kind: Literal["llava_next", "llava1_6"] = "llava_next"
    """Chooses this processor."""
    canvases: tuple[Size, ...] = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    """Canvases to choose from, as (rows, columns) of squares: `image_grid_pinpoints` / 336."""

    def __post_init__(self) -> None:
        if not self.canvases or any(min(c) < 1 or math.prod(c) > 256 for c in self.canvases):
            raise SpecError(
                f"llava_next canvases are {list(self.canvases)}; there must be at least one, each "
                "of 1..256 squares."
            )

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """The whole picture as one square, then the canvas's squares row by row. The grid is
        [canvas, rows, columns, 1]: the canvas's rows of squares, and the rows and columns of the
        unpadded patches. Squares of one number may be of several canvases.

        Raises:
            SampleError: the picture is so thin that it fills no patch of its canvas.
        """
        canvas = best_canvas(height, width, self.canvases)
        rows, columns = unpadded(height, width, canvas)
        if min(rows, columns) < 1:
            raise SampleError(
                f"{width}×{height} pixels on a canvas of {canvas[0]}×{canvas[1]} squares leaves "
                f"{rows}×{columns} patches behind its border; llava_next needs at least one. Crop "
                "the picture, or leave it out."
            )
        squares = 1 + math.prod(canvas)
        return VisionPlan(
            encoder_tokens=squares * PATCHES * PATCHES,
            llm_tokens=PATCHES * PATCHES + rows * (columns + 1),
            views=(View.whole(SIDE, SIDE), _squares(height, width, canvas)),
            grid=(canvas[0], rows, columns, 1),
        )

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """Raises SampleError: LLaVA-NeXT takes pictures only."""
        raise no_clips(self.kind)


def _squares(height: int, width: int, canvas: Size) -> View:
    """The squares of a canvas with the picture in its middle, on black."""
    high, wide = fitted(height, width, canvas)
    top, left = (canvas[0] * SIDE - high) // 2, (canvas[1] * SIDE - wide) // 2
    return View(
        width=wide,
        height=high,
        tile_width=SIDE,
        tile_height=SIDE,
        origins=tuple(
            (column * SIDE - left, row * SIDE - top)
            for row in range(canvas[0])
            for column in range(canvas[1])
        ),
    )
