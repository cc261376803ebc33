"""How a job is planned: one strategy by name, or each stage chosen on its own.

Only names stand here, so that a job file is validated without kernels. The function of each name
is in a table of the stage it belongs to; a test holds names and tables together.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import ClassVar, Literal, Self, TypeVar, get_args

import numpy as np

from dataservice.core.cost import ContextCost, PhaseCost, StepCost
from dataservice.core.errors import PlanningError
from dataservice.core.job import STRICT
from dataservice.core.layout import padded_tokens
from dataservice.core.memory import MemoryModel
from dataservice.core.topology import ReplicaLayout

Strategy = Literal["full", "packing", "length_grouped", "random"]
Pack = Literal["auto", "joint", "balanced", "isf", "bfd", "padded", "padded_by_length"]
Context = Literal["dynamic", "power_of_two", "static"]
Assign = Literal["balanced", "as_packed"]
Order = Literal["search", "mmscale", "as_formed"]
Dispatch = Literal["balanced", "home"]
Solver = Literal["threshold", "dp"]
FullAttention = Literal["none", "items"]

# What may stand under each key of PlanOptions that names an algorithm.
NAMES: dict[str, tuple[str, ...]] = {
    "strategy": get_args(Strategy),
    "pack": get_args(Pack),
    "context": get_args(Context),
    "assign": get_args(Assign),
    "order": get_args(Order),
    "dispatch": get_args(Dispatch),
    "solver": get_args(Solver),
    "full_attention": get_args(FullAttention),
}
Name = TypeVar("Name", bound=str)
Algorithm = TypeVar("Algorithm")

STATIC_PACKS: tuple[Pack, ...] = ("bfd", "padded", "padded_by_length")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The algorithm of every stage, all decided."""

    pack: Pack
    context: Context
    assign: Assign
    order: Order
    dispatch: Dispatch


STRATEGIES: dict[Strategy, Stages] = {
    "full": Stages(
        pack="auto", context="dynamic", assign="balanced", order="search", dispatch="balanced"
    ),
    "packing": Stages(
        pack="bfd", context="static", assign="as_packed", order="as_formed", dispatch="home"
    ),
    "length_grouped": Stages(
        pack="padded_by_length",
        context="static",
        assign="as_packed",
        order="as_formed",
        dispatch="home",
    ),
    "random": Stages(
        pack="padded", context="static", assign="as_packed", order="as_formed", dispatch="home"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModel:
    """Seconds of a forward and backward pass, by phase. Calibrate for your model."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    llm: ContextCost = field(default_factory=ContextCost.flexsp_7b)
    """The decoder, by length and CP degree (DHP eq. 8–10)."""
    vision: PhaseCost = field(
        default_factory=lambda: PhaseCost(linear_s_per_token=1.2e-5, item_s=1e-3)
    )
    """The vision encoder, by patches of an item."""
    audio: PhaseCost = field(
        default_factory=lambda: PhaseCost(linear_s_per_token=1.2e-5, item_s=1e-3)
    )
    """The audio encoder, by frames of an item."""
    step: StepCost = field(default_factory=StepCost)
    """What a step takes beside them: features on their way, and what follows the last backward."""

    @property
    def version(self) -> str:
        """Names these coefficients in the ledger."""
        return _version_of(self)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Every coefficient, by phase."""
        return {phase.name: getattr(self, phase.name).to_dict() for phase in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Mapping[str, float]]) -> Self:
        """The reverse; a phase left out has its default. Raises PlanningError on unknown names."""
        known: dict[str, Mapping[str, float]] = {**cls().to_dict()}
        if unknown := sorted(set(values) - set(known)):
            raise PlanningError(
                f"a cost model has no phase {', '.join(unknown)}; it has {', '.join(known)}"
            )
        given = {**known, **values}
        return cls(
            llm=ContextCost.from_dict(given["llm"]),
            vision=PhaseCost.from_dict(given["vision"]),
            audio=PhaseCost.from_dict(given["audio"]),
            step=StepCost.from_dict(given["step"]),
        )


@lru_cache(maxsize=64)
def _version_of(cost: CostModel) -> str:
    # Every plan has it, and small steps are planned in less time than it takes.
    versions = (getattr(cost, phase.name).version for phase in fields(cost))
    return "-".join(version for version in versions if version)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """How each global batch is planned. Stages left out follow `strategy`."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    memory_tokens: int = 0
    """Tokens of one microbatch that a replica can hold; longer samples are shared by a CP group.
    The simple form of `memory`: give one of the two."""
    memory: MemoryModel | None = None
    """The same in bytes, encoders included; or the path of a file `dataservice calibrate` wrote."""
    strategy: Strategy = "full"
    """full, or a baseline: packing (static CP), length_grouped, random (both padded)."""
    pack: Pack | None = None
    """auto: balanced, and of up to 8,192 samples joint with the groups where that ends far from the
    bound; isf, bfd; or a baseline."""
    context: Context | None = None
    """dynamic (any integer degree), power_of_two, or static."""
    static_degree: int | None = None
    """Degree of static context; by default the least divisor of N that holds the step."""
    solver: Solver = "threshold"
    """Degree solver: threshold is exact and fast; dp is DHP's 2D dynamic programming. Balanced
    packs find their degrees as they are filled, without either."""
    assign: Assign | None = None
    """balanced evens out the replicas over the waves; as_packed leaves packs where they came."""
    order: Order | None = None
    """Order of waves for pipeline parallelism: search, mmscale, or as_formed."""
    dispatch: Dispatch | None = None
    """balanced spreads encoder items over all replicas; home encodes where the text is."""
    cut_items: bool = True
    """Long clips and pictures of many tiles are encoded in pieces by several replicas, where the
    processor says that no frame attends to another; false for an encoder of yours whose frames
    do."""
    window_steps: int = 1
    """Steps that are drawn together and split into steps of equal work."""
    full_attention: FullAttention = "none"
    """Which tokens see one another both ways in the decoder, which costs attention twice: none, or
    those of the same image, clip or recording (items; η of DHP eq. 8)."""
    cost: CostModel = field(default_factory=CostModel)
    """Seconds by length: the coefficients, or the path of a file `dataservice calibrate` wrote."""

    def __post_init__(self) -> None:
        for key, names in NAMES.items():
            if (name := getattr(self, key)) is not None:
                require_name(name, names, f"plan.{key}")
        if self.memory_tokens < 0 or (self.memory_tokens == 0 and self.memory is None):
            raise PlanningError(
                f"plan.memory_tokens is {self.memory_tokens}; it must be at least 1. Give the "
                "tokens of a microbatch that a replica can hold, or plan.memory in bytes."
            )
        if self.window_steps < 1:
            raise PlanningError(f"plan.window_steps is {self.window_steps}; it must be at least 1")
        if self.stages.context == "static" and self.stages.pack not in STATIC_PACKS:
            raise PlanningError(
                f"plan.pack {self.stages.pack} chooses packs for degrees that are free, and "
                f"plan.context is static. Set plan.pack to one of {', '.join(STATIC_PACKS)}, or "
                "plan.context to dynamic."
            )
        if self.static_degree is not None and self.static_degree < 1:
            raise PlanningError(
                f"plan.static_degree is {self.static_degree}; leave it out or give at least 1"
            )

    @property
    def stages(self) -> Stages:
        """Every stage's algorithm, defaults from `strategy`."""
        default = STRATEGIES[self.strategy]
        return Stages(
            pack=self.pack or default.pack,
            context=self.context or default.context,
            assign=self.assign or default.assign,
            order=self.order or default.order,
            dispatch=self.dispatch or default.dispatch,
        )

    def over(self, layout: ReplicaLayout) -> Self:
        """The options with the `memory_tokens` that `memory` leaves in this layout; the same where
        they have no `memory`. Raises PlanningError where it leaves none."""
        if self.memory is None:
            return self
        return replace(self, memory_tokens=self.memory.tokens(layout))

    def static_degree_of(self, longest_tokens: int, replicas: int) -> int:
        """The degree of static context: `static_degree`, or the least that holds the longest
        sample. Raises PlanningError where no group of it does, or there are fewer replicas."""
        if self.static_degree is None:
            return self.static_degree_for(longest_tokens, replicas)
        held = self.longest_sample_tokens(replicas)
        if longest_tokens > held:
            raise PlanningError(
                f"a sample has {longest_tokens} tokens; a group of plan.static_degree "
                f"{self.static_degree} holds at most {held}. Raise it or plan.memory_tokens."
            )
        return self.static_degree

    def static_degree_for(self, longest_tokens: int, replicas: int) -> int:
        """The least divisor of `replicas` at which one group holds the longest sample."""
        for degree in range(1, replicas + 1):
            if replicas % degree:
                continue
            held = int(padded_tokens(np.array([longest_tokens]), degree)[0]) // degree
            if held <= self.memory_tokens:
                return degree
        raise PlanningError(
            f"a sample has {longest_tokens} tokens; {replicas} replicas of {self.memory_tokens} "
            "tokens do not hold it. Give more replicas or raise memory_tokens."
        )

    def widest_degree(self, replicas: int) -> int:
        """The most replicas that may share a sample. Raises PlanningError where `static_degree` is
        more than there are."""
        context = self.stages.context
        if context == "power_of_two":
            return 1 << (replicas.bit_length() - 1)
        if context != "static" or self.static_degree is None:
            return replicas
        if self.static_degree > replicas:
            raise PlanningError(
                f"plan.static_degree is {self.static_degree}, and there are {replicas} replicas. "
                "Start as many, or lower it, or leave it out: then it is the least that holds the "
                "longest sample."
            )
        return self.static_degree

    def longest_sample_tokens(self, replicas: int) -> int:
        """The longest sample that a group of these replicas holds, padding to 2N counted. Raises as
        `widest_degree` does."""
        degree = self.widest_degree(replicas)
        together = degree * self.memory_tokens
        return together if degree == 1 else together // (2 * degree) * (2 * degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class IsfLimits:
    """Most and least tokens of a pack: Q_t, Q_v and Q'_t, Q'_v in OmniBal's words."""

    max_text: int
    max_vision: int
    min_text: int
    min_vision: int


def require_name(name: str, names: Iterable[str], what: str) -> None:
    """Raises PlanningError unless `name` is one of `names`; `what` is the argument or key."""
    known = tuple(names)
    if name not in known:
        raise PlanningError(f"{what} is {name!r}; choose one of {', '.join(known)}")


def algorithm_named(table: Mapping[Name, Algorithm], name: Name, what: str) -> Algorithm:
    """The algorithm of that name in the table of a stage, which stands beside its functions. Raises
    PlanningError with the names of the table."""
    require_name(name, table, what)
    return table[name]
