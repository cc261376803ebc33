"""Seconds and bytes of each layer on one GPU: the one form of what is measured and of what is
computed.

    LayerProfile.seconds(work)      float64[microbatch, layer]     work: Σ tokens and Σ tokens² of
                .kept_bytes(work)   float64[microbatch, layer]           each module in a microbatch

A layer's time is a line in Σ tokens and in Σ tokens², so that a real mix of lengths is priced, and
not a mean.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds of each entry, float64[layers]: max(token_s · Σ tokens, least_s) + square_s ·
    Σ tokens² + constant_s. An entry without tokens takes none."""

    token_s: Floats
    square_s: Floats
    constant_s: Floats
    least_s: Floats

    def seconds(self, tokens: Floats, squares: Floats) -> Floats:
        """Of `tokens`, `squares` float64[..., layers]: float64 of the same shape."""
        taken = np.maximum(self.token_s * tokens, self.least_s)
        taken = taken + self.square_s * squares + self.constant_s
        return np.where(tokens > 0, taken, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerProfile:
    """Every entry of a pipeline on one GPU of the ranks that share it. Arrays are [layers], in the
    order in which they run.

    `kept_token_bytes`, `kept_square_bytes` by kind of recomputation: what a token, and a squared
    one, keeps until its backward pass. `again`: seconds of the work that selective recomputation
    does again; full recomputation does the forward pass again. `state_bytes`: weights and
    gradients; `gradient_bytes`: gradients alone; `optimizer_bytes`: what ZeRO-1 divides over
    data-parallel ranks. `output_bytes`: what a token hands to the next entry."""

    names: tuple[str, ...]
    modules: tuple[str, ...]
    forward: Pace
    backward: Pace
    again: Pace
    kept_token_bytes: Mapping[Recompute, Floats]
    kept_square_bytes: Mapping[Recompute, Floats]
    state_bytes: Floats
    gradient_bytes: Floats
    optimizer_bytes: Floats
    output_bytes: Floats

    def __post_init__(self) -> None:
        count = len(self.names)
        paces = (self.forward, self.backward, self.again)
        found = [getattr(pace, field.name) for pace in paces for field in fields(Pace)]
        found += [*self.kept_token_bytes.values(), *self.kept_square_bytes.values()]
        found += [self.state_bytes, self.gradient_bytes, self.optimizer_bytes, self.output_bytes]
        for values in found:
            sound = values.shape == (count,) and bool((np.isfinite(values) & (values >= 0)).all())
            if not sound or len(self.modules) != count:
                raise PlanningError(
                    f"a layer profile of {count} entries has values of shape {values.shape}; give "
                    "one for each entry, finite and at least 0"
                )

    def entries_of(self, module: str) -> NDArray[np.bool_]:
        """Which entries are this module's: bool[entries]."""
        return np.array([each == module for each in self.modules])

    @property
    def trains(self) -> NDArray[np.bool_]:
        """Which entries have weights that a step changes: bool[entries]."""
        trains: NDArray[np.bool_] = self.optimizer_bytes > 0
        return trains

    @property
    def trained_bytes(self) -> Floats:
        """Weights and gradients of what trains, which data-parallel ranks send around:
        float64[entries]."""
        trained: Floats = self.state_bytes * self.trains
        return trained

    def both_passes(self, of: str, recompute: int | NDArray[np.int8]) -> Floats:
        """The column `of` of a pace, over both passes of every entry and what is made again between
        them: float64[entries]. `recompute` int[entries], or one for all, indexes RECOMPUTE."""
        forward, backward, again = (
            getattr(pace, of) for pace in (self.forward, self.backward, self.again)
        )
        # Where nothing has to stay for a backward pass, there is none to make anything again for.
        keeps = self.kept_token_bytes["none"] > 0
        added = np.choose(recompute, (np.zeros_like(forward), again, forward)) * keeps
        total: Floats = forward + backward + added
        return total

    def seconds(self, work: "LayerWork") -> tuple[Floats, Floats]:
        """Forward and backward seconds, each float64[microbatches, layers]."""
        tokens, squares = work.columns(self.modules)
        return self.forward.seconds(tokens, squares), self.backward.seconds(tokens, squares)

    def added_s(self, work: "LayerWork", recompute: Recompute) -> Floats:
        """What recomputation adds to the backward pass: float64[microbatches, layers]."""
        tokens, squares = work.columns(self.modules)
        if recompute == "none":
            return np.zeros_like(tokens)
        pace = self.forward if recompute == "full" else self.again  # as in `both_passes`
        return pace.seconds(tokens, squares) * (self.kept_token_bytes["none"] > 0)

    def kept_bytes(self, work: "LayerWork", recompute: Recompute) -> Floats:
        """What a microbatch keeps: float64[microbatches, layers]."""
        tokens, squares = work.columns(self.modules)
        by_token, by_square = self.kept_token_bytes[recompute], self.kept_square_bytes[recompute]
        return tokens * by_token + squares * by_square

    def handed_on_bytes(self, work: "LayerWork") -> Floats:
        """What crosses to the next stage, were it cut behind each entry: float64[microbatches,
        layers]. Between encoders, the features of those before cross too; text stays token ids."""
        tokens, _ = work.columns(self.modules)
        own = tokens * self.output_bytes
        crossing = own.copy()
        begin = self.modules.index("decoder") if "decoder" in self.modules else len(self.modules)
        for end in range(begin - 1):
            if self.modules[end] != self.modules[end + 1]:
                crossing[:, end + 1 : begin] += own[:, [end]]
        return crossing


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """Tokens of each microbatch, by module: `tokens`, `squares` (Σ of the squared lengths of what
    attends to itself), float64[microbatches] under each module's name."""

    tokens: Mapping[str, Floats]
    squares: Mapping[str, Floats]

    @staticmethod
    def of(**modules: tuple[ArrayLike, ArrayLike]) -> "LayerWork":
        """From (tokens, squares) under each module's name. Raises PlanningError."""
        tokens = {name: np.asarray(each[0], np.float64) for name, each in modules.items()}
        squares = {name: np.asarray(each[1], np.float64) for name, each in modules.items()}
        shapes = {values.shape for values in (*tokens.values(), *squares.values())}
        if len(shapes) != 1 or len(next(iter(shapes))) != 1:
            raise PlanningError(
                f"the work of modules has shapes {sorted(shapes)}; give each module one number a "
                "microbatch, for tokens and for squares"
            )
        return LayerWork(tokens=tokens, squares=squares)

    def columns(self, modules: tuple[str, ...]) -> tuple[Floats, Floats]:
        """Tokens and squares of each entry, each float64[microbatches, layers]."""
        if missing := sorted(set(modules) - set(self.tokens)):
            raise PlanningError(
                f"there is no work for the module {missing[0]!r}, only for "
                f"{sorted(self.tokens)}; give its tokens and their squares"
            )
        tokens = np.stack([self.tokens[module] for module in modules], axis=1)
        squares = np.stack([self.squares[module] for module in modules], axis=1)
        return tokens, squares


def joined(values: ArrayLike, names: tuple[str, ...]) -> Floats:
    """Sums float64[..., layers] so that only numbered layers are left, as papers count them: what
    stands before a module's layers joins its first, and what stands behind joins its last."""
    amounts = np.asarray(values, np.float64)
    numbered = [place for place, name in enumerate(names) if name.rsplit(".", 1)[-1].isdigit()]
    if not numbered:
        raise PlanningError("no entry is a numbered layer; give the names of a layer profile")
    into = []
    for place, name in enumerate(names):
        module = name.rsplit(".", 1)[0]
        same = [at for at in numbered if names[at].rsplit(".", 1)[0] == module]
        into.append(min(same or numbered, key=lambda at: abs(at - place)))
    found = np.zeros((*amounts.shape[:-1], len(numbered)))
    for place, at in enumerate(into):
        found[..., numbered.index(at)] += amounts[..., place]
    return found
