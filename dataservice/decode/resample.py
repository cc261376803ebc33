"""Resizes pictures as torch does: the same integers, bit by bit, on every machine.

Hugging Face's default image processors resize uint8 tensors with torch's antialiased `interpolate`.
That is a pass along rows and then one along columns, each a weighted sum of neighbours in whole
numbers, rounded to 8 bits. Weights are scaled by the largest power of two for which they fit 16
bits; sums fit 32. Pillow scales by 2²², and begins with columns where that is less work: its pixels
are up to four levels from torch's.

Source: the kernels of torch's `_upsample_bicubic2d_aa` for uint8 (ATen, UpSampleKernel), whose
arithmetic this file states anew; tests compare the two on thousands of sizes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit, types
from numpy.typing import NDArray

from dataservice.decode.processors.base import Filter

_MOST_BITS = 22
_WEIGHT_LIMIT = 2**15
BAND_ROWS = 64  # of the first pass: so many rows are computed at once
Pixels = NDArray[np.uint8]
Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def resize_columns(pixels: Pixels, width: int, filter: Filter) -> Pixels:
    """The first pass: uint8[h, w, 3] to uint8[h, width, 3]; `pixels` itself when w is the width.
    Every row is resized by itself."""
    if pixels.shape[1] == width:
        return pixels
    resized = np.empty((pixels.shape[0], width, 3), dtype=np.uint8)
    taps = _taps(pixels.shape[1], width, filter)
    _sum_columns(_joined(pixels), _joined(resized), taps.first, taps.weights, taps.bits)
    return resized


def resize_rows(pixels: Pixels, height: int, filter: Filter) -> Pixels:
    """The second pass: uint8[h, w, 3] to uint8[height, w, 3]; `pixels` itself when h is the height.
    After the first, the picture equals torch's `interpolate` with `antialias=True`."""
    if pixels.shape[0] == height:
        return pixels
    resized = np.empty((height, pixels.shape[1], 3), dtype=np.uint8)
    taps = _taps(pixels.shape[0], height, filter)
    _sum_rows(_joined(pixels), _joined(resized), taps.first, taps.weights, taps.bits)
    return resized


def _joined(pixels: Pixels) -> Pixels:
    """uint8[h, w · 3]: colours side by side."""
    return np.ascontiguousarray(pixels).reshape(len(pixels), -1)


@dataclass(frozen=True, slots=True)
class _Taps:
    """Output i is Σ over k of weights[i, k] · input[first[i] + k], divided by 2^bits.

    Weights of neighbours that do not exist are 0 and stand last; `first` leaves room for them.
    """

    first: NDArray[np.int32]
    weights: NDArray[np.int32]
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
    return _Taps((first - shift).astype(np.int32), moved.astype(np.int32), bits)


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


def _kernel(function: Kernel) -> Kernel:
    """Compiled when this module is loaded, or read from numba's cache on disk: decoders are forked
    from a process that has loaded it, and never compile. Runs without the GIL."""
    given = types.Array(types.uint8, 2, "C", readonly=True)  # as Pillow's pixels are
    taps = types.int32[::1], types.int32[:, ::1], types.int64
    signature = types.void(given, types.uint8[:, ::1], *taps)
    return cast(Kernel, njit(signature, cache=True, nogil=True)(function))


@_kernel
def _sum_columns(
    pixels: Pixels, out: Pixels, first: NDArray[np.int32], weights: NDArray[np.int32], bits: int
) -> None:
    """Bands of rows are turned on their side, so that a weight meets a whole run of neighbouring
    bytes, which the compiler turns into vector instructions."""
    rows, half = BAND_ROWS, np.int32(1 << (bits - 1))
    band = np.zeros((pixels.shape[1], rows), np.uint8)
    done = np.empty((out.shape[1], rows), np.uint8)
    total = np.empty(rows, np.int32)
    for top in range(0, len(pixels), rows):
        height = min(rows, len(pixels) - top)
        for x in range(pixels.shape[1]):
            for y in range(height):
                band[x, y] = pixels[top + y, x]
        for i in range(len(first)):
            for colour in range(3):
                total[:] = half
                for k in range(weights.shape[1]):
                    weight, line = weights[i, k], band[(first[i] + k) * 3 + colour]
                    for y in range(rows):
                        total[y] += weight * np.int32(line[y])
                line = done[i * 3 + colour]
                for y in range(rows):
                    line[y] = min(max(total[y] >> bits, 0), 255)
        for y in range(height):
            for x in range(out.shape[1]):
                out[top + y, x] = done[x, y]


@_kernel
def _sum_rows(
    pixels: Pixels, out: Pixels, first: NDArray[np.int32], weights: NDArray[np.int32], bits: int
) -> None:
    half, length = np.int32(1 << (bits - 1)), pixels.shape[1]
    total = np.empty(length, np.int32)
    for i in range(len(first)):
        total[:] = half
        for k in range(weights.shape[1]):
            weight, line = weights[i, k], pixels[first[i] + k]
            for x in range(length):
                total[x] += weight * np.int32(line[x])
        for x in range(length):
            out[i, x] = min(max(total[x] >> bits, 0), 255)
