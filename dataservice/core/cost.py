"""Cost models: seconds of a context-parallel group, of an encoder item, of the rest of a step.

All are plain coefficients, so a calibration can fit them, a file can hold them and a ledger can
name them by `version`. Everything else in this room only asks them for seconds.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from dataservice.core.errors import PlanningError
from dataservice.core.job import STRICT
from dataservice.core.layout import padded_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextCost:
    """Seconds of one group of sequences on `degree` replicas (DHP eq. 8–10).

    Zigzag ring attention cuts every sequence in 2d chunks, so above degree 1 each is padded to a
    multiple of 2d; the padding costs compute and bandwidth here, and memory in the planner.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    attention_s_per_token2: float
    """α₁, causal; a fully attended sequence costs twice that."""
    linear_s_per_token: float
    """α₂: all work that grows with the tokens."""
    group_s: float = 0.0
    """β₁, once a group and wave: launches, gathering sharded weights."""
    ring_intra_s_per_token: float = 0.0
    """α₃ / v inside a node: keys and values of one token passed on."""
    ring_inter_s_per_token: float = 0.0
    """α₃ / v of a ring that crosses nodes."""
    ring_hop_s: float = 0.0
    """β₂, latency of one hop; a ring of degree d makes d-1."""

    def __post_init__(self) -> None:
        _require_coefficients(self)
        if self.attention_s_per_token2 == self.linear_s_per_token == self.group_s == 0:
            raise PlanningError(
                "attention_s_per_token2, linear_s_per_token and group_s are all 0; plans are made "
                "by the decoder's seconds: give one of them, however small, or calibrate"
            )
        if self.ring_inter_s_per_token < self.ring_intra_s_per_token:
            raise PlanningError(
                f"ring_inter_s_per_token is {self.ring_inter_s_per_token}, below "
                f"ring_intra_s_per_token {self.ring_intra_s_per_token}: a ring that crosses nodes "
                "cannot be the faster one; swap them or calibrate again"
            )

    @classmethod
    def flexsp_7b(cls) -> Self:
        """A 7B decoder: α₁, α₂, β₁ as FlexSP publishes them. The ring moves 1.5 MB a token (keys,
        values and their gradients, 32 layers of width 4096, bf16), taken at 300 GB/s inside a node
        and 50 GB/s between nodes, 20 µs a hop; those three are our assumption."""
        return cls(
            attention_s_per_token2=5.128e-9,
            linear_s_per_token=1.84e-4,
            group_s=0.629,
            ring_intra_s_per_token=5.0e-6,
            ring_inter_s_per_token=3.0e-5,
            ring_hop_s=2.0e-5,
        )

    @property
    def coefficients(self) -> npt.NDArray[np.float64]:
        """The six coefficients in field order, for kernels."""
        return np.array([getattr(self, field.name) for field in fields(self)], dtype=np.float64)

    @property
    def version(self) -> str:
        """Stable digest of the coefficients; it goes into every plan's identity."""
        return _digest("context", self.to_dict())

    def time_s(
        self,
        tokens: npt.ArrayLike,
        degree: int,
        full_attention: npt.ArrayLike | None = None,
        crosses_node: bool = False,
    ) -> float:
        """Seconds of one group that holds sequences of `tokens` [n] on `degree` replicas.

        `full_attention` [n] is η: the share of a sequence that attends in both directions.
        Raises PlanningError on a bad length, share or degree. O(n).
        """
        return float(self.times_s(tokens, [degree], full_attention, crosses_node)[0])

    def times_s(
        self,
        tokens: npt.ArrayLike,
        degrees: npt.ArrayLike,
        full_attention: npt.ArrayLike | None = None,
        crosses_node: npt.ArrayLike = False,
    ) -> npt.NDArray[np.float64]:
        """Seconds [degrees] of one group at each of `degrees`. O(n · degrees)."""
        lengths, weights = sequences(tokens, full_attention)
        degree = np.asarray(degrees, dtype=np.int64)
        if degree.size and degree.min() < 1:
            raise PlanningError(f"degree is {degree.min()}; a group has at least 1 replica")
        crosses = np.broadcast_to(np.asarray(crosses_node, dtype=np.bool_), degree.shape)
        # [degrees, n]
        padded = padded_tokens(lengths[None, :], degree[:, None]).astype(np.float64)
        squares = (weights * padded * padded).sum(axis=1)
        return self.group_times_s(padded.sum(axis=1), squares, degree, crosses)

    def alone_s(
        self, tokens: npt.ArrayLike, degree: int, full_attention: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.float64]:
        """Seconds [n] of each sequence in a group of its own, inside a node."""
        lengths, weights = sequences(tokens, full_attention)
        padded = padded_tokens(lengths, degree).astype(np.float64)
        return self.group_times_s(padded, weights * padded * padded, degree, False)

    def work_s(
        self, tokens: npt.ArrayLike, full_attention: npt.ArrayLike | None = None
    ) -> npt.NDArray[np.float64]:
        """Replica-seconds [n] each sequence costs at least, at any degree: no padding, no ring."""
        lengths, weights = sequences(tokens, full_attention)
        size = lengths.astype(np.float64)
        linear, attention, _ = self._terms_s(size, weights * size * size, 1, False)
        return linear + attention

    def total_work_s(
        self, tokens: npt.ArrayLike, full_attention: npt.ArrayLike | None = None
    ) -> float:
        """The sum of `work_s`: the work of one group that holds all of them, without its β₁."""
        if full_attention is None:
            size = _checked_lengths(tokens).astype(np.float64)
            total = size.sum()
            squares = np.square(size, out=size)  # memory of its own would take most of the time
        else:
            lengths, weights = sequences(tokens, full_attention)
            size = lengths.astype(np.float64)
            total, squares = size.sum(), weights * size * size
        return float(self.group_times_s(total, squares.sum(), 1, False)) - self.group_s

    def group_times_s(
        self,
        tokens: npt.ArrayLike,
        squares: npt.ArrayLike,
        degree: npt.ArrayLike,
        crosses_node: npt.ArrayLike,
    ) -> npt.NDArray[np.float64]:
        """Seconds [G] of groups that hold `tokens` Σs and `squares` Σ(1+η)s² [G], padded for their
        `degree` [G]: all else here derives from it. `planning.context.seconds` has it for kernels.
        """
        linear, attention, ring = self._terms_s(tokens, squares, degree, crosses_node)
        seconds: npt.NDArray[np.float64] = linear + self.group_s + np.maximum(attention, ring)
        return seconds

    def _terms_s(
        self,
        tokens: npt.ArrayLike,
        squares: npt.ArrayLike,
        degree: npt.ArrayLike,
        crosses_node: npt.ArrayLike,
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """What grows with a group: linear work, attention, and the ring that attention hides."""
        total, d = np.asarray(tokens, dtype=np.float64), np.asarray(degree, dtype=np.float64)
        rate = np.where(crosses_node, self.ring_inter_s_per_token, self.ring_intra_s_per_token)
        ring = rate * total * (d - 1) / d + self.ring_hop_s * (d - 1)
        linear = self.linear_s_per_token * total / d
        return linear, self.attention_s_per_token2 * np.asarray(squares) / d, ring

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Self:
        """Raises PlanningError on unknown or missing names."""
        return cls(**_checked(cls, values))


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseCost:
    """Seconds of one encoder on one replica: a·tokens + b·tokens² + c for each item, and a constant
    for each batch of them.

    An item of u equal units that attend to themselves alone takes b·tokens²/u. Where the plan does
    not know of such units (windows), this says more than it takes.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    linear_s_per_token: float
    """Seconds of each encoder token."""
    quadratic_s_per_token2: float = 0.0
    """Seconds of each pair of tokens, for attention over the whole item."""
    item_s: float = 0.0
    """Seconds of every item, whatever its length."""
    batch_s: float = 0.0
    """Seconds of every wave in which anyone has items, however many: launches, sharded weights."""

    def __post_init__(self) -> None:
        _require_coefficients(self)

    @property
    def coefficients(self) -> npt.NDArray[np.float64]:
        """The coefficients of an item in field order, for kernels: float64[3]."""
        return np.array([self.linear_s_per_token, self.quadratic_s_per_token2, self.item_s])

    @property
    def version(self) -> str:
        """Stable digest of the coefficients; without `batch_s` where that is 0, as it was before
        there was one."""
        values = self.to_dict()
        return _digest("phase", {k: v for k, v in values.items() if k != "batch_s" or v > 0})

    def item_seconds(
        self, tokens: npt.ArrayLike, units: npt.ArrayLike = 1
    ) -> npt.NDArray[np.float64]:
        """Seconds [n] of items of `tokens` [n] in `units` [n]. Raises PlanningError on a negative
        length."""
        size = np.asarray(tokens, dtype=np.float64)
        if size.size and not size.min() >= 0:
            raise PlanningError(f"tokens has {size.min()}; lengths are 0 or more")
        squares = size * size / np.asarray(units, dtype=np.float64)
        return self.sums_s(1, size, squares)

    def sums_s(
        self, items: npt.ArrayLike, tokens: npt.ArrayLike, squares: npt.ArrayLike
    ) -> npt.NDArray[np.float64]:
        """Seconds [n] of so many `items` each, of `tokens` Σt and `squares` Σt²/u together: all
        else here derives from it."""
        size = np.asarray(tokens, dtype=np.float64)
        work_s = self.linear_s_per_token * size + self.quadratic_s_per_token2 * np.asarray(squares)
        seconds: npt.NDArray[np.float64] = work_s + self.item_s * np.asarray(items)
        return seconds

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Self:
        """Raises PlanningError on unknown or missing names."""
        return cls(**_checked(cls, values))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds of a step beside its encoders and its decoder; 0 where they are not known or hide
    behind compute."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    feature_intra_s_per_token: float = 0.0
    """Seconds of sending one encoded feature row to another replica of the same node, and its
    gradient back."""
    feature_inter_s_per_token: float = 0.0
    """Seconds of sending one encoded feature row to a replica of another node, and its gradient
    back."""
    exchange_s: float = 0.0
    """Seconds of every exchange in which a feature row leaves its replica, however few do: at most
    once a wave and encoder, both ways."""
    gradient_s: float = 0.0
    """Seconds of every step for what it takes once: comparing plans, and the part of the sum of
    gradients that nothing hides. Where a trainer reports seconds that include its optimizer, those
    of the optimizer too."""

    def __post_init__(self) -> None:
        _require_coefficients(self)
        if self.feature_inter_s_per_token < self.feature_intra_s_per_token:
            raise PlanningError(
                f"feature_inter_s_per_token is {self.feature_inter_s_per_token}, below "
                f"feature_intra_s_per_token {self.feature_intra_s_per_token}: rows between nodes "
                "cannot be the faster ones; swap them or measure again"
            )

    @property
    def version(self) -> str:
        """Stable digest of the coefficients; empty where all are 0."""
        values = self.to_dict()
        return _digest("step", values) if any(values.values()) else ""

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> Self:
        """Raises PlanningError on unknown names."""
        return cls(**_checked(cls, values))


def sequences(
    tokens: npt.ArrayLike, full_attention: npt.ArrayLike | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Checked lengths [n] and attention weights 1+η [n]."""
    lengths = _checked_lengths(tokens).astype(np.int64, copy=False)
    if full_attention is None:
        return lengths, np.ones(lengths.size, dtype=np.float64)
    share = np.asarray(full_attention, dtype=np.float64)
    if share.shape != lengths.shape:
        raise PlanningError(
            f"full_attention has shape {share.shape} and tokens {lengths.shape}; "
            "give one share a sample"
        )
    if share.size and not (share.min() >= 0 and share.max() <= 1):
        raise PlanningError(
            f"full_attention spans {share.min()}..{share.max()}; a share lies in 0..1"
        )
    return lengths, 1.0 + share


def _checked_lengths(tokens: npt.ArrayLike) -> npt.NDArray[Any]:
    lengths = np.asarray(tokens)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise PlanningError(
            f"tokens has shape {lengths.shape} and type {lengths.dtype}; give a flat array of "
            "integers"
        )
    if lengths.size and lengths.min() < 1:
        where = int(np.argmin(lengths))
        raise PlanningError(
            f"sample {where} has {lengths[where]} tokens; a sample has at least 1: "
            "leave empty samples out before planning"
        )
    return lengths


def _require_coefficients(cost: ContextCost | PhaseCost | StepCost) -> None:
    for field in fields(cost):
        value = getattr(cost, field.name)
        if not (math.isfinite(value) and value >= 0):
            raise PlanningError(
                f"{field.name} is {value}; a cost coefficient is finite and at least 0: "
                "calibrate again"
            )


def _checked(
    owner: type[ContextCost] | type[PhaseCost] | type[StepCost], values: Mapping[str, float]
) -> dict[str, float]:
    names = {field.name for field in fields(owner)}
    required = {field.name for field in fields(owner) if field.default is MISSING}
    wrong = sorted((set(values) - names) | (required - set(values)))
    if wrong:
        raise PlanningError(
            f"{owner.__name__} got {sorted(values)}; it takes {sorted(names)} and needs "
            f"{sorted(required)}: mend {', '.join(wrong)} in the cost model file"
        )
    try:
        return {name: float(value) for name, value in values.items()}
    except (TypeError, ValueError) as error:
        raise PlanningError(
            f"{owner.__name__} got {dict(values)}; every coefficient is a number of seconds"
        ) from error


def _digest(kind: str, values: Mapping[str, float]) -> str:
    # 0.0 and -0.0 are equal, and so are what has them: it has one name.
    text = json.dumps([kind, sorted((k, (float(v) + 0.0).hex()) for k, v in values.items())])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
