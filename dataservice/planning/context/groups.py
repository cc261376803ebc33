"""The front door of context parallelism: groups of one wave, waves of one step, static baseline."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.cost import ContextCost
from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import Solver, require_name
from dataservice.planning.context.bound import wave_bound, waves_bound
from dataservice.planning.context.check import check_waves
from dataservice.planning.context.exact import best_waves
from dataservice.planning.context.plan import ContextGroup, ContextPlan
from dataservice.planning.context.seconds import group_seconds
from dataservice.planning.context.step_waves import (
    cut_static,
    pack_one_wave,
    pack_static,
    solve_one_wave,
    solve_waves,
    wave_units,
)
from dataservice.planning.context.units import (
    Degrees,
    Setting,
    Units,
    fitting_degrees,
    make_setting,
    make_units,
    select_units,
)
from dataservice.planning.context.wave import SOLVERS, static_wave
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.integers import padded_length
from dataservice.planning.kernels.sort import group_stable

__all__ = [
    "ContextGroup",
    "ContextPlan",
    "ContextWaves",
    "context_bound",
    "plan_context_groups",
    "plan_context_waves",
    "plan_static_context",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextWaves:
    """All waves of a step, longest samples first. Sample indices are the caller's.

    `lower_bound_s`: β₁ for the least number of waves memory allows, plus the larger of
    Σwork/N and the longest sample's least time, or what memory leaves to others beside that sample;
    the makespan itself where all was tried. No sequence of waves is faster.
    """

    waves: tuple[ContextPlan, ...]
    lower_bound_s: float

    @property
    def makespan_s(self) -> float:
        """Sum of the waves' makespans: replicas meet after every wave."""
        return sum(wave.makespan_s for wave in self.waves)


def plan_context_groups(
    tokens: ArrayLike,
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    full_attention: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    solver: Solver = "threshold",
    degrees: Degrees = "any",
) -> ContextPlan:
    """Context-parallel groups of one wave: every sample of `tokens` int[n], at once.

    `memory_tokens` is what one replica holds, padding counted; `full_attention` float[n] the share
    η of each sample that attends both ways; replicas k·ranks_per_node.. share a node.
    Raises PlanningError on bad input, on a sample that all ranks together cannot hold, and when the
    samples do not fit one wave. About O(n·(log n + log N)) a build, a dozen builds, then local
    improvement. Source: DHP §4.3, its grouping improved against the bound of `context.bound`.
    """
    setting = make_setting(
        ranks=ranks,
        memory_tokens=memory_tokens,
        cost=cost,
        ranks_per_node=ranks_per_node,
        degrees=degrees,
    )
    require_name(solver, SOLVERS, "solver")
    units = make_units(tokens, full_attention, cost)
    least = fitting_degrees(units, setting)
    plan = solve_one_wave(units, least, setting, solver, False)
    if plan is None:
        packed = pack_one_wave(units, least, setting)
        raise PlanningError(
            f"{units.total.size} samples of {int(units.total.sum())} tokens need "
            f"{int(packed[1].sum())} replicas of {memory_tokens} tokens and there are {ranks}; "
            f"give that many, raise memory_tokens to about "
            f"{-(-int(packed[1].sum()) * memory_tokens // ranks)}, or plan several waves "
            "(plan_context_waves)"
        )
    _check((plan,), units, setting)
    return plan


def plan_context_waves(
    tokens: ArrayLike,
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    full_attention: ArrayLike | None = None,
    ranks_per_node: int | None = None,
    solver: Solver = "threshold",
    degrees: Degrees = "any",
    max_pack_tokens: int | None = None,
    packs: ArrayLike | None = None,
) -> ContextWaves:
    """Waves and groups of a whole step, minimising the sum of the waves' makespans.

    As `plan_context_groups`, for samples int[n] that need not fit at once. `packs` int[n] keeps the
    samples of a pack together and alone in one group, whose degree is free. `max_pack_tokens`
    lowers what a replica holds to the length its kernels are built for.
    Raises PlanningError on bad input and on a unit that all ranks together cannot hold.
    """
    memory = memory_tokens if max_pack_tokens is None else min(memory_tokens, max_pack_tokens)
    setting = make_setting(
        ranks=ranks,
        memory_tokens=memory,
        cost=cost,
        ranks_per_node=ranks_per_node,
        degrees=degrees,
    )
    require_name(solver, SOLVERS, "solver")
    units = make_units(tokens, full_attention, cost, packs)
    if units.total.size == 0:
        return ContextWaves(waves=(), lower_bound_s=0.0)
    least = fitting_degrees(units, setting)
    whole = packs is not None
    bound_s = waves_bound(units, least, setting)
    waves = best_waves(units, setting, whole)
    if waves is None:
        waves = solve_waves(units, least, bound_s, setting, solver, whole)
    else:  # no other is faster
        bound_s = sum(wave.makespan_s for wave in waves)
    _check(waves, units, setting)
    return ContextWaves(waves=waves, lower_bound_s=bound_s)


def context_bound(
    tokens: ArrayLike,
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    full_attention: ArrayLike | None = None,
    ranks_per_node: int | None = None,
) -> float:
    """Seconds that no waves of these samples, int[n], go below in sum, whatever their degrees:
    `lower_bound_s` of ContextWaves, without the waves. O(n log n). Raises PlanningError on a sample
    that all ranks together cannot hold."""
    setting = make_setting(
        ranks=ranks,
        memory_tokens=memory_tokens,
        cost=cost,
        ranks_per_node=ranks_per_node,
        degrees="any",
    )
    units = make_units(tokens, full_attention, cost)
    if units.total.size == 0:
        return 0.0
    return waves_bound(units, fitting_degrees(units, setting), setting)


def plan_static_context(
    tokens: ArrayLike,
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    degree: int,
    full_attention: ArrayLike | None = None,
    ranks_per_node: int | None = None,
) -> ContextWaves:
    """The static baseline: every group of every wave has `degree` replicas, which divides `ranks`.

    It is given best-fit packing, waves of about equal times and greedy balance inside each wave, so
    that what it loses is due to its fixed degree alone. Raises PlanningError as the others do.
    """
    setting = make_setting(
        ranks=ranks,
        memory_tokens=memory_tokens,
        cost=cost,
        ranks_per_node=ranks_per_node,
        degrees="any",
    )
    if not 1 <= degree <= ranks or ranks % degree:
        raise PlanningError(
            f"degree is {degree} for {ranks} replicas; a static degree divides their number"
        )
    units = make_units(tokens, full_attention, cost)
    if units.total.size == 0:
        return ContextWaves(waves=(), lower_bound_s=0.0)
    least = fitting_degrees(units, setting)
    if least.max() > degree:
        unit = int(np.argmax(least))
        raise PlanningError(
            f"sample {unit} has {units.total[unit]} tokens and {degree} replicas of "
            f"{memory_tokens} hold {degree * memory_tokens}; the static degree must be at least "
            f"{least[unit]}"
        )
    packing = pack_static(units, degree, setting)
    waves = []
    for groups in cut_static(units, packing, setting):
        chosen, packed = wave_units(packing, groups)
        wave = select_units(units, chosen)
        bound_s = wave_bound(wave, least[chosen], setting)
        waves.append(static_wave(wave, packed, degree, bound_s, setting))
    _check(tuple(waves), units, setting)
    return ContextWaves(waves=tuple(waves), lower_bound_s=waves_bound(units, least, setting))


def _check(waves: tuple[ContextPlan, ...], units: Units, setting: Setting) -> None:
    """Every plan is checked before it leaves, in the caller's numbering of samples."""
    tokens, weights = np.empty_like(units.tokens), np.empty_like(units.weights)
    tokens[units.samples], weights[units.samples] = units.tokens, units.weights
    check_waves(waves, tokens, weights, setting)


def static_waves(
    tokens: NDArray[np.int64],
    pack_of: NDArray[np.int32],
    cost_tokens: NDArray[np.int64],
    *,
    replicas: int,
    degree: int,
    cost: ContextCost,
    ranks_per_node: int | None = None,
    full_attention: NDArray[np.float64] | None = None,
) -> tuple[ContextPlan, ...]:
    """Waves of N/degree packs, in pack order; group g of a wave has the ranks from g·degree on.

    `tokens` int64[n] true lengths, `pack_of` int32[n], `cost_tokens` int64[n] the lengths that
    are paid for (padded ones in a padded baseline), `full_attention` float64[n] η. O(n).
    """
    packs = int(pack_of.max(initial=-1)) + 1
    samples, offsets = group_stable(pack_of.astype(np.int64), np.arange(pack_of.size), packs)
    seconds, padded = static_times(
        samples,
        offsets,
        tokens,
        cost_tokens,
        replicas=replicas,
        degree=degree,
        cost=cost,
        ranks_per_node=ranks_per_node,
        full_attention=full_attention,
    )
    per_wave, waves = replicas // degree, []
    for begin in range(0, packs, per_wave):
        end = min(begin + per_wave, packs)
        waves.append(
            ContextPlan(
                samples=samples[offsets[begin] : offsets[end]].astype(np.int32),
                sample_offsets=offsets[begin : end + 1] - offsets[begin],
                ranks=np.arange((end - begin) * degree, dtype=np.int32),
                rank_offsets=np.arange(end - begin + 1) * degree,
                time_s=seconds[begin:end],
                padded_tokens=padded[begin:end],
                lower_bound_s=0.0,
            )
        )
    return tuple(waves)


def static_times(
    samples: NDArray[np.int64],
    offsets: NDArray[np.int64],
    tokens: NDArray[np.int64],
    cost_tokens: NDArray[np.int64],
    *,
    replicas: int,
    degree: int,
    cost: ContextCost,
    ranks_per_node: int | None,
    full_attention: NDArray[np.float64] | None,
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Seconds float64[packs] and padded tokens int64[packs] of packs that take the places of
    `static_waves` in their order: pack p is samples[offsets[p] : offsets[p + 1]]. O(n)."""
    node = ranks_per_node or replicas
    first = np.arange(offsets.size - 1) % (replicas // degree) * degree
    crosses = first // node != (first + degree - 1) // node
    weights = np.ones(tokens.size) if full_attention is None else 1.0 + full_attention
    return _pack_sums(
        samples, offsets, tokens, cost_tokens, weights, degree, crosses, cost.coefficients
    )


@kernel
def _pack_sums(
    samples: NDArray[np.int64],
    offsets: NDArray[np.int64],
    tokens: NDArray[np.int64],
    cost_tokens: NDArray[np.int64],
    weights: NDArray[np.float64],
    degree: int,
    crosses: NDArray[np.bool_],
    coefficients: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Seconds and padded tokens of each pack: [packs]."""
    packs = offsets.size - 1
    seconds = np.empty(packs)
    padded = np.zeros(packs, np.int64)
    for pack in range(packs):
        paid, squares = 0, 0.0
        for at in range(offsets[pack], offsets[pack + 1]):
            padded[pack] += padded_length(tokens[samples[at]], degree)
            length = padded_length(cost_tokens[samples[at]], degree)
            paid += length
            squares += weights[samples[at]] * float(length) * float(length)
        seconds[pack] = group_seconds(float(paid), squares, degree, crosses[pack], coefficients)
    return seconds, padded
