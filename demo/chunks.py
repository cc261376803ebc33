"""The demo's model, cut into chunks for pipeline parallelism.

    encoders ─▶ embedding ─ layer ─┆─ layer ─┆─ layer ─┆─ layer ─ norm, output head
              FirstChunk           ┆      LaterChunk, once a cut

A layout may cut the encoders as well, over the first chunks; those before the embedding only hold
what `DemoEncoders` run there.

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
    EncoderCut,
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
    if (cut := layout.encoder_cut) is None:
        return _cut(model, layout.decoder_bounds)
    chunks = _cut(model, layout.decoder_bounds[cut.decoder_chunk :], encoders=nn.ModuleDict())
    chunks = [*(nn.Module() for _ in range(cut.decoder_chunk)), *chunks]
    for name, of_chunks in cut.parts.items():
        for chunk, (first, end) in of_chunks.items():
            part = _part_of(model.encoders[name], first, end)
            chunks[chunk].add_module(f"part_of_{name}", part)
    return chunks


def _cut(
    model: DemoModel, bounds: Sequence[int], encoders: nn.ModuleDict | None = None
) -> list[nn.Module]:
    parts = [list(model.layers[first:end]) for first, end in itertools.pairwise(bounds)]
    later = [LaterChunk(model, part, last=part is parts[-1]) for part in parts[1:]]
    return [FirstChunk(model, parts[0], encoders=encoders, last=not later), *later]


def _part_of(encoder: nn.Module, first: int, end: int) -> nn.ModuleList:
    """What an encoder's blocks first..end bring with them: what comes in with the first block, what
    merges rows with the last."""
    assert isinstance(encoder, VisionEncoder | AudioEncoder)
    children = dict(encoder.named_children())
    place = list(children).index("blocks")
    before, behind = list(children.values())[:place], list(children.values())[place + 1 :]
    held = list(encoder.blocks[first:end])
    if first == 0:
        held = [*before, *held]
    return nn.ModuleList([*held, *behind] if end == len(encoder.blocks) else held)


class FirstChunk(DemoModel):
    """A `DemoModel` without its last layers and its head, whose output is hidden states; or, where
    encoders alone come before it and it is the last, with its head. `encoders`: those that it runs,
    all when not given."""

    def __init__(
        self,
        model: DemoModel,
        layers: Sequence[nn.Module],
        *,
        encoders: nn.ModuleDict | None = None,
        last: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        self.config, self.tokens = model.config, model.tokens
        self.encoders = model.encoders if encoders is None else encoders
        self.layers = nn.ModuleList(layers)
        self.head = model.norm if last else None

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor:
        """Hidden states [local tokens, width], or of the last chunk logits."""
        x = self.embed(microbatch, features)
        x = run_layers(self.layers, x, microbatch.position_ids, attention)
        return x if self.head is None else functional.linear(self.head(x), self.tokens.weight)


class DemoEncoders(nn.Module):
    """Encoders layer by layer: `LayeredEncoders` of the runtime. With the `cut` of a layout, what a
    chunk has of an encoder is one of its layers."""

    def __init__(
        self,
        model: DemoModel,
        modalities: Sequence[str] = ("vision", "audio"),
        cut: EncoderCut | None = None,
    ) -> None:
        super().__init__()
        self.modalities, self.config = tuple(modalities), model.config
        self.encoders = nn.ModuleDict({name: model.encoders[name] for name in modalities})
        self.blocks = {
            name: cut.layers_of(name) if cut else _each(len(self._encoder(name).blocks))
            for name in modalities
        }
        self.encoder_trains = model.encoder_trains

    def layers(self, modality: str) -> int:
        """Blocks of an encoder, or its parts."""
        return len(self.blocks[modality])

    def run_layer(
        self, modality: str, batch: ModalityBatch, layer: int, hidden: Tensor | None
    ) -> Tensor:
        """One block or part; the first also embeds the items, the last makes feature rows."""
        encoder = self._encoder(modality)
        angles, spans = encoder.places(batch.items)
        x = encoder.rows(batch.items) if hidden is None else hidden
        for block in encoder.blocks[slice(*self.blocks[modality][layer])]:
            x = block(x, angles, spans)
        return x if layer + 1 < self.layers(modality) else encoder.merged(x, spans)

    def shape_of(self, modality: str, batch: ModalityBatch, layer: int) -> tuple[int, int]:
        """Of a block's rows; behind the last, of feature rows, which the plan counts."""
        encoder = self._encoder(modality)
        if layer + 1 == self.layers(modality):
            return len(batch.exchange.send_rows), self.config.width
        _, spans = encoder.places(batch.items)
        return sum(count * length for count, length in spans), self.config.encoder_width

    def _encoder(self, modality: str) -> VisionEncoder | AudioEncoder:
        encoder = self.encoders[modality]
        assert isinstance(encoder, VisionEncoder | AudioEncoder)
        return encoder


def _each(layers: int) -> list[tuple[int, int]]:
    return [(layer, layer + 1) for layer in range(layers)]


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
