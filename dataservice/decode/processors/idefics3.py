"""Idefics 3 and SmolVLM: a picture becomes rows of square tiles and a thumbnail, named in text.

Source: Idefics 3 (arXiv:2408.12637) §3, SmolVLM (arXiv:2504.05299) §2 and their published
processors. The picture is enlarged or reduced to a longest side of `longest` pixels, then to whole
tiles. Each tile is encoded alone: (side / patch)² tokens, of which shuffle² become one LLM token.

    <fake_token_around_image><row_1_col_1>…<fake_token_around_image><row_1_col_2>…\\n
    \\n<fake_token_around_image><global-img>…<fake_token_around_image>

A clip of SmolVLM is a sentence about its length, and its frames as single tiles behind their times.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Literal

import numpy as np

from dataservice.core.errors import SpecError
from dataservice.core.job import STRICT
from dataservice.decode.processors.base import VideoHeader, View, VisionPlan, no_clips

FAKE, GLOBAL = "<fake_token_around_image>", "<global-img>"
LONGEST_SIDE = 4096
MOST_ROWS = 6  # the vocabulary has <row_1_col_1> to <row_6_col_6>
SKIPPED_S = 1  # at each end of a long clip
MOST_FRAMES = 999  # of which the number is written in words
# (tile, patch, shuffle) as published for Idefics3-8B and SmolVLM2-2.2B.
_PUBLISHED = {"idefics3": (364, 14, 2), "smolvlm": (384, 14, 3), "smolvlm2": (384, 14, 3)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Idefics3Processor:
    """Idefics 3's and SmolVLM's rows of tiles, each an item of its own; clips for SmolVLM only."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    literals: ClassVar[tuple[str, ...]] = (FAKE, GLOBAL, "<row_1_col_1>")

    kind: Literal["idefics3", "smolvlm", "smolvlm2"] = "idefics3"
    """Chooses this processor, and the defaults of its model."""
    tile: int | None = None
    """Side of a tile in pixels (`max_image_size`): 364 for idefics3, 384 for SmolVLM's 2.2B and 512
    for its smaller models."""
    longest: int | None = None
    """Longest side of a picture in pixels (`size`); by default 4 tiles."""
    patch: int | None = None
    """Side of a patch in pixels: 14, or 16 for the smaller models."""
    shuffle: int | None = None
    """Patches per side that become one LLM token: 2 for idefics3, 3 for SmolVLM's 2.2B, 4 for the
    smaller models."""
    splitting: bool = True
    """Cut pictures into tiles (`do_image_splitting`); otherwise each is one tile."""
    video_fps: float = 1.0
    """Frames sampled for each second of video."""
    video_max_frames: int = 64
    """Frames of a long clip."""

    def __post_init__(self) -> None:
        tile, patch, shuffle = self._sizes
        if not 1 <= shuffle * patch <= tile <= LONGEST_SIDE or (tile // patch) % shuffle:
            raise SpecError(
                f"{self.kind} tile is {tile}, patch {patch} and shuffle {shuffle}; tile must be at "
                f"most {LONGEST_SIDE}, and hold a multiple of shuffle of patches a side."
            )
        if not tile <= self.longest_side <= min(MOST_ROWS * tile, LONGEST_SIDE):
            raise SpecError(
                f"{self.kind} longest is {self.longest_side}; it must be in {tile}.."
                f"{min(MOST_ROWS * tile, LONGEST_SIDE)}, one to {MOST_ROWS} tiles."
            )
        if not 1 <= self.video_max_frames <= MOST_FRAMES:
            raise SpecError(
                f"{self.kind} video_max_frames is {self.video_max_frames}; it must be in "
                f"1..{MOST_FRAMES}."
            )
        if not self.video_fps > 0:
            raise SpecError(f"{self.kind} video_fps is {self.video_fps}; it must be above 0.")

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """(tile, patch, shuffle)"""
        tile, patch, shuffle = _PUBLISHED[self.kind]
        return self.tile or tile, self.patch or patch, self.shuffle or shuffle

    @property
    def tile_side(self) -> int:
        """Side of a tile in pixels, given or published."""
        return self._sizes[0]

    @property
    def longest_side(self) -> int:
        """Longest side of a picture in pixels, given or 4 tiles."""
        return self.longest or 4 * self._sizes[0]

    def plan_image(self, *, width: int, height: int) -> VisionPlan:
        """Tiles row by row, then the thumbnail; a picture of one tile is only that."""
        rows, columns = self.tiles(width, height) if self.splitting else (1, 1)
        tile = self._sizes[0]
        first = fitted(width, height, self.longest_side)
        if rows * columns == 1:
            return self._plan(1, (_square(tile, via=(first,)),), texts=(FAKE + GLOBAL, FAKE))
        grid = View(
            width=columns * tile,
            height=rows * tile,
            tile_width=tile,
            tile_height=tile,
            origins=tuple((c * tile, r * tile) for r in range(rows) for c in range(columns)),
            filter="lanczos",
            via=(first,),
        )
        names = [
            ("\n" if row > 1 and column == 1 else "") + f"{FAKE}<row_{row}_col_{column}>"
            for row in range(1, rows + 1)
            for column in range(1, columns + 1)
        ]
        return self._plan(
            rows * columns + 1,
            (grid, _square(tile, via=grid.sizes)),
            texts=(*names, f"\n\n{FAKE}{GLOBAL}", FAKE),
        )

    def tiles(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tiles of a picture: fitted, then both sides grow to whole tiles."""
        tile, wide = self._sizes[0], width >= height
        # In floating point as published: rounding decides between two numbers of tiles.
        fitted_width, fitted_height = fitted(width, height, self.longest_side)
        shape = fitted_width / fitted_height
        longer = math.ceil(self.longest_side / tile) * tile
        shorter = int(longer / shape) if wide else int(longer * shape)
        counts = math.ceil(shorter / tile), longer // tile
        return counts if wide else counts[::-1]

    def plan_video(self, header: VideoHeader) -> VisionPlan:
        """Frames at even distances, one tile each.

        Raises:
            SampleError: the processor is idefics3, which takes pictures only.
        """
        if self.kind == "idefics3":
            raise no_clips(self.kind)
        indices = self.sampled(header)
        tile = self._sizes[0]
        duration = timedelta(seconds=int(header.frames / header.frames_per_s))
        about = (
            f"You are provided the following series of {in_words(len(indices))} frames from a "
            f"{duration} [H:MM:SS] video.\n"
        )
        seconds = [index / header.frames_per_s for index in indices]
        times = [
            f"\nFrame from {int(s // 60):02d}:{int(s % 60):02d}:{FAKE}{GLOBAL}" for s in seconds
        ]
        return self._plan(
            len(indices),
            (_square(tile, via=(fitted(header.width, header.height, tile),)),),
            frame_indices=indices,
            texts=(about + times[0], *(FAKE + time for time in times[1:]), f"{FAKE}\n\n"),
        )

    def sampled(self, header: VideoHeader) -> tuple[int, ...]:
        """Frames between the first and the last, without those of a second at both ends if the clip
        is longer than its frames."""
        duration_s = header.frames / header.frames_per_s
        count = max(1, min(round(self.video_fps * duration_s), self.video_max_frames))
        first, last = 0, header.frames - 1
        if duration_s - 2 * SKIPPED_S > self.video_max_frames * self.video_fps:
            skipped = SKIPPED_S * header.frames_per_s
            inner = int(skipped), min(int(header.frames - skipped), last)
            first, last = inner if inner[0] < inner[1] else (first, last)
        return tuple(int(index) for index in np.unique(np.linspace(first, last, count, dtype=int)))

    def _plan(
        self,
        tiles: int,
        views: tuple[View, ...],
        *,
        texts: tuple[str, ...],
        frame_indices: tuple[int, ...] = (),
    ) -> VisionPlan:
        tile, patch, shuffle = self._sizes
        return VisionPlan(
            encoder_tokens=tiles * (tile // patch) ** 2,
            llm_tokens=tiles * (tile // patch // shuffle) ** 2,
            views=views,
            texts=texts,
            frame_indices=frame_indices,
        )


def fitted(width: int, height: int, longest: int) -> tuple[int, int]:
    """(width, height) of a picture whose longest side becomes `longest`, and the other an even
    number."""
    shape, wide = width / height, width >= height
    shorter = int(longest / shape) if wide else int(longest * shape)
    shorter = max(shorter + shorter % 2, 1)
    return (longest, shorter) if wide else (shorter, longest)


def _square(tile: int, via: tuple[tuple[int, int], ...]) -> View:
    return View(
        width=tile, height=tile, tile_width=tile, tile_height=tile, filter="lanczos", via=via
    )


_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def in_words(number: int) -> str:
    """A number in 0..999 in English words: three hundred and twenty-one."""
    hundreds, rest = divmod(number, 100)
    tens, ones = divmod(rest, 10)
    below = _ONES[rest] if rest < 20 else _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
    if not hundreds:
        return below
    return f"{_ONES[hundreds]} hundred" + (f" and {below}" if rest else "")
