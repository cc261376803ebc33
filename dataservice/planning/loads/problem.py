"""The nouns of number partitioning, one validated problem, its certificate and its answer; and how
uneven batches are, by OmniBal's Pad ratio and Dist ratio.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.invariants import check_assignment, require
from dataservice.planning.kernels.sort import argsort_descending

# Sums of the same costs in another order differ by this much, relatively; a cap is not that sharp.
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """Items spread over ranks, with the proof of how good it can get.

    `rank_of` int32[n] rank of each item; `loads` float64[ranks] summed cost per rank;
    `lower_bound` no assignment has a smaller largest load, in the unit of the costs.
    """

    rank_of: NDArray[np.int32]
    loads: NDArray[np.float64]
    lower_bound: float

    @property
    def max_load(self) -> float:
        """Largest load of any rank."""
        return float(self.loads.max())

    @property
    def gap(self) -> float:
        """Certified relative distance to the optimum: max_load / lower_bound − 1."""
        return self.max_load / self.lower_bound - 1.0 if self.lower_bound > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionProblem:
    """Validated input of every algorithm; arrays are sorted by falling cost.

    `order` int64[n] item at each sorted place; `costs`, `sizes` float64[n] in that order.
    A rank holds at most `max_count` items, at most `full_ranks` ranks hold that many, and the
    summed size of a rank stays within `capacity` (infinity: no limit).
    """

    order: NDArray[np.int64]
    costs: NDArray[np.float64]
    sizes: NDArray[np.float64]
    ranks: int
    capacity: float
    max_count: int
    full_ranks: int
    equal_count: bool
    lower_bound: float


def as_amounts(values: ArrayLike, name: str) -> NDArray[np.float64]:
    """`values` as float64[n]. Raises PlanningError unless one-dimensional, finite and ≥ 0."""
    # Writable: kernels are compiled for that, and a read-only array would compile them anew.
    amounts = np.require(values, np.float64, ("C", "W"))
    if amounts.ndim != 1:
        raise PlanningError(f"{name} has {amounts.ndim} axes; give one value per item")
    # min and max carry any NaN along, so two passes find every kind of bad value.
    if amounts.size and not (amounts.min() >= 0.0 and amounts.max() < np.inf):
        bad = int(np.flatnonzero(~(np.isfinite(amounts) & (amounts >= 0.0)))[0])
        raise PlanningError(
            f"{name}[{bad}] is {amounts[bad]}; it must be finite and at least 0: "
            "mend the lengths or the cost model that gave it"
        )
    return amounts


def check_ranks(ranks: int) -> int:
    """Raises PlanningError if `ranks` is below 1."""
    if ranks < 1:
        raise PlanningError(f"ranks is {ranks}; give at least 1 rank to spread the items over")
    return int(ranks)


def build_problem(
    costs: ArrayLike,
    ranks: int,
    *,
    equal_count: bool,
    capacity: float | None,
    sizes: ArrayLike | None,
) -> PartitionProblem:
    """Check the input, sort it once and certify it. Raises PlanningError on bad input."""
    ranks = check_ranks(ranks)
    amounts = as_amounts(costs, "costs")
    weights = amounts if sizes is None else as_amounts(sizes, "sizes")
    if weights.size != amounts.size:
        raise PlanningError(
            f"sizes has {weights.size} values for {amounts.size} costs; give one size per item"
        )
    if capacity is not None and not capacity > 0:
        raise PlanningError(f"capacity is {capacity}; it must be positive, or None for no limit")
    if capacity is not None and weights.size and weights.max() > capacity:
        largest = int(weights.argmax())
        raise PlanningError(
            f"item {largest} has size {weights[largest]:g} but the capacity of a rank is "
            f"{capacity:g}: raise the capacity or split the item over several ranks"
        )
    room = np.inf
    if capacity is not None:  # sums of fractions are rounded, those of whole numbers are exact
        whole = bool((weights == np.rint(weights)).all())
        room = float(capacity) * (1.0 if whole else 1.0 + ROUNDING)
    n = amounts.size
    order = argsort_descending(amounts)
    fell = amounts[order]
    most = -(-n // ranks)
    return PartitionProblem(
        order=order,
        costs=fell,
        sizes=fell if sizes is None else weights[order],
        ranks=ranks,
        capacity=room,
        max_count=most if equal_count else n + 1,
        full_ranks=n - (most - 1) * ranks if equal_count and n else ranks,
        equal_count=equal_count,
        lower_bound=certify(fell, ranks, equal_count=equal_count),
    )


def certify(costs: NDArray[np.float64], ranks: int, *, equal_count: bool) -> float:
    """A bound that no assignment of float64[n] falling `costs` to `ranks` can go below. O(n).

    The larger of the mean load (where every cost is whole, rounded up to a multiple of what divides
    them all) and, for each j, the j + 1 smallest of the j·ranks + 1 largest items: some rank holds
    at least that many of them. With equal counts, also the largest item with as many of the
    smallest as must join it.
    """
    n = costs.size
    if n == 0:
        return 0.0
    prefix = np.concatenate(([0.0], np.cumsum(costs)))
    mean = float(prefix[-1]) / ranks
    if prefix[-1] < 2.0**53 and bool((costs == np.floor(costs)).all()):
        unit = max(int(np.gcd.reduce(costs.astype(np.int64))), 1)
        mean = float(math.ceil(mean / unit - ROUNDING) * unit)
    last = np.arange(0, n, ranks)  # place j·ranks holds the (j·ranks + 1)-th largest item
    rounds = np.arange(last.size)
    crowded = float((prefix[last + 1] - prefix[last - rounds]).max())
    bound = max(mean, crowded, float(costs[0]))
    if equal_count and n >= ranks:
        fewest = n // ranks
        bound = max(bound, float(costs[0] + prefix[n] - prefix[n - fewest + 1]))
    return bound


def to_partition(problem: PartitionProblem, rank_at: NDArray[np.int64]) -> Partition:
    """From the rank of every sorted place to the answer in the caller's item order."""
    rank_of = np.empty(rank_at.size, np.int32)
    rank_of[problem.order] = rank_at
    check_assignment(rank_of, problem.ranks, "rank of an item")
    _check_limits(problem, rank_at)
    loads = np.bincount(rank_at, weights=problem.costs, minlength=problem.ranks)
    return Partition(
        rank_of=rank_of,
        loads=loads.astype(np.float64, copy=False),
        # Summing in another order may land a hair under the bound: never claim so.
        lower_bound=min(problem.lower_bound, float(loads.max())),
    )


def _check_limits(problem: PartitionProblem, rank_at: NDArray[np.int64]) -> None:
    if np.isfinite(problem.capacity):
        held = float(np.bincount(rank_at, weights=problem.sizes).max(initial=0.0))
        require(held <= problem.capacity, f"a rank holds {held:g} of {problem.capacity:g}")
    if problem.equal_count:
        most = int(np.bincount(rank_at).max(initial=0))
        require(most <= problem.max_count, f"a rank holds {most} items of {problem.max_count}")


def max_load(problem: PartitionProblem, rank_at: NDArray[np.int64]) -> float:
    """Largest load of the assignment `rank_at` int64[n] over sorted places."""
    return float(np.bincount(rank_at, weights=problem.costs, minlength=problem.ranks).max())


def pad_ratio(lengths: ArrayLike, batch_of: ArrayLike) -> float:
    """Share of padding over all batches when each is padded to its longest item.

    `lengths` [n] tokens, `batch_of` [n] batch of each item. OmniBal eq. 1 summed over batches:
    Σ_b Σ_i (max_b − l_i) / Σ_b max_b·count_b. Packed sequences have none by construction.
    Raises PlanningError on bad lengths or batch numbers. O(n).
    """
    tokens = as_amounts(lengths, "lengths")
    batches = np.asarray(batch_of, dtype=np.int64)
    if batches.shape != tokens.shape:
        raise PlanningError(
            f"batch_of has shape {batches.shape} for {tokens.size} lengths; give one batch an item"
        )
    if tokens.size == 0:
        return 0.0
    if batches.min() < 0:
        raise PlanningError(f"batch_of holds {batches.min()}; batches are numbered from 0")
    longest = np.zeros(int(batches.max()) + 1)
    np.maximum.at(longest, batches, tokens)
    padded = float(longest[batches].sum())
    return (padded - float(tokens.sum())) / padded if padded > 0 else 0.0


def dist_ratio(tokens_per_rank: ArrayLike) -> float:
    """Share of time ranks wait for the heaviest one, tokens taken as time.

    OmniBal eq. 2: Σ_i (T_max − T_i) / (T_max·N). `tokens_per_rank` [ranks], or [steps, ranks] for
    the mean over steps of the ratio in each step at that number of ranks, which is the figure the
    paper reports. Raises PlanningError on bad values. O(size).
    """
    tokens = np.asarray(tokens_per_rank, dtype=np.float64)
    if tokens.ndim not in (1, 2) or tokens.size == 0:
        raise PlanningError(
            f"tokens_per_rank has shape {tokens.shape}; give [ranks] or [steps, ranks], not empty"
        )
    steps = np.atleast_2d(tokens)
    as_amounts(steps.ravel(), "tokens_per_rank")
    heaviest = steps.max(axis=1)
    mean = steps.mean(axis=1)
    waiting = np.divide(heaviest - mean, heaviest, out=np.zeros_like(mean), where=heaviest > 0)
    return float(waiting.mean())
