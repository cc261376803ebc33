"""A model's encoder cut over the first chunks of a pipeline, as a layout says.

    chunk 0   pixels ─▶ patches ─ layer ─ layer ─┆ hidden states
    chunk 1                       hidden states ─┆─ layer ─ layer ─ merger ─▶ feature rows

A part is the library's own encoder with some of its layers, so that it computes positions, windows
and masks itself. In the place of the layers before a part stands what the part before it gave; what
comes in with the first layer, and what merges behind the last, each belong to one part alone.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from trainer_client.adapters.transformers.families import QwenVL, TextFamily
from trainer_client.adapters.transformers.faults import UnsupportedModel
from trainer_client.adapters.transformers.model_parts import with_children, with_parts
from trainer_client.adapters.transformers.trainable import TrainableModel
from trainer_client.runtime import EncoderCut
from trainer_client.shard import ModalityBatch

Part = tuple[int, int]  # first layer, and end


class CutEncoders(Module):
    """A model's encoders as ``LayeredEncoders`` whose layers are the parts of a layout's
    ``encoder_cut``. Raises UnsupportedModel where the family's encoder cannot be cut."""

    def __init__(self, model: TrainableModel, cut: EncoderCut) -> None:
        super().__init__()
        self.modalities = tuple(model.family.encoders)
        self._family = model.family
        self._parts = {
            name: [part_of(model.family, part) for part in cut.layers_of(name)]
            for name in self.modalities
        }
        self.held = ModuleList(part.model for parts in self._parts.values() for part in parts)

    def layers(self, modality: str) -> int:
        """How many chunks have a part of the encoder."""
        return len(self._parts[modality])

    def encoder_trains(self, modality: str) -> bool:
        """Whether any weight that makes this modality's features takes gradients."""
        return any(weight.requires_grad for weight in self._family.weights(modality))

    def run_layer(
        self, modality: str, batch: ModalityBatch, layer: int, hidden: Tensor | None
    ) -> Tensor:
        """Hidden states behind a part's layers; of the last part, feature rows."""
        part = self._parts[modality][layer]
        encoder = getattr(part.model.model, part.encoders[modality][0])
        if not isinstance(encoder, _EncoderPart):
            return part.encode(modality, batch)
        return encoder.run(part, batch, hidden)

    def shape_of(self, modality: str, batch: ModalityBatch, layer: int) -> tuple[int, int]:
        """Of a part's hidden states; behind the last, of feature rows, which the plan counts."""
        rows, family = len(batch.exchange.send_rows), self._family
        if layer + 1 == self.layers(modality):
            return rows, family.decoder.config.hidden_size * (1 + family.deep_layers)
        merged = family.model.config.vision_config.spatial_merge_size**2
        return rows * merged, _width(family.model.model.visual)


def part_of(family: TextFamily, part: Part) -> TextFamily:
    """The family of a copy of its model that has this part of the encoder alone. Raises
    UnsupportedModel where it would divide an encoder that does more between its layers than to hand
    on hidden states."""
    whole = with_parts(family, slice(0, 0), keep=("encoders",))
    layers = len(encoder_layers(family))
    if part == (0, layers):
        return whole
    if type(family) is not QwenVL:
        raise UnsupportedModel(
            f"the layout cuts the encoder of {type(family.model).__name__} behind layer "
            f"{(part[0] or part[1]) - 1}; encoders of Qwen2-VL and Qwen2.5-VL can be cut, and "
            "others not: lay out with `dataservice layout --encoders first --encoders own "
            "--encoders spread`"
        )
    visual = whole.model.model.visual
    whole.model.model.__dict__["_modules"]["visual"] = _EncoderPart(visual, part)
    return whole


def encoder_layers(family: TextFamily) -> list[Module]:
    """The layers of its encoder."""
    (names,) = family.encoders.values()
    parts = [getattr(family.model.model, name) for name in names]
    return max((_longest_list(part) for part in parts), key=len)


def _longest_list(part: Any) -> list[Module]:
    """Other module lists hold what stands beside the layers."""
    modules = part.modules() if isinstance(part, Module) else ()
    lists = [each for each in modules if isinstance(each, ModuleList)]
    return list(max(lists, key=len, default=[]))


def _width(visual: Any) -> int:
    width: int = next(visual.blocks[-1].norm1.parameters()).shape[0]
    return width


class _EncoderPart(Module):
    """Some of the blocks of a vision encoder of Qwen."""

    def __init__(self, visual: Any, part: Part) -> None:
        super().__init__()
        (first, end), count = part, len(visual.blocks)
        self._given, self._taken = _Given(), _Taken()
        blocks: list[Module] = [_Passed() for _ in range(count)]
        blocks[first:end] = visual.blocks[first:end]
        children: dict[str, Module | None] = {}
        if first > 0:
            blocks[first - 1] = self._given
            children["patch_embed"] = _NoPatches(_width(visual))
        if end < count:
            blocks[end] = self._taken
            children["merger"] = _NoMerger(visual.spatial_merge_size**2)
        self._first, self._last = first == 0, end == count
        self.visual = with_children(visual, **children, blocks=ModuleList(blocks))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.visual(*inputs, **named)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.visual.dtype
        return dtype

    @property
    def config(self) -> Any:
        return self.visual.config

    @property
    def spatial_merge_size(self) -> int:
        size: int = self.visual.spatial_merge_size
        return size

    def run(self, family: Any, batch: ModalityBatch, hidden: Tensor | None) -> Tensor:
        """This part of one microbatch."""
        # Pixels are those of the first part; of a later one's only the shapes count.
        rows = family.patches(batch) if hidden is None else hidden.new_empty(len(hidden), 1)
        self._given.hidden = hidden
        found = family.seen_patches(rows, batch)
        self._given.hidden, taken = None, self._taken.hidden
        self._taken.hidden = None
        if self._last:
            made: Tensor = family._rows(found)
            return made
        assert taken is not None  # the blocks ran
        return taken


class _Passed(Module):
    """In the place of a block that another part has."""

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        return hidden


class _Given(Module):
    """In the place of the block before a part's first: gives what that one gave."""

    hidden: Tensor | None = None

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        assert self.hidden is not None
        return self.hidden


class _Taken(Module):
    """In the place of the block behind a part's last: keeps what that one gave."""

    hidden: Tensor | None = None

    def forward(self, hidden: Tensor, **_: Any) -> Tensor:
        self.hidden = hidden
        return hidden


class _NoPatches(Module):
    """Rows that nothing reads, as many as there are patches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.new_zeros(len(pixels), self._width)


class _NoMerger(Module):
    """Rows that nothing reads, as many as there are merged ones."""

    def __init__(self, merged: int) -> None:
        super().__init__()
        self._merged = merged

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.detach().reshape(len(hidden) // self._merged, -1)
