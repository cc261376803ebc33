"""transformers' own processors as the judges of parity tests.

Their geometry is asked without pixels: a processor's `resize` is replaced by one that gives an
array of the same shape and no memory. Processors of clips need torchvision to be made, but not to
write text: `made` fills in what their constructors would.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.image_processing_utils import select_best_resolution
from transformers.image_utils import SizeDict
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,
    get_resize_output_image_size,
)
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    smart_resize as smart_resize_image,
)
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
    smart_resize as smart_resize_clip,
)
from transformers.video_utils import VideoMetadata

from dataservice.decode.processors.base import VideoHeader

logging.getLogger("transformers").setLevel(logging.ERROR)
SIDE = 336


def blank(height: int, width: int, colour: int = 0) -> NDArray[np.uint8]:
    """A picture of this size that takes no memory: uint8[3, height, width]."""
    return np.broadcast_to(np.uint8(colour), (3, height, width))


def made(kind: type, **attributes: object) -> Any:
    """A processor with these attributes, made without its constructor."""
    processor = object.__new__(kind)
    for name, value in attributes.items():
        setattr(processor, name, value)
    return processor


# ---- Qwen-VL ------------------------------------------------------------------------------


def qwen_grid(width: int, height: int, *, patch: int, least: int, most: int) -> tuple[int, int]:
    """(h, w) in patches of an image."""
    rows, columns = smart_resize_image(height, width, patch * 2, least, most)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": least, "longest_edge": most}
    )
    patches = processor.get_number_of_image_patches(height, width, {})
    assert patches == rows * columns // patch**2
    return rows // patch, columns // patch


class Qwen3Clips:
    """Qwen3-VL's rules for clips, as its checkpoints configure them."""

    def __init__(self, *, capped: bool = False) -> None:
        size = {"shortest_edge": 4096, "longest_edge": 25_165_824}
        self.videos = Qwen3VLVideoProcessor(size=size, cap_pixels_per_frame=capped)
        self.processor = made(
            Qwen3VLProcessor,
            video_processor=self.videos,
            image_token="<|image_pad|>",
            video_token="<|video_pad|>",
            vision_start_token="<|vision_start|>",
            vision_end_token="<|vision_end|>",
        )

    def sampled(self, header: VideoHeader) -> list[int]:
        """The sampled frames."""
        return list(map(int, self.videos.sample_frames(metadata(header))))

    def grid(self, header: VideoHeader) -> tuple[int, int, int]:
        """(t, h, w) in patches."""
        frames, size = len(self.sampled(header)), self.videos.size
        most = size["longest_edge"]
        if self.videos.cap_pixels_per_frame:
            share = min(768 * 32 * 32, most // frames)
            most = max(share, int(size["shortest_edge"] * 1.05)) * frames
        rows, columns = smart_resize_clip(
            frames, header.height, header.width, 2, 32, size["shortest_edge"], most
        )
        patches = self.videos.get_num_of_video_patches(frames, header.height, header.width)
        assert patches == -(-frames // 2) * rows * columns // 256
        return -(-frames // 2), rows // 16, columns // 16

    def text(self, header: VideoHeader) -> str:
        """What its video token becomes."""
        inputs = {
            "video_grid_thw": np.array([self.grid(header)]),
            "video_metadata": [metadata(header, self.sampled(header))],
        }
        return str(self.processor.replace_video_token(inputs, 0))


def metadata(header: VideoHeader, sampled: list[int] | None = None) -> VideoMetadata:
    return VideoMetadata(
        total_num_frames=header.frames,
        fps=header.frames_per_s,
        width=header.width,
        height=header.height,
        duration=header.frames / header.frames_per_s,
        frames_indices=sampled,
    )


# ---- tiles --------------------------------------------------------------------------------


class _Idefics3Sizes(Idefics3ImageProcessorPil):
    def resize(self, image, size, resample=None, **_):
        if size.longest_edge:
            return blank(*get_resize_output_image_size(image, size.longest_edge))
        return blank(size.height, size.width)


class Idefics3Tiles:
    """Idefics 3's tiles of a side, from a longest side of four."""

    def __init__(self, tile: int) -> None:
        self.tile = {"longest_edge": tile}
        self.images = _Idefics3Sizes(size={"longest_edge": 4 * tile}, max_image_size=self.tile)

    def rows_and_columns(self, width: int, height: int) -> tuple[int, int]:
        """(0, 0) when the picture is not split."""
        size = SizeDict(longest_edge=4 * self.tile["longest_edge"])
        image = self.images.resize(blank(height, width), size)
        image = self.images.resize_for_vision_encoder(image, self.tile["longest_edge"])
        frames, rows, columns = self.images.split_images(image, self.tile)
        assert len(frames) == rows * columns + 1
        return rows, columns


class _LlavaNextSizes(LlavaNextImageProcessorPil):
    def resize(self, image, size, resample=None, **_):
        return blank(size.height, size.width, colour=255)


class LlavaNextSquares:
    """LLaVA-NeXT's squares, as its checkpoints configure them."""

    def __init__(self) -> None:
        square = {"height": SIDE, "width": SIDE}
        self.images = _LlavaNextSizes(size={"shortest_edge": SIDE}, crop_size=square)
        self.processor = made(
            LlavaNextProcessor,
            image_processor=self.images,
            image_token="<image>",
            patch_size=14,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )

    def text(self, width: int, height: int) -> str:
        """What the token of a picture becomes."""
        inputs = {"image_sizes": [[height, width]], "pixel_values": [[blank(SIDE, SIDE)]]}
        return str(self.processor.replace_image_token(inputs, 0))

    def canvas(self, width: int, height: int) -> NDArray[np.uint8]:
        """uint8[height, width] of the squares together: the picture in white on black."""
        pinpoints = self.images.image_grid_pinpoints
        thumbnail, *squares = self.images.get_image_patches(
            blank(height, width), pinpoints, (SIDE, SIDE), SIDE, None
        )
        assert {square.shape for square in (thumbnail, *squares)} == {(3, SIDE, SIDE)}
        columns = select_best_resolution((height, width), pinpoints)[1] // SIDE
        return _whole(squares, columns)

    def unpadded(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of patches that the model keeps of a canvas."""
        rows, columns = select_best_resolution((height, width), self.images.image_grid_pinpoints)
        patches = torch.empty(1, rows // 14, columns // 14, device="meta")
        _, rows, columns = unpad_image(patches, (height, width)).shape
        return rows, columns


def _whole(squares: Sequence[NDArray[np.uint8]], columns: int) -> NDArray[np.uint8]:
    """Squares [3, side, side], row by row, as one plane [height, width]."""
    planes = [square[0] for square in squares]
    rows = (planes[k : k + columns] for k in range(0, len(planes), columns))
    return np.vstack([np.hstack(row) for row in rows])


def internvl_tiles(width: int, height: int, most: int = 12) -> int:
    """Tiles of a picture, its thumbnail included."""
    images = GotOcr2ImageProcessorPil(
        size={"height": 448, "width": 448}, crop_to_patches=True, max_patches=most
    )
    return int(images.get_number_of_image_patches(height, width))
