"""Measured layers in the place of computed ones.

    measured   vision.0 … vision.n vision.head        │ decoder.0 … decoder.n decoder.head
                     │              └──┬──────────┐
    computed   vision.0 … vision.n   vision.input vision.projector   decoder.embedding …

Layers were measured on a rank that holds all of each. With tensor parallelism, what they compute
and keep is taken to shrink as the computed layers do, and what their ranks exchange is added as it
is computed. What runs outside of layers was measured as one: its seconds are divided as computed,
and its bytes are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.layout.cluster import NodeGroup
from dataservice.planning.layout.costs import LayerShares, Precision, analytic_profile
from dataservice.planning.layout.layers import layer_shapes
from dataservice.planning.layout.model import ModelDescription
from dataservice.planning.layout.profile import Floats, LayerProfile, Pace

HEAD = "head"
# Bytes of a weight that layers are measured in, and how far a layer's weights may be from what the
# description says: biases and norms that it does not count.
_WEIGHT_BYTES = (1.0, 2.0, 4.0, 8.0)
_WEIGHTS_OFF = 0.1
_LINKLESS = 1e30  # bytes a second: what is exchanged takes no time


def require_measured(measured: LayerProfile, model: ModelDescription) -> None:
    """Raises PlanningError where the measured layers are not those of the model: of other modules,
    of another number, of other weights, or trained where they are frozen."""
    theirs = {module: _numbered(measured.names, module) for module in measured.modules}
    rows = {row.name: row for row in layer_shapes(model)}
    for module in model.module_names:
        ours = _numbered(tuple(rows), module)
        if len(ours) != len(theirs.get(module, [])):
            raise PlanningError(
                f"{len(theirs.get(module, []))} layers of {module} were measured, and {model.name} "
                f"has {len(ours)}: measure that model, or lay out the one that was measured"
            )
        for name in theirs[module]:
            _require_like(measured, name, rows[name].parameters, rows[name].trained, model.name)
    if strange := sorted(set(theirs) - set(model.module_names)):
        raise PlanningError(
            f"layers of {strange[0]} were measured, and {model.name} has "
            f"{', '.join(model.module_names)} alone"
        )


def _numbered(names: tuple[str, ...], module: str) -> list[str]:
    """Names of a module's layers."""
    return [
        name
        for name in names
        if name.rpartition(".")[0] == module and name.rpartition(".")[2].isdigit()
    ]


def _require_like(
    measured: LayerProfile, name: str, weights: int, trained: bool, model: str
) -> None:
    """One layer: as many weights as the description says, in a precision that there is."""
    at = measured.names.index(name)
    held = float(measured.state_bytes[at] - measured.gradient_bytes[at])
    if weights and not any(
        abs(held / (weights * size) - 1) <= _WEIGHTS_OFF for size in _WEIGHT_BYTES
    ):
        raise PlanningError(
            f"{name} was measured with {held:,.0f} bytes of weights, and that of {model} has "
            f"{weights:,} weights, of 1, 2, 4 or 8 bytes each: measure that model, or lay out the "
            "one that was measured"
        )
    if trained != bool(measured.optimizer_bytes[at] > 0):
        words = ("frozen", "trained") if trained else ("trained", "frozen")
        raise PlanningError(
            f"{name} was measured {words[0]}, and that of {model} is {words[1]}: freeze the same "
            "modules in both"
        )


def measured_profile(
    measured: LayerProfile,
    model: ModelDescription,
    group: NodeGroup,
    *,
    tensor_ranks: int = 1,
    precision: Precision | None = None,
) -> LayerProfile:
    """The entries of `analytic_profile`, with the seconds and bytes of measured layers. Raises
    PlanningError as `require_measured` does."""
    require_measured(measured, model)

    linkless = replace(group, inside_bytes_per_s=_LINKLESS, between_bytes_per_s=_LINKLESS)

    def computed(ranks: int, on: NodeGroup) -> LayerProfile:
        shares = LayerShares(tensor_ranks=ranks)
        return analytic_profile(model, on, shares=shares, precision=precision)

    parts = _Parts(
        measured=measured,
        whole=computed(1, linkless),
        shared=computed(tensor_ranks, linkless),
        exchanging=computed(tensor_ranks, group),
    )
    full, none = parts.exchanging, np.zeros(len(parts.exchanging.names))
    return replace(
        full,
        forward=parts.pace(lambda of: of.forward),
        backward=parts.pace(lambda of: of.backward),
        # Selective recomputation was not measured: it keeps as much as none, and does nothing.
        again=Pace(token_s=none, square_s=none, constant_s=none, least_s=none),
        kept_token_bytes={
            "none": parts.amounts(lambda of: of.kept_token_bytes["none"]),
            "selective": parts.amounts(lambda of: of.kept_token_bytes["none"]),
            "full": parts.amounts(lambda of: of.kept_token_bytes["full"]),
        },
        kept_square_bytes={
            "none": parts.amounts(lambda of: of.kept_square_bytes["none"]),
            "selective": parts.amounts(lambda of: of.kept_square_bytes["none"]),
            "full": parts.amounts(lambda of: of.kept_square_bytes["full"]),
        },
        state_bytes=parts.amounts(lambda of: of.state_bytes),
        gradient_bytes=parts.amounts(lambda of: of.gradient_bytes),
        optimizer_bytes=parts.amounts(lambda of: of.optimizer_bytes),
        output_bytes=parts.amounts(lambda of: of.output_bytes),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """The computed entries on one rank, on each of several without what they exchange, and with
    it: `whole`, `shared`, `exchanging`."""

    measured: LayerProfile
    whole: LayerProfile
    shared: LayerProfile
    exchanging: LayerProfile

    def amounts(self, of: Callable[[LayerProfile], Floats]) -> Floats:
        """Bytes of each entry, float64[entries]: measured ones of layers, computed of the rest."""
        taken = (self._taken() @ of(self.measured)) * _ratio(of(self.shared), of(self.whole))
        amounts: Floats = np.where(self._layers(), taken, of(self.shared))
        return amounts

    def pace(self, of: Callable[[LayerProfile], Pace]) -> Pace:
        """Seconds of each entry."""
        measured, whole, shared = of(self.measured), of(self.whole), of(self.shared)
        taken = self._taken()
        by_token = _ratio(shared.token_s, whole.token_s)
        squares = whole.square_s > 0
        by_square = np.where(squares, _ratio(shared.square_s, whole.square_s), by_token)
        exchanged = of(self.exchanging).token_s - shared.token_s
        return Pace(
            token_s=(taken @ measured.token_s) * by_token + np.maximum(exchanged, 0.0),
            square_s=(taken @ measured.square_s) * by_square,
            constant_s=taken @ measured.constant_s,
            least_s=np.zeros(len(taken)),
        )

    def _layers(self) -> NDArray[np.bool_]:
        """Which entries are numbered layers: bool[entries]."""
        return np.array([name.rpartition(".")[2].isdigit() for name in self.whole.names])

    def _taken(self) -> Floats:
        """What each entry has of each measured one, float64[entries, measured]: a layer its own;
        what is outside of layers its part of the head's by computed seconds, or the last layer
        where nothing is."""
        found = np.zeros((len(self.whole.names), len(self.measured.names)))
        layers = self._layers()
        for column, name in enumerate(self.measured.names):
            module, _, part = name.rpartition(".")
            if part != HEAD:
                found[self.whole.names.index(name), column] = 1.0
                continue
            mine = self.whole.entries_of(module)
            outside = np.flatnonzero(mine & ~layers)
            if not outside.size:
                outside = np.flatnonzero(mine)[-1:]
            seconds = self.whole.forward.token_s[outside]
            even = np.full(outside.size, 1.0 / outside.size)
            found[outside, column] = seconds / seconds.sum() if seconds.sum() > 0 else even
        return found


def _ratio(part: Floats, whole: Floats) -> Floats:
    """What sharing leaves of each entry; 1 where there is nothing to share."""
    ratio: Floats = np.divide(part, whole, out=np.ones_like(whole), where=whole > 0)
    return ratio
