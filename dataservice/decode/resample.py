"""Resizes pictures as torch does: the same integers, bit by bit, on every machine.

Hugging Face's default image processors resize uint8 tensors with torch's antialiased `interpolate`.
That is a pass along rows and then one along columns, each a weighted sum of neighbours in whole
numbers, rounded to 8 bits. Weights are scaled by the largest power of two for which they fit 16
bits; sums fit 32. Pillow scales by 2²², and begins with columns where that is less work: its pixels
are up to four levels from torch's.

A picture is uint32[h, w], a pixel's bytes being red, green, blue and one that is ignored, as they
lie in Pillow's memory; or uint8[h, w, 3].

Source: the kernels of torch's `_upsample_bicubic2d_aa` for uint8 (ATen, UpSampleKernel), whose
arithmetic this file states anew; tests compare the two on thousands of sizes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.kernels import array, kernel, read_only
from dataservice.decode.processors.base import Filter

_MOST_BITS = 22
_WEIGHT_LIMIT = 2**15
_BAND_ROWS = 32  # of the first pass: a band of the picture then lies in a core's own cache
_SPAN = 1024  # bytes of a row that the second pass sums at once
Pixels = NDArray[np.uint8]
Words = NDArray[np.uint32]


class Resizing:
    """A picture, or the square around it, on its way to one size. Rows are added from the top, any
    number at a time; then `finish` writes uint8[height, width, 3]."""

    def __init__(
        self,
        before: tuple[int, int],
        after: tuple[int, int],
        filter: Filter,
        *,
        square: tuple[int, int, int] | None = None,
    ) -> None:
        """Sizes are (width, height). `square` is the colour around a picture that is centred on a
        square as large as its longer side."""
        width, height = before
        self._whole = (max(before),) * 2 if square else before
        self._after, self._filter = after, filter
        self._left, self._top = (self._whole[0] - width) // 2, (self._whole[1] - height) // 2
        self._ground = np.array([*(square or (0, 0, 0)), 0], np.uint8).view(np.uint32)[0]
        self._narrow = np.empty((self._whole[1], _words(after[0])), np.uint32)
        self._next = self._top
        if square:
            empty: Words = np.full((1, self._whole[0]), self._ground, dtype=np.uint32)
            self._first_pass(empty, self._narrow[:1], left=0)
            self._narrow[1:] = self._narrow[0]

    def add(self, rows: Words | Pixels) -> None:
        """The next rows of the picture, which the first pass resizes along their length."""
        place = self._narrow[self._next : self._next + len(rows)]
        whole: Any = np.ascontiguousarray(rows)  # whose type of elements is lost
        self._first_pass(whole, place, left=self._left)
        self._next += len(rows)

    def finish(self, made: Pixels) -> None:
        """The second pass, along columns: `made` uint8[height, width, 3] equals torch's
        `interpolate` with `antialias=True`."""
        width, height = self._after
        taps = _taps(self._whole[1], height, self._filter)
        lines = self._narrow.view(np.uint8)[:, : 3 * width]
        _sum_rows(lines, made.reshape(height, -1), taps.first, taps.weights, taps.bits)

    def _first_pass(self, rows: Words | Pixels, out: Words, *, left: int) -> None:
        taps = _taps(self._whole[0], self._after[0], self._filter)
        place = self._whole[0], left, self._ground
        if len(rows) >= _BAND_ROWS:
            _sum_columns(rows, out, taps.first, taps.weights, taps.bits, *place)
            return
        band = np.zeros((_BAND_ROWS, *rows.shape[1:]), rows.dtype)
        band[: len(rows)] = rows
        narrow = np.empty((_BAND_ROWS, out.shape[1]), np.uint32)
        _sum_columns(band, narrow, taps.first, taps.weights, taps.bits, *place)
        out[:] = narrow[: len(out)]


def resize(picture: Words | Pixels, size: tuple[int, int], filter: Filter) -> Pixels:
    """uint8[height, width, 3] of a picture in memory."""
    resizing = Resizing((picture.shape[1], picture.shape[0]), size, filter)
    resizing.add(picture)
    made = np.empty((size[1], size[0], 3), np.uint8)
    resizing.finish(made)
    return made


def _words(width: int) -> int:
    """Words of 4 bytes that hold a row of this many pixels of 3 bytes: three for four pixels."""
    return -(-width // 4) * 3


@dataclass(frozen=True, slots=True)
class _Taps:
    """Output i is Σ over k of weights[i, k] · input[first[i] + k], divided by 2^bits.

    Weights of neighbours that do not exist are 0 and stand last; `first` leaves room for them. The
    number of weights is even, so that kernels take two at a time: the last may be 0 and fall
    outside.
    """

    first: NDArray[np.int32]
    weights: NDArray[np.int16]
    bits: int


@lru_cache(maxsize=16)  # the frames of a clip, the views of a picture
def _taps(before: int, after: int, filter: Filter) -> _Taps:
    """The neighbours of each output along one side of `before` pixels resized to `after`."""
    radius, curve = _CURVES[filter]
    scale = before / after
    stretch = max(scale, 1.0)
    reach = radius * stretch
    centre = scale * (np.arange(after) + 0.5)
    first = np.maximum(np.trunc(centre - reach + 0.5), 0).astype(np.int64)
    last = np.minimum(np.trunc(centre + reach + 0.5), before).astype(np.int64)
    count = np.minimum(last - first, 2 * math.ceil(reach) + 1)
    place = np.arange(int(count.max()))
    distance = (place + first[:, None] - centre[:, None] + 0.5) * (1.0 / stretch)
    weights = np.where(place < count[:, None], curve(np.abs(distance)), 0.0)
    total = np.cumsum(weights, axis=1)[:, -1:]  # in order, as C adds
    weights /= np.where(total == 0.0, 1.0, total)
    bits = _bits(float(weights.max()))
    scaled = weights * 2.0**bits
    whole = np.trunc(scaled + np.where(scaled < 0, -0.5, 0.5)).astype(np.int32)
    return _aligned(before, first.astype(np.int32), whole, bits)


def _aligned(before: int, first: NDArray[np.int32], weights: NDArray[np.int32], bits: int) -> _Taps:
    """Taps whose rows all have the same number of weights within the picture: rows at its end
    begin earlier, with weights of 0."""
    count = weights.shape[1]
    shift = np.maximum(first + count - before, 0)
    source = np.arange(count) - shift[:, None]
    moved = np.where(source >= 0, np.take_along_axis(weights, np.maximum(source, 0), axis=1), 0)
    even = np.pad(moved, ((0, 0), (0, count % 2)))
    return _Taps((first - shift).astype(np.int32), even.astype(np.int16), bits)


def _bits(largest: float) -> int:
    """The most bits by which weights up to `largest` may be scaled and still fit 16, their sign
    included; at most 22."""
    bits = 0
    while bits < _MOST_BITS and int(0.5 + largest * 2 ** (bits + 1)) < _WEIGHT_LIMIT:
        bits += 1
    return bits


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' cubic with a = −0.5, at x ≥ 0."""
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _triangle(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(1.0 - x, 0.0)


def _lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(x < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0)


_CURVES: dict[Filter, tuple[float, Callable[[NDArray[np.float64]], NDArray[np.float64]]]] = {
    "bicubic": (2.0, _cubic),
    "bilinear": (1.0, _triangle),
    "lanczos": (3.0, _lanczos),
}


_TAPS = array(np.int32), array(np.int16, 2), np.int64
_OF_ROWS = *_TAPS, np.int64, np.int64, np.uint32


@kernel(
    (read_only(np.uint32, 2), array(np.uint32, 2), *_OF_ROWS),
    (read_only(np.uint8, 3), array(np.uint32, 2), *_OF_ROWS),
)
def _sum_columns(
    picture: Words | Pixels,
    out: Words,
    first: NDArray[np.int32],
    weights: NDArray[np.int16],
    bits: int,
    whole: int,
    left: int,
    ground: int,
) -> None:
    """The first pass, of at least a band of rows that stand `left` pixels into rows of `whole`
    pixels of ground.

    Bands of rows are turned on their side, so that a weight meets a whole run of neighbouring
    bytes, which the compiler turns into vector instructions. All bands are equally high, for the
    compiler's sake: the last one begins earlier. Turned back, four pixels lose their fourth bytes
    and become three words.
    """
    rows, half = _BAND_ROWS, np.int32(1 << (bits - 1))
    band = np.full((whole + 1, rows), ground, np.uint32)
    done = np.zeros((-(-len(first) // 4) * 4, rows), np.uint32)
    band_bytes, done_bytes = band.view(np.uint8), done.view(np.uint8)
    total = np.empty(4 * rows, np.int32)
    for start in range(0, len(picture), rows):
        top = min(start, len(picture) - rows)
        for x in range(picture.shape[1]):
            for y in range(rows):
                if picture.ndim == 2:
                    band[left + x, y] = picture[top + y, x]
                else:
                    for colour in range(3):
                        band_bytes[left + x, 4 * y + colour] = picture[top + y, x, colour]
        for i in range(len(first)):
            total[:] = half
            for k in range(0, weights.shape[1], 2):
                one, two = np.int32(weights[i, k]), np.int32(weights[i, k + 1])
                line, next_line = band_bytes[first[i] + k], band_bytes[first[i] + k + 1]
                for y in range(4 * rows):
                    total[y] += one * np.int32(line[y]) + two * np.int32(next_line[y])
            line = done_bytes[i]
            for y in range(4 * rows):
                line[y] = min(max(total[y] >> bits, 0), 255)
        for y in range(rows):
            for x in range(0, len(done), 4):
                a, b, c, d = done[x, y], done[x + 1, y], done[x + 2, y], done[x + 3, y]
                words = out[top + y, x // 4 * 3 : x // 4 * 3 + 3]
                words[0] = a & np.uint32(0xFFFFFF) | b << np.uint32(24)
                words[1] = b >> np.uint32(8) & np.uint32(0xFFFF) | c << np.uint32(16)
                words[2] = c >> np.uint32(16) & np.uint32(0xFF) | d << np.uint32(8)


@kernel((array(np.uint8, 2, spaced=True), array(np.uint8, 2), *_TAPS))
def _sum_rows(
    lines: Pixels, out: Pixels, first: NDArray[np.int32], weights: NDArray[np.int16], bits: int
) -> None:
    """The second pass, in spans of bytes whose sums stay in a core's nearest cache."""
    half, last = np.int32(1 << (bits - 1)), len(lines) - 1
    total = np.empty(_SPAN, np.int32)
    for i in range(len(first)):
        for start in range(0, out.shape[1], _SPAN):
            end = min(start + _SPAN, out.shape[1])
            total[:] = half
            for k in range(0, weights.shape[1], 2):
                one, two = np.int32(weights[i, k]), np.int32(weights[i, k + 1])
                line = lines[first[i] + k, start:end]
                next_line = lines[min(first[i] + k + 1, last), start:end]
                for x in range(end - start):
                    total[x] += one * np.int32(line[x]) + two * np.int32(next_line[x])
            line = out[i, start:end]
            for x in range(end - start):
                line[x] = min(max(total[x] >> bits, 0), 255)
