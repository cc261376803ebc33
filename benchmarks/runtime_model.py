"""A decoder and a vision transformer of realistic width, to measure the runtime with.

No model of the demo: its widths are those at which a GPU's matrix units are busy. Layers are few,
since they repeat.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_client import Microbatch, ModalityBatch, normalize_pixels, patchify
from trainer_client.runtime import PackedAttention, scatter_rows

PATCH, TEMPORAL_PATCH, MERGE = 14, 2, 2
PATCH_VALUES = 3 * TEMPORAL_PATCH * PATCH**2


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What is run. `memory_tokens` is one microbatch's room, as in a job file; `mla_dims` are the
    widths of queries and keys, and of values."""

    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    layers: int = 4
    vocabulary: int = 32_000
    vision_width: int = 1280
    vision_heads: int = 16
    vision_layers: int = 8
    lengths: tuple[int, ...] = (512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
    patches: tuple[int, ...] = (256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
    ring_tokens: tuple[int, ...] = (16384, 65536)
    memory_tokens: int = 16384
    samples: int = 128
    tiles: int = 256
    tile_px: tuple[int, int] = (448, 448)
    step_tokens: int = 16384
    step_bytes: int = 2**30
    turns: int = 7
    loss_shape: tuple[int, int] = (16384, 152_064)
    parity_dims: tuple[int, ...] = (64, 128, 256)
    parity_degrees: tuple[int, ...] = (2, 3, 4, 8)
    mla_dims: tuple[int, int] = (192, 128)
    parity_lengths: tuple[int, ...] = (1, 1, 700, 33, 1, 2048)
    parity_tokens: int = 2048


TINY = Size(
    width=32, heads=2, kv_heads=1, layers=1, vocabulary=256, vision_width=32, vision_heads=2,
    vision_layers=1, lengths=(16, 32, 48, 64, 96, 128), patches=(8, 16, 32, 48, 64, 96),
    ring_tokens=(96,), memory_tokens=2048, samples=8, tiles=2, tile_px=(56, 56),
    step_tokens=96, step_bytes=2**16, turns=2, parity_dims=(8,),
    parity_degrees=(2, 3, 8), mla_dims=(12, 8), parity_lengths=(1, 1, 40, 7, 1), parity_tokens=96,
)  # fmt: skip


# Four of them, in fp64, share one GPU.
PARITY = Size(
    width=512, heads=8, kv_heads=2, layers=2, vocabulary=2048, vision_width=256, vision_heads=4,
    vision_layers=2,
)  # fmt: skip


class Block(nn.Module):
    """Grouped-query attention and SwiGLU, causal or not."""

    def __init__(self, width: int, heads: int, kv_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.dim, self.causal = width // heads, causal
        self.split = [width, kv_heads * self.dim, kv_heads * self.dim]
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, sum(self.split), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 7 * width, bias=False)  # 3.5 × width each
        self.down = nn.Linear(7 * width // 2, width, bias=False)

    def forward(self, x: Tensor, attention: PackedAttention) -> Tensor:
        """[rows, width] to the same."""
        parts = self.qkv(self.norms[0](x)).split(self.split, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.dim)) for part in parts)
        x = x + self.out(attention(q, k, v, causal=self.causal).flatten(1))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        mixed: Tensor = self.down(functional.silu(gate) * up)
        return x + mixed


class Model(nn.Module):
    """A decoder and a vision transformer; a MultimodalModel."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head_dim = size.width // size.heads
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.layers = nn.ModuleList(
            Block(size.width, size.heads, size.kv_heads, causal=True) for _ in range(size.layers)
        )
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.embed = nn.Linear(PATCH_VALUES, size.vision_width)
        self.vision = nn.ModuleList(
            Block(size.vision_width, size.vision_heads, size.vision_heads, causal=False)
            for _ in range(size.vision_layers)
        )
        self.merge = nn.Linear(MERGE**2 * size.vision_width, size.width)

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        """Full attention inside each item."""
        dtype = self.embed.weight.dtype
        rows = []
        for pixels in batch.items:
            normal = normalize_pixels(pixels, (0.5,) * 3, (0.25,) * 3, dtype)
            rows.append(
                patchify(normal, patch=PATCH, temporal_patch=TEMPORAL_PATCH, merge=MERGE)[0]
            )
        x = self.embed(torch.cat(rows))
        attention = PackedAttention(np.cumsum([0, *map(len, rows)]).tolist())
        for block in self.vision:
            x = block(x, attention)
        merged: Tensor = self.merge(x.reshape(-1, MERGE**2 * x.shape[1]))
        return merged

    def dummy_item(self, modality: str) -> Tensor:
        """2 × 2 patches."""
        side = MERGE * PATCH
        return torch.zeros(1, side, side, 3, dtype=torch.uint8, device=self.tokens.weight.device)

    def encoder_trains(self, modality: str) -> bool:
        """Always."""
        return True

    def decode(
        self, microbatch: Microbatch, features: Mapping[str, Any], attention: PackedAttention
    ) -> Tensor:
        """Logits of this rank's rows."""
        x: Tensor = self.tokens(microbatch.input_ids)
        for found in features.values():
            x = scatter_rows(x, found.rows, found.positions)
        for block in self.layers:
            x = block(x, attention)
        logits: Tensor = self.head(x)
        return logits
