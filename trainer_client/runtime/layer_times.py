"""Seconds and bytes of each layer of a model, for laying it over stages of a pipeline.

    forward   │ before │ layer 0 │ layer 1 │ … │ behind │      a layer begins and ends as its module
    backward  │ behind │ … │ layer 1 │ layer 0, before │      backward: from its output's gradient
                                                              on, until that of the next

Layers are the members of a model's module lists; a list inside a layer, such as that of its
experts, is no list of layers. What runs outside of them is one entry more, the phase's `head`.
What a layer keeps for its backward pass is what autograd saves in it, so that it is known on every
device, CPU included.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from trainer_client.runtime.group_pool import GroupPool
from trainer_client.runtime.loads import EncodedAs, Groups, Load, decoder_loads, encoder_loads
from trainer_client.runtime.step import MultimodalModel

HEAD = "head"
_FORWARD_PART = 1 / 3  # of what runs outside of layers: a backward pass works twice as much
NUMBERED = {"llm": "decoder"}  # the name that layouts have for a phase, where it is another


def layers_of(model: Module) -> list[Module]:
    """The layers of a model, in the order in which it names them."""
    found: list[Module] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, ModuleList) and not any(name.startswith(f"{p}.") for p in inside):
            inside += [f"{name}.{number}" for number in range(len(module))]
            found += list(module)
    return found


@dataclass(kw_only=True)
class LayerTimes:
    """What one run of a load took: by the layer's place in `layers_of`. `order`: places in the
    order in which they ran first."""

    forward_s: dict[int, float] = field(default_factory=dict)
    backward_s: dict[int, float] = field(default_factory=dict)
    kept_bytes: dict[int, int] = field(default_factory=dict)
    output_bytes: dict[int, int] = field(default_factory=dict)
    total_s: float = 0.0

    @property
    def order(self) -> list[int]:
        return list(self.forward_s)

    @property
    def outside_s(self) -> float:
        """What ran outside of layers."""
        layers = sum(self.forward_s.values()) + sum(self.backward_s.values())
        return max(0.0, self.total_s - layers)


def time_layers(
    layers: list[Module], run: Callable[[], float | None], now_s: Callable[[], float]
) -> LayerTimes:
    """Run once, and time every layer by `now_s`, which waits for the device."""
    found, began, open_at = LayerTimes(), [0.0], list[tuple[int, float]]()

    def turn(place: int | None) -> None:
        """The backward pass has come to a layer, or to its end."""
        now = now_s()
        if open_at:
            last, since = open_at.pop()
            found.backward_s[last] = found.backward_s.get(last, 0.0) + now - since
        if place is not None:
            open_at.append((place, now))

    def before(place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            began[0] = now_s()

        return hook

    def behind(place: int) -> Callable[..., None]:
        def hook(module: Module, _: Any, output: Any) -> None:
            found.forward_s[place] = found.forward_s.get(place, 0.0) + now_s() - began[0]
            made = output if isinstance(output, Tensor) else output[0]
            held = found.output_bytes.get(place, 0)
            found.output_bytes[place] = held + made.numel() * made.element_size()
            if made.requires_grad:
                made.register_hook(lambda gradient: turn(place))

        return hook

    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            hooks.callback(layer.register_forward_pre_hook(before(place)).remove)
            hooks.callback(layer.register_forward_hook(behind(place)).remove)
        started = now_s()
        run()
        turn(None)
        found.total_s = now_s() - started
    return found


def kept_by_layer(layers: list[Module], run: Callable[[], float | None]) -> dict[int, int]:
    """Run once, and count the bytes that autograd saves in each layer: each storage once, where it
    is saved first, weights left out."""
    found: dict[int, int] = {}
    weights = {weight.data_ptr() for layer in layers for weight in layer.parameters()}
    seen: dict[int, Any] = {}  # the storages stay alive, so that none has another's address
    here: list[int] = []

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        new = storage.data_ptr() not in seen and storage.data_ptr() not in weights
        if here and new:
            seen[storage.data_ptr()] = storage
            found[here[-1]] = found.get(here[-1], 0) + storage.nbytes()
        return saved

    def entering(place: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            here.append(place)

        return hook

    def leave(*_: Any) -> None:
        here.pop()

    with ExitStack() as hooks:
        for place, layer in enumerate(layers):
            hooks.callback(layer.register_forward_pre_hook(entering(place)).remove)
            hooks.callback(layer.register_forward_hook(leave).remove)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            run()
    return found


def measure_layers(
    model: MultimodalModel,
    pool: GroupPool,
    options: argparse.Namespace,
    *,
    now_s: Callable[[], float],
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """A row for every layer and load: its phase and number, the load's tokens, seconds of both
    passes, the least over the repeats; bytes kept and handed on; bytes of its weights, and how
    many of them train. Every rank computes alone."""
    module = cast(Module, model)
    layers = layers_of(module)
    loads = list(_loads(model, pool, options))
    rows: list[dict[str, Any]] = []
    for number, load in enumerate(loads, start=1):
        with _no_gradients_left(module):
            kept = kept_by_layer(layers, load.run)  # warms up, too
            runs = [time_layers(layers, load.run, now_s) for _ in range(options.repeats)]
        rows += _rows(load, layers, runs, kept)
        tell(f"measured {number}/{len(loads)} layers, {load.in_words}")
    return rows


def _loads(model: MultimodalModel, pool: GroupPool, options: argparse.Namespace) -> Iterator[Load]:
    alone = Groups(degree=1, crosses_node=False, members=tuple((r,) for r in range(pool.replicas)))
    encoders = [EncodedAs.parse(text) for text in options.modalities]
    modalities = [encoded.name for encoded in encoders]
    yield from decoder_loads(model, pool, alone, options.lengths, modalities=modalities)
    for encoded in encoders:
        for load in encoder_loads(model, encoded, options.item_tokens, alone):
            if not load.clip:  # whose frames an encoder may hold apart
                yield load


@contextmanager
def _no_gradients_left(module: Module) -> Iterator[None]:
    try:
        yield
    finally:
        module.zero_grad()


def _rows(
    load: Load, layers: list[Module], runs: list[LayerTimes], kept: dict[int, int]
) -> Iterator[dict[str, Any]]:
    phase = NUMBERED.get(load.phase, load.phase)
    for number, place in enumerate(runs[0].order):
        weights = list(layers[place].parameters())
        yield {
            "module": phase,
            "layer": str(number),
            "tokens": list(load.tokens),
            "forward_s": min(run.forward_s[place] for run in runs),
            "backward_s": min(run.backward_s.get(place, 0.0) for run in runs),
            "kept_bytes": kept.get(place, 0),
            "output_bytes": runs[0].output_bytes[place],
            "weight_bytes": sum(each.numel() * each.element_size() for each in weights),
            "trained": sum(each.numel() for each in weights if each.requires_grad),
        }
    outside_s = min(run.outside_s for run in runs)
    backward = any(run.backward_s for run in runs)
    part = _FORWARD_PART if backward else 1.0
    yield {
        "module": phase,
        "layer": HEAD,
        "tokens": list(load.tokens),
        "forward_s": part * outside_s,
        "backward_s": (1.0 - part) * outside_s,
        "kept_bytes": 0,
        "output_bytes": 0,
        "weight_bytes": 0,
        "trained": 0,
    }
