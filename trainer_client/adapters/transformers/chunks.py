"""A model of transformers, cut into the chunks of a pipeline as a layout says.

    encoder ─▶ embeddings ─ layer ─┆─ layer ─┆─ layer ─ norm, head
              FirstChunk           ┆   LaterChunk, once a cut

A chunk is the library's own model with some of its parts: copies that share its modules, in which
the decoder has some of the layers alone. What runs is the library's forward of those. A decoder
that does more than its layers between embeddings and norm (scales what it takes, for instance)
would do so in each chunk, and is refused.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.checkpoint import checkpoint

from trainer_client.adapters.transformers.cut_encoders import encoder_layers, part_of
from trainer_client.adapters.transformers.families import TextFamily
from trainer_client.adapters.transformers.faults import UnsupportedModel
from trainer_client.adapters.transformers.model_parts import Keep, with_parts
from trainer_client.adapters.transformers.trainable import TrainableModel, refuse_long_rope
from trainer_client.runtime import (
    Features,
    HiddenStates,
    LayoutError,
    PackedAttention,
    PipelineMesh,
    Recompute,
    StageLayout,
    sum_of_stages,
)
from trainer_client.shard import Microbatch, ModalityBatch


def pipeline_chunks(model: TrainableModel, layout: StageLayout) -> list[Module]:
    """The layout's chunks, in model order; they share the model's weights, whose layers recompute
    from now on as the layout says. Where encoders are spread, give ``WholeEncoders(model)`` to
    ``run_pipeline_step``; where they are cut, ``CutEncoders(model, layout.encoder_cut)``.

    Raises
    ------
    LayoutError: the layout is of another model, or cuts it where it cannot be cut.
    UnsupportedModel: the decoder does more than run its layers, a layer cannot recompute, or the
        encoder is cut and cannot be.
    """
    family, cut = model.family, layout.encoder_cut
    begins = 0 if cut is None else cut.decoder_chunk
    bounds = layout.decoder_bounds[begins:]
    _set_recompute(family, layout)
    _refuse_uncuttable(family)
    if layout.chunks == 1:
        raise LayoutError(
            f"bounds are {layout.bounds}, which is one chunk; train the model itself by run_step"
        )
    if bounds[1] < family.deep_layers:
        raise LayoutError(
            f"its first chunk has {bounds[1]} decoder layers, and {type(family.model).__name__} "
            f"adds features behind its first {family.deep_layers}; cut behind them"
        )
    first, *later = [slice(*pair) for pair in itertools.pairwise(bounds)]
    tied = _are_tied(family)
    keep: list[Keep] = ["embeddings"]
    if cut is None:
        keep.append("encoders")
    if not later:
        keep.append("head")
    chunks: list[Module] = [
        *(Module() for _ in range(begins)),  # which have parts of the encoder alone
        FirstChunk(with_parts(family, first, keep=keep), tied=tied, last=not later),
    ]
    for layers in later:
        last = layers is later[-1]
        its_own = with_parts(family, layers, keep=("head",) if last else ())
        chunks.append(LaterChunk(its_own, tied=tied and last, last=last))
    for of_chunks in () if cut is None else cut.parts.values():
        for chunk, part in of_chunks.items():
            chunks[chunk].add_module("encoder", part_of(family, part).model)
    return chunks


def hidden_states(model: TrainableModel) -> HiddenStates:
    """What travels between the chunks of a model: of the type that its decoder's weights have."""
    weight = next(model.family.decoder.layers[0].parameters())
    width = model.family.decoder.config.hidden_size
    return HiddenStates(width=width, dtype=weight.dtype, device=weight.device)


def sum_tied_gradient(chunks: Sequence[Module], mesh: PipelineMesh) -> None:
    """Add up the gradients of the embeddings and the head, where the model ties them. Call it on
    all ranks after ``run_pipeline_step``."""
    for chunk in chunks:
        if isinstance(chunk, FirstChunk | LaterChunk) and chunk.tied is not None:
            sum_of_stages(chunk.tied, mesh)


class FirstChunk(TrainableModel):
    """Encoders, embeddings and some layers, whose output is hidden states; the head as well where
    chunks before it have the encoders, and it is the last."""

    def __init__(self, family: TextFamily, *, tied: bool, last: bool) -> None:
        super().__init__(family.model, family)
        self._tied, self._last = tied, last
        self.train()

    @property
    def tied(self) -> Parameter | None:
        """The embeddings' weight as it is now, FSDP having replaced it; None where the head has its
        own."""
        weight: Parameter = self.family.decoder.embed_tokens.weight
        return weight if self._tied else None

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor:
        """Hidden states [local rows, width]; of the last chunk what the model decodes to."""
        if self._last:
            return super().decode(microbatch, features, attention)
        refuse_long_rope(self.family.decoder.config, microbatch)
        taken = self.family.taken(microbatch.input_ids[None], features)
        return self.family.through(self.family.hidden, taken, microbatch, attention)


class LaterChunk(Module):
    """Some layers; the last chunk also has norm and head."""

    def __init__(self, family: TextFamily, *, tied: bool, last: bool) -> None:
        super().__init__()
        self.model = family.model
        self._family, self._tied, self._last = family, tied, last
        self.train()

    @property
    def tied(self) -> Parameter | None:
        """The head's weight as it is now; None where it is elsewhere, or the embeddings have
        another."""
        head = self._family.model.get_output_embeddings()
        return head.weight if self._tied else None

    def forward(self, microbatch: Microbatch, hidden: Tensor, attention: PackedAttention) -> Tensor:
        """Hidden states [rows, width], or of the last chunk logits [rows, vocabulary]."""
        family = self._family
        compute = family.logits if self._last else family.hidden
        return family.through(compute, {"inputs_embeds": hidden[None]}, microbatch, attention)


class WholeEncoders(Module):
    """A model's encoders as ``LayeredEncoders``, each of one layer: for layouts that spread them
    over all stages."""

    def __init__(self, model: TrainableModel) -> None:
        super().__init__()
        self._family = with_parts(model.family, slice(0, 0), keep=("encoders",))
        self.model = self._family.model
        self.modalities = tuple(self._family.encoders)

    def layers(self, modality: str) -> int:
        """1: the library's encoder with its projector, as a whole."""
        return 1

    def encoder_trains(self, modality: str) -> bool:
        """Whether any weight that makes this modality's features takes gradients."""
        return any(weight.requires_grad for weight in self._family.weights(modality))

    def run_layer(
        self, modality: str, batch: ModalityBatch, layer: int, hidden: Tensor | None
    ) -> Tensor:
        """Feature rows of the batch's items."""
        return self._family.encode(modality, batch)

    def shape_of(self, modality: str, batch: ModalityBatch, layer: int) -> tuple[int, int]:
        """Rows as the plan counts them; with features for deeper layers behind their own width."""
        width = self._family.decoder.config.hidden_size * (1 + self._family.deep_layers)
        return len(batch.exchange.send_rows), width


def _are_tied(family: TextFamily) -> bool:
    """Whether embeddings and head have one weight. A config that ties them is not enough: the
    library leaves those of a checkpoint apart that differ."""
    head = family.model.get_output_embeddings()
    return head.weight is family.decoder.embed_tokens.weight


def _refuse_uncuttable(family: TextFamily) -> None:
    """Raise UnsupportedModel where chunks would compute something else than the whole."""
    name, decoder = type(family.decoder).__name__, family.decoder
    parts = dict(decoder.named_children())
    others = [
        part
        for part, module in parts.items()
        if part not in ("embed_tokens", "layers", "norm") and any(module.parameters())
    ]
    headless = family.model.get_output_embeddings() is None
    if not {"embed_tokens", "layers", "norm"} <= parts.keys() or others or headless:
        raise UnsupportedModel(
            f"{name} has {', '.join(parts)}; chunks are cut where a decoder has embed_tokens, "
            "layers, norm and no other weights, and its model a head: train it by run_step"
        )
    if type(family).spans is not TextFamily.spans:
        raise UnsupportedModel(
            f"{type(family.model).__name__} lets the tokens of an image see one another, for which "
            "each layer needs the tokens, and later stages have none: train it by run_step"
        )
    empty = with_parts(family, slice(0, 0), keep=())
    weight = next(decoder.layers[0].parameters())
    rows = torch.linspace(-1, 1, 3 * decoder.config.hidden_size).view(1, 3, -1).to(weight)
    places = torch.arange(3, device=weight.device).expand(family.position_rows, 1, 3)
    positions = places if family.position_rows > 1 else places[0]
    with torch.no_grad():
        given = empty.hidden(inputs_embeds=rows, position_ids=positions, use_cache=False)
    if not torch.equal(given, rows):
        raise UnsupportedModel(
            f"{name} changes what it takes before its first layer or behind its last, and would do "
            "so in each chunk: train it by run_step"
        )


def _set_recompute(family: TextFamily, layout: StageLayout) -> None:
    """Have each layer recompute what the layout says. Raises LayoutError, UnsupportedModel."""
    towers = {"llm": list(family.decoder.layers)}
    for modality in family.encoders:
        towers[modality] = encoder_layers(family)
    for name in sorted(towers.keys() | set(layout.modules)):
        layers = towers.get(name, [])
        for layer, how in zip(layers, layout.recompute_of(name, len(layers)), strict=True):
            _recompute(layer, how)


def _recompute(layer: Any, how: Recompute) -> None:
    """Selective is the network on each row, which keeps most of what there is to keep."""
    network = getattr(layer, "mlp", None)
    if network is not None:
        network.__dict__.pop("forward", None)
    if (how == "selective" and network is None) or not hasattr(layer, "gradient_checkpointing"):
        raise UnsupportedModel(
            f"{type(layer).__name__} cannot recompute in part; lay the model out with full "
            "recomputation of this layer, or none"
        )
    layer.gradient_checkpointing = how == "full"
    layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    if how == "selective" and network is not None:
        network.forward = partial(checkpoint, network.forward, use_reentrant=False)
