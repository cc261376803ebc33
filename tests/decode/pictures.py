"""Pictures of every mode, size and format, as files."""

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

from tests.decode.files import Files

ORIENTATION = 0x0112
# What each mode is written as.
WRITTEN = {
    "L": "PNG", "LA": "PNG", "P": "PNG", "P, one colour clear": "PNG", "RGB": "JPEG",
    "RGB, one colour clear": "PNG", "RGBA": "PNG", "RGBA, lossy": "WEBP", "CMYK": "JPEG",
    "1": "PNG", "L, JPEG": "JPEG", "CMYK, TIFF": "TIFF", "RGB, BMP": "BMP", "P, GIF": "GIF",
}  # fmt: skip


def soft_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """RGB: soft shapes under noise, which filters and reduced decoding change."""
    rng = np.random.default_rng([seed, width, height])
    soft = Image.fromarray(rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), np.uint8))
    noise = rng.integers(-25, 26, (height, width, 3))
    pixels = np.asarray(soft.resize((width, height), Image.Resampling.BICUBIC)) + noise
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def written(picture: Image.Image, kind: str, orientation: int = 1, **options: object) -> bytes:
    """The file of an RGB picture turned into one of the kinds in `WRITTEN`."""
    mode, format = kind.split(",")[0], WRITTEN[kind]
    shown = picture.convert(mode)
    if mode in ("LA", "RGBA"):
        shown.putalpha(Image.linear_gradient("L").resize(picture.size))
    if kind.endswith("one colour clear"):
        options["transparency"] = 3 if mode == "P" else shown.getpixel((0, 0))
    if orientation != 1:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif
    return Files.saved(shown, format, **options)


def assorted(count: int, seed: int) -> Iterator[bytes]:
    """Pictures of a few to some hundred pixels a side, of every kind, some turned."""
    rng = np.random.default_rng(seed)
    kinds = sorted(WRITTEN)
    for number in range(count):
        width, height = np.exp(rng.uniform(np.log(16), np.log(900), 2)).astype(int)
        kind = kinds[number % len(kinds)]
        turned = int(rng.integers(1, 9)) if WRITTEN[kind] == "JPEG" else 1
        picture = soft_picture(int(width), int(height), seed=number)
        yield written(picture, kind, orientation=turned)


def size_of(data: bytes) -> tuple[int, int]:
    """(width, height) as stored."""
    return Image.open(io.BytesIO(data)).size
