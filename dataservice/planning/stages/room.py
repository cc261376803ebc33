"""Encoders in memory, for the stages: how full packs may be, and waves that have room for items.

`encoder_memory/` has the bytes and the search; here they meet options, topology and cost.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dataservice.core.plan_options import PlanOptions
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning.context.groups import ContextPlan, context_bound
from dataservice.planning.encoder_memory.room import PIECE_SHARE, AllBytes, EncoderRoom
from dataservice.planning.encoder_memory.waves import (
    WaveRoom,
    group_degrees,
    least_tokens,
    waves_with_room,
)
from dataservice.planning.stages.group import PackedStep, full_attention

# Of the tokens that leave room for all items, what a wave is given where most bytes are in pieces
# near the largest: in rooms full to the brim, they go where there is room and not where time is.
_LEVEL, _LARGE_PIECES = 0.96, 0.8
_NEAR = 0.999


def beside_encoders(
    lengths: LengthTable, held: AllBytes | None, topology: Topology, options: PlanOptions
) -> PlanOptions:
    """The options with as many tokens a replica as leave room for what the step's waves encode on
    average, somewhat less where pieces are large; at least what the longest sample takes. What the
    step holds in all is `held`, None where encoders have no limit."""
    if held is None:
        return options
    tokens = held.most_tokens(options.memory_tokens)
    if tokens < options.memory_tokens and held.mean_part > _LARGE_PIECES * PIECE_SHARE:
        tokens = int(tokens * _LEVEL)
    tokens = max(tokens, least_for(lengths, topology, options))
    return replace(options, memory_tokens=min(tokens, options.memory_tokens))


def bound_in_bytes(
    lengths: LengthTable, held: AllBytes, topology: Topology, options: PlanOptions, fewer_s: float
) -> float:
    """What no waves take less than in sum: by their tokens, or by all the bytes that the step
    keeps, which fill so many waves. `fewer_s` is the bound at fewer tokens than memory holds, which
    is no lower: where it is hardly above that of the bytes, the tokens' is not looked for."""
    llm, eta = options.cost.llm, full_attention(lengths, options.full_attention)
    work_s = llm.total_work_s(lengths.llm_tokens, eta) / topology.replicas
    bytes_s = work_s + held.least_waves(topology.replicas) * llm.group_s
    if bytes_s >= fewer_s * _NEAR:
        return bytes_s
    return max(bound_in_tokens(lengths, eta, topology, options), bytes_s)


def bound_in_tokens(
    lengths: LengthTable,
    eta: NDArray[np.float64] | None,
    topology: Topology,
    options: PlanOptions,
) -> float:
    """What no waves take less than in sum, whatever their packs and degrees. `eta` float64[n]:
    shares of attention beyond the causal, None where there is none."""
    return context_bound(
        lengths.llm_tokens,
        ranks=topology.replicas,
        memory_tokens=options.memory_tokens,
        cost=options.cost.llm,
        full_attention=eta,
        ranks_per_node=topology.replicas_per_node,
    )


def step_room(
    lengths: LengthTable,
    units: NDArray[np.int32] | None,
    topology: Topology,
    options: PlanOptions,
    room: EncoderRoom,
) -> WaveRoom:
    """What tells whether samples of these lengths have room in a wave, each item in pieces where it
    may be cut into `units` int32[m]."""
    unit_bytes = room.unit_bytes(lengths.item_modality, lengths.item_encoder_tokens, units)
    if units is None:
        units = np.ones(unit_bytes.size, np.int32)
    return WaveRoom(
        lengths=lengths,
        units=units,
        unit_bytes=unit_bytes,
        pieces=room.pieces(unit_bytes, units),
        room=room,
        replicas=topology.replicas,
        degrees=_degrees(lengths, topology, options),
    )


def waves_in_room(
    lengths: LengthTable,
    units: NDArray[np.int32] | None,
    packed: PackedStep,
    waves: tuple[ContextPlan, ...],
    room: EncoderRoom,
    group: Callable[[LengthTable, PlanOptions], tuple[ContextPlan, ...]],
) -> tuple[ContextPlan, ...]:
    """The waves, in each of which there is room for its items; `group` forms those of some samples
    with other options. Raises NoRoomError on a sample whose items fit nowhere."""
    topology, options = packed.topology, packed.options
    node, llm = topology.replicas_per_node or topology.replicas, options.cost.llm
    if options.stages.context == "static":
        options = replace(options, static_degree=packed.degree)
    paid = packed.packed[1] if options.stages.context == "static" else packed.tokens
    eta = packed.full_attention

    def regroup(samples: NDArray[np.int64], part: float) -> tuple[ContextPlan, ...]:
        some = lengths.take(samples)
        tokens = int(room.of_all(some).most_tokens(options.memory_tokens) * part)
        tokens = max(tokens, least_for(some, topology, options))
        fewer = replace(options, memory_tokens=min(tokens, options.memory_tokens))
        return group(some, fewer)

    def seconds_of(samples: NDArray[np.int32], ranks: NDArray[np.int32]) -> float:
        crosses = bool(ranks.min() // node != ranks.max() // node)
        both_ways = None if eta is None else eta[samples]
        return llm.time_s(paid[samples], ranks.size, both_ways, crosses_node=crosses)

    return waves_with_room(
        waves,
        step_room(lengths, units, topology, options, room),
        memory_tokens=options.over(topology).memory_tokens,
        regroup=regroup,
        seconds_of=seconds_of,
    )


def static_degree(lengths: LengthTable, replicas: int, options: PlanOptions) -> int:
    """The one degree of static context; 1 where degrees are chosen pack by pack."""
    if options.stages.context != "static":
        return 1
    longest = int(lengths.llm_tokens.max(initial=1))
    return options.static_degree_of(longest, replicas)


def _degrees(lengths: LengthTable, topology: Topology, options: PlanOptions) -> Sequence[int]:
    static = static_degree(lengths, topology.replicas, options)
    return group_degrees(options.stages.context, topology.replicas, static)


def least_for(lengths: LengthTable, topology: Topology, options: PlanOptions) -> int:
    """Tokens that each replica must hold for some group to hold the longest sample."""
    return least_tokens(lengths.llm_tokens, _degrees(lengths, topology, options))
