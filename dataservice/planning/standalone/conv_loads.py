"""Post-balancing where attention is padded but the rest is not: OrchMLLM Alg. 5, corrected.

A rank with b items up to m tokens costs α·Σl + λ·b·m² (ConvTransformers). The paper's algorithm
uses an undefined bound and compares count × current item, which in falling order is not count ×
longest. Here the cost itself is evaluated: the best contiguous cut in falling order and a plain
partition of α·l + λ·l² are made, both are improved by moves and swaps, and the better one is kept.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.planning.invariants import check_assignment
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_descending, argsort_rising
from dataservice.planning.loads.partition import partition
from dataservice.planning.loads.problem import Partition, as_amounts, check_ranks
from dataservice.planning.standalone.padded_loads import (
    check_weight,
    contiguous_cut,
    split_for_idle,
)

_WORK_LIMIT = 800_000  # exchanges looked at
_PARTNERS = 32
_PRICES = 40


@kernel
def _contiguous(
    prefix: NDArray[np.float64], squares: NDArray[np.float64], batches: int
) -> NDArray[np.int64]:
    """Best contiguous cut of places in falling order, by bisection of the bound."""
    n = squares.size
    starts = np.zeros(batches, np.int64)
    trial = np.zeros(batches, np.int64)
    low = 0.0
    high = prefix[n] + n * squares[0]
    used = 1
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        used_trial, cost = contiguous_cut(prefix, squares, middle, batches, trial)
        if used_trial <= batches:
            used, high = used_trial, min(middle, cost)
            starts[:] = trial
        else:
            low = middle
    return split_for_idle(starts, used, n, batches, squares)


@kernel
def _least_padded_sum(squares: NDArray[np.float64], batches: int) -> float:
    """A bound no split into `batches` goes below for the summed b·m² of all batches.

    Minimal for contiguous batches. A price per batch replaces the limit on their number, and any
    price gives a bound; it is best where the optimum just uses `batches`, found by bisection. For
    one price a monotone queue of lines gives the optimum in O(n).
    """
    n = squares.size
    rising = squares[::-1].copy()
    cost = np.zeros(n + 1)
    used = np.zeros(n + 1, np.int64)
    queue = np.empty(n + 1, np.int64)
    best = 0.0
    low = 0.0
    high = n * rising[n - 1]
    for _ in range(_PRICES):
        price = 0.5 * (low + high)
        first, last = 0, 0
        queue[0] = 0
        for j in range(1, n + 1):
            x = rising[j - 1]
            while first < last and (
                cost[queue[first + 1]] - queue[first + 1] * x
                <= cost[queue[first]] - queue[first] * x
            ):
                first += 1
            cost[j] = cost[queue[first]] + (j - queue[first]) * x + price
            used[j] = used[queue[first]] + 1
            while first < last:
                a, b = queue[last - 1], queue[last]
                if (cost[b] - cost[a]) * (j - b) < (cost[j] - cost[b]) * (b - a):
                    break
                last -= 1
            last += 1
            queue[last] = j
        best = max(best, cost[n] - price * batches)
        if used[n] > batches:
            low = price
        else:
            high = price
    return best


@kernel
def _improve(
    rank_at: NDArray[np.int64],
    linear: NDArray[np.float64],
    squares: NDArray[np.float64],
    ranks: int,
    work_limit: int,
) -> None:
    """Move or swap one item of the costliest rank while that lowers the largest cost."""
    n = rank_at.size
    work = 0
    while work < work_limit:
        count = np.zeros(ranks, np.int64)
        total = np.zeros(ranks)
        first = np.full(ranks, n)  # places of the longest and second longest item of a rank
        second = np.full(ranks, n)
        for place in range(n):
            rank = rank_at[place]
            count[rank] += 1
            total[rank] += linear[place]
            if first[rank] == n:
                first[rank] = place
            elif second[rank] == n:
                second[rank] = place
        loads = np.zeros(ranks)
        for rank in range(ranks):
            if count[rank] > 0:
                loads[rank] = total[rank] + count[rank] * squares[first[rank]]
        rising = argsort_rising(loads)
        a = rising[ranks - 1]
        partner = np.zeros(ranks, np.bool_)
        partner[rising[: min(_PARTNERS, ranks - 1)]] = True
        best = loads[a] * (1.0 - 1e-12)
        best_x = -1
        best_y = -1
        for x in range(n):
            if rank_at[x] != a:
                continue
            rest = second[a] if first[a] == x else first[a]
            if x > 0 and rank_at[x - 1] == a and linear[x] == linear[x - 1] and rest == first[a]:
                continue  # the same length was just tried
            if work >= work_limit:
                break
            for b in rising[: min(_PARTNERS, ranks - 1)]:
                longest_b = min(first[b], x)
                cost_b = total[b] + linear[x] + (count[b] + 1) * squares[longest_b]
                cost_a = 0.0
                if count[a] > 1:
                    cost_a = total[a] - linear[x] + (count[a] - 1) * squares[rest]
                if max(cost_a, cost_b) < best:
                    best, best_x, best_y = max(cost_a, cost_b), x, -1 - b
            for y in range(n):
                b = rank_at[y]
                if not partner[b]:
                    continue
                work += 1
                longest_a = min(rest, y)
                longest_b = min(second[b] if first[b] == y else first[b], x)
                cost_a = total[a] - linear[x] + linear[y] + count[a] * squares[longest_a]
                if cost_a >= best:
                    continue
                cost_b = total[b] + linear[x] - linear[y] + count[b] * squares[longest_b]
                if cost_b < best:
                    best, best_x, best_y = max(cost_a, cost_b), x, y
        work += n
        if best_x < 0:
            return
        if best_y < 0:
            rank_at[best_x] = -1 - best_y
        else:
            rank_at[best_x] = rank_at[best_y]
            rank_at[best_y] = a


def _loads(
    rank_at: NDArray[np.int64],
    linear: NDArray[np.float64],
    squares: NDArray[np.float64],
    ranks: int,
) -> NDArray[np.float64]:
    longest = np.zeros(ranks)
    np.maximum.at(longest, rank_at, squares)
    sums = np.bincount(rank_at, weights=linear, minlength=ranks)
    return np.asarray(sums + np.bincount(rank_at, minlength=ranks) * longest)


def balance_conv(lengths: ArrayLike, ranks: int, *, alpha: float, lam: float) -> Partition:
    """Spread items so that the largest α·Σl + λ·b·m² of a rank (b items, longest m) is small.

    `lengths` [n] tokens; `loads` are those costs. `lower_bound`: the larger of the costliest item
    and the mean of α·Σl plus the least possible sum of λ·b·m². Raises PlanningError on bad
    input. O(n log n), then bounded work.
    """
    tokens = as_amounts(lengths, "lengths")
    ranks = check_ranks(ranks)
    alpha, lam = check_weight(alpha, "alpha"), check_weight(lam, "lam")
    if tokens.size == 0:
        return Partition(rank_of=np.empty(0, np.int32), loads=np.zeros(ranks), lower_bound=0.0)
    order = argsort_descending(tokens)
    fell = tokens[order]
    linear = alpha * fell
    squares = lam * fell * fell
    prefix = np.concatenate((np.zeros(1), np.cumsum(linear)))
    starts = [
        _contiguous(prefix, squares, ranks),
        partition(linear + squares, ranks).rank_of.astype(np.int64),
    ]
    for start in starts:
        check_assignment(start, ranks, "rank of an item")
    tries = [(_loads(start, linear, squares, ranks), start) for start in starts]
    bound = float(linear[0] + squares[0])
    if min(float(loads.max()) for loads, _ in tries) > bound:
        # Otherwise one item alone sets the largest load and nothing can be gained.
        for start in starts:
            _improve(start, linear, squares, ranks, _WORK_LIMIT)
        tries = [(_loads(start, linear, squares, ranks), start) for start in starts]
        padded_sum = float(_least_padded_sum(squares, ranks))
        bound = max(bound, (float(prefix[-1]) + padded_sum) / ranks)
    loads, best = min(tries, key=lambda found: float(found[0].max()))
    rank_of = np.empty(tokens.size, np.int32)
    rank_of[order] = best
    check_assignment(rank_of, ranks, "rank of an item")
    return Partition(rank_of=rank_of, loads=loads, lower_bound=min(bound, float(loads.max())))
