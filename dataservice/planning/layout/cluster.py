"""The machines: what a GPU computes, holds and reaches, and how many of which kind there are."""

import math
from dataclasses import dataclass, fields
from typing import ClassVar

from dataservice.core.errors import PlanningError
from dataservice.core.job import STRICT


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One kind of GPU, and what of its peak a training step reaches. The efficiencies are stated,
    not known: measure layers to do without them."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    name: str = "GPU"
    """What it is called."""
    peak_flops: float
    """Operations a second of its matrix units, in the precision of training, without sparsity."""
    memory_bytes: float
    """Bytes of its memory that training may use."""
    memory_bytes_per_s: float
    """Bytes a second that its memory gives."""
    matrix_efficiency: float = 0.6
    """Part of the peak that products of matrices reach."""
    attention_efficiency: float = 0.4
    """Part of the peak that attention reaches."""
    memory_efficiency: float = 0.8
    """Part of the memory's bytes a second that norms and activation functions reach."""
    launch_s: float = 0.0
    """Seconds that a layer takes besides its work, forward; backward twice as many."""

    def __post_init__(self) -> None:
        for name in ("peak_flops", "memory_bytes", "memory_bytes_per_s"):
            _require(getattr(self, name) > 0, f"device.{name}", getattr(self, name), "above 0")
        for name in ("matrix_efficiency", "attention_efficiency", "memory_efficiency"):
            share = getattr(self, name)
            _require(0 < share <= 1, f"device.{name}", share, "a part of the peak, in 0..1")
        _require(self.launch_s >= 0, "device.launch_s", self.launch_s, "0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeGroup:
    """Nodes of one kind."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    nodes: int
    """How many there are."""
    device: Device
    """The GPUs in them."""
    gpus_per_node: int = 8
    """GPUs of each."""
    inside_bytes_per_s: float
    """Bytes a second that a GPU sends to others of its node."""
    between_bytes_per_s: float
    """Bytes a second that a GPU sends to other nodes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float):
                _require(value > 0, f"cluster.{field.name}", value, "above 0")

    @property
    def gpus(self) -> int:
        """GPUs of all its nodes."""
        return self.nodes * self.gpus_per_node

    @property
    def words(self) -> str:
        """As people name it."""
        return f"{self.nodes} × {self.gpus_per_node} {self.device.name}"

    def link_bytes_per_s(self, ranks: int) -> float:
        """Bytes a second of the slowest link among so many ranks that are neighbours."""
        inside = ranks <= self.gpus_per_node
        return self.inside_bytes_per_s if inside else self.between_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """All machines of a training job: one kind of nodes, or several."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    groups: tuple[NodeGroup, ...]
    """The nodes, by kind."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise PlanningError("the cluster has no groups of nodes; give at least one")

    @property
    def gpus(self) -> int:
        """All GPUs."""
        return sum(group.gpus for group in self.groups)

    @property
    def memory_bytes(self) -> float:
        """Bytes of the GPU that has the least."""
        return min(group.device.memory_bytes for group in self.groups)


def _require(fine: bool, name: str, value: float, allowed: str) -> None:
    if not (fine and math.isfinite(value)):
        raise PlanningError(f"{name} is {value}; it must be {allowed}: mend the cluster file")
