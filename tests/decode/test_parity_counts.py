"""Tokens and grids are those of transformers' own processors, over thousands of sizes.

Known differences, which are counted here: a picture that fills no patch of its canvas is refused
by llava_next, where transformers shows only the thumbnail; a clip of one frame is shown twice by
qwen3_vl, where transformers refuses it.
"""

import math
import random

import numpy as np
import pytest
from transformers import SiglipVisionConfig
from transformers.models.siglip.modeling_siglip import SiglipVisionEmbeddings

from dataservice.core.errors import SampleError
from dataservice.decode.processors.base import VideoHeader
from dataservice.decode.processors.gemma3 import Gemma3Processor
from dataservice.decode.processors.idefics3 import Idefics3Processor
from dataservice.decode.processors.internvl import InternVLProcessor
from dataservice.decode.processors.llava_next import LlavaNextProcessor
from dataservice.decode.processors.qwen2_vl import Qwen2VLProcessor
from dataservice.decode.processors.qwen3_vl import Qwen3VLProcessor
from dataservice.decode.processors.siglip import SiglipProcessor
from tests.decode.judges import (
    Idefics3Tiles,
    LlavaNextSquares,
    Qwen3Clips,
    internvl_tiles,
    qwen_grid,
)

RATES = (1, 5, 24, 24000 / 1001, 25, 30000 / 1001, 29.97, 30, 60)


def sizes(seed: str, count: int) -> list[tuple[int, int]]:
    """(width, height) of pictures: stamps, photographs and strips, and squares of all tiles."""
    rng = random.Random(seed)
    edges = [28, 32, 224, 336, 364, 384, 448, 512, 672, 1008]
    known = [(a + x, b + y) for a in edges for b in edges for x in (-1, 0, 1) for y in (-1, 0, 1)]
    tops = [rng.choice([(60, 60), (2500, 2500), (3000, 200), (200, 3000)]) for _ in range(count)]
    return known + [(rng.randint(1, wide), rng.randint(1, high)) for wide, high in tops]


def clips(seed: str, count: int) -> list[VideoHeader]:
    rng = random.Random(seed)
    return [
        VideoHeader(
            width=width,
            height=height,
            frames=rng.randint(2, rng.choice([12, 60, 4000])),
            frames_per_s=rng.choice([*RATES, rng.uniform(0.5, 70)]),
        )
        for width, height in sizes(seed, count)[-count:]
        if max(width, height) <= 200 * min(width, height)
    ]


@pytest.mark.parametrize(
    ("processor", "patch"), [(Qwen2VLProcessor(), 14), (Qwen3VLProcessor(), 16)]
)
def test_qwen_vl_images_have_the_grid_of_transformers(processor, patch):
    limits = {"least": processor.min_pixels, "most": processor.max_pixels}
    refused = 0
    for width, height in sizes(processor.kind, 3000):
        try:
            plan = processor.plan_image(width=width, height=height)
        except SampleError:
            refused += 1
            with pytest.raises(ValueError, match="aspect ratio"):
                qwen_grid(width, height, patch=patch, **limits)
            continue
        grid = qwen_grid(width, height, patch=patch, **limits)
        assert plan.grid == (1, *grid, 2), (width, height)
        assert plan.encoder_tokens == math.prod(grid) == 4 * plan.llm_tokens
    assert refused < 200


@pytest.mark.parametrize("capped", [False, True])
def test_qwen3_vl_clips_have_the_frames_grids_and_times_of_transformers(capped):
    judge = Qwen3Clips(capped=capped)
    processor = Qwen3VLProcessor(video_frame_pixels=768 * 32 * 32 if capped else None)
    for header in clips("qwen3_vl", 600):
        plan = processor.plan_video(header)
        grid = judge.grid(header)
        assert (plan.runs, *plan.grid) == (grid[0], 1, *grid[1:], 2), header
        sampled = judge.sampled(header)
        assert plan.frame_indices == (*sampled, *sampled[-1:])[: 2 * plan.runs]
        run = "<|video_pad|>" * (plan.llm_tokens // plan.runs)
        text = f"<|vision_start|>{run}<|vision_end|>".join(plan.texts)
        assert text == f"<|vision_start|>{judge.text(header)}<|vision_end|>"


def test_a_clip_of_one_frame_shows_it_twice_to_qwen3_vl():
    header = VideoHeader(width=320, height=240, frames=1, frames_per_s=25)
    with pytest.raises(ValueError, match="temporal_factor"):
        Qwen3Clips().grid(header)
    plan = Qwen3VLProcessor().plan_video(header)
    assert plan.frame_indices == (0, 0)
    assert plan.texts == ("<|vision_start|><0.0 seconds>", "<|vision_end|>")


@pytest.mark.parametrize("most", [1, 6, 12])
def test_internvl_has_the_tiles_of_transformers(most):
    processor = InternVLProcessor(max_tiles=most)
    for width, height in sizes("internvl", 1500):
        plan = processor.plan_image(width=width, height=height)
        assert plan.shape[0] == internvl_tiles(width, height, most), (width, height)


@pytest.mark.parametrize(
    "processor",
    [
        Idefics3Processor(),
        Idefics3Processor(kind="smolvlm"),
        Idefics3Processor(kind="smolvlm2", tile=512, patch=16, shuffle=4),
    ],
    ids=lambda processor: processor.kind,
)
def test_idefics3_has_the_tiles_of_transformers(processor):
    tile = processor.plan_image(width=9, height=9).shape[1]
    judge = Idefics3Tiles(tile)
    for width, height in sizes(processor.kind, 1500):
        rows, columns = judge.rows_and_columns(width, height)
        plan = processor.plan_image(width=width, height=height)
        assert (plan.runs, plan.shape[0]) == (rows * columns + 1, rows * columns + 1)
        assert (plan.views[0].width, plan.views[0].height) == (columns * tile, rows * tile)


def test_llava_next_has_the_squares_and_tokens_of_transformers():
    judge, processor, refused = LlavaNextSquares(), LlavaNextProcessor(), 0
    for number, (width, height) in enumerate(sizes("llava_next", 1500)):
        rows, columns = judge.unpadded(width, height)
        if min(rows, columns) == 0:
            refused += 1
            with pytest.raises(SampleError, match="leaves"):
                processor.plan_image(width=width, height=height)
            continue
        plan = processor.plan_image(width=width, height=height)
        assert plan.llm_tokens == judge.text(width, height).count("<image>"), (width, height)
        assert plan.grid[1:] == (rows, columns, 1)
        if number % 10 == 0:
            canvas, view = judge.canvas(width, height), plan.views[1]
            assert plan.shape[0] == canvas.size // 336**2 + 1
            assert plan.grid[0] == canvas.shape[0] // 336
            left, top = (-origin for origin in view.origins[0])
            assert canvas[top : top + view.height, left : left + view.width].all()
            assert np.count_nonzero(canvas) == view.height * view.width
    assert refused < 200


def test_gemma3_has_256_tokens_whatever_the_picture():
    plan = Gemma3Processor().plan_image(width=31, height=4000)
    assert (plan.llm_tokens, plan.encoder_tokens, plan.shape) == (256, 4096, (1, 896, 896, 3))


@pytest.mark.parametrize(("side", "patch"), [(384, 14), (224, 14), (512, 16), (256, 16)])
def test_siglip_has_the_tokens_of_its_encoder(side, patch):
    encoder = SiglipVisionEmbeddings(
        SiglipVisionConfig(image_size=side, patch_size=patch, hidden_size=8)
    )
    plan = SiglipProcessor(side=side, patch=patch).plan_image(width=31, height=4000)
    assert plan.encoder_tokens == plan.llm_tokens == encoder.num_patches
    assert plan.shape == (1, side, side, 3)
