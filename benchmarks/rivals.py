"""What trainers use today and what the papers print, written anew in the plainest way.

These are yardsticks: no tuning, no refinement, and each in the language its users run it in
(Python with a heap, numba). Where a choice had to be made it favours the rival.
"""

import heapq
import math
from dataclasses import dataclass, field

import numba
import numpy as np
from numpy.typing import NDArray

from dataservice.core.cost import ContextCost
from dataservice.planning.context.degrees import degrees_by_dp

# Megatron's hybrid CP ends a wave once the loads of all ranks are this close.
_BALANCED = 0.05


def differencing(costs: list[float], ranks: int) -> list[list[int]]:
    """Karmarkar–Karp without refinement, as verl, slime and tunix run it: a heap of states of
    `ranks` (sum, items), the two of largest spread merged heaviest with lightest."""
    states: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for item, cost in enumerate(costs):
        empty: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(ranks - 1)]
        states.append((-cost, item, [(cost, [item]), *empty]))
    heapq.heapify(states)
    while len(states) > 1:
        _, _, heavy = heapq.heappop(states)
        _, tie, light = heapq.heappop(states)
        merged = [
            (one + other, [*items, *others])
            for (one, items), (other, others) in zip(heavy, reversed(light), strict=True)
        ]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(states, (merged[-1][0] - merged[0][0], tie, merged))
    return [items for _, items in states[0][2]]


def greedy_loads(costs: list[float], ranks: int, *, falling: bool) -> list[float]:
    """Each cost to the least loaded rank, with a heap. Falling is LPT; rising is MMScale's Alg. 2
    as printed, which the 4/3 it quotes does not hold for. Returns the loads."""
    loads = [0.0] * ranks
    for cost in sorted(costs, reverse=falling):
        heapq.heapreplace(loads, loads[0] + cost)
    return loads


def padded_as_printed(lengths: list[int], ranks: int) -> list[list[int]]:
    """OrchMLLM's Alg. 2 to the letter: bounds from element 0 of the rising list, and the batches
    of the last probe, whether or not they were few enough."""
    rising = sorted(lengths)

    def batches_within(bound: int) -> list[list[int]]:
        batches: list[list[int]] = [[]]
        for length in rising:
            if (len(batches[-1]) + 1) * length > bound:
                batches.append([])
            batches[-1].append(length)
        return batches

    left, right = rising[0], rising[0] * (len(lengths) // ranks + 1)
    batches = batches_within(right)
    while left < right:
        middle = (left + right) // 2
        batches = batches_within(middle)
        if len(batches) <= ranks:
            right = middle
        else:
            left = middle + 1
    return batches


@numba.njit(cache=True)
def _first_fit(falling: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    bin_of = np.empty(falling.size, np.int64)
    room = np.empty(falling.size, np.int64)
    opened = 0
    for place in range(falling.size):
        found = opened
        for at in range(opened):
            if room[at] >= falling[place]:
                found = at
                break
        if found == opened:
            room[found] = capacity
            opened += 1
        room[found] -= falling[place]
        bin_of[place] = found
    return bin_of


def first_fit_decreasing(
    lengths: NDArray[np.int64], capacity: int, *, group: int = 100_000
) -> NDArray[np.int64]:
    """Bin of each length, int64[n]: first-fit decreasing in groups of 100,000 samples, every open
    bin looked at in turn, as axolotl's multipack sampler does with numba."""
    bin_of = np.empty(lengths.size, np.int64)
    opened = 0
    for begin in range(0, lengths.size, group):
        part = lengths[begin : begin + group]
        order = np.argsort(-part, kind="stable")
        placed = _first_fit(part[order], capacity)
        bin_of[begin + order] = opened + placed
        opened += int(placed.max()) + 1
    return bin_of


@dataclass(kw_only=True, slots=True)
class _Group:
    """Ranks that work together: `degree` of them, the samples they run and their load."""

    degree: int
    samples: list[int] = field(default_factory=list)
    load: float = 0.0


def power_of_two_waves(
    tokens: NDArray[np.int64], *, ranks: int, memory_tokens: int
) -> list[list[tuple[list[int], int]]]:
    """Waves of (samples, degree), as Megatron-LM's hybrid context parallelism forms them.

    A sample takes the least power of two of ranks that holds it; samples fall by length; each goes
    to the least loaded group of its degree, or to free ranks; work is counted as s²/degree. A wave
    ends when nothing can be placed or the ranks are within 5 %; what overloads the heaviest group
    is put back, and groups are doubled while ranks stay empty. `ranks` is a power of two.
    """
    remaining = sorted(range(tokens.size), key=lambda i: -int(tokens[i]))
    waves = []
    while remaining:
        groups, remaining = _one_wave(tokens, remaining, ranks, memory_tokens)
        waves.append([(group.samples, group.degree) for group in groups])
    return waves


def _one_wave(
    tokens: NDArray[np.int64], samples: list[int], ranks: int, memory_tokens: int
) -> tuple[list[_Group], list[int]]:
    queues: dict[int, list[int]] = {}
    for sample in reversed(samples):
        needed = max(1, math.ceil(tokens[sample] / memory_tokens))
        queues.setdefault(1 << (needed - 1).bit_length(), []).append(sample)
    heaps: dict[int, list[tuple[float, int]]] = {}
    groups: list[_Group] = []
    free = ranks
    widest = max(queues)
    for degree in sorted(queues, reverse=True):
        heap = heaps.setdefault(degree, [])
        while queues[degree]:
            if degree < widest and free == 0 and _within_reach(groups):
                break
            if free >= degree:
                free -= degree
                groups.append(_Group(degree=degree))
                heap.append((0.0, len(groups) - 1))
                heapq.heapify(heap)
            elif not heap:
                break
            sample = queues[degree].pop()
            load, at = heap[0]
            load += float(tokens[sample]) ** 2 / degree
            groups[at].samples.append(sample)
            groups[at].load = load
            heapq.heapreplace(heap, (load, at))
    left = [sample for queue in queues.values() for sample in queue]
    left += _put_back(tokens, groups) if free == 0 else []
    _widen(groups, free)
    return groups, sorted(left, key=lambda i: -int(tokens[i]))


def _within_reach(groups: list[_Group]) -> bool:
    loads = [group.load for group in groups]
    return max(loads) - min(loads) <= _BALANCED * max(loads)


def _put_back(tokens: NDArray[np.int64], groups: list[_Group]) -> list[int]:
    """The last samples of the heaviest group leave the wave while that narrows the spread."""
    taken: list[int] = []
    while not _within_reach(groups):
        heaviest = max(groups, key=lambda group: group.load)
        lightest = min(group.load for group in groups)
        if len(heaviest.samples) <= 1:
            break
        load = heaviest.load - float(tokens[heaviest.samples[-1]]) ** 2 / heaviest.degree
        others = [group.load for group in groups if group is not heaviest]
        after = max([load, *others]) - min([load, *others])
        if after >= heaviest.load - lightest:
            break
        heaviest.load = load
        taken.append(heaviest.samples.pop())
    return taken


def _widen(groups: list[_Group], free: int) -> None:
    """Double the narrowest groups, in the order they were made, while ranks are free."""
    while free > 0:
        narrow = min(group.degree for group in groups)
        if narrow > free:
            return
        group = next(group for group in groups if group.degree == narrow)
        free -= narrow
        group.degree *= 2
        group.load /= 2


def power_of_two_seconds(
    tokens: NDArray[np.int64],
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    ranks_per_node: int,
) -> float:
    """What its waves take by our cost model, at the best of its settings: the tokens a rank takes
    are the memory or any half of it. A group pays β₁ once a wave, however many samples it runs,
    and their summed memory is not held against it."""
    found = []
    while memory_tokens * ranks >= tokens.max():
        waves = power_of_two_waves(tokens, ranks=ranks, memory_tokens=memory_tokens)
        found.append(_waves_seconds(tokens, waves, cost, ranks_per_node))
        memory_tokens //= 2
    return min(found)


def _waves_seconds(
    tokens: NDArray[np.int64],
    waves: list[list[tuple[list[int], int]]],
    cost: ContextCost,
    ranks_per_node: int,
) -> float:
    return sum(
        max(
            cost.time_s(tokens[samples], degree, crosses_node=degree > ranks_per_node)
            for samples, degree in wave
        )
        for wave in waves
    )


def dhp_groups(
    tokens: NDArray[np.int64], *, ranks: int, memory_tokens: int
) -> tuple[list[list[int]], list[int]]:
    """DHP's stage 1 as published: best-fit decreasing by memory gives atomic groups and the least
    degree of each. Raises ValueError if they need more than `ranks`."""
    groups: list[list[int]] = []
    least: list[int] = []
    room: list[int] = []
    for sample in np.argsort(-tokens, kind="stable").tolist():
        size = int(tokens[sample])
        fitting = [g for g in range(len(groups)) if room[g] >= size]
        if fitting:
            best = min(fitting, key=room.__getitem__)
        else:
            best = len(groups)
            groups.append([])
            least.append(-(-size // memory_tokens))
            room.append(least[-1] * memory_tokens)
        groups[best].append(sample)
        room[best] -= size
    if sum(least) > ranks:
        raise ValueError(f"{sum(least)} ranks are needed and there are {ranks}")
    return groups, least


def degree_table(
    tokens: NDArray[np.int64],
    groups: list[list[int]],
    least: list[int],
    *,
    ranks: int,
    cost: ContextCost,
    ranks_per_node: int,
) -> NDArray[np.float64]:
    """Seconds [group, degree], infinite below a group's least degree."""
    degrees = np.arange(1, ranks + 1)
    table = np.stack(
        [cost.times_s(tokens[group], degrees, None, degrees > ranks_per_node) for group in groups]
    )
    table[degrees[None, :] < np.array(least)[:, None]] = np.inf
    return table


def dhp_seconds(
    tokens: NDArray[np.int64],
    *,
    ranks: int,
    memory_tokens: int,
    cost: ContextCost,
    ranks_per_node: int,
) -> float:
    """Makespan of DHP as published: groups by memory, then 2D dynamic programming for degrees."""
    groups, least = dhp_groups(tokens, ranks=ranks, memory_tokens=memory_tokens)
    table = degree_table(
        tokens, groups, least, ranks=ranks, cost=cost, ranks_per_node=ranks_per_node
    )
    chosen = degrees_by_dp(table, ranks=ranks)
    return float(table[np.arange(len(groups)), chosen - 1].max())
