"""Seconds and bytes of each layer from its operations, its bytes and the device's stated
efficiencies.

    model ──► layer_shapes ──► one row a layer ──► × device ÷ shares ──► LayerProfile

The roofline: products of matrices take the longer of their operations and of reading their
weights; norms and activation functions take reading and writing what they work on; tensor and
expert parallelism take what they exchange.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.layers import LayerShape, layer_shapes
from dataservice.planning.layout.model import ModelDescription
from dataservice.planning.layout.profile import (
    RECOMPUTE,
    Floats,
    LayerProfile,
    Pace,
    Recompute,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """Bytes of a weight, of its gradient, of its optimizer states, and of a number that is kept.
    The defaults are mixed precision with Adam as Megatron runs it: weights in bfloat16, gradients
    in float32, and a float32 copy with two moments."""

    weight_bytes: float = 2.0
    gradient_bytes: float = 4.0
    optimizer_bytes: float = 12.0
    kept_bytes: float = 2.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise PlanningError(f"{field.name} is {value}; give a number of 0 or more bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShares:
    """What divides the layers of a module: over `tensor_ranks`, its experts over `expert_ranks`
    too. `sequence_parallel`: what tensor parallelism leaves whole is divided as well.
    `stored_scores`: attention keeps its probabilities, as without flash attention."""

    tensor_ranks: int = 1
    expert_ranks: int = 1
    sequence_parallel: bool = True
    stored_scores: bool = False

    def __post_init__(self) -> None:
        for name in ("tensor_ranks", "expert_ranks"):
            if getattr(self, name) < 1:
                raise PlanningError(f"{name} is {getattr(self, name)}; give 1 or more ranks")


def analytic_profile(
    model: ModelDescription,
    group: NodeGroup,
    *,
    shares: LayerShares | Mapping[str, LayerShares] | None = None,
    precision: Precision | None = None,
    dropout: bool = False,
) -> LayerProfile:
    """Seconds and bytes of `model` on the GPUs of `group`; `shares` for all modules, or by name.

    Kept bytes follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
    Transformer Models", eq. 1 to 6): `full` recomputation keeps a layer's input; `selective` drops
    the scores where they are stored, as there, and otherwise the outputs of norms and activation
    functions. Tensor parallelism sums a layer's width over its ranks twice in each direction;
    heads that it does not divide leave ranks waiting; experts are reached by two all-to-alls in
    each direction. `dropout`: its masks are kept. Raises PlanningError where expert_ranks do not
    divide the experts, or shares name no module.
    """
    by_module = _by_module(model, shares)
    rates = Precision() if precision is None else precision
    rows = layer_shapes(model, dropout=dropout)
    priced = [_PricedLayer(row, group, by_module[row.module], rates) for row in rows]
    kept = {kind: np.array([each.kept(kind) for each in priced]) for kind in RECOMPUTE}
    states = np.array([each.states() for each in priced])
    return LayerProfile(
        names=tuple(row.name for row in rows),
        modules=tuple(row.module for row in rows),
        forward=_pace([each.forward() for each in priced]),
        backward=_pace([each.backward() for each in priced]),
        again=_pace([each.again() for each in priced]),
        kept_token_bytes={kind: amounts[:, 0] for kind, amounts in kept.items()},
        kept_square_bytes={kind: amounts[:, 1] for kind, amounts in kept.items()},
        state_bytes=states[:, 0] + states[:, 1],
        gradient_bytes=states[:, 1],
        optimizer_bytes=states[:, 2],
        output_bytes=np.array([row.output_width * rates.kept_bytes for row in rows]),
    )


def _by_module(
    model: ModelDescription, shares: LayerShares | Mapping[str, LayerShares] | None
) -> dict[str, LayerShares]:
    default = shares if isinstance(shares, LayerShares) else LayerShares()
    given = {} if shares is None or isinstance(shares, LayerShares) else shares
    if strange := sorted(set(given) - set(model.module_names)):
        raise PlanningError(
            f"there are shares for the module {strange[0]!r}; {model.name} has "
            f"{', '.join(model.module_names)}"
        )
    found = {name: given.get(name, default) for name in model.module_names}
    stacks = {encoder.name: encoder.experts for encoder in model.encoders}
    for name, experts in {**stacks, "decoder": model.decoder.experts}.items():
        if experts and experts.count % found[name].expert_ranks:
            raise PlanningError(
                f"expert_ranks is {found[name].expert_ranks}, which does not divide the "
                f"{experts.count} experts of {name}: give a divisor of them"
            )
    return found


def _pace(rows: list[tuple[float, float, float, float]]) -> Pace:
    columns: Floats = np.array(rows, np.float64).reshape(-1, 4)
    return Pace(
        token_s=columns[:, 0],
        square_s=columns[:, 1],
        constant_s=columns[:, 2],
        least_s=columns[:, 3],
    )


class _PricedLayer:
    """One layer on one GPU of those that share it."""

    def __init__(
        self, row: LayerShape, group: NodeGroup, shares: LayerShares, precision: Precision
    ) -> None:
        self._row, self._group, self._shares, self._precision = row, group, shares, precision
        self._part = 1.0 / shares.tensor_ranks
        device = group.device
        self._matrix_flops = device.peak_flops * device.matrix_efficiency
        self._attention_flops = device.peak_flops * device.attention_efficiency
        self._memory = device.memory_bytes_per_s * device.memory_efficiency

    def forward(self) -> tuple[float, float, float, float]:
        """Seconds a token and a squared token, constant and least seconds of a forward pass."""
        return self._seconds(matrices=1.0, attention=1.0, passes=1.0)

    def backward(self) -> tuple[float, float, float, float]:
        """The same of a backward pass."""
        row = self._row
        if not row.keeps:
            return (0.0, 0.0, 0.0, 0.0)
        return self._seconds(
            matrices=row.backward_matrices, attention=row.backward_attention, passes=2.0
        )

    def again(self) -> tuple[float, float, float, float]:
        """The same of what selective recomputation makes again."""
        row, heads = self._row, self._heads_part / self._attention_flops
        if self._shares.stored_scores:
            return (row.window_flops * heads, row.square_flops * heads, 0.0, 0.0)
        made = 2.0 * (row.kept.norms + row.kept.products)
        return (self._moving_s(made), 0.0, 0.0, 0.0)

    def kept(self, recompute: Recompute) -> tuple[float, float]:
        """Bytes that a token and a squared token keep."""
        kept, shares, number = self._row.kept, self._shares, self._precision.kept_bytes
        whole = self._part if shares.sequence_parallel else 1.0
        if recompute == "full" and kept.anything:
            return (self._row.input_width * number * whole, 0.0)
        again = recompute == "selective" and not shares.stored_scores
        replicated = kept.replicated - (kept.norms if again else 0.0)
        divided = kept.divided - (kept.products if again else 0.0)
        scores = kept.scores if shares.stored_scores and recompute == "none" else 0.0
        flat = number * (replicated * whole + divided * self._part)
        return (flat + kept.small_bytes * self._part, number * scores * self._part)

    def states(self) -> tuple[float, float, float]:
        """Bytes of weights, of gradients, and of optimizer states before ZeRO-1 divides them over
        all data-parallel ranks: those of an expert over the few that have it, which is as much."""
        held, trained = self._parameters(self._shares.expert_ranks), float(self._row.trained)
        precision = self._precision
        return (
            held * precision.weight_bytes,
            held * trained * precision.gradient_bytes,
            self._parameters(1) * trained * precision.optimizer_bytes,
        )

    def _seconds(
        self, *, matrices: float, attention: float, passes: float
    ) -> tuple[float, float, float, float]:
        row = self._row
        heads = attention * self._heads_part / self._attention_flops
        token = (
            matrices * row.matrix_flops * self._part / self._matrix_flops
            + row.window_flops * heads
            + self._moving_s(passes * self._moved_numbers)
            + self._exchange_s
        )
        worked = row.matrix_flops > 0
        held = self._parameters(self._shares.expert_ranks)
        read = held * self._precision.weight_bytes if worked else 0.0
        launched = passes * self._group.device.launch_s if worked else 0.0
        return (token, row.square_flops * heads, launched, matrices * read / self._memory)

    @property
    def _heads_part(self) -> float:
        """The part of attention that the rank with most heads does."""
        return -(-self._row.heads // self._shares.tensor_ranks) / self._row.heads

    def _parameters(self, expert_ranks: int) -> float:
        """Weights on one GPU, where experts are divided over so many."""
        row = self._row
        dense = row.parameters + row.copied_parameters - row.expert_parameters
        return (dense + row.expert_parameters / expert_ranks) * self._part

    @property
    def _moved_numbers(self) -> float:
        """Numbers that norms and activation functions of a token read and write: what would be
        kept of theirs, from as much again."""
        return 2.0 * (self._row.norms + self._row.products)

    def _moving_s(self, numbers: float) -> float:
        """Seconds to read and write so many numbers of the ranks that share the layer."""
        return numbers * self._precision.kept_bytes * self._part / self._memory

    @property
    def _exchange_s(self) -> float:
        """Seconds a token for tensor and expert parallelism, in one direction: two all-reduces, or
        as much in gathers and scatters; two all-to-alls."""
        row, number = self._row, self._precision.kept_bytes
        ranks, experts = self._shares.tensor_ranks, self._shares.expert_ranks
        summed = 2.0 * 2.0 * (ranks - 1) / ranks * row.exchanged_width * number
        sent = 2.0 * (experts - 1) / experts * row.dispatched_width * number / ranks
        link, far = (self._group.link_bytes_per_s(n) for n in (ranks, ranks * experts))
        return summed / link + sent / far
