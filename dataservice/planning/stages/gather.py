"""Waves whose heavy items sit together, where replicas wait for the slowest encoder of every wave.

Waves are formed by what the decoder takes, and a wave's encoders take as long as its largest item
at least: in ten waves, ten such items take ten times what they take side by side in one. So packs
trade places between waves with others of as many replicas, those with heavy items first:

    wave 0 [· · H ·]   wave 1 [H · · ·]   wave 2 [· H · H]       H: an item larger than what
    wave 0 [H H H H]   wave 1 [· · · ·]   wave 2 [· · · ·]       a replica encodes in the mean

Where waves take unlike times, only neighbours trade: several numbers of blocks are compared by what
the waves' decoders take and their encoders take at least. `compose` tells by the evaluator whether
the best of them is a better plan.

Shapes: W waves of N replicas, P packs of all waves, M modalities, m items.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.core.layout import expanded, sample_starts
from dataservice.planning.context.check import joined
from dataservice.planning.context.plan import ContextPlan
from dataservice.planning.stages.dispatch import MODALITIES, EncoderItems, encoding_bounds
from dataservice.planning.stages.group import WORTH_TRYING
from dataservice.planning.step_bound import StageParts

_BLOCKS = (1, 2, 4, 8, 16)


def gathered_waves(
    waves: Sequence[ContextPlan],
    items: EncoderItems,
    *,
    replicas: int,
    ranks_per_node: int,
    parts: StageParts,
) -> tuple[ContextPlan, ...] | None:
    """As many waves of the same packs, each with its seats, heavy `items` in as few of them as
    promise to end sooner on the stage that takes such `parts`; None where none do. `items` have
    their packs by their place in `waves`. O((P + m) log P)."""
    packs = _Packs.of(waves, items, replicas, ranks_per_node)
    if not packs.heavy_s.any():
        return None
    best, best_s = None, _estimate(packs.wave, packs, items, replicas, parts) / WORTH_TRYING
    for wave in _arrangements(packs, len(waves)):
        seconds = _estimate(wave, packs, items, replicas, parts)
        if seconds < best_s:
            best, best_s = wave, seconds
    return None if best is None else _rearranged(waves, packs, best)


class _Packs(NamedTuple):
    """All packs, [P] each: `wave` int64; `time_s` float64; `seat` int64, the same of packs that may
    trade places, widest first; and the seconds of their heavy items, `heavy_s` float64."""

    wave: NDArray[np.int64]
    time_s: NDArray[np.float64]
    seat: NDArray[np.int64]
    heavy_s: NDArray[np.float64]

    @classmethod
    def of(
        cls, waves: Sequence[ContextPlan], items: EncoderItems, replicas: int, ranks_per_node: int
    ) -> "_Packs":
        """Heavy is an item of which the smallest piece takes longer than what a replica encodes in
        a wave in the mean. Packs trade places where they have as many replicas, and rings that
        cross nodes or do not: so they take as long as before."""
        time_s = joined([wave.time_s for wave in waves], np.float64)
        modality = items.phase % MODALITIES
        mean_s = items.mean_s(replicas) / len(waves)
        heavy = np.flatnonzero(items.unit_seconds > mean_s[modality])
        heavy_s = np.zeros(len(time_s))
        np.add.at(heavy_s, items.pack[heavy], items.seconds[heavy])
        degrees = joined([wave.degrees for wave in waves], np.int64)
        first = sample_starts(degrees)[:-1]
        node = joined([wave.ranks for wave in waves], np.int32) // ranks_per_node
        inside = np.minimum.reduceat(node, first) == np.maximum.reduceat(node, first)
        return cls(
            wave=np.repeat(np.arange(len(waves)), [len(wave.time_s) for wave in waves]),
            time_s=time_s,
            seat=np.unique(-2 * degrees + inside, return_inverse=True)[1],
            heavy_s=heavy_s,
        )


def _estimate(
    wave: NDArray[np.int64],
    packs: _Packs,
    items: EncoderItems,
    replicas: int,
    parts: StageParts,
) -> float:
    """Seconds of all waves where each pack is in this `wave` int64[P]: of the slowest pack, and of
    encoders by their bound."""
    slowest_s = _slowest_s(packs, wave)
    phase = wave[items.pack] * MODALITIES + items.phase % MODALITIES
    encoding_s = encoding_bounds(replace(items, phase=phase), replicas).reshape(-1, MODALITIES)
    encoding_s += (encoding_s > 0) * items.batch_s
    return float(slowest_s.sum() * parts.decoder + encoding_s.sum(axis=0) @ parts.encoders)


def _slowest_s(packs: _Packs, wave: NDArray[np.int64]) -> NDArray[np.float64]:
    """The slowest pack of each wave where each is in this `wave` int64[P]: float64[W]."""
    slowest_s = np.zeros(int(packs.wave[-1]) + 1)
    np.maximum.at(slowest_s, wave, packs.time_s)
    return slowest_s


def _arrangements(packs: _Packs, waves: int) -> Iterator[NDArray[np.int64]]:
    """The wave of each pack int64[P], in several ways."""
    by_time = np.argsort(-_slowest_s(packs, packs.wave), kind="stable")
    for blocks in _BLOCKS:
        if blocks <= waves // 2 or blocks == 1:
            block_of = np.empty(waves, np.int64)
            block_of[by_time] = np.arange(waves) * blocks // waves
            for even in (False, True):
                yield _arranged(packs, block_of, even)


def _arranged(packs: _Packs, block_of: NDArray[np.int64], even: bool) -> NDArray[np.int64]:
    """Packs on the like seats of the waves of their block, `block_of` int64[W], the heaviest first
    and then the slowest; `even`: heavy ones go round as few waves as have seats for them."""
    waves, seat, block = block_of.size, packs.seat, block_of[packs.wave]
    # Of the packs of few seats, which have little choice, heavy ones stay together, and others
    # join them.
    rare = np.bincount(seat)[seat] < waves
    first = np.lexsort(
        (
            -np.bincount(packs.wave, minlength=waves),
            -np.bincount(packs.wave, np.where(rare, packs.heavy_s, 0.0), waves),
        )
    )
    turn_of = np.empty(waves, np.int64)
    turn_of[first] = np.arange(waves)
    listed = np.lexsort((-packs.time_s, -packs.heavy_s, block, seat))
    taken = np.lexsort((turn_of[packs.wave], block, seat))  # seats, each as the pack on it now
    if even:
        taken = taken[_evenly(taken, listed, packs, block)]
    wave = np.empty_like(packs.wave)
    wave[listed] = packs.wave[taken]
    return wave


def _evenly(
    taken: NDArray[np.int64],
    listed: NDArray[np.int64],
    packs: _Packs,
    block: NDArray[np.int64],
) -> NDArray[np.int64]:
    """The order in which `listed` packs take the seats `taken`, so that heavy ones of a kind and a
    block go round its first waves, a seat of each in turn."""
    kind = np.cumsum(_begins(packs.seat[taken], block[taken]))
    run = np.cumsum(_begins(kind, packs.wave[taken]))  # seats of one kind in one wave
    with_heavy = np.bincount(run, packs.heavy_s[listed])[run] > 0
    turn = np.arange(run.size) - np.flatnonzero(_begins(run))[run - 1]
    # Seats of the waves that have heavy packs come first either way, so each kind keeps its seats.
    order: NDArray[np.int64] = np.lexsort((np.where(with_heavy, turn, 0), ~with_heavy, kind))
    return order


def _begins(*columns: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Where any of the columns [P] changes: bool[P]."""
    begins = np.ones(columns[0].size, np.bool_)
    begins[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return begins


def _rearranged(
    waves: Sequence[ContextPlan], packs: _Packs, wave: NDArray[np.int64]
) -> tuple[ContextPlan, ...]:
    """The waves with each pack in the `wave` int64[P] that it is given, on the seats that those of
    its kind had there; widest first, and then slowest first."""
    order = np.lexsort((-packs.time_s, packs.seat, wave))
    samples = joined([each.samples for each in waves], np.int32)
    counts = joined([np.diff(each.sample_offsets) for each in waves], np.int64)
    padded_tokens = joined([each.padded_tokens for each in waves], np.int64)
    starts = sample_starts(counts)[:-1]
    made, end = [], 0
    for old in waves:
        here = slice(end, end + len(old.time_s))
        end = here.stop
        mine, seats = order[here], np.argsort(packs.seat[here], kind="stable")
        held = old.degrees[seats]
        made.append(
            replace(
                old,
                samples=samples[expanded(starts[mine], counts[mine])],
                sample_offsets=sample_starts(counts[mine]),
                ranks=old.ranks[expanded(old.rank_offsets[:-1][seats], held)],
                rank_offsets=sample_starts(held),
                time_s=packs.time_s[mine],
                padded_tokens=padded_tokens[mine],
                lower_bound_s=0.0,
            )
        )
    return tuple(made)
