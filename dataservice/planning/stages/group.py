"""Stage 2, group: who shares a pack, and in which wave it runs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import padded_tokens
from dataservice.core.plan import StageReport
from dataservice.core.plan_options import Context, FullAttention, Pack, PlanOptions, algorithm_named
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning.context.groups import (
    ContextWaves,
    plan_context_waves,
    static_times,
    static_waves,
)
from dataservice.planning.context.many import find_many_waves
from dataservice.planning.context.units import Degrees
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.kernels.sort import argsort_falling
from dataservice.planning.packs.bfd import bound_falling
from dataservice.planning.packs.padded import cut_padded
from dataservice.planning.stages.pack import Packed

# Packs that level many samples are quick. Those formed jointly with their groups take longer and
# are tried where samples are few and the quick ones end this far from the bound.
FEW_SAMPLES = 8192
_FEW_BESIDE_ENCODERS = 1024  # where what has no room leaves its wave, and is grouped again
_JOINT_S, _BOTH_WAYS = 5e-6, 1.5  # what one of them takes about, and times that with η
# What planning may take for the sake of a better plan: so long, or this part of the step. What work
# takes is told by its size, never by a clock, so that plans are the same everywhere.
LEAST_S, SHARE = 0.05, 0.01
WORTH_TRYING = 1.003
# Of the samples, how many are packed before it is seen whether their waves tell enough.
_PARTS = (1 / 8, 1 / 2, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStep:
    """What the group stage is given: `tokens` int64[n] true lengths, what the pack stage made of
    them, and the `degree` of static context."""

    tokens: NDArray[np.int64]
    packed: Packed
    degree: int
    topology: Topology
    options: PlanOptions
    full_attention: NDArray[np.float64] | None = None
    """η float64[n], None where all attention is causal."""


def full_attention(lengths: LengthTable, which: FullAttention) -> NDArray[np.float64] | None:
    """The share η of each sample's attention beyond the causal, float64[n] (DHP eq. 8); None where
    there is none. Raises PlanningError on an unknown name."""
    return algorithm_named(FULL_ATTENTION, which, "plan.full_attention")(lengths)


def _of_items(lengths: LengthTable) -> NDArray[np.float64] | None:
    """Tokens of one item that see one another both ways take its own causal attention once more:
    Σ v²/s² of items of v tokens in a sample of s."""
    if len(lengths.item_llm_tokens) == 0:
        return None
    squares = np.concatenate([[0.0], np.cumsum(lengths.item_llm_tokens.astype(np.float64) ** 2)])
    both_ways = squares[lengths.item_offsets[1:]] - squares[lengths.item_offsets[:-1]]
    share: NDArray[np.float64] = both_ways / lengths.llm_tokens.astype(np.float64) ** 2
    return np.minimum(share, 1.0)


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


class StaticBound(NamedTuple):
    """What static waves take in sum at least: all work, spread over all replicas; or the sample
    that takes longest alone, beside the least of all other waves."""

    spread_s: float
    longest_s: float


class StaticBounds:
    """What waves of static context take in sum at least, of these samples with their `eta`
    float64[n], None where all attention is causal, and items that may be cut into `units` int32[m],
    None where they are whole."""

    def __init__(
        self,
        lengths: LengthTable,
        eta: NDArray[np.float64] | None,
        topology: Topology,
        units: NDArray[np.int32] | None = None,
    ) -> None:
        self._lengths, self._eta, self._topology, self._units = lengths, eta, topology, units
        self._padded_for: dict[int, NDArray[np.int64]] = {}
        self._falling_for: dict[int, NDArray[np.int64]] = {}
        self._first_waves_of: dict[tuple[int, int, bool, float], float | None] = {}
        self._item_bytes_of: dict[EncoderRoom, tuple[int, float]] = {}

    def packs_stay(self, degree: int, options: PlanOptions) -> bool:
        """Whether any pack surely has room for its items beside it alone, on replicas that are idle
        then. So of waves that `waves_in_room` parts, the slowest pack stays in each, and in sum
        they take no less afterwards. O(m) once."""
        room = EncoderRoom.of(options.memory, self._topology)
        if room is None or len(self._lengths.item_modality) == 0:
            return True
        if room not in self._item_bytes_of:
            self._item_bytes_of[room] = self._item_bytes(room)
        largest, of_token = self._item_bytes_of[room]
        idle_bytes = (self._topology.replicas - degree) * max(room.microbatch_bytes - largest, 0)
        return of_token * degree * options.memory_tokens <= idle_bytes

    def _item_bytes(self, room: EncoderRoom) -> tuple[int, float]:
        """Bytes of the largest unit, and the most that a token of the decoder stands for."""
        modality, units = self._lengths.item_modality, self._units
        sizes = room.unit_bytes(modality, self._lengths.item_encoder_tokens, units)
        largest = int(sizes.max())
        sizes = sizes if units is None else sizes * units
        if self._lengths.item_llm_tokens.min() == 0:
            return largest, np.inf  # a pack may hold any number
        return largest, float((sizes / self._lengths.item_llm_tokens).max())

    def of_any(self, degree: int, options: PlanOptions) -> StaticBound:
        """Whatever their packs: memory calls for some at least, and they take no less than one
        group that held everything."""
        llm, squares = options.cost.llm, self._squares
        longest = int(squares.argmax())
        longest_tokens = self._lengths.llm_tokens[longest]
        crosses = self._crosses(degree)
        longest_s = float(llm.group_times_s(longest_tokens, squares[longest], degree, crosses))
        spread_s, packs = self._spread(self._tokens, self._sum_squares, degree, options)
        waves = -(-packs // (self._topology.replicas // degree))
        return StaticBound(spread_s=spread_s, longest_s=longest_s + (waves - 1) * llm.group_s)

    def _crosses(self, degree: int) -> bool:
        """Whether every group of that degree crosses nodes."""
        return degree > (self._topology.replicas_per_node or self._topology.replicas)

    def _spread(
        self, tokens: int, squares: float, degree: int, options: PlanOptions
    ) -> tuple[float, int]:
        """Seconds of the waves of samples of Σs and Σ(1+η)s², and how many packs they are at least;
        none where there are none."""
        llm = options.cost.llm
        packs = -(-tokens // (degree * options.memory_tokens))
        if packs == 0:
            return 0.0, 0
        together_s = float(llm.group_times_s(tokens, squares, degree, self._crosses(degree)))
        per_wave = self._topology.replicas // degree
        return (together_s + (packs - 1) * llm.group_s) / per_wave, packs

    @cached_property
    def _tokens(self) -> int:
        """Σs of all samples."""
        return int(self._lengths.llm_tokens.sum(dtype=np.int64))

    @cached_property
    def _sum_squares(self) -> float:
        """Σ(1+η)s² of all samples."""
        return float(self._squares.sum())

    @cached_property
    def _squares(self) -> NDArray[np.float64]:
        """(1+η)s² of each sample."""
        squares = np.square(self._lengths.llm_tokens, dtype=np.float64)
        return squares if self._eta is None else (1.0 + self._eta) * squares

    def of_packs(self, degree: int, options: PlanOptions, spread_s: float) -> Iterator[float]:
        """Of the packs that the options' pack stage makes, paid for unpadded, in the waves where
        they are formed: rising bounds, the last one the makespan itself where they are consecutive
        samples. `spread_s` of any packs. O(n log n) in all, a part of what making them takes.

        Best fit fills all packs but the last to what `bound_falling` says. So where it is known how
        many waves they are, it is known what those of the last one hold at least, and that is
        spread over no replicas but theirs.
        """
        if options.stages.pack != "bfd":
            yield from self._consecutive(degree, options)
            return
        topology = self._topology
        tokens, order = self._padded(degree), self._falling(degree)
        room_tokens, per_wave = degree * options.memory_tokens, topology.replicas // degree
        least = -(-int(tokens.sum()) // room_tokens)
        most, held = bound_falling(tokens[order], room_tokens, least)
        waves = -(-least // per_wave)
        if -(-most // per_wave) > waves:
            return
        pack_s = float(options.cost.llm.group_times_s(held, 0.0, degree, self._crosses(degree)))
        last = np.array([least, most]) - (waves - 1) * per_wave  # packs of the last wave
        # Concave in between, so least at an end.
        yield spread_s + float((pack_s * (last - 1) * (1 / last - 1 / per_wave)).min())

    def _padded(self, degree: int) -> NDArray[np.int64]:
        """The samples' tokens padded for a degree."""
        if degree not in self._padded_for:
            self._padded_for[degree] = padded_tokens(self._lengths.llm_tokens, degree)
        return self._padded_for[degree]

    def _falling(self, degree: int) -> NDArray[np.int64]:
        """The samples by falling tokens, padded for a degree."""
        if degree not in self._falling_for:
            self._falling_for[degree] = argsort_falling(self._padded(degree))
        return self._falling_for[degree]

    def _consecutive(self, degree: int, options: PlanOptions) -> Iterator[float]:
        """The waves of the first samples, and the work of the others spread; then more of them.
        Where packs are far from full, a few waves tell."""
        by_length = options.stages.pack == "padded_by_length"
        for part in _PARTS if len(self._lengths) > FEW_SAMPLES else (1.0,):
            key = degree, options.memory_tokens, by_length, part
            if key not in self._first_waves_of:
                self._first_waves_of[key] = self._first_waves(degree, options, by_length, part)
            waves_s = self._first_waves_of[key]
            if waves_s is not None:
                yield waves_s

    def _first_waves(
        self, degree: int, options: PlanOptions, by_length: bool, part: float
    ) -> float | None:
        """What is known from a part of the samples, longest first or as drawn; None where they fill
        no wave."""
        tokens, topology = self._padded(degree), self._topology
        order = self._falling(degree) if by_length else np.arange(tokens.size)
        per_wave = topology.replicas // degree
        samples, offsets = cut_padded(
            tokens,
            max_tokens=degree * options.memory_tokens,
            order=order[: int(part * tokens.size)],
        )
        packs = offsets.size - 1
        if part < 1.0:
            packs = (packs - 1) // per_wave * per_wave  # whole waves; the last pack may grow
        if packs <= 0:
            return None
        seconds, _ = static_times(
            samples,
            offsets[: packs + 1],
            tokens,
            tokens,
            replicas=topology.replicas,
            degree=degree,
            cost=options.cost.llm,
            ranks_per_node=topology.replicas_per_node,
            full_attention=self._eta,
        )
        waves_s = float(np.maximum.reduceat(seconds, np.arange(0, packs, per_wave)).sum())
        first = samples[: offsets[packs]]
        left = self._tokens - int(self._lengths.llm_tokens[first].sum(dtype=np.int64))
        squares = self._sum_squares - float(self._squares[first].sum())
        left_s, _ = self._spread(left, max(squares, 0.0), degree, options)
        return waves_s + left_s


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
    takes_s = _JOINT_S * len(step.tokens) * (1.0 if step.full_attention is None else _BOTH_WAYS)
    worth_it = takes_s <= max(LEAST_S, SHARE * many.makespan_s)
    if near or len(step.tokens) > few or not worth_it:
        return many
    joint = _joint(step, degrees)
    better = min(joint, many, key=lambda waves: waves.makespan_s)
    return replace(better, lower_bound_s=max(joint.lower_bound_s, many.lower_bound_s))


def _many(step: PackedStep, degrees: Degrees) -> ContextWaves:
    return find_many_waves(
        step.tokens,
        ranks=step.topology.replicas,
        memory_tokens=step.options.memory_tokens,
        cost=step.options.cost.llm,
        full_attention=step.full_attention,
        ranks_per_node=step.topology.replicas_per_node,
        degrees=degrees,
    )


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
