"""Bytes that a replica has left for encoding in each wave, and bytes that items take there.

    microbatch_bytes │ decoder: bytes · its part of the pack │ room for what it encodes │

Whole bytes, rounded against the plan, so that every sum is the same in any order.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.memory import MemoryModel
from dataservice.core.plan import StepPlan
from dataservice.core.sample import LengthTable
from dataservice.core.topology import ReplicaLayout
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.integers import padded_length

# Of what a microbatch may keep, what a piece of an item that may be cut keeps at most.
PIECE_SHARE = 1.0 / 8.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderRoom:
    """What one microbatch may keep on each rank of a replica, and what tokens keep of it.

    `llm_token_bytes` is 0 where encoders have a pipeline stage of their own; `token_bytes` are
    those of encoder tokens, in the order of Modality.
    """

    microbatch_bytes: int
    llm_token_bytes: float
    token_bytes: tuple[float, ...]

    @staticmethod
    def of(memory: MemoryModel | None, layout: ReplicaLayout) -> "EncoderRoom | None":
        """None where encoders have no limit. Raises PlanningError as `microbatch_bytes` does."""
        if memory is None or not any(memory.encoder_token_bytes):
            return None
        apart = layout.encoder_stage == "own" and layout.pipeline_stages > 1
        return EncoderRoom(
            microbatch_bytes=int(memory.microbatch_bytes(layout)),
            # A whole number of Python's would compile the kernels for whole numbers too.
            llm_token_bytes=0.0 if apart else float(memory.llm_token_bytes),
            token_bytes=tuple(map(float, memory.encoder_token_bytes)),
        )

    def unit_bytes(
        self,
        modality: NDArray[np.int8],
        encoder_tokens: NDArray[np.int32],
        units: NDArray[np.int32] | None = None,
    ) -> NDArray[np.int64]:
        """What each unit of an item, or of a piece of one, takes on the replica that encodes it:
        int64[m]; without `units` int32[m], the items themselves."""
        tokens = encoder_tokens if units is None else encoder_tokens // units
        return _token_bytes(modality, tokens, np.array(self.token_bytes))

    def row_bytes(self, plan: StepPlan) -> NDArray[np.int64]:
        """What each row of a plan, an item or a piece of one, takes: int64[m]."""
        units = plan.item_units
        sizes = self.unit_bytes(plan.item_modality, plan.item_encoder_tokens, units)
        return sizes if units is None else sizes * units

    def pieces(self, unit_bytes: NDArray[np.int64], units: NDArray[np.int32]) -> NDArray[np.int64]:
        """Into how many pieces to cut each item of so many `units` [m] of `unit_bytes` [m], so that
        one keeps a small part of what a microbatch may, where its units allow: int64[m]."""
        return _piece_counts(unit_bytes, units, self.microbatch_bytes)

    def may_be_lacked_by(self, lengths: LengthTable, memory_tokens: int) -> NDArray[np.int64]:
        """The samples [k], rising, for which a replica that holds so many tokens may have no room,
        where a sample may be on one replica. All others surely have it there, however their items
        are cut: nearly all, in a hundredth of the time that it takes to find out. O(n + m)."""
        return _may_lack_room(
            lengths.llm_tokens,
            lengths.item_offsets,
            lengths.item_modality,
            lengths.item_encoder_tokens,
            np.array(self.token_bytes),
            self.llm_token_bytes,
            self.microbatch_bytes,
            memory_tokens,
        )

    def of_all(self, lengths: LengthTable) -> "AllBytes":
        """What these samples keep in all. O(n + m)."""
        encoder_bytes, weighted, pieces = _sums(
            lengths.item_modality,
            lengths.item_encoder_tokens,
            np.array(self.token_bytes),
            self.microbatch_bytes,
        )
        return AllBytes(
            room=self,
            llm_tokens=int(lengths.llm_tokens.sum(dtype=np.int64)),
            encoder_bytes=encoder_bytes,
            mean_part=weighted / encoder_bytes if encoder_bytes else 0.0,
            pieces=pieces,
        )

    def rooms(self, plan: StepPlan) -> NDArray[np.int64]:
        """Bytes that each replica may encode in each wave of a plan: int64[W, N]. O(n + W·N)."""
        return plan_rooms(
            plan.pack_samples,
            plan.pack_offsets,
            plan.pack_replicas,
            plan.replica_offsets,
            plan.pack_wave,
            plan.sample_tokens,
            plan.waves,
            plan.replicas,
            self.microbatch_bytes,
            self.llm_token_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AllBytes:
    """What samples keep in all: `llm_tokens` of the decoder, and `encoder_bytes` of their items.

    `mean_part`: how large a piece is in which a byte of the items lies, in the mean over their
    bytes: as a part of a microbatch, at most PIECE_SHARE. `pieces`: items, or the pieces that their
    bytes fill, whichever are more: about as many rows as their dispatch has.
    """

    room: EncoderRoom
    llm_tokens: int
    encoder_bytes: int
    mean_part: float
    pieces: float

    def most_tokens(self, memory_tokens: int) -> int:
        """At most so many tokens of the decoder a replica should hold, so that in waves of the
        step's own mixture there is room for what they encode. Between 1 and `memory_tokens`."""
        if self.encoder_bytes == 0:
            return memory_tokens
        of_token = self.room.llm_token_bytes + self.encoder_bytes / self.llm_tokens
        return max(1, min(memory_tokens, int(self.room.microbatch_bytes / of_token)))

    def least_waves(self, replicas: int) -> int:
        """Waves that all bytes of these samples fill at least."""
        all_bytes = self.encoder_bytes + self.room.llm_token_bytes * self.llm_tokens
        of_wave = replicas * float(self.room.microbatch_bytes)
        return math.ceil(all_bytes / of_wave * (1.0 - 1e-9))


@kernel
def _sums(
    modality: NDArray[np.int8],
    encoder_tokens: NDArray[np.int32],
    token_bytes: NDArray[np.float64],
    microbatch_bytes: int,
) -> tuple[int, float, float]:
    """Of all items: their bytes, these times the part that each is of a microbatch, and pieces."""
    total, weighted, pieces = 0, 0.0, 0.0
    for item in range(modality.size):
        size = np.int64(np.ceil(token_bytes[modality[item]] * encoder_tokens[item]))
        part = size / microbatch_bytes
        total += int(size)
        weighted += size * min(part, PIECE_SHARE)
        pieces += max(part / PIECE_SHARE, 1.0)
    return total, weighted, pieces


@kernel
def _may_lack_room(
    llm_tokens: NDArray[np.int32],
    item_offsets: NDArray[np.int64],
    modality: NDArray[np.int8],
    encoder_tokens: NDArray[np.int32],
    token_bytes: NDArray[np.float64],
    llm_token_bytes: float,
    microbatch_bytes: int,
    memory_tokens: int,
) -> NDArray[np.int64]:
    found, count = np.empty(llm_tokens.size, np.int64), 0
    for sample in range(llm_tokens.size):
        first, last = item_offsets[sample], item_offsets[sample + 1]
        if first == last:
            continue
        held = np.ceil(llm_token_bytes * llm_tokens[sample])  # in floats nothing is too large
        for item in range(first, last):
            tokens = encoder_tokens[item]
            # Each unit is rounded up, and there are no more units than tokens.
            held += np.ceil(token_bytes[modality[item]] * tokens) + tokens
        if llm_tokens[sample] > memory_tokens or held > microbatch_bytes:
            found[count] = sample
            count += 1
    return found[:count].copy()


@kernel
def _token_bytes(
    modality: NDArray[np.int8], encoder_tokens: NDArray[np.int32], token_bytes: NDArray[np.float64]
) -> NDArray[np.int64]:
    sizes = np.empty(modality.size, np.int64)
    for item in range(modality.size):
        sizes[item] = np.int64(np.ceil(token_bytes[modality[item]] * encoder_tokens[item]))
    return sizes


@kernel
def _piece_counts(
    unit_bytes: NDArray[np.int64], units: NDArray[np.int32], microbatch_bytes: int
) -> NDArray[np.int64]:
    counts = np.empty(units.size, np.int64)
    for item in range(units.size):
        counts[item] = piece_count(unit_bytes[item], units[item], microbatch_bytes)
    return counts


@leaf
def piece_count(unit_bytes: int, units: int, microbatch_bytes: int) -> int:
    """`EncoderRoom.pieces` of one item."""
    wanted = np.ceil(unit_bytes * units / (microbatch_bytes * PIECE_SHARE))
    return int(max(1.0, min(float(units), wanted)))


@leaf
def room_beside(tokens: int, microbatch_bytes: int, llm_token_bytes: float) -> int:
    """Bytes left beside so many tokens of the decoder."""
    return max(0, microbatch_bytes - int(np.ceil(llm_token_bytes * tokens)))


@kernel
def plan_rooms(
    samples: NDArray[np.int32],
    sample_offsets: NDArray[np.int64],
    ranks: NDArray[np.int32],
    rank_offsets: NDArray[np.int64],
    wave_of: NDArray[np.int32],
    tokens: NDArray[np.int32],
    waves: int,
    replicas: int,
    microbatch_bytes: int,
    llm_token_bytes: float,
) -> NDArray[np.int64]:
    """Room of each replica in each wave, int64[waves, replicas]: all of it where it is idle."""
    room = np.full((waves, replicas), microbatch_bytes)
    for group in range(wave_of.size):
        degree = rank_offsets[group + 1] - rank_offsets[group]
        held = 0
        for at in range(sample_offsets[group], sample_offsets[group + 1]):
            held += padded_length(tokens[samples[at]], degree)
        left = room_beside(held // degree, microbatch_bytes, llm_token_bytes)
        for at in range(rank_offsets[group], rank_offsets[group + 1]):
            room[wave_of[group], ranks[at]] = left
    return room
