"""Stage 2, group: who shares a pack, and in which wave it runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan import StageReport
from dataservice.core.plan_options import Context, FullAttention, Pack, PlanOptions, algorithm_named
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning.context.groups import (
    ContextWaves,
    plan_context_waves,
    static_waves,
)
from dataservice.planning.context.many import find_many_waves
from dataservice.planning.context.units import Degrees
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.stages.effort import Effort, forming_s, joint_s
from dataservice.planning.stages.pack import Packed

# Packs that level many samples are quick. Those formed jointly with their groups take longer and
# are tried where samples are few and the quick ones end this far from the bound.
FEW_SAMPLES = 8192
_FEW_BESIDE_ENCODERS = 1024  # where what has no room leaves its wave, and is grouped again
WORTH_TRYING = 1.003


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStep:
    """What the group stage is given: `tokens` int64[n] true lengths, what the pack stage made of
    them, the `degree` of static context, and the `effort` that forming waves is counted in."""

    tokens: NDArray[np.int64]
    packed: Packed
    degree: int
    topology: Topology
    options: PlanOptions
    effort: Effort
    full_attention: NDArray[np.float64] | None = None
    """η float64[n], None where all attention is causal."""

    @property
    def restricts(self) -> bool:
        """Whether waves are made of packs as they were given, or of some degrees alone."""
        return self.packed[0] is not None or self.options.stages.context != "dynamic"


def full_attention(lengths: LengthTable, which: FullAttention) -> NDArray[np.float64] | None:
    """The share η of each sample's attention beyond the causal, float64[n] (DHP eq. 8); None where
    there is none. Raises PlanningError on an unknown name."""
    return algorithm_named(FULL_ATTENTION, which, "plan.full_attention")(lengths)


def _of_items(lengths: LengthTable) -> NDArray[np.float64] | None:
    """Tokens of one item that see one another both ways take its own causal attention once more:
    Σ v²/s² of items of v tokens in a sample of s."""
    if len(lengths.item_llm_tokens) == 0:
        return None
    return _squares_shares(lengths.llm_tokens, lengths.item_offsets, lengths.item_llm_tokens)


@kernel
def _squares_shares(
    llm_tokens: NDArray[np.int32],
    item_offsets: NDArray[np.int64],
    item_llm_tokens: NDArray[np.int32],
) -> NDArray[np.float64]:
    shares = np.empty(llm_tokens.size)
    for sample in range(llm_tokens.size):
        both_ways = 0.0
        for item in range(item_offsets[sample], item_offsets[sample + 1]):
            both_ways += float(item_llm_tokens[item]) ** 2
        shares[sample] = min(both_ways / float(llm_tokens[sample]) ** 2, 1.0)
    return shares


FULL_ATTENTION: dict[FullAttention, Callable[[LengthTable], NDArray[np.float64] | None]] = {
    "none": lambda lengths: None,
    "items": _of_items,
}


def group_packs(step: PackedStep) -> ContextWaves:
    """Waves of CP groups, and a lower bound of their summed makespans.

    Raises PlanningError on an unknown algorithm, and on a sample that all replicas together
    cannot hold.
    """
    group = algorithm_named(CONTEXTS, step.options.stages.context, "plan.context")
    return group(step)


def _searched(step: PackedStep, *, degrees: Degrees) -> ContextWaves:
    return algorithm_named(SEARCHES, step.options.stages.pack, "plan.pack")(step, degrees)


def _static(step: PackedStep) -> ContextWaves:
    pack_of, charged = step.packed
    assert pack_of is not None, "options refuse static context without packs"
    cost, replicas = step.options.cost.llm, step.topology.replicas
    waves = static_waves(
        step.tokens,
        pack_of,
        charged,
        replicas=replicas,
        degree=step.degree,
        cost=cost,
        ranks_per_node=step.topology.replicas_per_node,
        full_attention=step.full_attention,
    )
    work_s = cost.total_work_s(step.tokens, step.full_attention)
    return ContextWaves(waves=waves, lower_bound_s=work_s / replicas)


def _auto(step: PackedStep, degrees: Degrees) -> ContextWaves:
    many = _many(step, degrees)
    near = many.makespan_s <= many.lower_bound_s * WORTH_TRYING
    apart = EncoderRoom.of(step.options.memory, step.topology) is None
    few = FEW_SAMPLES if apart else _FEW_BESIDE_ENCODERS
    if near or len(step.tokens) > few:
        return many
    takes_s = joint_s(len(step.tokens), len(many.waves), both_ways=step.full_attention is not None)
    if not step.effort.spend(takes_s):
        return many
    joint = _joint(step, degrees)
    better = min(joint, many, key=lambda waves: waves.makespan_s)
    return replace(better, lower_bound_s=max(joint.lower_bound_s, many.lower_bound_s))


def _many(step: PackedStep, degrees: Degrees) -> ContextWaves:
    many = find_many_waves(
        step.tokens,
        ranks=step.topology.replicas,
        memory_tokens=step.options.memory_tokens,
        cost=step.options.cost.llm,
        full_attention=step.full_attention,
        ranks_per_node=step.topology.replicas_per_node,
        degrees=degrees,
    )
    step.effort.take(forming_s(len(step.tokens), len(many.waves), step.topology.replicas))
    return many


def _joint(step: PackedStep, degrees: Degrees) -> ContextWaves:
    return plan_context_waves(
        step.tokens,
        ranks=step.topology.replicas,
        memory_tokens=step.options.memory_tokens,
        cost=step.options.cost.llm,
        full_attention=step.full_attention,
        ranks_per_node=step.topology.replicas_per_node,
        solver=step.options.solver,
        degrees=degrees,
        packs=step.packed[0],
    )


CONTEXTS: dict[Context, Callable[[PackedStep], ContextWaves]] = {
    "dynamic": partial(_searched, degrees="any"),
    "power_of_two": partial(_searched, degrees="power_of_two"),
    "static": _static,
}
# Free degrees are searched for packs as the pack stage left them.
SEARCHES: dict[Pack, Callable[[PackedStep, Degrees], ContextWaves]] = {
    "auto": _auto,
    "joint": _joint,
    "balanced": _many,
    "isf": _joint,
    "bfd": _joint,
    "padded": _joint,
    "padded_by_length": _joint,
}


def group_report(step: PackedStep, grouped: ContextWaves) -> StageReport:
    """Before: every sample alone, in draw order, at the static degree that holds the longest."""
    tokens, options, replicas = step.tokens, step.options, step.topology.replicas
    degree = options.static_degree_for(int(tokens.max(initial=1)), replicas)
    waves, llm = np.arange(0, len(tokens), replicas // degree), options.cost.llm
    if step.full_attention is None:  # the longest of each wave is its slowest
        slowest = llm.alone_s(np.maximum.reduceat(tokens, waves), degree)
    else:
        alone_s = llm.alone_s(tokens, degree, step.full_attention)
        slowest = np.maximum.reduceat(alone_s, waves)
    return StageReport(
        stage="group",
        algorithm=options.stages.context,
        unit="s",
        before=float(slowest.sum()),
        after=grouped.makespan_s,
        lower_bound=grouped.lower_bound_s,
    )
