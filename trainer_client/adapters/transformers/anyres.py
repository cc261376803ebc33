"""Pictures on LLaVA-NeXT's canvases, by the sizes from which the library finds them again.

The library is given a picture's size, and finds from it the canvas that keeps most of the picture,
and the border to cut away. A shard says what the job found: the canvas, and the patches that are
left. Any size from which the library finds the same gives the same features.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import unpad_image

from trainer_client.runtime import LayoutError

Size = tuple[int, int]
"""(height, width) or (rows, columns)."""


@lru_cache(maxsize=4096)
def size_on_canvas(canvas: Size, patches: Size, patch: int, pinpoints: tuple[Size, ...]) -> Size:
    """The (height, width) of a picture that the library puts on this of the canvases `pinpoints`,
    in pixels, so that these (rows, columns) of patches of `patch` pixels are left of it.

    Raises LayoutError where there is none: the job's canvases are not the model's.
    """
    listed = [*map(list, pinpoints)]
    whole = torch.empty(1, canvas[0] // patch, canvas[1] // patch, device="meta")
    for size in _sizes(canvas, patches, patch):
        left = tuple(unpad_image(whole, size).shape[1:])
        if left == patches and tuple(select_best_resolution(size, listed)) == canvas:
            return size
    raise LayoutError(
        f"an item has {patches[0]}×{patches[1]} patches on a canvas of {canvas[0]}×{canvas[1]} "
        f"pixels, and the model's image_grid_pinpoints are {listed}. Give the job's vision "
        "processor the same canvases: `canvases` of kind llava_next, in squares."
    )


def _sizes(canvas: Size, patches: Size, patch: int) -> Iterator[Size]:
    """Sizes of the shape of what is left, the likeliest first: as large as the canvas lets them be;
    larger ones, of finer shapes; and small ones, which many canvases hold whole.

    Equal numbers of patches are cut from both ends, so that up to a patch more may have been left
    than the picture filled, or than is seen.
    """
    for scale in (1.0, 4.0, 0.5, 0.125):
        if patches[0] == canvas[0] // patch:
            for width in range((patches[1] + 1) * patch, (patches[1] - 2) * patch, -1):
                yield _scaled((canvas[0], width), scale)
        if patches[1] == canvas[1] // patch:
            for height in range((patches[0] + 1) * patch, (patches[0] - 2) * patch, -1):
                yield _scaled((height, canvas[1]), scale)


def _scaled(size: Size, scale: float) -> Size:
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
