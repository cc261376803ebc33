"""Cut a step into waves whose units take about the same time.

Every unit has a natural time: its work over the least ranks that hold it. In a wave of time τ a
unit that is slower than τ is widened (work/τ ranks), one that is faster leaves its ranks waiting,
so units are sorted by natural time and a wave is a run of them. Dynamic programming over the cuts
minimises the sum of the waves' times, each taken from the least τ with

    Σ_{natural > τ} work/τ  +  Σ_{natural ≤ τ} least ranks  ≤  N

    natural time ↓   |████████|██████|█████|▓▓▓▓▓|▓▓▓|░░░|░░|
                     └─ wave 0 ──────┘└── wave 1 ───┘└ wave 2
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf

_CUTS_A_WAVE = 32  # candidate cuts among one wave's ranks; bounds the programme's size
_BISECTIONS = 10


@leaf
def _first_not_above(natural: NDArray[np.float64], start: int, end: int, limit: float) -> int:
    """First place in start:end whose natural time is ≤ limit (they fall)."""
    while start < end:
        middle = (start + end) // 2
        if natural[middle] > limit:
            start = middle + 1
        else:
            end = middle
    return start


@leaf
def _ranks_at(
    tau: float,
    start: int,
    end: int,
    whole: bool,
    natural: NDArray[np.float64],
    slots: NDArray[np.int64],
    work: NDArray[np.float64],
    wide: NDArray[np.int64],
    wide_work: NDArray[np.float64],
) -> float:
    """Ranks that the run start:end needs to meet τ. Prefix sums have one place more than units."""
    raised = _first_not_above(natural, start, end, tau)
    rest = float(slots[end] - slots[raised])
    if not whole:
        return float((work[raised] - work[start]) / tau + rest)
    # Whole units of one rank go to ⌈work/τ⌉: one, and one more for every multiple they exceed.
    # Wide units are taken as fluid, half a rank lost to rounding.
    ranks = (wide_work[raised] - wide_work[start]) / tau + 0.5 * (wide[raised] - wide[start])
    multiple = 1
    above = raised
    while above > start and multiple < 64:
        ranks += (above - start) - (wide[above] - wide[start])
        above = _first_not_above(natural, start, above, tau * (multiple + 1))
        if multiple == 1:
            ranks += (raised - start) - (wide[raised] - wide[start])
        multiple += 1
    return float(ranks + rest)


@kernel
def cut_waves(
    natural: NDArray[np.float64],
    least: NDArray[np.int64],
    work: NDArray[np.float64],
    fastest: NDArray[np.float64],
    ranks: int,
    base_s: float,
    whole: bool,
    lost_room: float,
) -> NDArray[np.int64]:
    """Ends int64[waves] of the waves among units sorted by falling natural time.

    `natural`, `least` ranks, `work`, and `fastest` = min_d T(d) − β₁ are [U] in that order;
    `base_s` is β₁, paid once a wave; `lost_room` in 0..1 is how much of the time by which a wave
    exceeds Σwork/N, for want of memory, is really lost. O(U · cuts a wave · log U),
    U thinned to cut points.
    """
    count = natural.size
    slots = np.zeros(count + 1, np.int64)  # int64[U + 1]: prefix sums, as the next three
    summed = np.zeros(count + 1, np.float64)
    wide = np.zeros(count + 1, np.int64)
    wide_work = np.zeros(count + 1, np.float64)
    for i in range(count):
        slots[i + 1] = slots[i] + least[i]
        summed[i + 1] = summed[i] + work[i]
        wide[i + 1] = wide[i] + (1 if least[i] > 1 else 0)
        wide_work[i + 1] = wide_work[i] + (work[i] if least[i] > 1 else 0.0)
    cuts = _cut_points(slots, ranks)  # int64[cuts]
    # float64[cuts]: what no wave goes below that holds the units between a cut and the next.
    slowest = np.zeros(cuts.size)
    for back in range(cuts.size - 1):
        for i in range(cuts[back], cuts[back + 1]):
            slowest[back] = max(slowest[back], fastest[i])
    best = np.full(cuts.size, np.inf)  # float64[cuts]: least seconds of all waves up to it
    origin = np.zeros(cuts.size, np.int64)  # int64[cuts]: where its last wave starts
    best[0] = 0.0
    for at in range(1, cuts.size):
        end = cuts[at]
        floor = 0.0
        for back in range(at - 1, -1, -1):
            start = cuts[back]
            if slots[end] - slots[start] > ranks:
                break
            floor = max(floor, slowest[back])
            low = max((summed[end] - summed[start]) / ranks, floor)
            if best[back] + base_s + low >= best[at]:
                continue
            tau = _least_tau(low, start, end, whole, ranks, natural, slots, summed, wide, wide_work)
            tau = low + lost_room * (tau - low)
            if best[back] + base_s + tau < best[at]:
                best[at] = best[back] + base_s + tau
                origin[at] = back
    return _ends(cuts, origin)


@leaf
def _least_tau(
    low: float,
    start: int,
    end: int,
    whole: bool,
    ranks: int,
    natural: NDArray[np.float64],
    slots: NDArray[np.int64],
    summed: NDArray[np.float64],
    wide: NDArray[np.int64],
    wide_work: NDArray[np.float64],
) -> float:
    if (
        low <= 0
        or _ranks_at(low, start, end, whole, natural, slots, summed, wide, wide_work) <= ranks
    ):
        return low
    high = max(float(natural[start]), low)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if _ranks_at(middle, start, end, whole, natural, slots, summed, wide, wide_work) <= ranks:
            high = middle
        else:
            low = middle
    return high


@kernel
def _cut_points(slots: NDArray[np.int64], ranks: int) -> NDArray[np.int64]:
    """Places where a wave may end: every unit, or about _CUTS_A_WAVE for each N ranks."""
    spacing = max(1, ranks // _CUTS_A_WAVE)
    cuts = np.empty(slots.size, np.int64)
    cuts[0] = 0
    count = 1
    for i in range(1, slots.size):
        last = cuts[count - 1]
        ahead = i + 1 >= slots.size or slots[i + 1] - slots[last] > spacing
        if ahead:
            cuts[count] = i
            count += 1
    return cuts[:count].copy()


@kernel
def _ends(cuts: NDArray[np.int64], origin: NDArray[np.int64]) -> NDArray[np.int64]:
    ends = np.empty(cuts.size, np.int64)
    count = 0
    at = cuts.size - 1
    while at > 0:
        ends[count] = cuts[at]
        count += 1
        at = origin[at]
    return ends[:count][::-1].copy()
