"""LLaVA-NeXT's canvases: what the job found for a picture, the library finds again."""

import numpy as np
import pytest
import torch
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import unpad_image

from dataservice.decode.processors.llava_next import PATCHES, SIDE, LlavaNextProcessor
from trainer_client.adapters.transformers.anyres import size_on_canvas
from trainer_client.runtime import LayoutError

PATCH = SIDE // PATCHES
# The published default; LLaVA-OneVision's 36; and a list in which canvases of many squares come
# first.
PINPOINTS = {
    "next": ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3)),
    "onevision": tuple((rows, columns) for rows in range(1, 7) for columns in range(1, 7)),
    "falling": ((2, 2), (3, 1), (1, 3), (2, 1), (1, 2)),
}


def pictures():
    """Sizes of all shapes: large ones, small ones, those near a square's side, and thin ones."""
    random = np.random.default_rng(0)
    large = random.integers(100, 3000, (400, 2))
    small = random.integers(50, 420, (400, 2))
    near = random.integers(326, 347, (200, 2))
    thin = np.stack([random.integers(40, 90, 100), random.integers(300, 2000, 100)], axis=1)
    strange = np.array([[1472, 753], [343, 335], [335, 343], [336, 336], [672, 336]])
    return np.concatenate([large, small, near, thin, thin[:, ::-1], strange]).tolist()


@pytest.mark.parametrize("canvases", PINPOINTS.values(), ids=PINPOINTS)
def test_the_library_finds_the_jobs_canvas_and_border_again(canvases):
    processor = LlavaNextProcessor(canvases=canvases)
    pinpoints = tuple((rows * SIDE, columns * SIDE) for rows, columns in canvases)
    for height, width in pictures():
        plan = processor.plan_image(width=width, height=height)
        high, rows, columns, _ = plan.grid
        canvas = high * SIDE, (plan.shape[0] - 1) // high * SIDE
        # Of the picture itself:
        assert select_best_resolution((height, width), [*map(list, pinpoints)]) == canvas
        whole = torch.empty(1, canvas[0] // PATCH, canvas[1] // PATCH, device="meta")
        assert tuple(unpad_image(whole, (height, width)).shape[1:]) == (rows, columns)
        # And of the size that the library is given instead, or an error is raised:
        size_on_canvas(canvas, (rows, columns), PATCH, pinpoints)


def test_a_canvas_that_the_model_does_not_have_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"672×1008 pixels, .*\[\[336, 672\]\].*`canvases`"):
        size_on_canvas((672, 1008), (48, 72), PATCH, ((336, 672),))
