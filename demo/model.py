"""A small multimodal model of the usual shape: two encoders feed one decoder.

    pixels ─ patches ─ vision blocks ─ 2×2 merge ──┐
    sound ── log-mel ─ stem ─ audio block ─ pool ──┤ feature rows, one an LLM token
    token ids ─ embedding ◀──── put in place of ───┘
                    └─ decoder blocks (attention over the pack's CP group) ─▶ logits

It has what `trainer_client.runtime.run_step` asks of a model: `encode`, `dummy_item`,
`encoder_trains`, `decode`. Rows are tokens laid end to end, without a batch axis and without
padding; encoders hold whole items, the decoder holds this rank's part of a pack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer_client import Microbatch, ModalityBatch, log_mel, normalize_pixels, patchify
from trainer_client.runtime import (
    Features,
    GroupPool,
    PackedAttention,
    Recompute,
    forward_microbatch,
    recomputed,
    scatter_rows,
)

PATCH, TEMPORAL_PATCH, MERGE = 14, 2, 2  # as in the qwen2_vl processor
MEL_BINS = 80
ROW_SAMPLES = 320  # samples of sound per row after the stem
# Normalisation of CLIP's and Qwen2-VL's inputs.
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)

Angles = tuple[Tensor, Tensor]  # cosine and sine, [rows, 1, head_dim / 2] each
Span = tuple[int, int]  # (count, length): `count` sequences of one length, end to end
Where = PackedAttention | Sequence[Span]  # of a decoder's block, of an encoder's


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of the model; the defaults give a million parameters.

    `audio_pool` is the `pool` of the job's whisper processor. Raises ValueError when heads do not
    divide widths.
    """

    vocabulary: int = 2_048
    width: int = 128
    layers: int = 2
    heads: int = 2
    kv_heads: int = 1
    encoder_width: int = 64
    encoder_heads: int = 2
    vision_layers: int = 2
    audio_layers: int = 1
    audio_pool: int = 2

    def __post_init__(self) -> None:
        for width, heads in (
            (self.width, 2 * self.heads),  # rotary positions rotate pairs
            (self.encoder_width, 4 * self.encoder_heads),  # those of patches: pairs of pairs
            (self.heads, self.kv_heads),
        ):
            if width % heads:
                raise ValueError(f"{self}: {width} must be a multiple of {heads}")


class DemoModel(nn.Module):
    """See the module's drawing. Weights depend only on torch's seed."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ModelConfig()
        self.tokens = nn.Embedding(config.vocabulary, config.width)  # also the output head
        self.encoders = nn.ModuleDict(
            {"vision": VisionEncoder(config), "audio": AudioEncoder(config)}
        )
        self.layers = nn.ModuleList(DecoderBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, microbatch: Microbatch, groups: GroupPool) -> Tensor:
        """Logits [local tokens, vocabulary] of a microbatch; DDP and FSDP2 hook into this call."""
        return forward_microbatch(self, microbatch, groups)

    def encode(self, modality: str, batch: ModalityBatch) -> Tensor:
        """Feature rows of the items, end to end: [LLM tokens of the items, width]."""
        features: Tensor = self.encoders[modality](batch.items)
        return features

    def dummy_item(self, modality: str) -> Tensor:
        """An item of one LLM token."""
        device, side = self.tokens.weight.device, MERGE * PATCH
        if modality == "vision":
            return torch.zeros(1, side, side, 3, dtype=torch.uint8, device=device)
        return torch.zeros(ROW_SAMPLES * self.config.audio_pool, device=device)

    def encoder_trains(self, modality: str) -> bool:
        """Whether gradients flow into this encoder."""
        return any(weight.requires_grad for weight in self.encoders[modality].parameters())

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor:
        """Logits [local tokens, vocabulary] of this rank's part of the pack, if any."""
        x = self.embed(microbatch, features)
        x = run_layers(self.layers, x, microbatch.position_ids, attention)
        return functional.linear(self.norm(x), self.tokens.weight)

    def embed(self, microbatch: Microbatch, features: Mapping[str, Features]) -> Tensor:
        """Rows [local tokens, width]: embedded ids, with features in their places."""
        x: Tensor = self.tokens(microbatch.input_ids)
        for arrived in features.values():
            x = scatter_rows(x, arrived.rows, arrived.positions)
        return x


class Block(nn.Module):
    """Attention, then a network on each row. `recompute` says what its backward runs again: the
    network alone where selective, which keeps most of what there is to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.recompute: Recompute = "none"

    def forward(self, x: Tensor, angles: Angles, where: Where) -> Tensor:
        """[rows, width] to the same shape; `where` says which rows attend to which."""
        if self.recompute == "full":
            return recomputed(self.whole, x, angles, where)
        return self.whole(x, angles, where)

    def whole(self, x: Tensor, angles: Angles, where: Where) -> Tensor:
        x = x + self.attend(x, angles, where)
        again = self.recompute == "selective"
        return x + (recomputed(self.mix, x) if again else self.mix(x))

    def attend(self, x: Tensor, angles: Angles, where: Where) -> Tensor:
        raise NotImplementedError

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class DecoderBlock(Block):
    """Grouped-query attention and SwiGLU, as in Llama and Qwen2. `where` is the pack's attention,
    which exchanges rows with other ranks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, head_dim = config.width, config.width // config.heads
        self.head_dim = head_dim
        self.heads = (config.heads, config.kv_heads, config.kv_heads)
        self.widths = [heads * head_dim for heads in self.heads]
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, sum(self.widths), bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate_up = nn.Linear(width, 2 * (8 * width // 3), bias=False)
        self.down = nn.Linear(8 * width // 3, width, bias=False)

    def attend(self, x: Tensor, angles: Angles, where: Where) -> Tensor:
        assert callable(where)
        parts = self.qkv(self.attention_norm(x)).split(self.widths, dim=-1)
        q, k, v = (
            part.unflatten(-1, (heads, -1)) for part, heads in zip(parts, self.heads, strict=True)
        )
        attended: Tensor = self.out(
            where(rotate(q, angles), rotate(k, angles), v, causal=True).flatten(1)
        )
        return attended

    def mix(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        mixed: Tensor = self.down(functional.silu(gate) * up)
        return mixed


def run_layers(
    layers: nn.ModuleList, x: Tensor, position_ids: Tensor, attention: PackedAttention
) -> Tensor:
    """Decoder blocks one after the other: [rows, width] to the same shape."""
    for layer in layers:
        assert isinstance(layer, DecoderBlock)
        angles = rotary_angles(position_ids[:, None], layer.head_dim, x.dtype)
        x = layer(x, angles, attention)
    return x


class EncoderBlock(Block):
    """Full attention inside each span, and a GELU network. `where`: spans that cover the rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.encoder_width
        self.heads = config.encoder_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def attend(self, x: Tensor, angles: Angles, where: Where) -> Tensor:
        assert not callable(where)
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        attended: Tensor = self.out(
            attend_within(rotate(q, angles), rotate(k, angles), v, where).flatten(1)
        )
        return attended

    def mix(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mlp(self.mlp_norm(x))
        return mixed


class VisionEncoder(nn.Module):
    """Images and clips of any size, in the rows of Qwen2-VL (arXiv 2409.12191, §2.1).

    As there, patches attend only within their own pair of frames, the decoder connects the pairs,
    and 2 × 2 neighbours merge into one LLM token.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.encoder_width
        self.head_dim = width // config.encoder_heads
        self.embed = nn.Linear(3 * TEMPORAL_PATCH * PATCH**2, width)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.vision_layers))
        self.norm = nn.LayerNorm(width)
        self.merge = nn.Sequential(
            nn.Linear(MERGE**2 * width, MERGE**2 * width),
            nn.GELU(),
            nn.Linear(MERGE**2 * width, config.width),
        )

    def forward(self, items: Sequence[Tensor]) -> Tensor:
        """uint8 [frames, height, width, 3] each to [Σ ⌈frames/2⌉ · height/28 · width/28, width].

        Raises ValueError when a side is not a multiple of 28.
        """
        x, (angles, spans) = self.rows(items), self.places(items)
        for block in self.blocks:
            x = block(x, angles, spans)
        return self.merged(x, spans)

    def rows(self, items: Sequence[Tensor]) -> Tensor:
        """Embedded patches: [Σ ⌈frames/2⌉ · height/14 · width/14, width]."""
        dtype = self.embed.weight.dtype
        patches = [
            patchify(
                normalize_pixels(pixels, PIXEL_MEAN, PIXEL_STD, dtype),
                patch=PATCH,
                temporal_patch=TEMPORAL_PATCH,
                merge=MERGE,
            )[0]
            for pixels in items
        ]
        return torch.cat([self.embed(rows) for rows in patches])

    def places(self, items: Sequence[Tensor]) -> tuple[Angles, list[Span]]:
        """Where the patches of items lie, and which see one another."""
        grids = [
            (-(-frames // TEMPORAL_PATCH), height // PATCH, width // PATCH)
            for frames, height, width, _ in (item.shape for item in items)
        ]
        places = torch.cat([patch_places(h, w).repeat(t, 1) for t, h, w in grids])
        weight = self.embed.weight
        angles = rotary_angles(places.to(weight.device), self.head_dim, weight.dtype)
        return angles, [(t, h * w) for t, h, w in grids]

    def merged(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        """[patches, width] to [LLM tokens, decoder width]: neighbours are adjacent rows."""
        merged: Tensor = self.merge(self.norm(x).reshape(-1, MERGE**2 * x.shape[1]))
        return merged


class AudioEncoder(nn.Module):
    """Recordings of up to 30 s: Whisper's stem (arXiv 2212.04356, §2.2), then pooling.

    100 mel frames a second become 50 rows in the stem and 50 / pool LLM tokens.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.encoder_width
        self.head_dim, self.pool = width // config.encoder_heads, config.audio_pool
        self.stem = nn.Sequential(
            nn.Conv1d(MEL_BINS, width, kernel_size=3, padding=1),
            nn.GELU(),
            nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1),
            nn.GELU(),
        )
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.audio_layers))
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, config.width)

    def forward(self, items: Sequence[Tensor]) -> Tensor:
        """float32 [samples] at 16 kHz each to [Σ ((samples/160 − 1) // 2 + 1) // pool, width]."""
        x, (angles, spans) = self.rows(items), self.places(items)
        for block in self.blocks:
            x = block(x, angles, spans)
        return self.merged(x, spans)

    def rows(self, items: Sequence[Tensor]) -> Tensor:
        """What the stem gives: [Σ rows, width]."""
        dtype = self.project.weight.dtype
        mels = [log_mel(audio, n_mels=MEL_BINS).to(dtype)[None] for audio in items]
        return torch.cat([self.stem(mel)[0].T for mel in mels])

    def places(self, items: Sequence[Tensor]) -> tuple[Angles, list[Span]]:
        """Where the rows of items lie, and which see one another."""
        frames = [len(audio) // (ROW_SAMPLES // 2) for audio in items]
        lengths = [max(1, (count - 1) // 2 + 1) for count in frames]
        weight = self.project.weight
        places = torch.cat([torch.arange(length, device=weight.device) for length in lengths])
        angles = rotary_angles(places[:, None], self.head_dim, weight.dtype)
        return angles, [(1, length) for length in lengths]

    def merged(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        """[rows, width] to [LLM tokens, decoder width]. Remaining rows that do not fill a pool are
        dropped, as average pooling does."""
        lengths = [length for _, length in spans]
        pooled = [
            rows[: length // self.pool * self.pool].unflatten(0, (-1, self.pool)).mean(1)
            for rows, length in zip(self.norm(x).split(lengths), lengths, strict=True)
        ]
        projected: Tensor = self.project(torch.cat(pooled))
        return projected


def patch_places(height: int, width: int) -> Tensor:
    """Row and column of each patch of a frame, in `patchify`'s order: int64 [height · width, 2]."""
    blocks = (height // MERGE, width // MERGE, MERGE, MERGE)
    row = torch.arange(height).view(-1, 1, MERGE, 1).expand(blocks)
    column = torch.arange(width).view(1, -1, 1, MERGE).expand(blocks)
    return torch.stack([row, column], dim=-1).flatten(0, 3)


def rotary_angles(places: Tensor, head_dim: int, dtype: torch.dtype) -> Angles:
    """Rotary positions of rows at `places` [rows, axes]; the axes share the head between them.

    Source: RoPE (arXiv 2104.09864), eq. 15. Angles are taken in float64: in float32 those of
    distant tokens are off by more than a rounding error of the result.
    """
    per_axis = head_dim // 2 // places.shape[1]
    exponents = torch.arange(per_axis, dtype=torch.float64, device=places.device) / per_axis
    angles = (places[:, :, None] * 10_000.0**-exponents).flatten(1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn the pairs (i, i + dim/2) of x [rows, heads, dim] by the angles of their row."""
    cosine, sine = angles
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def attend_within(q: Tensor, k: Tensor, v: Tensor, spans: Sequence[Span]) -> Tensor:
    """Full attention inside every sequence: [rows, heads, dim] to the same shape."""
    sizes = [count * length for count, length in spans]
    pieces = [torch.split(tensor, sizes) for tensor in (q, k, v)]
    attended = []
    for span, *parts in zip(spans, *pieces, strict=True):
        # [count · length, heads, dim] → [count, heads, length, dim]
        heads_first = (part.unflatten(0, span).transpose(1, 2) for part in parts)
        out = functional.scaled_dot_product_attention(*heads_first)
        attended.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(attended)
