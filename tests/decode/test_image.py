"""Still images: what is checked before they are decoded, and how their pixels are reached."""

import importlib.util
import io
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from dataservice.core.errors import SampleError
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.core.sample import MediaBlob
from dataservice.decode import image as image_module
from dataservice.decode.image import cut_views, decode_image, image_size
from dataservice.decode.processors.base import View, VisionPlan
from tests.decode.pictures import soft_picture

ONE_SCAN = DecodeLimits(max_image_scans=1)
PLAN = VisionPlan(encoder_tokens=1, llm_tokens=1, views=(View.whole(56, 28),))
SCAN = b"\xff\xda"


def jpeg(picture: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def single_component_scans(data: bytes) -> bytes:
    """A JPEG whose first scan says that it has one of the picture's three components."""
    start = data.rindex(SCAN)
    return data[:start] + SCAN + b"\x00\x08\x01\x01\x00\x00\x3f\x00" + data[start + 14 :]


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_of_one_scan_may_have_the_marker_of_scans_in_its_comments(files, mode):
    """Only the scans that libjpeg would decode count."""
    data = jpeg(soft_picture(64, 48).convert(mode), comment=SCAN * 50)
    blob = files.blob("image", data)
    assert image_size(blob, ONE_SCAN) == (64, 48)
    assert decode_image(blob, PLAN, ONE_SCAN).shape == (1, 28, 56, 3)


@pytest.mark.parametrize(
    "data",
    [
        jpeg(soft_picture(64, 48), progressive=True),
        jpeg(soft_picture(64, 48).convert("L"), progressive=True),
        single_component_scans(jpeg(soft_picture(64, 48), comment=SCAN + b"\x00\x0c\x03")),
        jpeg(soft_picture(64, 48).convert("CMYK"), comment=SCAN),
    ],
    ids=["progressive", "progressive grey", "one component a scan", "four components"],
)
def test_every_scan_of_another_jpeg_is_counted_before_it_is_decoded(files, data):
    with pytest.raises(SampleError, match=r"scans is .*max_image_scans"):
        image_size(files.blob("image", data), ONE_SCAN)


def test_a_second_scan_of_a_jpeg_that_can_have_one_is_refused_by_the_decoder(files):
    data = jpeg(soft_picture(64, 48))
    scan = data[data.rindex(SCAN) : -2]
    twice = files.blob("image", data[:-2] + scan * 3 + data[-2:])
    try:
        made = decode_image(twice, PLAN, ONE_SCAN)
    except SampleError:
        return
    assert (made == decode_image(files.blob("image", data), PLAN, DEFAULT_LIMITS)).all()


def test_a_picture_in_several_blocks_of_pillows_memory_is_resized_alike(monkeypatch):
    """A picture above 16 MiB lies in several; it is copied a band at a time."""
    picture = soft_picture(300, 700)
    views = [View.whole(212, 140), View(width=196, height=196, tile_width=196, tile_height=196,
                                        square=True, fill=(9, 200, 77))]  # fmt: skip
    wanted = [cut_views(picture, [view]) for view in views]
    monkeypatch.setattr(image_module, "BLOCK_BYTES", 1000)
    for view, pixels in zip(views, wanted, strict=True):
        assert (cut_views(picture, [view]) == pixels).all()
        assert (cut_views(np.asarray(picture), [view]) == pixels).all()


def test_a_picture_larger_than_a_block_is_read():
    picture = Image.new("RGB", (2200, 2000), (7, 80, 200))
    made = cut_views(picture, [View.whole(28, 28)])
    assert (made == (7, 80, 200)).all()


def test_a_picture_of_few_wide_rows_is_read():
    """128 of these rows take more than a block."""
    picture = Image.new("RGB", (DEFAULT_LIMITS.max_image_side, 130), (7, 80, 200))
    made = cut_views(picture, [View.whole(28, 28)])
    assert (made == (7, 80, 200)).all()


def test_a_picture_is_resized_in_pillows_own_memory(monkeypatch):
    """Neither copied nor packed beforehand: that took as long as the second pass."""

    def copied(*_: object, **__: object) -> None:
        raise AssertionError("the picture was copied")

    picture = soft_picture(640, 480)
    monkeypatch.setattr(Image.Image, "tobytes", copied)
    monkeypatch.setattr(Image.Image, "crop", copied)
    assert cut_views(picture, [View.whole(308, 224)]).shape == (1, 224, 308, 3)


def test_decoding_a_picture_does_not_load_what_pyarrow_would_load_for_tables():
    """Pandas took each new decoder a sixth of a second at its first picture."""
    if importlib.util.find_spec("pandas") is None:
        pytest.skip("pandas is not installed")
    script = """
import io, sys
from PIL import Image
from dataservice.core.limits import DEFAULT_LIMITS
from dataservice.core.sample import MediaBlob
from dataservice.decode.image import decode_image
from dataservice.decode.processors.base import View, VisionPlan
file = io.BytesIO()
Image.new("RGB", (64, 48), "red").save(file, "PNG")
plan = VisionPlan(encoder_tokens=1, llm_tokens=1, views=(View.whole(32, 24),))
blob = MediaBlob(kind="image", name="a.png", data=file.getvalue())
made = decode_image(blob, plan, DEFAULT_LIMITS)
print((made == (255, 0, 0)).all(), "pandas" in sys.modules)
"""
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "False"]


def test_the_tiles_of_all_views_are_made_in_the_place_given_for_them(files):
    """No copy of the pixels is made to hand them to another process."""
    blob = files.blob("image", jpeg(soft_picture(300, 200)))
    whole = View.whole(64, 48)
    cut = View(width=128, height=96, tile_width=64, tile_height=48, origins=((0, 0), (64, 48)))
    plan = VisionPlan(encoder_tokens=1, llm_tokens=1, views=(whole, cut, whole))
    place = np.full((4, 48, 64, 3), 77, np.uint8)
    made = decode_image(blob, plan, DEFAULT_LIMITS, place)
    assert made is place
    alone = [
        decode_image(
            blob, VisionPlan(encoder_tokens=1, llm_tokens=1, views=(view,)), DEFAULT_LIMITS
        )
        for view in plan.views
    ]
    assert (place == np.concatenate(alone)).all()


@pytest.mark.parametrize("pixels", [np.full((8, 8), 0.5, np.float32), np.full((8, 8), 70_000)])
def test_numbers_that_do_not_say_what_white_is_are_refused_and_not_shown_black(pixels):
    stored = io.BytesIO()
    Image.fromarray(pixels.astype(pixels.dtype.str.replace("8", "4"))).save(stored, "TIFF")
    blob = MediaBlob(kind="image", name="depth.tif", data=stored.getvalue())
    with pytest.raises(SampleError, match=r"'depth.tif' has pixels of 32 bits"):
        image_size(blob, DEFAULT_LIMITS)
