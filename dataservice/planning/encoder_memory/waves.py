"""Waves whose items fit beside their packs: what has no room leaves its wave, and is planned anew.

Groups are made of decoder tokens alone. Fewer of these a replica leave room for what waves of the
step's mixture encode on average (`AllBytes.most_tokens`); a wave with more than that keeps its
slowest groups, as many as fit together with their items, and those of all waves that leave are
grouped again, in ever smaller packs. What is left after a few rounds has waves of its own.

    wave 0 [■■■■ ▒▒][■■■ ▒▒][■■ ▒▒▒▒▒▒▒]      the third's items have no room anywhere
    wave 0 [■■■■ ▒▒][■■■ ▒▒]   wave 1 [■■ ▒▒▒▒▒▒▒][■ ▒▒▒ of another wave]

A wave that is full to the brim has its items where there is room, so that all wait for the few
replicas with little else. If it is level with a few groups fewer, these leave it too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError
from dataservice.core.layout import padded_tokens, sample_starts
from dataservice.core.plan_options import Context
from dataservice.core.sample import IntArray, LengthTable
from dataservice.planning.context.plan import ContextPlan
from dataservice.planning.encoder_memory.fit import have_room, surely_fit
from dataservice.planning.encoder_memory.room import EncoderRoom, room_beside
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.integers import padded_length
from dataservice.planning.kernels.sort import argsort_falling
from dataservice.planning.pieces import first_of_piece

# Rounds in which what left its wave is grouped again, each in packs this much smaller.
_ROUNDS = 6
_SMALLER = 0.85
# Of a wave's groups or a group's samples, to what part it is found out how many fit.
_PARTS = 128
# Times the groups with which a wave is level, where more of them have room too: then these stay.
_WORTH_LEAVING = 1.2


class NoRoomError(PlanningError):
    """A sample has items that no replicas have room for at the degrees that a plan allows."""


Regroup = Callable[[NDArray[np.int64], float], Sequence[ContextPlan]]
"""Waves of these samples, int64[k], whose packs may have this part of the usual tokens; they are
named by their place among these."""
SecondsOf = Callable[[NDArray[np.int32], NDArray[np.int32]], float]
"""Seconds of a group of these samples on these replicas."""


def group_degrees(context: Context, replicas: int, static_degree: int) -> Sequence[int]:
    """The degrees that a group may have, rising."""
    if context == "static":
        return (static_degree,)
    if context == "power_of_two":
        return tuple(1 << power for power in range(replicas.bit_length()))
    return range(1, replicas + 1)


def least_tokens(llm_tokens: NDArray[np.int32], degrees: Sequence[int]) -> int:
    """Tokens that each replica must hold for the widest group to hold the longest sample."""
    widest = degrees[-1]
    return -(-int(padded_tokens(llm_tokens.max(keepdims=True), widest)[0]) // widest)


@dataclass(frozen=True, kw_only=True, slots=True)
class WaveRoom:
    """The samples of a step, `lengths`, and what they encode: each item may be cut into `units`
    int32[m] of `unit_bytes` int64[m], and usually is into `pieces` int64[m], each on one of the
    `replicas`, which have `room` for it. `degrees` are those that a group may have, rising."""

    lengths: LengthTable
    units: NDArray[np.int32]
    unit_bytes: NDArray[np.int64]
    pieces: NDArray[np.int64]
    room: EncoderRoom
    replicas: int
    degrees: Sequence[int]

    def fits(
        self, samples: IntArray, offsets: IntArray, degrees: IntArray, *, level: bool = False
    ) -> bool:
        """Whether a wave of groups, samples[offsets[g]:offsets[g+1]] on degrees[g] replicas each,
        has room for all of its items: either surely for their units, however they come, or for
        pieces of them, the largest first. `level`: though no replica takes more than the mean and
        one piece. O(k log N) for k pieces, O(items + N) in the first case.
        """
        return bool(
            _wave_fits(
                np.asarray(samples, dtype=np.int64),
                np.asarray(offsets, dtype=np.int64),
                np.asarray(degrees, dtype=np.int64),
                self.lengths.llm_tokens,
                self.lengths.item_offsets,
                self.units,
                self.unit_bytes,
                self.pieces,
                self.replicas,
                self.room.microbatch_bytes,
                self.room.llm_token_bytes,
                level,
            )
        )

    def degree_alone(self, sample: int, memory_tokens: int) -> int | None:
        """The least of some degrees at which a sample fits in a wave of its own, None where it fits
        at none: the least that holds its tokens, its doubles, and the largest."""
        tokens = self.lengths.llm_tokens[[sample]]
        held = [d for d in self.degrees if padded_tokens(tokens, d)[0] <= d * memory_tokens]
        tried = 0
        for degree in held:
            if degree < 2 * tried and degree != held[-1]:
                continue
            tried = degree
            if self.fits(np.array([sample]), np.array([0, 1]), np.array([degree])):
                return degree
        return None

    def most(self, count: int, fits: Callable[[int], bool]) -> int:
        """A number up to `count` for which `fits` holds, 0 where none is found: by halves, as if
        less always fitted where more does, and to a part of `count`. O(1) calls for many."""
        if fits(count):
            return count
        low, high = 0, count
        while high - low > max(1, count // _PARTS):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def sample_without_room(step: WaveRoom, memory_tokens: int) -> int | None:
    """A sample whose items have no room anywhere, even in a wave of its own; None where each has.

    O(n + m), and a search for each sample that is neither small as a whole nor small beside what
    the other replicas have.
    """
    lengths, room = step.lengths, step.room
    tokens = lengths.llm_tokens.astype(np.int64)
    sums = np.concatenate([[0], np.cumsum(step.units * step.unit_bytes)])
    encoder_bytes = np.diff(sums[lengths.item_offsets])
    largest = np.zeros(len(lengths), np.int64)  # unit of each
    has = np.flatnonzero(np.diff(lengths.item_offsets))
    if has.size:
        largest[has] = np.maximum.reduceat(step.unit_bytes, lengths.item_offsets[has])
    together = np.ceil(room.llm_token_bytes * tokens) + encoder_bytes <= room.microbatch_bytes
    idle = np.maximum(step.replicas - -(-tokens // memory_tokens) - 1, 0)
    beside = encoder_bytes <= idle * (room.microbatch_bytes - largest)
    if len(step.degrees) < step.replicas:  # wider groups than need be leave fewer idle
        beside[:] = False
    fits = (together & (tokens <= memory_tokens) & (step.degrees[0] == 1)) | beside
    for sample in np.flatnonzero(~fits & (encoder_bytes > 0)):
        if step.degree_alone(int(sample), memory_tokens) is None:
            return int(sample)
    return None


def waves_with_room(
    waves: Sequence[ContextPlan],
    step: WaveRoom,
    *,
    memory_tokens: int,
    regroup: Regroup,
    seconds_of: SecondsOf,
) -> tuple[ContextPlan, ...]:
    """The waves, each of which has room for its items; the same where all have.

    Raises NoRoomError on a sample whose items fit nowhere, though it has a wave of its own.
    """
    kept: list[ContextPlan] = []
    part = 1.0
    for _ in range(_ROUNDS):
        left = []
        for wave in waves:
            stays, leaves = _part_wave(wave, step)
            kept += [stays] if stays is not None else []
            left.append(leaves)
        samples = np.sort(np.concatenate(left)) if left else np.zeros(0, np.int64)
        if samples.size == 0:
            return tuple(kept)
        part *= _SMALLER
        again = regroup(samples, part)
        waves = tuple(replace(w, samples=samples[w.samples].astype(np.int32)) for w in again)
    for wave in waves:
        kept += _cut_wave(wave, step, memory_tokens, seconds_of)
    return tuple(kept)


def _part_wave(wave: ContextPlan, step: WaveRoom) -> tuple[ContextPlan | None, NDArray[np.int64]]:
    """The wave with the slowest groups that fit together, and the samples of the others."""
    groups = wave.time_s.size
    slowest = np.lexsort((np.arange(groups), -wave.time_s))

    def fits(count: int, level: bool) -> bool:
        part = _with_groups(wave, np.sort(slowest[:count]))
        return step.fits(part.samples, part.sample_offsets, part.degrees, level=level)

    count = step.most(groups, partial(fits, level=True))
    more = int(count * _WORTH_LEAVING) + 1
    if more <= groups and fits(more, level=False):
        count = step.most(groups, partial(fits, level=False))
    if count == groups:
        return wave, np.zeros(0, np.int64)
    leaves = _with_groups(wave, np.sort(slowest[count:])).samples.astype(np.int64)
    return (_with_groups(wave, np.sort(slowest[:count])) if count else None), leaves


def _with_groups(wave: ContextPlan, groups: NDArray[np.int64]) -> ContextPlan:
    """These groups of a wave alone, on the ranks that they have."""
    sizes = np.diff(wave.sample_offsets)
    chosen = np.zeros(wave.time_s.size, np.bool_)
    chosen[groups] = True
    return ContextPlan(
        samples=wave.samples[np.repeat(chosen, sizes)],
        sample_offsets=sample_starts(sizes[groups]),
        ranks=wave.ranks[np.repeat(chosen, wave.degrees)],
        rank_offsets=sample_starts(wave.degrees[groups]),
        time_s=wave.time_s[groups],
        padded_tokens=wave.padded_tokens[groups],
        lower_bound_s=0.0,
    )


def _cut_wave(
    wave: ContextPlan, step: WaveRoom, memory_tokens: int, seconds_of: SecondsOf
) -> Iterator[ContextPlan]:
    """Waves of the same samples that fit: of its groups, of parts of one group, of one sample."""
    groups = np.arange(wave.time_s.size)
    while groups.size:
        count = step.most(
            groups.size,
            lambda c, rest=groups: step.fits(  # type: ignore[misc]
                (part := _with_groups(wave, rest[:c])).samples, part.sample_offsets, part.degrees
            ),
        )
        if count:
            yield _with_groups(wave, groups[:count])
        else:
            yield from _cut_group(_with_groups(wave, groups[:1]), step, memory_tokens, seconds_of)
        groups = groups[max(count, 1) :]


def _cut_group(
    group: ContextPlan, step: WaveRoom, memory_tokens: int, seconds_of: SecondsOf
) -> Iterator[ContextPlan]:
    """Waves of one group each: as many of its samples as fit on its ranks, or one that needs
    others."""
    samples, degree = group.samples, int(group.degrees[0])
    while samples.size:
        count = step.most(
            samples.size,
            lambda c, rest=samples: step.fits(  # type: ignore[misc]
                rest[:c], np.array([0, c]), np.array([degree])
            ),
        )
        if count:
            yield _one_group(samples[:count], group.ranks, step, seconds_of)
        else:
            alone = step.degree_alone(int(samples[0]), memory_tokens)
            if alone is None:
                raise NoRoomError(
                    f"sample {int(samples[0])} of the step has items that no replicas have room "
                    "for: give them more memory, or leave it out"
                )
            ranks = np.arange(alone, dtype=np.int32)
            yield _one_group(samples[:1], ranks, step, seconds_of)
        samples = samples[max(count, 1) :]


def _one_group(
    samples: NDArray[np.int32], ranks: NDArray[np.int32], step: WaveRoom, seconds_of: SecondsOf
) -> ContextPlan:
    """A wave of one group."""
    padded = padded_tokens(step.lengths.llm_tokens[samples], ranks.size).sum()
    return ContextPlan(
        samples=samples,
        sample_offsets=np.array([0, samples.size]),
        ranks=ranks,
        rank_offsets=np.array([0, ranks.size]),
        time_s=np.array([seconds_of(samples, ranks)]),
        padded_tokens=np.array([padded], dtype=np.int64),
        lower_bound_s=0.0,
    )


@kernel
def _wave_fits(
    samples: NDArray[np.int64],
    sample_offsets: NDArray[np.int64],
    degrees: NDArray[np.int64],
    tokens: NDArray[np.int32],
    item_offsets: NDArray[np.int64],
    units: NDArray[np.int32],
    unit_bytes: NDArray[np.int64],
    piece_counts: NDArray[np.int64],
    replicas: int,
    microbatch_bytes: int,
    llm_token_bytes: float,
    level: bool,
) -> bool:
    held_bytes, largest, count, piece = 0, 0, 0, 0
    for sample in samples:
        for item in range(item_offsets[sample], item_offsets[sample + 1]):
            held_bytes += units[item] * unit_bytes[item]
            largest = max(largest, unit_bytes[item])
            pieces = piece_counts[item]
            piece = max(piece, -(-units[item] // pieces) * unit_bytes[item])
            count += pieces
    most = held_bytes // replicas + piece if level else microbatch_bytes
    room = np.empty(replicas, np.int64)
    seat = 0
    for group in range(degrees.size):
        held = 0
        for place in range(sample_offsets[group], sample_offsets[group + 1]):
            held += padded_length(tokens[samples[place]], degrees[group])
        left = room_beside(held // degrees[group], microbatch_bytes, llm_token_bytes)
        for place in range(seat, seat + degrees[group]):
            room[place] = min(left, most)
        seat += degrees[group]
    for place in range(seat, replicas):
        room[place] = min(microbatch_bytes, most)
    if surely_fit(held_bytes, largest, room):
        return True
    if held_bytes > room.sum() or largest > room.max():
        return False
    sizes = np.empty(count, np.int64)  # int64[pieces of the wave]
    at = 0
    for sample in samples:
        for item in range(item_offsets[sample], item_offsets[sample + 1]):
            pieces = piece_counts[item]
            for place in range(pieces):
                first = first_of_piece(units[item], pieces, place)
                behind = first_of_piece(units[item], pieces, place + 1)
                sizes[at] = (behind - first) * unit_bytes[item]
                at += 1
    return have_room(sizes[argsort_falling(sizes)], room)
