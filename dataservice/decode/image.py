"""Still images: size from the header, pixels through a processor's views."""

import io
import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    JpegImagePlugin,
    PngImagePlugin,
    TiffImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from dataservice.core.errors import SampleError
from dataservice.core.limits import DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode.processors.base import View, VisionPlan

# A hostile header may earn one warning a tag; what is wrong with a picture is said by its error.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Formats that decode in process: no PostScript, no plugin that starts a program. Naming the
# plugins registers them; Pillow does so for a few only, until it has failed to open a file.
FORMATS = tuple(
    plugin.format
    for plugin in (
        JpegImagePlugin.JpegImageFile,
        PngImagePlugin.PngImageFile,
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
        BmpImagePlugin.BmpImageFile,
        TiffImagePlugin.TiffImageFile,
    )
)
_ORIENTATION_TAG = 0x0112
_TIFF_TILE = (322, 323)  # width and height; a tile is decoded whole
_START_OF_SCAN = b"\xff\xda"
_SWAPS_SIDES = frozenset({5, 6, 7, 8})


def image_size(blob: MediaBlob, limits: DecodeLimits) -> tuple[int, int]:
    """(width, height) in pixels as shown, EXIF orientation applied; from the header alone.

    Raises:
        SampleError: not an image of a known format, or more pixels than the limit.
    """
    with _opened(blob, limits) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _SWAPS_SIDES else (width, height)


def decode_image(blob: MediaBlob, plan: VisionPlan, limits: DecodeLimits) -> NDArray[np.uint8]:
    """The tiles of all the plan's views: uint8[frames, height, width, 3].

    A JPEG is decoded at the smallest of 1/2, 1/4, 1/8 of its size that no view enlarges. Of
    an animation, the first frame is shown; transparent parts are shown on white.

    Raises:
        SampleError: the image is damaged, truncated or too large.
    """
    with _opened(blob, limits) as image:
        orientation = _orientation(image)
        largest = (max(v.width for v in plan.views), max(v.height for v in plan.views))
        image.draft(None, largest[::-1] if orientation in _SWAPS_SIDES else largest)
        upright = _upright(_as_rgb(image), orientation)
        tiles = [
            cut_tiles(
                np.asarray(upright.resize((view.width, view.height), Image.Resampling.BICUBIC)),
                view,
            )
            for view in plan.views
        ]
    return tiles[0] if len(tiles) == 1 else np.concatenate(tiles)


def cut_tiles(pixels: NDArray[np.uint8], view: View) -> NDArray[np.uint8]:
    """Tiles uint8[tiles, tile_height, tile_width, 3] of a resized picture uint8[h, w, 3]."""
    tiles = np.empty((len(view.origins), view.tile_height, view.tile_width, 3), dtype=np.uint8)
    height, width = pixels.shape[:2]
    for tile, (left, top) in zip(tiles, view.origins, strict=True):
        x0, x1 = max(left, 0), min(left + view.tile_width, width)
        y0, y1 = max(top, 0), min(top + view.tile_height, height)
        if (x1 - x0, y1 - y0) != (view.tile_width, view.tile_height):
            tile[:] = view.fill
        tile[y0 - top : y1 - top, x0 - left : x1 - left] = pixels[y0:y1, x0:x1]
    return tiles


@contextmanager
def _opened(blob: MediaBlob, limits: DecodeLimits) -> Iterator[Image.Image]:
    """The image with only its header read. The border at which Pillow's errors become ours."""
    # Opening a GIF makes room for its first frame, whose size only Pillow has seen by then: it
    # refuses what is above twice this, and warns of the rest. A process has one set of limits.
    Image.MAX_IMAGE_PIXELS = limits.max_image_pixels
    try:
        with Image.open(io.BytesIO(blob.data), formats=FORMATS) as image:
            _check_header(image, blob, limits)
            yield image
    except SampleError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        stated = re.search(r"\d+", str(error))
        pixels = int(stated[0]) if stated else math.inf
        limits.check("max_image_pixels", pixels, f"image {blob.name!r}: pixels")
    except UnidentifiedImageError as error:  # its own text names an object in memory
        raise SampleError(
            f"image {blob.name!r} ({len(blob.data):,} bytes) cannot be decoded: it has no header "
            f"of a known format. Replace the file or leave the sample out; readable are "
            f"{', '.join(FORMATS)}."
        ) from error
    # Damaged bytes make Pillow's readers raise nearly anything (OSError, SyntaxError,
    # struct.error, ValueError, EOFError, zlib.error …), so all of it is this sample's fault.
    except Exception as error:
        text = str(error) or type(error).__name__
        raise SampleError(
            f"image {blob.name!r} ({len(blob.data):,} bytes) cannot be decoded: {text}. "
            f"Replace the file or leave the sample out; readable are {', '.join(FORMATS)}."
        ) from error


def _check_header(image: Image.Image, blob: MediaBlob, limits: DecodeLimits) -> None:
    what = f"image {blob.name!r}"
    limits.check("max_image_pixels", image.width * image.height, f"{what}: pixels")
    limits.check("max_image_side", max(image.size), f"{what}: the longer side")
    if isinstance(image, JpegImagePlugin.JpegImageFile):
        # Each scan of a progressive JPEG goes over the whole picture, and needs a few bytes.
        limits.check("max_image_scans", blob.data.count(_START_OF_SCAN), f"{what}: scans")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        sides = [image.tag_v2.get(tag, 1) for tag in _TIFF_TILE]
        tile = math.prod(side if isinstance(side, int) else 0 for side in sides)
        limits.check("max_image_pixels", tile, f"{what}: pixels of one tile")


def _orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8, from what the header alone holds.

    `image.getexif()` would decode a whole PNG to look for EXIF behind its pixels; measuring
    and decoding must agree, so neither looks there.
    """
    data = image.info.get("exif")
    if not isinstance(data, bytes):
        return 1
    exif = Image.Exif()
    try:
        exif.load(data)
        return int(exif.get(_ORIENTATION_TAG, 1))
    except Exception:
        # A damaged EXIF block leaves the picture itself readable: show it as stored.
        return 1


def _as_rgb(image: Image.Image) -> Image.Image:
    """The whole picture as RGB, in at most 10 bytes a pixel besides the file."""
    if image.mode.startswith("I;16"):
        # Pillow clips 16-bit greys to 255 instead of scaling them.
        deep = np.asarray(image)
        high = np.right_shift(deep, 8, out=np.empty(deep.shape, np.uint8), casting="unsafe")
        return Image.fromarray(high).convert("RGB")
    if image.has_transparency_data:
        shown = image if image.mode == "RGBA" else image.convert("RGBA")
        shown.load()
        ground = Image.new("RGB", shown.size, (255, 255, 255))
        ground.paste(shown, mask=shown.getchannel("A"))
        return ground
    if image.mode == "RGB":
        image.load()
        return image
    return image.convert("RGB")


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    steps = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_270,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_90,
    }
    return image.transpose(steps[orientation]) if orientation in steps else image
