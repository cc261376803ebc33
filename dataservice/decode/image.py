"""Still images: their size from the header, and their pixels through a processor's views."""

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import (
    AvifImagePlugin,
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
from dataservice.decode.resample import Pixels, Resizing, Words

# A hostile header can cause one warning per tag; the error already says what is wrong with a
# picture.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Formats that Pillow decodes in this process: no PostScript, no plugin that starts a program.
# Importing the plugins registers them; Pillow itself registers only a few, until it has failed to
# open a file.
FORMATS = tuple(
    plugin.format
    for plugin in (
        JpegImagePlugin.JpegImageFile,
        PngImagePlugin.PngImageFile,
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
        BmpImagePlugin.BmpImageFile,
        TiffImagePlugin.TiffImageFile,
        AvifImagePlugin.AvifImageFile,
    )
)
# Workers decode many samples at once; a decoder's own threads would only slow them down.
AvifImagePlugin.DEFAULT_MAX_THREADS = 1
_ORIENTATION_TAG = 0x0112
_TIFF_TILE = (322, 323)  # width and height; a tile is decoded whole
_START_OF_SCAN = b"\xff\xda"
_PIXEL_BYTES = 4  # in Pillow's memory
BLOCK_BYTES = 16 * 2**20  # Pillow gives a larger picture several blocks of memory
_COPIED_ROWS = 128
_SWAPS_SIDES = frozenset({5, 6, 7, 8})
_WITHOUT_WHITE = frozenset({"F", "I"})  # numbers of 32 bits, which Pillow clips to 0..255


def image_size(blob: MediaBlob, limits: DecodeLimits) -> tuple[int, int]:
    """(width, height) in pixels as shown, orientation applied; from the header alone.

    Raises:
        SampleError: it is not an image of a known format, or has more pixels than the limit.
    """
    with _opened(blob, limits) as image:
        width, height = image.size
        return (height, width) if _orientation(image) in _SWAPS_SIDES else (width, height)


def decode_image(
    blob: MediaBlob, plan: VisionPlan, limits: DecodeLimits, place: Pixels | None = None
) -> Pixels:
    """The tiles of all views of the plan: uint8[frames, height, width, 3], in `place` where one is
    given.

    Pixels equal those of Hugging Face's default (torchvision) processors, bit for bit: the filter
    is applied to the full-size picture. Of an animation, the first frame is used; transparent
    parts are shown on white.

    Raises:
        SampleError: the image is damaged, truncated or too large.
    """
    return cut_views(read_image(blob, limits), plan.views, place)


def read_image(blob: MediaBlob, limits: DecodeLimits) -> Image.Image:
    """The whole picture, upright and RGB. What it was read from is freed before it is resized.
    Raises SampleError."""
    with _opened(blob, limits) as image:
        orientation = _orientation(image)  # before the pixels are read: see there
        return _upright(_as_rgb(image), orientation)


def cut_views(
    picture: Image.Image | Pixels, views: Sequence[View], place: Pixels | None = None
) -> Pixels:
    """The tiles uint8[tiles, tile_height, tile_width, 3] of all views of a picture, which is RGB or
    uint8[h, w, 3]; in `place` where one is given. What views have in common is computed once, and
    what is a tile as a whole is resized where the tile lies."""
    if place is None:
        tiles, first = sum(len(view.origins) for view in views), views[0]
        place = np.empty((tiles, first.tile_height, first.tile_width, 3), np.uint8)
    made: dict[tuple[object, ...], Pixels] = {}
    at = 0
    for view in views:
        own = place[at : at + len(view.origins)]
        at += len(own)
        tile, is_whole = own[0], _is_one_tile(view)
        shown = picture
        for steps, size in enumerate(view.sizes, start=1):
            key = view.filter, view.square, view.fill, view.sizes[:steps]
            if key not in made:
                in_place = is_whole and steps == len(view.sizes)
                made[key] = tile if in_place else np.empty((size[1], size[0], 3), np.uint8)
                _resize(shown, made[key], view, square=view.square and steps == 1)
            shown = made[key]
        if shown is not tile:
            cut_tiles(np.asarray(shown), view, own)
    return place


def _is_one_tile(view: View) -> bool:
    whole = (view.width, view.height) == (view.tile_width, view.tile_height)
    return whole and view.origins == ((0, 0),)


def cut_tiles(pixels: Pixels, view: View, tiles: Pixels) -> None:
    """Cut the tiles uint8[tiles, tile_height, tile_width, 3] out of a resized picture
    uint8[h, w, 3]."""
    height, width = pixels.shape[:2]
    for tile, (left, top) in zip(tiles, view.origins, strict=True):
        x0, x1 = max(left, 0), min(left + view.tile_width, width)
        y0, y1 = max(top, 0), min(top + view.tile_height, height)
        if (x1 - x0, y1 - y0) != (view.tile_width, view.tile_height):
            tile[:] = view.fill
        tile[y0 - top : y1 - top, x0 - left : x1 - left] = pixels[y0:y1, x0:x1]


def _resize(picture: Image.Image | Pixels, out: Pixels, view: View, *, square: bool) -> None:
    """Resize the picture, or the square around it, to one size of the view, that of `out`
    uint8[height, width, 3]. Neither the square nor a copy of the picture's bytes is ever in memory
    as a whole."""
    before = picture.size if isinstance(picture, Image.Image) else picture.shape[1::-1]
    height, width = out.shape[:2]
    if before == (width, height) and not (square and width != height):
        out[:] = np.asarray(picture)
        return
    filling = view.fill if square else None
    resizing = Resizing(before, (width, height), view.filter, square=filling)
    for rows in _rows(picture):
        resizing.add(rows)
    resizing.finish(out)


def _rows(picture: Image.Image | Pixels) -> Iterator[Words | Pixels]:
    """The picture's rows from the top, in its own memory or copied a band at a time."""
    if not isinstance(picture, Image.Image):
        yield picture
    elif picture.width * picture.height * _PIXEL_BYTES <= BLOCK_BYTES:
        yield _words(picture)
    else:
        fitting = BLOCK_BYTES // (picture.width * _PIXEL_BYTES)
        rows = max(1, min(_COPIED_ROWS, fitting))  # a row by itself is always one block
        for top in range(0, picture.height, rows):
            end = min(top + rows, picture.height)
            yield _words(picture.crop((0, top, picture.width, end)))


def _words(picture: Image.Image) -> Words:
    """An RGB picture's pixels where Pillow has them, uint32[h, w]: four bytes each, the last of
    which means nothing. The array keeps the picture."""
    given: Any = picture  # pyarrow's stubs do not know that it is one of Arrow's arrays
    # Arrow's own way to numpy loads pandas, where that is installed, in every decoder.
    (_, pixels) = pa.array(given).values.buffers()
    return np.frombuffer(pixels, np.uint32).reshape(picture.height, picture.width)


@contextmanager
def _opened(blob: MediaBlob, limits: DecodeLimits) -> Iterator[Image.Image]:
    """The image with only its header read. Turns Pillow's errors into ours."""
    # Opening a GIF allocates its first frame, whose size only Pillow knows at that point: above
    # twice this value it refuses, above once it warns. The value is global, but a process has one
    # set of limits.
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
    except UnidentifiedImageError as error:  # Pillow's message names an object in memory
        raise SampleError(
            f"image {blob.name!r} ({len(blob.data):,} bytes) cannot be decoded: it has no header "
            f"of a known format. Replace the file or leave the sample out; readable are "
            f"{', '.join(FORMATS)}."
        ) from error
    # Damaged bytes make Pillow's readers raise nearly any exception (OSError, SyntaxError,
    # struct.error, ValueError, EOFError, zlib.error …), so each counts as this sample's error.
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
    if image.mode in _WITHOUT_WHITE:
        raise SampleError(
            f"{what} has pixels of 32 bits, and does not say which of them is white: all may come "
            "out black. Write it with 8 or 16 bits a channel, or leave the sample out."
        )
    if isinstance(image, JpegImagePlugin.JpegImageFile) and not _has_one_scan(image, blob.data):
        # Each scan of a progressive JPEG decodes the whole picture again, and takes only a few
        # bytes of file.
        limits.check("max_image_scans", blob.data.count(_START_OF_SCAN), f"{what}: scans")
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        sides = [image.tag_v2.get(tag, 1) for tag in _TIFF_TILE]
        tile = math.prod(side if isinstance(side, int) else 0 for side in sides)
        limits.check("max_image_pixels", tile, f"{what}: pixels of one tile")


def _has_one_scan(image: JpegImagePlugin.JpegImageFile, data: bytes) -> bool:
    """Whether libjpeg decodes one scan at most: the picture is not progressive and its first scan
    has all components. libjpeg refuses such a picture when it finds a second scan.

    Pillow has read the file up to the end of the first scan's header: its marker, its length, the
    number of components, two bytes for each, and three more.
    """
    count = image.layers
    if count not in (1, 3) or "progressive" in image.info or image.fp is None:
        return False
    length = 6 + 2 * count
    begun = _START_OF_SCAN + length.to_bytes(2, "big") + bytes([count])
    start = image.fp.tell() - len(_START_OF_SCAN) - length
    return start >= 0 and data[start : start + len(begun)] == begun


def _orientation(image: Image.Image) -> int:
    """Orientation 1..8 by EXIF or, without it, by XMP, from the header alone.

    The method is that of all images: a PNG's own would decode it to look for EXIF behind its
    pixels; measuring and decoding must agree, so neither looks there. Pillow turns a TIFF itself.
    """
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return 1
    try:
        return int(Image.Image.getexif(image).get(_ORIENTATION_TAG, 1))
    except Exception:
        # A damaged EXIF block leaves the picture itself readable: show it as stored.
        return 1


def _as_rgb(image: Image.Image) -> Image.Image:
    """The whole picture as RGB; uses at most 10 bytes per pixel besides the file."""
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
