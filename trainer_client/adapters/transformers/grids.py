"""What Qwen's vision encoders derive from the grids of their items, derived on the host.

Left to themselves the encoders do it where the grids are. On a device the host would then wait for
each of these numbers, and in each layer for the lengths that attention splits rows by.
"""

from typing import Any

import torch
import transformers
from torch import Tensor

from trainer_client.staging import copied_once

try:
    from transformers import vision_utils
    from transformers.utils.generic import get_max_seqlen, is_flash_attention_requested
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} is installed, and trainer_client.adapters."
        "transformers takes 5.16 or later: its encoders tell what they derive from the shapes of "
        "items. Run `pip install --upgrade transformers`."
    ) from error


def derived_from(grids: Tensor, visual: Any, device: torch.device) -> dict[str, Any]:
    """Keyword arguments of an encoder, with which it derives nothing of grids, int64 [n, 3] on the
    host.

    Bounds of attention stay on the host, where the library's attention splits rows by them; for
    flash attention, whose kernel reads them, they are on the device with the rest.
    """
    config, merge = visual.config, visual.spatial_merge_size
    rows = {"position_ids": vision_utils.get_vision_position_ids(grids, merge)}
    bounds = {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grids)}
    if hasattr(config, "window_size"):
        rows["window_index"], bounds["cu_window_seqlens"] = vision_utils.get_vision_window_index(
            grids, merge, config.window_size, config.patch_size
        )
    if hasattr(visual, "interpolation_mode"):
        rows["interp_indices"], rows["interp_weights"] = (
            vision_utils.get_vision_interpolation_indices_and_weights(
                grids,
                visual.num_grid_per_side,
                mode=visual.interpolation_mode,
                align_corners=visual.interpolation_align_corners,
                spatial_merge_size=merge,
            )
        )
    longest = {
        name.replace("cu_", "max_").removesuffix("s"): get_max_seqlen(each, config)
        for name, each in bounds.items()
    }
    moved = {**rows, **bounds} if is_flash_attention_requested(config) else rows
    there = dict(zip(moved, copied_once(tuple(moved.values()), device), strict=True))
    return {**bounds, **there, **longest}
