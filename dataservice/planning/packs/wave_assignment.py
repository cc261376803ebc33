"""Pack-to-wave assignment: packs that run side by side should cost about the same.

Where replicas synchronise after every microbatch, and in each phase of it, a wave takes as long as
its costliest pack in every phase: the objective is Σ_waves Σ_phases max over the wave.

    by ViT cost, then by LLM cost inside blocks of waves:      ┌ 9 9 9 9 ┐┌ 9 9 8 8 ┐┌ 8 8 8 7 ┐
    one phase sorts perfectly, two need a compromise           └ 5 5 5 4 ┘└ 4 4 5 5 ┘└ 3 3 2 2 ┘

Sort-and-cut orders of several coarsenesses are tried, the best is improved by swaps. A swap can
only help if it takes the costliest pack of some phase out of its wave, so few need be looked at.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.invariants import check_permutation
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_descending, group_stable
from dataservice.planning.loads.problem import check_ranks

_WORK_LIMIT = 3_000_000  # swaps looked at


def assign_packs_to_waves(costs: ArrayLike, *, replicas: int) -> NDArray[np.int32]:
    """The wave of each pack, int32[packs]; at most `replicas` packs in each of ⌈packs/replicas⌉.

    `costs` float64[packs, phases], or [packs] for one phase, in any unit shared by the phases.
    Minimises the summed phase maxima of all waves; exact for one phase. Waves are numbered from
    the costliest down. Raises PlanningError on bad input. O(packs log packs), then bounded work.
    """
    table = _as_table(costs)
    replicas = check_ranks(replicas)
    packs, phases = table.shape
    if packs == 0:
        return np.empty(0, np.int32)
    waves = -(-packs // replicas)
    # Free slots are packs that cost nothing, so that a swap with one is a move.
    filled = np.zeros((waves * replicas, phases))
    filled[:packs] = table
    order = _best_sorted_order(filled, waves, replicas)
    if phases > 1 and waves > 1:
        _swap(order, filled, waves, replicas, _WORK_LIMIT)
    maxima = _wave_maxima(filled, order, waves).sum(axis=1)
    number = np.empty(waves, np.int64)
    number[np.argsort(-maxima, kind="stable")] = np.arange(waves)
    wave_of = np.empty(waves * replicas, np.int32)
    check_permutation(order, waves * replicas, "order of packs")
    wave_of[order] = np.repeat(number, replicas)
    return wave_of[:packs].copy()


def total_wave_cost(costs: ArrayLike, wave_of: ArrayLike) -> float:
    """Σ_waves Σ_phases max over the wave, in the unit of `costs` [packs, phases]. O(packs)."""
    table = _as_table(costs)
    waves = np.asarray(wave_of, dtype=np.int64)
    if waves.shape != table.shape[:1]:
        raise PlanningError(f"wave_of has shape {waves.shape} for {table.shape[0]} packs")
    if waves.size == 0:
        return 0.0
    longest = np.zeros((int(waves.max()) + 1, table.shape[1]))
    np.maximum.at(longest, waves, table)
    return float(longest.sum())


def bound_wave_cost(costs: ArrayLike, *, replicas: int) -> float:
    """No assignment has a smaller total: each phase sorted and cut for itself. O(packs log)."""
    table = _as_table(costs)
    falling = -np.sort(-table, axis=0)
    return float(falling[:: check_ranks(replicas)].sum())


def _as_table(costs: ArrayLike) -> NDArray[np.float64]:
    table = np.ascontiguousarray(costs, dtype=np.float64)
    if table.ndim == 1:
        table = table[:, None]
    if table.ndim != 2 or table.shape[1] == 0:
        raise PlanningError(f"costs has shape {table.shape}; give [packs, phases]")
    if table.size and not (table.min() >= 0.0 and table.max() < np.inf):
        raise PlanningError("costs holds a negative, infinite or NaN value; mend the cost model")
    return table


def _wave_maxima(
    table: NDArray[np.float64], order: NDArray[np.int64], waves: int
) -> NDArray[np.float64]:
    return np.asarray(table[order].reshape(waves, -1, table.shape[1]).max(axis=1))


def _best_sorted_order(table: NDArray[np.float64], waves: int, replicas: int) -> NDArray[np.int64]:
    """Sort by one phase, cut into blocks of whole waves, sort each block by the other phases."""
    total = table.sum(axis=1)
    best = argsort_descending(total)
    best_cost = _wave_maxima(table, best, waves).sum()
    for phase in range(table.shape[1]):
        by_rest = argsort_descending(np.maximum(total - table[:, phase], 0.0))
        by_phase = by_rest[argsort_descending(table[by_rest, phase])]
        block = np.empty(table.shape[0], np.int64)
        waves_per_block = waves
        while True:
            block[by_phase] = np.arange(table.shape[0]) // (waves_per_block * replicas)
            order, _ = group_stable(block, by_rest, waves)
            cost = _wave_maxima(table, order, waves).sum()
            if cost < best_cost:
                best, best_cost = order, cost
            if waves_per_block == 1:
                break
            waves_per_block = -(-waves_per_block // 2)
    return best


@leaf
def _top_two(
    order: NDArray[np.int64], table: NDArray[np.float64], wave: int, replicas: int, phase: int
) -> tuple[float, float, int]:
    """Largest and second largest cost of a phase in a wave, and the slot of the largest."""
    first = -1.0
    second = 0.0
    slot = wave * replicas
    for at in range(wave * replicas, (wave + 1) * replicas):
        cost = table[order[at], phase]
        if cost > first:
            second = max(first, 0.0)
            first = cost
            slot = at
        elif cost > second:
            second = cost
    return first, second, slot


@kernel
def _swap(
    order: NDArray[np.int64],
    table: NDArray[np.float64],
    waves: int,
    replicas: int,
    work_limit: int,
) -> None:
    """Best swap of each costliest pack in turn, in place, until none helps or out of work."""
    phases = table.shape[1]
    first = np.empty((waves, phases))
    second = np.empty((waves, phases))
    slot = np.empty((waves, phases), np.int64)
    for wave in range(waves):
        for phase in range(phases):
            first[wave, phase], second[wave, phase], slot[wave, phase] = _top_two(
                order, table, wave, replicas, phase
            )
    work = 0
    progress = True
    while progress:
        progress = False
        for a in range(waves):
            for lead in range(phases):
                if work >= work_limit:
                    return
                x = slot[a, lead]
                best_gain = 1e-12 * first[a, lead]
                best_y = -1
                for y in range(order.size):
                    b = y // replicas
                    if b == a:
                        continue
                    work += 1
                    gain = 0.0
                    for phase in range(phases):
                        cost_x = table[order[x], phase]
                        cost_y = table[order[y], phase]
                        rest_a = second[a, phase] if slot[a, phase] == x else first[a, phase]
                        rest_b = second[b, phase] if slot[b, phase] == y else first[b, phase]
                        gain += first[a, phase] - max(rest_a, cost_y)
                        gain += first[b, phase] - max(rest_b, cost_x)
                    if gain > best_gain:
                        best_gain = gain
                        best_y = y
                if best_y < 0:
                    continue
                progress = True
                order[x], order[best_y] = order[best_y], order[x]
                for wave in (a, best_y // replicas):
                    for phase in range(phases):
                        first[wave, phase], second[wave, phase], slot[wave, phase] = _top_two(
                            order, table, wave, replicas, phase
                        )
