"""A rank's encoder items as the inputs that a family's encoder takes.

Each function takes the items of one modality (`mb.vision.items`, `mb.audio.items`) and gives the
tensors that the family's own processor would give for the same pixels or samples, on the device
that the items are on.

    family                pixels or sound               gives
    Qwen2/2.5/3-VL        uint8[frames, h, w, 3]        patches [Σ t·h·w, C·T·P²], grids [n, 3]
    InternVL, LLaVA       uint8[tiles, side, side, 3]   squares [Σ tiles, 3, side, side]
    Whisper, Qwen2-Audio  float32[samples]              log-mel [n, mels, frames] and its mask

Qwen2.5-VL's window indices are not made here: in transformers, and in the released code, the
encoder itself derives them from the grids, as it does `frame_cu_seqlens`.

The host never waits for the device of the items. What follows from their shapes alone, it can have
without it: `patch_grids` and `sound_frames`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from trainer_client.features import HOP_SAMPLES, log_mel, normalize_pixels, patchify
from trainer_client.staging import copied_once


class PatchRows(NamedTuple):
    """Qwen-VL's `pixel_values` and `image_grid_thw` (or their namesakes of videos)."""

    pixel_values: torch.Tensor
    """[Σ t·h·w, channels · temporal_patch · patch²], item by item."""
    grid_thw: torch.Tensor
    """int64[n, 3]: patches in time, height and width of each item."""


class LogMelBatch(NamedTuple):
    """Whisper's `input_features` with its frames that hold sound."""

    input_features: torch.Tensor
    """[n, mels, frames]"""
    feature_attention_mask: torch.Tensor
    """int64[n, frames]: 1 for sound, 0 for padding."""


def patch_rows(
    items: Sequence[torch.Tensor],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    patch: int = 14,
    temporal_patch: int = 2,
    merge: int = 2,
    dtype: torch.dtype = torch.float32,
) -> PatchRows:
    """The inputs of Qwen-VL's vision encoders: `items` uint8[frames, height, width, 3] each, images
    and clips alike. Qwen3-VL has `patch=16`.

    Raises:
        ValueError: there are no items, or one does not fall into patches.
    """
    rows = pixel_rows(
        items, mean, std, patch=patch, temporal_patch=temporal_patch, merge=merge, dtype=dtype
    )
    grids = patch_grids(items, patch=patch, temporal_patch=temporal_patch)
    return PatchRows(rows, copied_once(grids, rows.device))


def pixel_rows(
    items: Sequence[torch.Tensor],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    patch: int = 14,
    temporal_patch: int = 2,
    merge: int = 2,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`PatchRows.pixel_values` alone. Raises as `patch_rows`."""
    _check_any(items)
    rows = []
    for pixels in items:
        normal = normalize_pixels(pixels, mean, std, dtype)
        made, _ = patchify(normal, patch=patch, temporal_patch=temporal_patch, merge=merge)
        rows.append(made)
    return torch.cat(rows)


def patch_grids(
    items: Sequence[torch.Tensor], *, patch: int = 14, temporal_patch: int = 2
) -> torch.Tensor:
    """`PatchRows.grid_thw` of items [frames, height, width, 3] on the host: int64[n, 3]."""
    grids = [
        (-(-frames // temporal_patch), height // patch, width // patch)
        for frames, height, width, _ in (pixels.shape for pixels in items)
    ]
    return torch.tensor(grids, dtype=torch.int64)


def frame_cu_seqlens(grid_thw: torch.Tensor) -> torch.Tensor:
    """Where each frame's patches begin and end in `PatchRows.pixel_values`: int32[Σ t + 1].

    A patch attends to those of its own frame only, a frame being one temporal patch.
    """
    patches = torch.repeat_interleave(grid_thw[:, 1] * grid_thw[:, 2], grid_thw[:, 0])
    return functional.pad(patches.cumsum(0), (1, 0)).to(torch.int32)


def square_pixels(
    items: Sequence[torch.Tensor],
    mean: Sequence[float],
    std: Sequence[float],
    *,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The inputs of encoders of one size: `items` uint8[tiles, side, side, 3] each, to
    [Σ tiles, 3, side, side], item by item. InternVL's tiles (448) and thumbnails, LLaVA's
    squares (336).

    Raises:
        ValueError: there are no items, or their sizes differ.
    """
    _check_any(items)
    sizes = {tuple(pixels.shape[1:3]) for pixels in items}
    if len(sizes) > 1:
        raise ValueError(
            f"the items have tiles of {sorted(sizes)} pixels; give those of one size at a time."
        )
    normal = normalize_pixels(torch.cat(list(items)), mean, std, dtype)
    return normal.permute(0, 3, 1, 2).contiguous()


def log_mel_batch(
    items: Sequence[torch.Tensor],
    *,
    n_mels: int = 80,
    pad_to_samples: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> LogMelBatch:
    """The inputs of Whisper's encoder: `items` float32[samples] each at 16 kHz, padded with silence
    to the longest, or to `pad_to_samples` (Whisper and Qwen2-Audio: 480,000, which is 30 s).

    Raises:
        ValueError: there are no items, or one is longer than `pad_to_samples`.
    """
    features = log_mels(items, n_mels=n_mels, pad_to_samples=pad_to_samples, dtype=dtype)
    frames = copied_once(sound_frames(items), features.device)
    place = torch.arange(features.shape[-1], device=features.device)
    return LogMelBatch(features, (place < frames[:, None]).to(torch.int64))


def log_mels(
    items: Sequence[torch.Tensor],
    *,
    n_mels: int = 80,
    pad_to_samples: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`LogMelBatch.input_features` alone. Raises as `log_mel_batch`."""
    _check_any(items)
    longest = max(len(audio) for audio in items)
    width = pad_to_samples or longest
    if longest > width:
        raise ValueError(
            f"a recording of {longest:,} samples does not fit pad_to_samples={width:,}; cut it, or "
            "lower the job's chunk_s."
        )
    padded = torch.stack([functional.pad(audio, (0, width - len(audio))) for audio in items])
    return log_mel(padded, n_mels=n_mels).to(dtype)


def sound_frames(items: Sequence[torch.Tensor]) -> torch.Tensor:
    """Log-mel frames that hold sound of items [samples], on the host: int64[n]."""
    return torch.tensor([-(-len(audio) // HOP_SAMPLES) for audio in items], dtype=torch.int64)


def _check_any(items: Sequence[torch.Tensor]) -> None:
    if not items:
        raise ValueError("there are no items: an encoder has nothing to do in this wave; skip it.")
