"""A model of transformers with some of its parts: a copy that shares the modules which it keeps."""

import copy
from collections.abc import Sequence
from typing import Any, Literal

from torch.nn import Identity, Module, ModuleList

from trainer_client.adapters.transformers.families import TextFamily

Keep = Literal["encoders", "embeddings", "head"]


def with_parts(family: TextFamily, layers: slice, *, keep: Sequence[Keep]) -> TextFamily:
    """The family of a copy of its model that has these decoder layers and these parts alone."""
    decoder = family.decoder
    parts = ModuleList(list(decoder.layers)[layers])
    children: dict[str, Module | None] = {"layers": parts}
    if "head" not in keep:
        children["norm"] = Identity()
    if "embeddings" not in keep:
        children["embed_tokens"] = None
    copied = with_children(decoder, **children)
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
        copied = with_children(holder, **others, **{path[depth]: copied})
        if not kept:
            copied.__dict__["_parameters"] = dict.fromkeys(holder._parameters)
    head = family.model.get_output_embeddings() if "head" in keep else None
    copied.get_output_embeddings = lambda: head  # the library's looks for embeddings first
    return family.of(copied)


def with_children(module: Module, **children: Module | None) -> Any:
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
