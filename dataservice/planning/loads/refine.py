"""Local search on a finished partition: exchange up to two items against up to two.

Two stages, both strictly downhill. First every rank above the middle is paired with its mirror
image below, which takes the bulk of the spread out in a few O(items) rounds; then the heaviest
rank alone trades with the others, lightest first, until it meets the target.

    heaviest  [■■■■ ■■ ■ ▪▪]        swap x against y with x − y as close as possible to
    lightest  [■■■ ■■ ■ ▪]          half the difference: one merge over sorted subset sums
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_rising
from dataservice.planning.loads.problem import PartitionProblem

_PAIRING_ROUNDS = 12
# Work is counted in subset sums looked at, not in time, so that plans stay reproducible.
_WORK_PER_ITEM = 240
_WORK_AT_LEAST = 50_000
_WORK_AT_MOST = 2_000_000
# A trade that leaves no more than this share of what a rank is above the target is taken at once.
_GOOD_SHARE = 0.6
_PAIRS_UP_TO = 40  # items in a rank beyond which pairs are too many to enumerate
_RANKS_WITH_PAIRS = 4096  # beyond, kept pair sums would take too much memory


@leaf
def _gather(
    rank: int, head: NDArray[np.int64], next_at: NDArray[np.int64], out: NDArray[np.int64]
) -> int:
    """Sorted places in `rank`, costliest first; returns how many."""
    count = 0
    place = head[rank]
    while place >= 0:
        out[count] = place
        count += 1
        place = next_at[place]
    return count


@leaf
def _unlink(rank: int, place: int, head: NDArray[np.int64], next_at: NDArray[np.int64]) -> None:
    at = head[rank]
    if at == place:
        head[rank] = next_at[place]
        return
    while next_at[at] != place:
        at = next_at[at]
    next_at[at] = next_at[place]


@leaf
def _link(rank: int, place: int, head: NDArray[np.int64], next_at: NDArray[np.int64]) -> None:
    at = head[rank]
    if at < 0 or at > place:
        next_at[place] = at
        head[rank] = place
        return
    while next_at[at] >= 0 and next_at[at] < place:
        at = next_at[at]
    next_at[place] = next_at[at]
    next_at[at] = place


@kernel
def _fill_pairs(
    places: NDArray[np.int64],
    count: int,
    costs: NDArray[np.float64],
    sums: NDArray[np.float64],
    codes: NDArray[np.int64],
) -> None:
    """Write the costs of all pairs of a rank, rising, and which pair each is (i · count + j)."""
    k = 0
    for i in range(count):
        for j in range(i + 1, count):
            sums[k] = costs[places[i]] + costs[places[j]]
            codes[k] = i * count + j
            k += 1
    rising = argsort_rising(sums[:k])
    old_sums = sums[:k].copy()
    old_codes = codes[:k].copy()
    for m in range(k):
        sums[m] = old_sums[rising[m]]
        codes[m] = old_codes[rising[m]]


@kernel
def _rising_costs(
    places: NDArray[np.int64], costs: NDArray[np.float64], out: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Costs of the items of a rank, rising, written to the front of `out`."""
    count = places.size
    for k in range(count):
        out[k] = costs[places[count - 1 - k]]
    return out[:count]


@leaf
def _closest(
    give: NDArray[np.float64], take: NDArray[np.float64], wanted: float
) -> tuple[float, int, int]:
    """Over rising `give` and `take`: the pair whose difference is closest to `wanted`."""
    best = np.inf
    best_i = -1
    best_j = -1
    i = 0
    for j in range(take.size):
        goal = take[j] + wanted
        while i < give.size and give[i] < goal:
            i += 1
        if i < give.size and give[i] - goal < best:
            best, best_i, best_j = give[i] - goal, i, j
        if i > 0 and goal - give[i - 1] < best:
            best, best_i, best_j = goal - give[i - 1], i - 1, j
    return best, best_i, best_j


@kernel
def _best_trade(
    level: int,
    wanted: float,
    equal_count: bool,
    costs: NDArray[np.float64],
    places_a: NDArray[np.int64],
    pairs_a: NDArray[np.float64],
    codes_a: NDArray[np.int64],
    places_b: NDArray[np.int64],
    pairs_b: NDArray[np.float64],
    codes_b: NDArray[np.int64],
    moved: NDArray[np.int64],
) -> tuple[float, int]:
    """Exchange of at most `level` items each way whose net cost is closest to `wanted`, half the
    difference of the loads. `moved` gets two places out of a, then two out of b (−1: none).

    Returns (distance from `wanted`, sums looked at); infinity if no exchange helps. A distance
    of `wanted` itself would only swap the two loads.
    """
    best = wanted * (1.0 - 1e-9)
    helps = False
    work = 0
    nothing = np.zeros(1)
    singles_a = _rising_costs(places_a, costs, np.empty(places_a.size))
    singles_b = _rising_costs(places_b, costs, np.empty(places_b.size))
    for out_of_a in range(1, level + 1):
        sums_a = singles_a if out_of_a == 1 else pairs_a
        for out_of_b in range(level + 1):
            net = out_of_a - out_of_b
            if equal_count and net != 0 and (abs(net) > 1 or net != places_a.size - places_b.size):
                continue
            if level == 2 and out_of_a < 2 and out_of_b < 2:
                continue  # singles alone were tried at level 1
            sums_b = nothing
            if out_of_b > 0:
                sums_b = singles_b if out_of_b == 1 else pairs_b
            work += sums_a.size + sums_b.size
            distance, i, j = _closest(sums_a, sums_b, wanted)
            if distance >= best:
                continue
            best = distance
            helps = True
            moved[:] = -1
            if out_of_a == 1:
                moved[0] = places_a[places_a.size - 1 - i]
            else:
                moved[0] = places_a[codes_a[i] // places_a.size]
                moved[1] = places_a[codes_a[i] % places_a.size]
            if out_of_b == 1:
                moved[2] = places_b[places_b.size - 1 - j]
            elif out_of_b == 2:
                moved[2] = places_b[codes_b[j] // places_b.size]
                moved[3] = places_b[codes_b[j] % places_b.size]
    return best if helps else np.inf, work


@leaf
def _fits(
    a: int,
    b: int,
    moved: NDArray[np.int64],
    sizes: NDArray[np.float64],
    held: NDArray[np.float64],
    capacity: float,
) -> bool:
    net = 0.0
    for k in range(2):
        net += sizes[moved[k]] if moved[k] >= 0 else 0.0
        net -= sizes[moved[2 + k]] if moved[2 + k] >= 0 else 0.0
    return bool(held[a] - net <= capacity and held[b] + net <= capacity)


@leaf
def _apply(
    a: int,
    b: int,
    moved: NDArray[np.int64],
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    rank_at: NDArray[np.int64],
    loads: NDArray[np.float64],
    held: NDArray[np.float64],
    head: NDArray[np.int64],
    next_at: NDArray[np.int64],
) -> None:
    for k in range(4):
        place = moved[k]
        if place < 0:
            continue
        source, target = (a, b) if k < 2 else (b, a)
        _unlink(source, place, head, next_at)
        _link(target, place, head, next_at)
        rank_at[place] = target
        loads[source] -= costs[place]
        loads[target] += costs[place]
        held[source] -= sizes[place]
        held[target] += sizes[place]


@kernel
def _pairing_rounds(
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    rank_at: NDArray[np.int64],
    loads: NDArray[np.float64],
    held: NDArray[np.float64],
    head: NDArray[np.int64],
    next_at: NDArray[np.int64],
    capacity: float,
    equal_count: bool,
    target: float,
) -> None:
    """Level every rank above the middle with its mirror image below, one item each way."""
    ranks = loads.size
    buffer_a = np.empty(costs.size, np.int64)
    buffer_b = np.empty(costs.size, np.int64)
    no_sums = np.empty(0)
    no_codes = np.empty(0, np.int64)
    moved = np.empty(4, np.int64)
    for _ in range(_PAIRING_ROUNDS):
        before = loads.max()
        if before <= target:
            return
        rising = argsort_rising(loads)
        for k in range(ranks // 2):
            a = rising[ranks - 1 - k]
            b = rising[k]
            places_a = buffer_a[: _gather(a, head, next_at, buffer_a)]
            places_b = buffer_b[: _gather(b, head, next_at, buffer_b)]
            wanted = 0.5 * (loads[a] - loads[b])
            distance, _work = _best_trade(
                1, wanted, equal_count, costs, places_a, no_sums, no_codes,
                places_b, no_sums, no_codes, moved,
            )  # fmt: skip
            if distance < np.inf and _fits(a, b, moved, sizes, held, capacity):
                _apply(a, b, moved, costs, sizes, rank_at, loads, held, head, next_at)
        if loads.max() > target + 0.7 * (before - target):
            return


@kernel
def _lighten_heaviest(
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    rank_at: NDArray[np.int64],
    loads: NDArray[np.float64],
    held: NDArray[np.float64],
    head: NDArray[np.int64],
    next_at: NDArray[np.int64],
    capacity: float,
    equal_count: bool,
    target: float,
    work_limit: int,
) -> None:
    """Ranks above `target`, heaviest first, trade with the first rank that brings them near it, or
    whichever brings them lowest.

    Sums of pairs are kept per rank until the rank changes. Ends at the target, when the heaviest
    rank cannot be lightened (nothing else lowers the maximum), or out of work.
    """
    ranks = loads.size
    buffer_a = np.empty(costs.size, np.int64)
    buffer_b = np.empty(costs.size, np.int64)
    most_pairs = _PAIRS_UP_TO * (_PAIRS_UP_TO - 1) // 2
    levels = 2 if ranks <= _RANKS_WITH_PAIRS else 1
    kept = ranks if levels == 2 else 1
    sums = np.empty((kept, most_pairs))  # float64[kept, pairs]
    codes = np.empty((kept, most_pairs), np.int64)  # int64[kept, pairs]
    pairs_of = np.full(ranks, -1)  # how many pair sums are kept, −1: none yet
    moved = np.empty(4, np.int64)
    chosen = np.empty(4, np.int64)
    work = 0
    while work < work_limit:
        rising = argsort_rising(loads)
        if loads[rising[ranks - 1]] <= target:
            return
        for k in range(ranks - 1, 0, -1):
            a = rising[k]
            if loads[a] <= target or work >= work_limit:
                break
            places_a = buffer_a[: _gather(a, head, next_at, buffer_a)]
            best = loads[a]
            good = target + _GOOD_SHARE * (best - target)
            partner = -1
            for level in range(1, levels + 1):
                if best <= good or (level == 2 and places_a.size > _PAIRS_UP_TO):
                    break
                if level == 2 and pairs_of[a] < 0:
                    _fill_pairs(places_a, places_a.size, costs, sums[a], codes[a])
                    pairs_of[a] = places_a.size * (places_a.size - 1) // 2
                    work += 4 * pairs_of[a]
                for m in range(k):
                    b = rising[m]
                    if loads[b] >= best:
                        continue
                    places_b = buffer_b[: _gather(b, head, next_at, buffer_b)]
                    if level == 2 and places_b.size > _PAIRS_UP_TO:
                        continue
                    if level == 2 and pairs_of[b] < 0:
                        _fill_pairs(places_b, places_b.size, costs, sums[b], codes[b])
                        pairs_of[b] = places_b.size * (places_b.size - 1) // 2
                        work += 4 * pairs_of[b]
                    row_a = a if level == 2 else 0
                    row_b = b if level == 2 else 0
                    wanted = 0.5 * (loads[a] - loads[b])
                    distance, spent = _best_trade(
                        level, wanted, equal_count, costs,
                        places_a, sums[row_a, : pairs_of[a]], codes[row_a],
                        places_b, sums[row_b, : pairs_of[b]], codes[row_b], moved,
                    )  # fmt: skip
                    work += spent + 2 * places_b.size
                    after = 0.5 * (loads[a] + loads[b]) + distance
                    if after < best * (1.0 - 1e-12) and _fits(a, b, moved, sizes, held, capacity):
                        best = after
                        partner = b
                        chosen[:] = moved
                    if best <= good or work >= work_limit:
                        break
            if partner >= 0:
                _apply(a, partner, chosen, costs, sizes, rank_at, loads, held, head, next_at)
                pairs_of[a] = -1
                pairs_of[partner] = -1
            elif k == ranks - 1:
                return


@kernel
def refine_in_place(
    rank_at: NDArray[np.int64],
    costs: NDArray[np.float64],
    sizes: NDArray[np.float64],
    ranks: int,
    capacity: float,
    equal_count: bool,
    target: float,
    work_limit: int,
) -> None:
    """Lower the largest load in place until it is at most `target`, stuck, or out of work."""
    head = np.full(ranks, -1)  # int64[ranks]: first place of each rank
    next_at = np.full(costs.size, -1)  # int64[n]: places of a rank, as lists
    loads = np.zeros(ranks)  # float64[ranks]
    held = np.zeros(ranks)  # float64[ranks]: summed sizes
    for place in range(costs.size - 1, -1, -1):  # lists come out costliest first
        rank = rank_at[place]
        next_at[place] = head[rank]
        head[rank] = place
        loads[rank] += costs[place]
        held[rank] += sizes[place]
    _pairing_rounds(
        costs, sizes, rank_at, loads, held, head, next_at, capacity, equal_count, target
    )
    _lighten_heaviest(
        costs, sizes, rank_at, loads, held, head, next_at, capacity, equal_count, target,
        work_limit,
    )  # fmt: skip


def refine(
    problem: PartitionProblem, rank_at: NDArray[np.int64], target: float
) -> NDArray[np.int64]:
    """A copy of `rank_at` whose largest load is not larger, and at most `target` if reachable.

    Counts stay equal to within one where the problem asks so, and capacity is kept.
    """
    refined = rank_at.copy()
    if problem.ranks < 2 or rank_at.size == 0:
        return refined
    work = min(max(_WORK_PER_ITEM * rank_at.size, _WORK_AT_LEAST), _WORK_AT_MOST)
    refine_in_place(
        refined,
        problem.costs,
        problem.sizes,
        problem.ranks,
        problem.capacity,
        problem.equal_count,
        target,
        work,
    )
    return refined
