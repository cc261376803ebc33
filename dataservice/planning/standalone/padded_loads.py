"""Post-balancing of padded batches: OrchMLLM Alg. 2, corrected and exact.

A batch of b items with longest m costs α·b·m + β·b·m². In falling order of length some optimum is
contiguous: give the batch with the longest item the b longest, and no other batch's longest grows.
So bisect the bound, and for each bound cut greedily from the longest item down:

    lengths  9 8 | 5 5 4 | 2 2 1 1 1 1     bound 18: 2·9, 3·5, 6·2 all fit, three batches do

The paper starts its search from the wrong ends and returns the last probe, not the last that fit.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.invariants import check_assignment
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_descending
from dataservice.planning.loads.problem import Partition, as_amounts, check_ranks


def check_weight(value: float, name: str) -> float:
    """Raises PlanningError unless a cost coefficient is finite and at least 0."""
    if not 0.0 <= value < np.inf:
        raise PlanningError(f"{name} is {value}; it must be finite and at least 0")
    return float(value)


@kernel
def contiguous_cut(
    prefix: NDArray[np.float64],
    item_cost: NDArray[np.float64],
    bound: float,
    batches: int,
    starts: NDArray[np.int64],
) -> tuple[int, float]:
    """Fewest contiguous batches within `bound`: (how many, the largest cost among them).

    `item_cost` [n] falls: the cost of one item when padded to the item at this place. `prefix`
    [n + 1] sums what the items cost besides. `starts` gets the first place of each batch; more than
    `batches` needed gives (batches + 1, infinity). O(batches · log n).
    """
    n = item_cost.size
    place = 0
    used = 0
    largest = 0.0
    while place < n:
        if used == batches:
            return batches + 1, np.inf
        starts[used] = place
        used += 1
        low, high = place, n  # the batch can end at `low`; bisect the furthest end
        while low < high:
            end = (low + high + 1) // 2
            if prefix[end] - prefix[place] + (end - place) * item_cost[place] <= bound:
                low = end
            else:
                high = end - 1
        if low == place:
            return batches + 1, np.inf
        largest = max(largest, prefix[low] - prefix[place] + (low - place) * item_cost[place])
        place = low
    return used, largest


@kernel
def _least_bound(
    item_cost: NDArray[np.float64], batches: int
) -> tuple[NDArray[np.int64], int, float]:
    """The smallest largest cost of any batch: (batch starts, how many, that cost)."""
    n = item_cost.size
    starts = np.empty(batches, np.int64)
    trial = np.empty(batches, np.int64)
    nothing = np.zeros(n + 1)  # padded items cost nothing besides
    low = item_cost[0]
    used, best = contiguous_cut(
        nothing, item_cost, item_cost[0] * (-(-n // batches)), batches, starts
    )
    used_trial, cost_trial = contiguous_cut(nothing, item_cost, low, batches, trial)
    if used_trial <= batches:
        return trial, used_trial, cost_trial
    while best - low > 1e-9 * best:  # low is too small, best is reached
        middle = 0.5 * (low + best)
        used_trial, cost_trial = contiguous_cut(nothing, item_cost, middle, batches, trial)
        if used_trial <= batches:
            used, best = used_trial, cost_trial
            starts[:] = trial
        else:
            low = middle
    while True:  # step down through the few costs left in between, until none below fits
        used_trial, cost_trial = contiguous_cut(
            nothing, item_cost, np.nextafter(best, 0.0), batches, trial
        )
        if used_trial > batches:
            return starts, used, best
        used, best = used_trial, cost_trial
        starts[:] = trial


@kernel
def split_for_idle(
    starts: NDArray[np.int64], used: int, n: int, batches: int, item_cost: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Halve the costliest batches until no rank is idle; no batch gets costlier by it."""
    begins = np.empty(batches, np.int64)
    begins[:used] = starts[:used]
    ends = np.empty(batches, np.int64)
    for k in range(used):
        ends[k] = begins[k + 1] if k + 1 < used else n
    while used < min(batches, n):
        worst = -1
        for k in range(used):
            if ends[k] - begins[k] < 2:
                continue
            cost = (ends[k] - begins[k]) * item_cost[begins[k]]
            if worst < 0 or cost > (ends[worst] - begins[worst]) * item_cost[begins[worst]]:
                worst = k
        middle = (begins[worst] + ends[worst]) // 2
        begins[used] = middle
        ends[used] = ends[worst]
        ends[worst] = middle
        used += 1
    rank_at = np.empty(n, np.int64)
    for k in range(used):
        rank_at[begins[k] : ends[k]] = k
    return rank_at


def contiguous_padded(
    item_cost: NDArray[np.float64], batches: int
) -> tuple[NDArray[np.int64], float]:
    """Exact cut of falling float64[n] `item_cost`: (batch of each place, optimum)."""
    starts, used, best = _least_bound(item_cost, batches)
    return split_for_idle(starts, used, item_cost.size, batches, item_cost), float(best)


def balance_padded(
    lengths: ArrayLike, ranks: int, *, alpha: float = 1.0, beta: float = 0.0
) -> Partition:
    """Spread items whose batches are padded to their longest; the largest cost is minimal.

    `lengths` [n] tokens. A rank with b items up to m tokens costs α·b·m + β·b·m² (OrchMLLM eq. 2
    with L = b·m). `loads` are those costs and `lower_bound` is the optimum itself. No rank is left
    empty while another holds two items. Raises PlanningError on bad input. O(n log n).
    """
    tokens = as_amounts(lengths, "lengths")
    ranks = check_ranks(ranks)
    alpha, beta = check_weight(alpha, "alpha"), check_weight(beta, "beta")
    if tokens.size == 0:
        return Partition(rank_of=np.empty(0, np.int32), loads=np.zeros(ranks), lower_bound=0.0)
    order = argsort_descending(tokens)
    fell = tokens[order]
    item_cost = alpha * fell + beta * fell * fell
    rank_at, best = contiguous_padded(item_cost, ranks)
    rank_of = np.empty(tokens.size, np.int32)
    rank_of[order] = rank_at
    check_assignment(rank_of, ranks, "rank of an item")
    longest = np.zeros(ranks)
    np.maximum.at(longest, rank_at, item_cost)
    loads = np.bincount(rank_at, minlength=ranks) * longest
    return Partition(rank_of=rank_of, loads=loads, lower_bound=best)
