"""A model of transformers, cut into the chunks of a pipeline as a layout says.

    encoder ─▶ embeddings ─ layer ─┆─ layer ─┆─ layer ─ norm, head
              FirstChunk           ┆   LaterChunk, once a cut

A chunk is the library's own model with some of its parts: copies that share its modules, in which
the decoder has some of the layers alone. What runs is the library's forward of those. A decoder
that does more than its layers between embeddings and norm (scales what it takes, for instance)
would do so in each chunk, and is refused.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Identity, Module, ModuleList, Parameter
from torch.utils.checkpoint import checkpoint

from trainer_client.adapters.transformers.families import TextFamily
from trainer_client.adapters.transformers.faults import UnsupportedModel
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

Keep = Literal["encoders", "embeddings", "head"]


def pipeline_chunks(model: TrainableModel, layout: StageLayout) -> list[Module]:
    """The layout's chunks, in model order; they share the model's weights, whose layers recompute
    from now on as the layout says. Where encoders are spread, give ``WholeEncoders(model)`` to
    ``run_pipeline_step``.

    Raises
    ------
    LayoutError: the layout is of another model, or cuts it where it cannot be cut.
    UnsupportedModel: the decoder does more than run its layers, or a layer cannot recompute.
    """
    family, bounds = model.family, layout.decoder_bounds
    _set_recompute(family, layout)
    _refuse_uncuttable(family)
    if len(bounds) < 3:
        raise LayoutError(
            f"bounds are {layout.bounds}, which is one chunk; train the model itself by run_step"
        )
    if bounds[1] < family.deep_layers:
        raise LayoutError(
            f"the first chunk has {bounds[1]} decoder layers, and {type(family.model).__name__} "
            f"adds features behind its first {family.deep_layers}; cut behind them"
        )
    first, *between, last = [slice(*pair) for pair in itertools.pairwise(bounds)]
    return [
        FirstChunk(_with_parts(family, first, keep=("encoders", "embeddings"))),
        *(LaterChunk(_with_parts(family, part, keep=()), last=False) for part in between),
        LaterChunk(_with_parts(family, last, keep=("head",)), last=True),
    ]


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
    """Encoders, embeddings and some layers; its output is hidden states."""

    def __init__(self, family: TextFamily) -> None:
        super().__init__(family.model, family)
        self.tied = _tied(family)
        self.train()

    def decode(
        self,
        microbatch: Microbatch,
        features: Mapping[str, Features],
        attention: PackedAttention,
    ) -> Tensor:
        """Hidden states [local rows, width]."""
        refuse_long_rope(self.family.decoder.config, microbatch)
        taken = self.family.taken(microbatch.input_ids[None], features)
        return self.family.through(self.family.hidden, taken, microbatch, attention)


class LaterChunk(Module):
    """Some layers; the last chunk also has norm and head."""

    def __init__(self, family: TextFamily, *, last: bool) -> None:
        super().__init__()
        self.model = family.model
        self.tied = _tied(family)
        self._family, self._last = family, last
        self.train()

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
        self._family = _with_parts(model.family, slice(0, 0), keep=("encoders",))
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


def _with_parts(family: TextFamily, layers: slice, *, keep: Sequence[Keep]) -> TextFamily:
    """The family of a copy of its model that has these decoder layers and these parts alone."""
    decoder = family.decoder
    parts = ModuleList(list(decoder.layers)[layers])
    children: dict[str, Module | None] = {"layers": parts}
    if "head" not in keep:
        children["norm"] = Identity()
    if "embeddings" not in keep:
        children["embed_tokens"] = None
    copied = _copy(decoder, **children)
    copied.config = _config_of(decoder.config, layers, len(parts))
    path = next(name for name, part in family.model.named_modules() if part is decoder).split(".")
    for depth in reversed(range(len(path))):
        holder = family.model.get_submodule(".".join(path[:depth]))
        kept = "encoders" in keep
        others = {
            name: None
            for name, part in holder.named_children()
            if name != path[depth] and not (kept if depth else "head" in keep)
        }
        copied = _copy(holder, **others, **{path[depth]: copied})
        if not kept:
            copied.__dict__["_parameters"] = dict.fromkeys(holder._parameters)
    head = family.model.get_output_embeddings() if "head" in keep else None
    copied.get_output_embeddings = lambda: head  # the library's looks for embeddings first
    return family.of(copied)


def _copy(module: Module, **children: Module | None) -> Any:
    """A module with other children; all else is shared."""
    copied = copy.copy(module)
    copied.__dict__["_modules"] = {**module._modules, **children}
    return copied


def _config_of(config: Any, layers: slice, count: int) -> Any:
    """The decoder's config as it is for some of its layers."""
    copied = copy.deepcopy(config)
    copied.num_hidden_layers = count
    if getattr(config, "layer_types", None):
        copied.layer_types = config.layer_types[layers]
    return copied


def _tied(family: TextFamily) -> Parameter | None:
    """The weight of embeddings or head that this chunk has, if the model ties them."""
    if not getattr(family.model.config, "tie_word_embeddings", False):
        return None
    parts = (family.model.get_output_embeddings(), family.decoder.embed_tokens)
    weights = [part.weight for part in parts if part is not None]
    return weights[0] if weights else None


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
    empty = _with_parts(family, slice(0, 0), keep=())
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
    for modality, names in family.encoders.items():
        parts = [getattr(family.model.model, name) for name in names]
        towers[modality] = max((_layers_of(part) for part in parts), key=len)
    for name in sorted(towers.keys() | set(layout.modules)):
        layers = towers.get(name, [])
        for layer, how in zip(layers, layout.recompute_of(name, len(layers)), strict=True):
            _recompute(layer, how)


def _layers_of(part: Module | Parameter) -> list[Module]:
    """The longest of its module lists: others hold what stands beside the layers."""
    lists = [each for each in _submodules(part) if isinstance(each, ModuleList)]
    return list(max(lists, key=len, default=[]))


def _submodules(part: Module | Parameter) -> list[Module]:
    return [] if isinstance(part, Parameter) else list(part.modules())


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
