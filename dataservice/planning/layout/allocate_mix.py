"""Encoders on one kind of nodes and the decoder on another: `allocate_modules` over a mix, exact.

    kind 0: GPUs, memory ─┐  encoder TP·DP·PP   each module has the GPUs, the memory and the
    kind 1: GPUs, memory ─┴▶ decoder TP·DP·PP   seconds of its own kind; one formula for both

Modules that share a kind are `allocate_modules` of that kind; every pair of different kinds is
searched by the same kernels, and the best of all is the answer. The formula, as there, leaves out
what features take between nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataservice.core.errors import PlanningError
from dataservice.planning.invariants import require
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.layout.allocate import Allocation, allocate_modules, answer_of, choices_of
from dataservice.planning.layout.allocate_search import (
    Begun,
    Choices,
    Floats,
    Ints,
    Step,
    begin,
    best_encoder,
    held_bytes,
    least_of,
    step_bound,
)
from dataservice.planning.layout.module_load import ModuleLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """GPUs of one kind, and what encoder and decoder ask of them."""

    gpus: int
    memory_bytes: float
    encoder: ModuleLoad
    decoder: ModuleLoad


@dataclass(frozen=True, kw_only=True, slots=True)
class MixAllocation:
    """The allocation, and the places in the list of kinds on which encoder and decoder are."""

    allocation: Allocation
    encoder_kind: int
    decoder_kind: int


def allocate_mix(kinds: Sequence[NodeKind], *, batch: int) -> MixAllocation:
    """The least seconds a step of `batch` samples, of all choices of a kind for each module. Of
    equal ones, the first kinds. Raises PlanningError where nothing fits, with what each misses, and
    where there is no kind."""
    if not kinds:
        raise PlanningError("there is no kind of nodes to put modules on; give one at least")
    found: list[MixAllocation] = []
    refused: list[str] = []
    for decoder, with_decoder in enumerate(kinds):
        for encoder, with_encoder in enumerate(kinds):
            try:
                if encoder == decoder:  # they share its GPUs
                    made = _shared(with_decoder, batch)
                else:
                    made = _allocated(with_encoder, with_decoder, batch)
            except PlanningError as error:
                refused.append(f"encoder on kind {encoder}, decoder on kind {decoder}: {error}")
                continue
            found.append(MixAllocation(allocation=made, encoder_kind=encoder, decoder_kind=decoder))
    if not found:
        raise PlanningError("\n".join(refused))
    return min(found, key=lambda each: each.allocation.seconds)


def _shared(kind: NodeKind, batch: int) -> Allocation:
    return allocate_modules(
        kind.decoder,
        encoder=kind.encoder,
        gpus=kind.gpus,
        batch=batch,
        memory_bytes=kind.memory_bytes,
    )


def _allocated(encoding: NodeKind, decoding: NodeKind, batch: int) -> Allocation:
    whole = np.arange(1, batch + 1)
    divisors = whole[batch % whole == 0]
    encoder = choices_of(encoding.encoder, divisors, encoding.gpus)
    decoder = choices_of(decoding.decoder, divisors, decoding.gpus)
    pools = np.array([encoding.gpus, decoding.gpus])
    memory = np.array([encoding.memory_bytes, decoding.memory_bytes], np.float64)
    best, bound, choice = _search_pair(pools, memory, batch, encoder, decoder)
    if not np.isfinite(best):
        raise PlanningError(
            f"{encoding.gpus:,} GPUs of {encoding.memory_bytes:,.0f} bytes and {decoding.gpus:,} "
            f"of {decoding.memory_bytes:,.0f} bytes do not hold {encoding.encoder.name} and "
            f"{decoding.decoder.name}: give more GPUs or memory, or recompute activations"
        )
    answer = answer_of(encoding.encoder, decoding.decoder, encoder, decoder, batch, choice, bound)
    require(
        abs(answer.seconds - best) <= 1e-9 * best, f"{answer.seconds} s of {best} s were searched"
    )
    return answer


@kernel
def _search_pair(
    pools: Ints, memory: Floats, batch: int, encoder: Choices, decoder: Choices
) -> tuple[float, float, Ints]:
    """The least seconds, what none goes below, the choice int64[3, 3] as of `search_allocation`;
    infinity where nothing fits. `pools` int64[2], `memory` float64[2]: GPUs and bytes of one, of
    the encoder's kind and of the decoder's."""
    best = bound = np.inf
    choice = np.zeros((3, 3), np.int64)
    for data in decoder.datas:
        encodes = Step(pools[0], memory[0], data, batch // data)
        decodes = Step(pools[1], memory[1], data, batch // data)
        alone = np.full(1, data, np.int64)
        first_s, first = least_of(encodes, encoder, encoder.datas, 1)
        second_s, second = least_of(decodes, decoder, alone, 0)
        if not (np.isfinite(first) and np.isfinite(second)):
            continue
        work = max(first / pools[0], second / pools[1])
        bound = min(bound, first_s + second_s + (encodes.micro - 1.0) * work)
        for row in range(decoder.shape.shape[0]):
            for place in range(decoder.stages.size):
                begun = begin(decodes, decoder, row, place)
                if begun.left < 0:
                    break
                if step_bound(decodes, begun, first_s, 0.0) >= best:
                    continue
                if held_bytes(decoder, row, data, place, 0, 1, decodes.micro) > memory[1]:
                    continue
                begun = Begun(pools[0], begun.once, begun.slowest_s, begun.stages)
                found, a, d, q = best_encoder(encodes, begun, encoder, best)
                if found < best:
                    best = found
                    choice[0, 0], choice[0, 1], choice[0, 2] = a, d, encoder.stages[q]
                    choice[1, 0], choice[1, 1] = row, data
                    choice[1, 2] = decoder.stages[place]
    return best, bound, choice
