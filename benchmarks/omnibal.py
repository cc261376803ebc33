"""OmniBal's Table 9, rebuilt: layer times and bytes of its models, its splits, its recomputation.

The paper gives layers a stage and no layer times; those are counted here: FLOPs of every layer over
what an A100 keeps of its peak, at the table's tensor parallelism, for packs that ISF makes of
InternVL-1.2M (Q_v = 9 tiles, Q_t = 4,096 tokens). EVA-CLIP-4B is left out: its row has 54 vision
layers, which no published model of that name has.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks import workloads
from dataservice.planning import pack_isf

TILES, TEXT_TOKENS = 9, 4096
TILE_TOKENS = 1025  # 448² px in patches of 14, and the class token
FLOPS_PER_S = 312e12 * 0.5
LINK_BYTES_PER_S = 25e9  # one of four 200 Gbit/s links


@dataclass(frozen=True, kw_only=True, slots=True)
class Tower:
    """Equal transformer layers. `feed_forward` is the width of each of `matrices` matrices of the
    MLP: 2, or 3 where it is gated. `kv_share`: keys' and values' heads over queries'."""

    layers: int
    hidden: int
    feed_forward: int
    matrices: int = 2
    kv_share: float = 1.0
    vocabulary: int = 0

    @property
    def layer_parameters(self) -> float:
        """Of one layer's matrices."""
        attention = (2 + 2 * self.kv_share) * self.hidden**2
        return attention + self.matrices * self.hidden * self.feed_forward


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """A row of the table: what its stages hold, and how many layers of each recompute."""

    vision: str
    text: str
    tensor: int
    split: tuple[int, ...]
    recomputed: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.vision} + {self.text}"

    @property
    def bounds(self) -> NDArray[np.int64]:
        """The split as bounds, int64[stages + 1]."""
        return np.concatenate([[0], np.cumsum(self.split)]).astype(np.int64)


TOWERS = {
    "InternVL-6B": Tower(layers=45, hidden=3200, feed_forward=12800),
    "EVA-CLIP-1B": Tower(layers=40, hidden=1408, feed_forward=6144),
    "EVA-CLIP-8B": Tower(layers=32, hidden=4096, feed_forward=20480),
    "EVA-CLIP-18B": Tower(layers=48, hidden=5120, feed_forward=25600),
    "Llama3-8B": Tower(
        layers=32, hidden=4096, feed_forward=14336, matrices=3, kv_share=1 / 4, vocabulary=128256
    ),
    "InternLM2-20B": Tower(
        layers=48, hidden=6144, feed_forward=16384, matrices=3, kv_share=1 / 6, vocabulary=92544
    ),
    "Yi-34B": Tower(
        layers=60, hidden=7168, feed_forward=20480, matrices=3, kv_share=1 / 7, vocabulary=64000
    ),
    "Llama3-70B": Tower(
        layers=80, hidden=8192, feed_forward=28672, matrices=3, kv_share=1 / 8, vocabulary=128256
    ),
    "Qwen1.5-110B": Tower(
        layers=80, hidden=8192, feed_forward=49152, matrices=3, kv_share=1 / 8, vocabulary=152064
    ),
}
TABLE_9 = (
    Published(
        vision="InternVL-6B",
        text="Llama3-8B",
        tensor=1,
        split=(16, 17, 20, 24),
        recomputed=(8, 7, 10, 24),
    ),
    Published(
        vision="InternVL-6B",
        text="InternLM2-20B",
        tensor=2,
        split=(22, 23, 24, 24),
        recomputed=(0, 0, 0, 0),
    ),
    Published(
        vision="InternVL-6B",
        text="Yi-34B",
        tensor=4,
        split=(28, 29, 24, 24),
        recomputed=(3, 2, 0, 0),
    ),
    Published(
        vision="InternVL-6B",
        text="Llama3-70B",
        tensor=4,
        split=(22, 23, 13, 14, 14, 14, 13, 12),
        recomputed=(11, 12, 8, 5, 3, 2, 0, 0),
    ),
    Published(
        vision="InternVL-6B",
        text="Qwen1.5-110B",
        tensor=8,
        split=(21, 22, 13, 13, 14, 14, 14, 14),
        recomputed=(6, 9, 1, 3, 0, 0, 0, 0),
    ),
    Published(
        vision="EVA-CLIP-1B",
        text="InternLM2-20B",
        tensor=2,
        split=(43, 16, 15, 14),
        recomputed=(0, 0, 0, 0),
    ),
    Published(
        vision="EVA-CLIP-8B",
        text="InternLM2-20B",
        tensor=2,
        split=(17, 18, 23, 22),
        recomputed=(5, 5, 8, 10),
    ),
    Published(
        vision="EVA-CLIP-18B",
        text="InternLM2-20B",
        tensor=4,
        split=(18, 19, 25, 34),
        recomputed=(2, 2, 0, 0),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layers:
    """What `partition_stages` is given: float64[microbatch, layer], seconds and bytes."""

    forward_s: NDArray[np.float64]
    backward_s: NDArray[np.float64]
    cut_bytes: NDArray[np.float64]


def layers_of(row: Published, microbatches: int, seed: int = 0) -> Layers:
    """Every layer of the row's two models, for packs of InternVL-1.2M-like samples."""
    tiles, tokens, squares = packs(microbatches, seed)
    vision, text = TOWERS[row.vision], TOWERS[row.text]
    rate = FLOPS_PER_S * row.tensor
    seen = tiles * TILE_TOKENS
    vision_s = _layer_s(vision, seen, seen * TILE_TOKENS, rate)
    text_s = _layer_s(text, tokens, squares / 2, rate)
    forward = np.hstack(
        [np.tile(vision_s[:, None], vision.layers), np.tile(text_s[:, None], text.layers)]
    )
    forward[:, -1] += 2 * tokens * text.hidden * text.vocabulary / rate
    sent = np.hstack(
        [
            np.tile(2.0 * seen[:, None] * vision.hidden, vision.layers),
            np.tile(2.0 * tokens[:, None] * text.hidden, text.layers),
        ]
    )
    return Layers(forward_s=forward, backward_s=2 * forward, cut_bytes=sent)


def packs(
    microbatches: int, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Tiles, decoder tokens and their summed squares of that many packs, each float64[packs]."""
    samples = workloads.vlm_sft(16 * microbatches, seed)
    counts = samples.encoder_tokens // workloads.TILE_ENCODER_TOKENS
    packed = pack_isf(samples.llm_tokens, counts, max_text=TEXT_TOKENS, max_vision=TILES)
    full = packed.pack_of
    tiles, tokens, squares = (
        np.bincount(full, weights)[:microbatches].astype(np.float64)
        for weights in (counts, samples.llm_tokens, samples.llm_tokens.astype(np.float64) ** 2)
    )
    return tiles, tokens, squares


def _layer_s(
    tower: Tower, tokens: NDArray[np.float64], pairs: NDArray[np.float64], rate: float
) -> NDArray[np.float64]:
    """Forward seconds of one layer: two FLOPs a parameter and token, four a pair and channel."""
    return (2 * tokens * tower.layer_parameters + 4 * pairs * tower.hidden) / rate
