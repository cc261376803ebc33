"""The demo's model, cut into chunks for pipeline parallelism.

    encoders ─▶ embedding ─ layer ─┆─ layer ─┆─ layer ─┆─ layer ─ norm, output head
              FirstChunk           ┆      LaterChunk, once a cut

Chunks share the whole model's own modules. Its output head is its embedding, so the first and the
last stage each compute a part of that weight's gradient; `sum_tied_gradient` adds the parts.
`DemoEncoders` are for schedules in which encoders run by themselves, on any stage.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from demo.model import AudioEncoder, Block, DemoModel, VisionEncoder, run_layers
from trainer_client import Microbatch, ModalityBatch
from trainer_client.runtime import (
    Features,
    PackedAttention,
    PipelineMesh,
    StageLayout,
    sum_of_stages,
)


def cut_model(model: DemoModel, chunks: int) -> list[nn.Module]:
    """Two or more chunks with nearly equal numbers of layers, in model order."""
    places = torch.arange(len(model.layers)).tensor_split(chunks)
    return _cut(model, [0, *itertools.accumulate(len(part) for part in places)])


def lay_out_model(model: DemoModel, layout: StageLayout) -> list[nn.Module]:
    """The layout's chunks, in model order; their layers recompute as it says. Raises LayoutError
    where it is of another model."""
    towers = {"llm": list(model.layers)}
    for name, encoder in model.encoders.items():
        assert isinstance(encoder, VisionEncoder | AudioEncoder)
        towers[name] = list(encoder.blocks)
    for name in sorted(towers.keys() | set(layout.modules)):
        blocks = towers.get(name, [])
        for block, how in zip(blocks, layout.recompute_of(name, len(blocks)), strict=True):
            assert isinstance(block, Block)
            block.recompute = how
    return _cut(model, layout.decoder_bounds)


def _cut(model: DemoModel, bounds: Sequence[int]) -> list[nn.Module]:
    parts = [list(model.layers[first:end]) for first, end in itertools.pairwise(bounds)]
    later = [LaterChunk(model, part, last=part is parts[-1]) for part in parts[1:]]
    return [FirstChunk(model, parts[0]), *later]


class FirstChunk(DemoModel):
    """A `DemoModel` without its last layers and its head; its output is hidden states."""

    def __init__(self, model: DemoModel, layers: Sequence[nn.Module]) -> None:
        nn.Module.__init__(self)
        self.config, self.tokens, self.encoders = model.config, model.tokens, model.encoders
        self.layers = nn.ModuleList(layers)

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor:
        """Hidden states [local tokens, width]."""
        x = self.embed(microbatch, features)
        return run_layers(self.layers, x, microbatch.position_ids, attention)


class DemoEncoders(nn.Module):
    """Encoders layer by layer: `LayeredEncoders` of the runtime."""

    def __init__(self, model: DemoModel, modalities: Sequence[str] = ("vision", "audio")) -> None:
        super().__init__()
        self.modalities, self.config = tuple(modalities), model.config
        self.encoders = nn.ModuleDict({name: model.encoders[name] for name in modalities})
        self.encoder_trains = model.encoder_trains

    def layers(self, modality: str) -> int:
        """Blocks of an encoder."""
        return len(self._encoder(modality).blocks)

    def run_layer(
        self, modality: str, batch: ModalityBatch, layer: int, hidden: Tensor | None
    ) -> Tensor:
        """One block; the first also embeds the items, the last makes feature rows."""
        encoder = self._encoder(modality)
        angles, spans = encoder.places(batch.items)
        x = encoder.rows(batch.items) if hidden is None else hidden
        x = encoder.blocks[layer](x, angles, spans)
        return x if layer + 1 < len(encoder.blocks) else encoder.merged(x, spans)

    def shape_of(self, modality: str, batch: ModalityBatch, layer: int) -> tuple[int, int]:
        """Of a block's rows; behind the last, of feature rows, which the plan counts."""
        encoder = self._encoder(modality)
        if layer + 1 == len(encoder.blocks):
            return len(batch.exchange.send_rows), self.config.width
        _, spans = encoder.places(batch.items)
        return sum(count * length for count, length in spans), self.config.encoder_width

    def _encoder(self, modality: str) -> VisionEncoder | AudioEncoder:
        encoder = self.encoders[modality]
        assert isinstance(encoder, VisionEncoder | AudioEncoder)
        return encoder


class LaterChunk(nn.Module):
    """Some layers; the last chunk also has norm and head."""

    def __init__(self, model: DemoModel, layers: Sequence[nn.Module], *, last: bool) -> None:
        super().__init__()
        self.config = model.config
        self.layers = nn.ModuleList(layers)
        self.norm = model.norm if last else None
        self.tokens = model.tokens if last else None

    def forward(self, microbatch: Microbatch, hidden: Tensor, attention: PackedAttention) -> Tensor:
        """Hidden states [rows, width], or in the last chunk logits [rows, vocabulary]."""
        x = run_layers(self.layers, hidden, microbatch.position_ids, attention)
        if self.norm is None or self.tokens is None:
            return x
        return functional.linear(self.norm(x), self.tokens.weight)


def sum_tied_gradient(chunks: Sequence[nn.Module], mesh: PipelineMesh) -> None:
    """Add up the gradients of the embedding's two uses, on the stages that hold it. Call it after
    `run_pipeline_step`."""
    ours = [chunk for chunk in chunks if isinstance(chunk, FirstChunk | LaterChunk)]
    for held in {chunk.tokens for chunk in ours if chunk.tokens is not None}:
        sum_of_stages(cast(nn.Parameter, held.weight), mesh)
