"""What waves of static context take at least, before they are made: how most baselines are refused.

All work spread over all replicas says something of any packs. More is known of the packs that a
baseline makes: best fit leaves none but the last far from full, and packs of consecutive samples
are cut quickly, so that a few of their waves are made and the rest is spread.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import padded_tokens
from dataservice.core.plan_options import PlanOptions
from dataservice.core.sample import LengthTable
from dataservice.core.topology import Topology
from dataservice.planning.context.groups import static_times
from dataservice.planning.encoder_memory.room import EncoderRoom
from dataservice.planning.kernels.sort import argsort_falling
from dataservice.planning.packs.bfd import bound_falling
from dataservice.planning.packs.padded import cut_padded

# Of many samples, how many are packed before it is seen whether their waves tell enough.
_PARTS, _MANY = (1 / 8, 1 / 2, 1.0), 8192


class StaticBound(NamedTuple):
    """What static waves take in sum at least: all work, spread over all groups of a wave; or the
    sample that takes longest alone, beside the least of all other waves. And what each replica
    does in the mean."""

    spread_s: float
    longest_s: float
    mean_s: float


class StaticBounds:
    """What waves of static context take in sum at least, of these samples with their `eta`
    float64[n], None where all attention is causal, and items that may be cut into `units` int32[m],
    None where they are whole. `room` is what all items share with the decoder, None where they need
    none."""

    def __init__(
        self,
        lengths: LengthTable,
        eta: NDArray[np.float64] | None,
        topology: Topology,
        units: NDArray[np.int32] | None = None,
        room: EncoderRoom | None = None,
    ) -> None:
        self._lengths, self._eta, self._topology = lengths, eta, topology
        self._units, self._room = units, room
        self._padded_for: dict[int, NDArray[np.int64]] = {}
        self._falling_for: dict[int, NDArray[np.int64]] = {}
        self._first_waves_of: dict[tuple[int, int, bool, float], float | None] = {}

    def packs_stay(self, degree: int, options: PlanOptions) -> bool:
        """Whether any pack surely has room for its items beside it alone, on replicas that are idle
        then. So of waves that `waves_in_room` parts, the slowest pack stays in each, and in sum
        they take no less afterwards. O(m) once."""
        if self._room is None:
            return True
        largest, of_token = self._item_bytes
        left = max(self._room.microbatch_bytes - largest, 0)
        return (
            of_token * degree * options.memory_tokens <= (self._topology.replicas - degree) * left
        )

    @cached_property
    def _item_bytes(self) -> tuple[int, float]:
        """Bytes of the largest unit, and the most that a token of the decoder stands for."""
        assert self._room is not None, "else items need none"
        lengths, units = self._lengths, self._units
        sizes = self._room.unit_bytes(lengths.item_modality, lengths.item_encoder_tokens, units)
        largest = int(sizes.max())
        sizes = sizes if units is None else sizes * units
        if lengths.item_llm_tokens.min() == 0:
            return largest, np.inf  # a pack may hold any number
        return largest, float((sizes / lengths.item_llm_tokens).max())

    def of_any(self, degree: int, options: PlanOptions) -> StaticBound:
        """Whatever their packs: memory calls for some at least, and they take no less than one
        group that held everything."""
        llm, squares = options.cost.llm, self._squares
        longest = int(squares.argmax())
        longest_tokens = self._lengths.llm_tokens[longest]
        crosses = self._crosses(degree)
        longest_s = float(llm.group_times_s(longest_tokens, squares[longest], degree, crosses))
        spread_s, packs = self._spread(self._tokens, self._sum_squares, degree, options)
        per_wave = self._topology.replicas // degree
        waves = -(-packs // per_wave)
        return StaticBound(
            spread_s=spread_s,
            longest_s=longest_s + (waves - 1) * llm.group_s,
            mean_s=spread_s * per_wave * degree / self._topology.replicas,
        )

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
        for part in _PARTS if len(self._lengths) > _MANY else (1.0,):
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
