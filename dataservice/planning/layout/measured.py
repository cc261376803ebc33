"""A layer profile from measured layers: each layer's line in Σ tokens and Σ tokens², fitted."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from dataservice.core.errors import PlanningError
from dataservice.planning.calibration import HELD_OUT_EVERY, RelativeError
from dataservice.planning.layout.profile import Floats, LayerProfile, Pace

LEAST_LOADS = 5
_OPTIMIZER_BYTES = 12.0  # a trained weight: its copy in float32, and two moments


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerMeasurement:
    """One layer at one load of `tokens`, the length of each sequence or item. `layer` is its number
    in `module`, or `head` for what runs outside of layers. Bytes: kept until the backward pass,
    handed on, and of its weights, of which `trained` are trained."""

    module: str
    layer: str
    tokens: tuple[int, ...]
    forward_s: float
    backward_s: float
    kept_bytes: float
    output_bytes: float
    weight_bytes: float
    trained: int

    def __post_init__(self) -> None:
        figures = (self.forward_s, self.backward_s, self.kept_bytes, self.output_bytes)
        if not self.tokens or min(self.tokens) < 1:
            raise PlanningError(
                f"a measurement of {self.module}.{self.layer} has tokens {list(self.tokens)}; each "
                "length is at least 1"
            )
        if not all(math.isfinite(each) and each >= 0 for each in figures):
            raise PlanningError(
                f"a measurement of {self.module}.{self.layer} has {figures}; seconds and bytes are "
                "finite and at least 0: measure again"
            )

    @property
    def name(self) -> str:
        return f"{self.module}.{self.layer}"

    @property
    def seconds(self) -> float:
        """Of both passes."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFit:
    """A profile, and by module its error on whole passes that were not fitted."""

    profile: LayerProfile
    held_out: dict[str, RelativeError]


def fit_layers(measured: Sequence[LayerMeasurement]) -> LayerFit:
    """Seconds and bytes of each layer, in the order in which they run: encoders, then the decoder.

    Residuals are relative and coefficients at least 0. Every fourth load of a module, by length, is
    held out and judges the fit of the others; the profile is that of all loads. Full recomputation
    keeps what a layer takes in; selective recomputation is not measured, and keeps as much as none.
    Raises PlanningError on fewer than 5 loads of a layer.
    """
    by_name: dict[str, list[LayerMeasurement]] = {}
    for each in sorted(measured, key=lambda each: each.module == "decoder"):
        by_name.setdefault(each.name, []).append(each)
    if not by_name:
        raise PlanningError("there are no measured layers; measure with --layers")
    for name, rows in by_name.items():
        if len({row.tokens for row in rows}) < LEAST_LOADS:
            raise PlanningError(
                f"{name} was measured at {len(rows)} loads; a fit needs {LEAST_LOADS} different "
                "ones: give more lengths"
            )
    return LayerFit(profile=_profile(by_name), held_out=_held_out(by_name))


def _profile(by_name: dict[str, list[LayerMeasurement]]) -> LayerProfile:
    groups = list(by_name.values())
    forward = _pace([_line(rows, [row.forward_s for row in rows]) for rows in groups])
    backward = _pace([_line(rows, [row.backward_s for row in rows]) for rows in groups])
    kept = np.array([_line(rows, [row.kept_bytes for row in rows])[:2] for rows in groups])
    out = np.array([_line(rows, [row.output_bytes for row in rows])[0] for rows in groups])
    trained = np.array([float(rows[0].trained) for rows in groups])
    weights = np.array([rows[0].weight_bytes for rows in groups])
    keeps = kept[:, 0] > 0
    none = np.zeros(len(groups))
    return LayerProfile(
        names=tuple(by_name),
        modules=tuple(rows[0].module for rows in groups),
        forward=forward,
        backward=backward,
        again=_pace([(0.0, 0.0, 0.0)] * len(groups)),
        kept_token_bytes={
            "none": kept[:, 0],
            "selective": kept[:, 0],
            "full": np.where(keeps, np.minimum(out, kept[:, 0]), 0.0),
        },
        kept_square_bytes={"none": kept[:, 1], "selective": kept[:, 1], "full": none},
        # A gradient has its weight's type.
        state_bytes=weights * np.where(trained > 0, 2.0, 1.0),
        gradient_bytes=weights * np.where(trained > 0, 1.0, 0.0),
        optimizer_bytes=trained * _OPTIMIZER_BYTES,
        output_bytes=out,
    )


def _line(rows: Sequence[LayerMeasurement], values: Sequence[float]) -> tuple[float, float, float]:
    """a, b, c ≥ 0 of a·Σt + b·Σt² + c, by least squares of relative residuals."""
    seen = np.array(values)
    if not seen.any():
        return (0.0, 0.0, 0.0)
    weight = 1.0 / np.maximum(seen, seen.max() * 1e-6)
    tokens = np.array([float(sum(row.tokens)) for row in rows])
    squares = np.array([float(sum(n * n for n in row.tokens)) for row in rows])
    terms = np.stack([tokens, squares, np.ones_like(tokens)], axis=1)
    scale = terms.max(axis=0)
    found, _ = nnls(terms / scale * weight[:, None], seen * weight)
    a, b, c = (found / scale).tolist()
    return (a, b, c)


def _pace(lines: Sequence[tuple[float, float, float]]) -> Pace:
    columns: Floats = np.array(lines).reshape(-1, 3)
    return Pace(
        token_s=columns[:, 0],
        square_s=columns[:, 1],
        constant_s=columns[:, 2],
        least_s=np.zeros(len(columns)),
    )


def _held_out(by_name: dict[str, list[LayerMeasurement]]) -> dict[str, RelativeError]:
    """By module, the error of a whole pass at the loads that every fourth is."""
    modules: dict[str, list[list[LayerMeasurement]]] = {}
    for rows in by_name.values():
        modules.setdefault(rows[0].module, []).append(sorted(rows, key=lambda r: sum(r.tokens)))
    found = {}
    for module, layers in modules.items():
        truth: Floats = np.zeros(1)
        said: Floats = np.zeros(1)
        for rows in layers:
            fitted = [row for at, row in enumerate(rows) if at % HELD_OUT_EVERY != 2]
            unseen = [row for at, row in enumerate(rows) if at % HELD_OUT_EVERY == 2]
            a, b, c = _line(fitted, [row.seconds for row in fitted])
            lengths = [np.array(row.tokens, np.float64) for row in unseen]
            said = said + np.array([a * n.sum() + b * (n * n).sum() + c for n in lengths])
            truth = truth + np.array([row.seconds for row in unseen])
        error = np.abs(said / truth - 1.0)
        found[module] = RelativeError(
            count=len(error),
            mean=float(error.mean()),
            median=float(np.median(error)),
            largest=float(error.max()),
        )
    return found
