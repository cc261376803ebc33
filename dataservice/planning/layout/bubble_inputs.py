"""What a bubble schedule is made from: seconds of kernels, bytes of layers, the backbone's cut.

A layer is a row of kernels, run one after the other. Each either computes or communicates between
tensor-parallel ranks; while a backbone kernel communicates, the processors of its device are idle.

    layer   ▓▓▓▓▓ ── ▓▓▓ ── ▓▓▓▓▓▓▓ ──        ▓ compute   ── communication: a TP bubble
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelTimes:
    """`seconds` float64[layer, kernel], 0 where a layer lacks a kernel; `communicates`
    bool[kernel]. Kernels run in this order, in a backward pass layers from the last to the
    first. Raises PlanningError on shapes that do not fit and times that are no times."""

    seconds: NDArray[np.float64]
    communicates: NDArray[np.bool_]

    def __post_init__(self) -> None:
        seconds = np.array(self.seconds, np.float64)
        kinds = np.array(self.communicates, np.bool_)
        if seconds.ndim != 2 or 0 in seconds.shape or kinds.shape != seconds.shape[1:]:
            raise PlanningError(
                f"seconds have shape {seconds.shape} and communicates {kinds.shape}; give "
                "[layer, kernel] and [kernel], at least one of each"
            )
        if not (seconds.min() >= 0 and seconds.max() < np.inf):
            raise PlanningError(
                f"seconds of kernels span {seconds.min()}..{seconds.max()}; times are ≥ 0, finite"
            )
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "communicates", kinds)

    @property
    def layers(self) -> int:
        return len(self.seconds)

    @property
    def compute_s(self) -> float:
        """Seconds of all kernels that compute."""
        return float(self.seconds[:, ~self.communicates].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class BackboneTimes:
    """The backbone of one replica: kernels of a microbatch on one device, and how it is cut.

    Layers are cut into `pipeline_parallel` · `virtual_stages` chunks at `bounds` int64[chunks + 1];
    without them evenly, the first ones a layer longer where that does not divide. `gather_s` comes
    before the first forward (all-gather of parameters), `scatter_s` after the last backward of each
    stage (reduce-scatter of gradients).
    `held_bytes` float64[stage]: what the backbone keeps on one GPU, activations included.
    """

    forward: KernelTimes
    backward: KernelTimes
    microbatches: int
    pipeline_parallel: int
    virtual_stages: int = 1
    tensor_parallel: int = 1
    gather_s: float = 0.0
    scatter_s: float = 0.0
    held_bytes: NDArray[np.float64] | None = None
    bounds: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        for name in ("microbatches", "pipeline_parallel", "virtual_stages", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise PlanningError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("gather_s", "scatter_s"):
            if not 0 <= getattr(self, name) < np.inf:
                raise PlanningError(f"{name} is {getattr(self, name)}; times are ≥ 0, finite")
        layers = self.forward.layers
        if layers != self.backward.layers or layers < self.chunks:
            raise PlanningError(
                f"the backbone has {layers} layers forward and {self.backward.layers} backward for "
                f"{self.chunks} chunks; give the same number, at least one a chunk"
            )
        held = np.zeros(self.pipeline_parallel) if self.held_bytes is None else self.held_bytes
        held = np.array(held, np.float64)
        if held.shape != (self.pipeline_parallel,) or not (held.min() >= 0 and held.max() < np.inf):
            raise PlanningError(
                f"held_bytes are {held.tolist()}; give one finite number ≥ 0 for each of the "
                f"{self.pipeline_parallel} stages"
            )
        object.__setattr__(self, "held_bytes", held)
        if self.bounds is not None:
            cuts = np.array(self.bounds, np.int64)
            rising = cuts.shape == (self.chunks + 1,) and bool((np.diff(cuts) > 0).all())
            if not (rising and cuts[0] == 0 and cuts[-1] == layers):
                raise PlanningError(
                    f"bounds are {cuts.tolist()}; give where each of the {self.chunks} chunks "
                    f"begins, rising from 0, and {layers}, the number of layers, at the end"
                )
            object.__setattr__(self, "bounds", cuts)

    @property
    def chunk_bounds(self) -> NDArray[np.int64]:
        """Where chunks begin, and the end: int64[chunks + 1]."""
        even = even_bounds(self.forward.layers, self.chunks)
        return even if self.bounds is None else self.bounds

    @property
    def chunks(self) -> int:
        return self.pipeline_parallel * self.virtual_stages

    @property
    def stage_bytes(self) -> NDArray[np.float64]:
        """float64[stage]."""
        assert self.held_bytes is not None
        return self.held_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderTimes:
    """One encoder: the kernels of one of the backbone's microbatches, by tensor-parallel degree.

    `forward[t]`, `backward[t]`: times at degree t; degrees that are missing are not considered. An
    encoder without `backward` is frozen; where only an adapter trains, the other layers' backward
    seconds are 0. `layer_bytes` float64[layer]: model states of a whole layer, `activation_bytes`
    those that a microbatch keeps of it until its backward pass; t ranks share both. `transfer_s`:
    features or gradients to the next stage, or to the backbone and from it.
    """

    name: str
    forward: Mapping[int, KernelTimes]
    backward: Mapping[int, KernelTimes] | None = None
    layer_bytes: NDArray[np.float64] | None = None
    activation_bytes: NDArray[np.float64] | None = None
    transfer_s: float = 0.0

    def __post_init__(self) -> None:
        backward = self.backward
        if not self.forward or (backward is not None and set(backward) != set(self.forward)):
            raise PlanningError(
                f"encoder {self.name!r} has forward times at degrees {sorted(self.forward)} and "
                f"backward at {sorted(backward or {})}; give both at the same, at least one"
            )
        tables = [*self.forward.values(), *(backward or {}).values()]
        if len({table.layers for table in tables}) != 1:
            raise PlanningError(
                f"encoder {self.name!r} has tables of {sorted({t.layers for t in tables})} layers; "
                "every degree and direction has the same layers"
            )
        if not 0 <= self.transfer_s < np.inf:
            raise PlanningError(f"transfer_s is {self.transfer_s}; times are ≥ 0, finite")
        for name in ("layer_bytes", "activation_bytes"):
            given = getattr(self, name)
            of_layers = np.zeros(self.layers) if given is None else np.array(given, np.float64)
            if of_layers.shape != (self.layers,) or not (0 <= of_layers.min() < np.inf):
                raise PlanningError(
                    f"{name} of encoder {self.name!r} are {of_layers.tolist()}; give one number "
                    f"≥ 0 for each of its {self.layers} layers"
                )
            object.__setattr__(self, name, of_layers)

    @property
    def layers(self) -> int:
        return next(iter(self.forward.values())).layers

    def bytes_of(self, layers: slice, tensor_parallel: int) -> tuple[float, float]:
        """Model states of these layers on one GPU, and what a microbatch keeps of them."""
        assert self.layer_bytes is not None
        assert self.activation_bytes is not None
        states, kept = self.layer_bytes[layers].sum(), self.activation_bytes[layers].sum()
        return float(states) / tensor_parallel, float(kept) / tensor_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderPlan:
    """How the encoders lie over one backbone replica (§4.1).

    Pipeline i has its stage k on backbone stage (i div L)·PP + k and slice i mod L of that stage's
    tensor-parallel ranks, where L = `slices`. Device = backbone stage · L + slice.
    """

    pipeline_parallel: int
    tensor_parallel: int
    blocks: int
    """Runs of `pipeline_parallel` backbone stages: PP of the backbone / PP of the encoders."""
    slices: int
    """TP of the backbone / TP of the encoders."""
    pipelines: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pipelines", self.blocks * self.slices)


def even_bounds(layers: int, parts: int) -> NDArray[np.int64]:
    """Contiguous cut into parts that differ by a layer at most, longer ones first:
    int64[parts + 1]."""
    sizes = np.full(parts, layers // parts)
    sizes[: layers % parts] += 1
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
