"""Pixels, once normalised on the rank, are those of transformers' own default processors.

The judge is transformers' own code (`transformers_judge.py`); what differs on purpose stands at the
end, one test each.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import av
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, PngImagePlugin

from dataservice.core.errors import SampleError
from dataservice.core.limits import DEFAULT_LIMITS, DecodeLimits
from dataservice.decode.image import cut_views, decode_image, image_size
from dataservice.decode.media import MediaPipeline
from dataservice.decode.processors.base import VideoHeader, VisionProcessor
from dataservice.decode.processors.gemma3 import Gemma3Processor
from dataservice.decode.processors.idefics3 import Idefics3Processor
from dataservice.decode.processors.internvl import InternVLProcessor
from dataservice.decode.processors.llava import LlavaProcessor
from dataservice.decode.processors.llava_next import LlavaNextProcessor
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.qwen3_vl import Qwen3VLProcessor
from dataservice.decode.processors.siglip import SiglipProcessor
from dataservice.decode.resample import resize
from dataservice.decode.video import decode_video, read_clip
from tests.decode.clips import MAKES, encoded
from tests.decode.parity import FACTOR
from tests.decode.pictures import WRITTEN, assorted, soft_picture, written
from tests.decode.transformers_judge import TransformersJudge
from trainer_client.encoder_inputs import patch_rows, square_pixels

TOLERANCE = 1e-6
# Of the long test, over all families.
PICTURES = 425 * FACTOR
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
AREA = {"shortest_edge": 56 * 56, "longest_edge": 256 * 28 * 28}
SQUARE = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}, **CLIP}
TILES = {"size": {"height": 448, "width": 448}, "min_patches": 1, **IMAGENET}
SIDE = {"size": {"height": 384, "width": 384}}
Inputs = Callable[..., torch.Tensor]


def tiles_of(side: int) -> dict[str, Any]:
    """Options of Idefics 3's processors: tiles of this side, four along the longer side."""
    return {"size": {"longest_edge": 4 * side}, "max_image_size": {"longest_edge": side}}


@dataclass(frozen=True)
class Family:
    """Our processor, theirs, and what the rank makes of the pixels."""

    ours: VisionProcessor
    theirs: str
    options: dict[str, Any]
    inputs: Inputs


FAMILIES = {
    "qwen2_vl": Family(
        Qwen2VLProcessor(max_pixels=AREA["longest_edge"]),
        "Qwen2VLImageProcessor",
        {"size": AREA, **CLIP},
        lambda *given: patch_rows(*given).pixel_values,
    ),
    "internvl": Family(
        InternVLProcessor(max_tiles=6),
        "GotOcr2ImageProcessor",
        {"crop_to_patches": True, "max_patches": 6, **TILES},
        square_pixels,
    ),
    "llava, cropped": Family(LlavaProcessor(), "CLIPImageProcessor", SQUARE, square_pixels),
    "llava, padded": Family(
        LlavaProcessor(aspect="pad"),
        "LlavaImageProcessor",
        {"do_pad": True, **SQUARE},
        square_pixels,
    ),
    "llava_next": Family(LlavaNextProcessor(), "LlavaNextImageProcessor", SQUARE, square_pixels),
    "qwen3_vl": Family(
        Qwen3VLProcessor(max_pixels=256 * 32 * 32),
        "Qwen2VLImageProcessor",
        {
            "patch_size": 16,
            "size": {"shortest_edge": 64 * 1024, "longest_edge": 256 * 1024},
            **HALF,
        },
        lambda *given: patch_rows(*given, patch=16).pixel_values,
    ),
    "siglip": Family(SiglipProcessor(), "SiglipImageProcessor", {**SIDE, **HALF}, square_pixels),
    "siglip2": Family(
        SiglipProcessor(kind="siglip2"),
        "SiglipImageProcessor",
        {"resample": Image.Resampling.BILINEAR, **SIDE, **HALF},
        square_pixels,
    ),
    "gemma3": Family(
        Gemma3Processor(),
        "Gemma3ImageProcessor",
        {"size": {"height": 896, "width": 896}, **HALF},
        square_pixels,
    ),
    "idefics3": Family(
        Idefics3Processor(), "Idefics3ImageProcessor", {**tiles_of(364), **HALF}, square_pixels
    ),
    "smolvlm": Family(
        Idefics3Processor(kind="smolvlm", tile=128, patch=16, shuffle=4),
        "SmolVLMImageProcessor",
        {**tiles_of(128), **HALF},
        square_pixels,
    ),
    "idefics3, not split": Family(
        Idefics3Processor(splitting=False),
        "Idefics3ImageProcessor",
        {"do_image_splitting": False, **tiles_of(364), **HALF},
        square_pixels,
    ),
}
SIZES = [(640, 480), (61, 900), (29, 28)]


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    judge = TransformersJudge(tmp_path_factory.mktemp("judge"))
    yield judge
    judge.close()


def normalised(family: Family, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What a rank makes of an item."""
    item = torch.from_numpy(pixels)
    made = family.inputs([item], family.options["image_mean"], family.options["image_std"])
    return made.numpy()


def ours(files, family: Family, data: bytes) -> NDArray[np.float32]:
    blob = files.blob("image", data)
    width, height = image_size(blob, DEFAULT_LIMITS)
    plan = family.ours.plan_image(width=width, height=height)
    return normalised(family, decode_image(blob, plan, DEFAULT_LIMITS))


def check(files, judge: TransformersJudge, family: Family, data: bytes) -> float:
    """The same inputs; some processors put those of a picture behind another axis. Gives the
    largest difference."""
    wanted = judge.pixels(family.theirs, family.options, data)
    made = ours(files, family, data)
    assert made.shape == wanted.shape[-made.ndim :]
    assert made.size == wanted.size
    difference = float(np.abs(made - wanted).max())
    assert difference <= TOLERANCE
    return difference


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", SIZES)
def test_a_picture_of_any_size_has_transformers_pixels(files, judge, size, name):
    check(files, judge, FAMILIES[name], written(soft_picture(*size), "RGB"))


@pytest.mark.parametrize("kind", WRITTEN)
def test_a_picture_of_any_mode_has_transformers_pixels(files, judge, kind):
    for name in ("qwen2_vl", "llava, padded"):
        check(files, judge, FAMILIES[name], written(soft_picture(210, 150), kind))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_turned_photograph_is_that_of_transformers_load_image(files, judge, orientation):
    data = written(soft_picture(200, 90), "RGB", orientation)
    for name in ("qwen2_vl", "llava, padded"):
        check(files, judge, FAMILIES[name], data)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "PNG, ImageMagick's"])
def test_a_photograph_that_another_block_than_exif_turns_is_turned(files, judge, format):
    exif, texts = Image.Exif(), PngImagePlugin.PngInfo()
    exif[0x0112] = 6
    xmp = '<rdf:Description tiff:Orientation="6"/>'
    options = {"xmp": xmp.encode()}
    if format == "PNG":
        texts.add_itxt("XML:com.adobe.xmp", xmp)
    elif format not in ("JPEG", "WEBP"):
        profile = exif.tobytes()
        texts.add_text("Raw profile type exif", f"\nexif\n{len(profile):8}\n{profile.hex()}\n")
    options = {"pnginfo": texts} if "PNG" in format else options
    data = files.saved(soft_picture(200, 90), format.split(",")[0], **options)
    assert image_size(files.blob("image", data), DEFAULT_LIMITS) == (90, 200)
    check(files, judge, FAMILIES["qwen2_vl"], data)


def test_large_jpegs_are_reduced_by_the_filter_and_not_while_they_are_decoded(files, judge):
    """JPEG can be decoded at half its size for half the cost, to other pixels (0.3 and more)."""
    check(files, judge, FAMILIES["qwen2_vl"], written(soft_picture(2400, 1600), "RGB", quality=90))


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_assorted_pictures_have_transformers_pixels(files, judge, name):
    count = math.ceil(PICTURES / len(FAMILIES))
    family, seed = FAMILIES[name], sorted(FAMILIES).index(name)
    largest = max(check(files, judge, family, data) for data in assorted(count, seed=seed))
    print(f"{name}: {count} pictures, the largest difference is {largest:.1e}")


# ---- resizing, against torch itself -------------------------------------------------------


def by_torch(pixels: NDArray[np.uint8], width: int, height: int, filter: str):
    planes = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()[None]
    resized = torch.nn.functional.interpolate(
        planes, size=[height, width], mode=filter, antialias=True, align_corners=False
    )
    return resized[0].permute(1, 2, 0).numpy()


def resizes(count: int, seed: int):
    """Pixels and the size wanted: noise, which has every value, and black and white, which
    overshoots."""
    rng = np.random.default_rng(seed)
    for number in range(count):
        width, height, new_width, new_height = np.exp(rng.uniform(0, 6, 4)).round().astype(int)
        if number % 10 == 0:
            (width, new_width), height = np.exp(rng.uniform(0, 9, 2)).round().astype(int), 3
        levels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        shown = levels if number % 3 else (levels > 127).astype(np.uint8) * np.uint8(255)
        yield shown, max(2, int(new_width)), max(2, int(new_height))  # torch fails at 1 × 1


def four_bytes(pixels: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """uint32[h, w]: the pixels as Pillow keeps them; what its fourth bytes are has no effect."""
    padded = np.full((*pixels.shape[:2], 4), 0xA5, np.uint8)
    padded[..., :3] = pixels
    return padded.view(np.uint32)[..., 0]


def check_resizes(count: int, seed: int) -> None:
    for pixels, width, height in resizes(count, seed):
        for filter in ("bicubic", "bilinear", "lanczos"):
            wanted = by_torch(pixels, width, height, filter)
            for picture in (pixels, four_bytes(pixels)):
                made = resize(picture, (width, height), filter)
                assert (made == wanted).all(), (pixels.shape, width, height, filter)


def test_resizing_is_torch_s_bit_by_bit():
    check_resizes(80, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_more_resizes_are_torch_s_bit_by_bit():
    check_resizes(850 * FACTOR, seed=1)


# ---- clips --------------------------------------------------------------------------------


def rgb_frames(data: bytes, wanted: Sequence[int]) -> NDArray[np.uint8]:
    """The frames as transformers' PyAV reader gives them."""
    with av.open(io.BytesIO(data)) as container:
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return np.stack([every[index] for index in wanted])


VIDEO_SIZE = {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}
CLIP_FAMILIES = {
    "qwen2_vl": Family(
        Qwen2VLProcessor(video_min_pixels=4 * 28 * 28, video_max_pixels=64 * 28 * 28),
        "Qwen2VLVideoProcessor",
        {"size": VIDEO_SIZE, "cap_pixels_per_frame": False, **CLIP},
        lambda *given: patch_rows(*given).pixel_values,
    ),
    "qwen3_vl": Family(
        Qwen3VLProcessor(video_max_pixels=256 * 32 * 32),
        "Qwen3VLVideoProcessor",
        {
            "size": {"shortest_edge": 4 * 1024, "longest_edge": 256 * 1024},
            "do_sample_frames": False,
            **HALF,
        },
        lambda *given: patch_rows(*given, patch=16).pixel_values,
    ),
    "smolvlm": Family(
        Idefics3Processor(kind="smolvlm", tile=128, patch=16, shuffle=4),
        "SmolVLMVideoProcessor",
        {
            "size": {"longest_edge": 128},
            "max_image_size": {"longest_edge": 128},
            "do_sample_frames": False,
            **HALF,
        },
        square_pixels,
    ),
    "internvl": Family(
        InternVLProcessor(video_frames=4),
        "InternVLVideoProcessor",
        {"size": {"height": 448, "width": 448}, **IMAGENET},
        square_pixels,
    ),
}


@pytest.mark.parametrize("name", CLIP_FAMILIES)
@pytest.mark.parametrize("make", ["h264", "vp9", "mpeg4"])
def test_frames_of_a_clip_have_transformers_pixels(files, judge, make, name):
    family, data = CLIP_FAMILIES[name], encoded(MAKES[make])
    blob = files.blob("video", data)
    clip = read_clip(blob, DEFAULT_LIMITS)
    plan = family.ours.plan_video(clip.header)
    made = normalised(family, decode_video(blob, clip, plan, DEFAULT_LIMITS))
    frames = rgb_frames(data, plan.frame_indices)
    wanted = judge.frames(family.theirs, family.options, frames).reshape(made.shape)
    assert np.abs(made - wanted).max() <= TOLERANCE


def test_frames_of_a_clip_are_padded_as_pictures_are(judge):
    family, frame = FAMILIES["llava, padded"], np.asarray(soft_picture(112, 80))
    view = family.ours.plan_image(width=112, height=80).views[0]
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG")
    wanted = judge.pixels(family.theirs, family.options, buffer.getvalue())
    assert np.abs(normalised(family, cut_views(frame, [view])) - wanted).max() <= TOLERANCE


# ---- what differs on purpose --------------------------------------------------------------


@pytest.mark.parametrize("frames", [40, 155, 300, 1000])
def test_frames_of_a_clip_are_those_of_the_models_own_code(judge, frames):
    """transformers' video processors sample none of these families' frames by default; asked to,
    they take the first frames (Qwen2-VL) or middles (InternVL) of segments of another length."""
    header = VideoHeader(width=112, height=80, frames=frames, frames_per_s=25.0)
    for name, options in (("qwen2_vl", {"fps": 2.0}), ("internvl", {"num_frames": 4})):
        family = CLIP_FAMILIES[name]
        made = np.array(family.ours.plan_video(header).frame_indices)
        theirs = judge.frame_choice(family.theirs, options, frames, 25.0)
        assert len(made) == len(theirs)
        assert 0 < np.abs(made - theirs).max() <= np.ceil(frames / len(made))


def test_deep_greys_keep_their_upper_8_bits_where_transformers_shows_white(files, judge):
    family = FAMILIES["llava, cropped"]
    grey = soft_picture(336, 336).convert("L")
    deep = files.saved(Image.fromarray(np.asarray(grey).astype(np.uint16) * 256 + 77), "PNG")
    as_8_bits = judge.pixels(family.theirs, family.options, files.saved(grey, "PNG"))
    assert np.abs(ours(files, family, deep) - as_8_bits).max() <= TOLERANCE
    theirs = judge.pixels(family.theirs, family.options, deep)
    assert np.ptp(theirs, axis=(2, 3)).max() == 0


def test_an_orientation_behind_a_png_s_pixels_is_not_applied(files, judge):
    """Measuring would have to decode the picture to find it."""
    family = FAMILIES["qwen2_vl"]
    picture = soft_picture(112, 84)
    plain = files.saved(picture, "PNG")
    exif = Image.Exif()
    exif[0x0112] = 6
    before = files.saved(picture, "PNG", exif=exif)
    start = before.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(before[start : start + 4], "big")
    last = before.index(b"IEND") - 4
    behind = before[:start] + before[end:last] + before[start:end] + before[last:]
    assert (ours(files, family, behind) == ours(files, family, plain)).all()
    check(files, judge, family, before)
    turned = judge.pixels(family.theirs, family.options, behind)
    assert not np.array_equal(turned, ours(files, family, behind))


def test_a_square_of_too_many_pixels_is_refused_before_it_is_resized(files):
    limits = DecodeLimits(max_image_pixels=999_999)
    pipeline = MediaPipeline(vision=LlavaProcessor(aspect="pad"), audio=None, limits=limits)
    pipeline.plan(files.blob("image", files.image(999, 10, "PNG")))
    with pytest.raises(SampleError, match=r"on a square, its pixels is 1,000,000; .*max_image_pix"):
        pipeline.plan(files.blob("image", files.image(1000, 10, "PNG")))
