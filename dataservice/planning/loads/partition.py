"""Number partitioning: one front door, one registry, every answer certified.

`auto` places greedily, stops if the certified gap is already small enough, and otherwise trades
items until nothing improves, from there and from Karmarkar–Karp's answer; few items are also
searched exhaustively. The named algorithms give the plain textbook answer, so that they can be
compared.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import algorithm_named
from dataservice.planning.loads.exact import MOST_ITEMS, exact
from dataservice.planning.loads.greedy import greedy
from dataservice.planning.loads.kk import karmarkar_karp
from dataservice.planning.loads.multifit import first_fit_decreasing, multifit
from dataservice.planning.loads.problem import (
    Partition,
    PartitionProblem,
    build_problem,
    max_load,
    to_partition,
)
from dataservice.planning.loads.refine import refine

PartitionAlgorithm = Literal["auto", "greedy", "kk", "multifit"]

# Certified gap at which `auto` stops. With many items a plan has to be quick, and a gap of a
# hundredth of a percent is far below the error of any cost model.
_TOLERANCE = 5e-6
_TOLERANCE_OF_MANY = 1e-4
_MANY_ITEMS = 16_384
_MOST_DIFFERENCED = 1 << 22  # items · ranks; Karmarkar–Karp takes that many steps

# Rank of each sorted place, or None where no room was found; and whether it is proven optimal.
Answer = tuple[NDArray[np.int64] | None, bool]


def partition(
    costs: ArrayLike,
    ranks: int,
    *,
    algorithm: PartitionAlgorithm = "auto",
    equal_count: bool = False,
    capacity: float | None = None,
    sizes: ArrayLike | None = None,
    tolerance: float | None = None,
) -> Partition:
    """Spread items over ranks so that the largest summed cost is as small as possible.

    `costs` [n] any unit, finite and ≥ 0. `equal_count`: ranks hold ⌊n/ranks⌋ or ⌈n/ranks⌉ items.
    `capacity` is a hard limit on the summed `sizes` [n] of a rank (the costs themselves if not
    given), never exceeded. `auto` stops once max load ≤ (1 + tolerance) · lower bound; by default
    the bound itself where costs are whole, else 5e-6, and 1e-4 from 16,384 items on.

    Raises PlanningError on bad input, an unknown algorithm, or if no assignment within the
    capacity is found; the message then names a number of ranks that suffices.
    Complexity: `auto` O(n log ranks) to place, then bounded work in O(n).
    """
    solve = algorithm_named(ALGORITHMS, algorithm, "algorithm")
    problem = build_problem(costs, ranks, equal_count=equal_count, capacity=capacity, sizes=sizes)
    if problem.costs.size == 0:
        return to_partition(problem, np.empty(0, np.int64))
    if tolerance is None:
        tolerance = _default_tolerance(problem)
    rank_at, proven = solve(problem, tolerance)
    if rank_at is None:
        rank_at = _place_by_size(problem)
    if rank_at is None:
        raise PlanningError(_no_room_message(problem))
    if proven:
        problem = replace(problem, lower_bound=max_load(problem, rank_at))
    return to_partition(problem, rank_at)


def _auto(problem: PartitionProblem, tolerance: float) -> Answer:
    target = problem.lower_bound * (1.0 + tolerance)
    best = greedy(problem)
    if best is None:
        best = _place_by_size(problem)
    if best is not None and max_load(problem, best) > target:
        best = _refined(problem, best, target)
    if problem.costs.size <= MOST_ITEMS and (best is None or max_load(problem, best) > target):
        return exact(problem, best)
    return best, False


def _refined(
    problem: PartitionProblem, rank_at: NDArray[np.int64], target: float
) -> NDArray[np.int64]:
    """Trades from here and, where they end above the target, from Karmarkar–Karp's answer."""
    best = refine(problem, rank_at, target)
    steps = problem.costs.size * problem.ranks
    if max_load(problem, best) > target and steps <= _MOST_DIFFERENCED:
        start = karmarkar_karp(problem)
        if start is not None:
            best = min(best, refine(problem, start, target), key=partial(max_load, problem))
    return best


def _default_tolerance(problem: PartitionProblem) -> float:
    """Whole costs miss the bound by 1 at least, or meet it."""
    if problem.costs.size >= _MANY_ITEMS:
        return _TOLERANCE_OF_MANY
    if bool((problem.costs == np.floor(problem.costs)).all()):
        return min(_TOLERANCE, 0.5 / max(problem.lower_bound, 1.0))
    return _TOLERANCE


ALGORITHMS: dict[PartitionAlgorithm, Callable[[PartitionProblem, float], Answer]] = {
    "auto": _auto,
    "greedy": lambda problem, _tolerance: (greedy(problem), False),
    "kk": lambda problem, _tolerance: (karmarkar_karp(problem), False),
    "multifit": lambda problem, _tolerance: (multifit(problem), False),
}


def _place_by_size(problem: PartitionProblem) -> NDArray[np.int64] | None:
    """Look only at the capacity: first-fit decreasing by size, whatever the costs become."""
    by_size = np.argsort(-problem.sizes, kind="stable")
    sizes = problem.sizes[by_size]
    placed_at, placed = first_fit_decreasing(
        sizes,
        sizes,
        problem.ranks,
        problem.capacity,
        problem.capacity,
        problem.max_count,
        problem.full_ranks,
    )
    if not placed:
        return None
    rank_at = np.empty_like(placed_at)
    rank_at[by_size] = placed_at
    return rank_at


def _no_room_message(problem: PartitionProblem) -> str:
    """Count the ranks that would do, so that the remedy is a number and not a hint."""
    n = problem.sizes.size
    falling = np.sort(problem.sizes)[::-1].copy()
    at_least = int(np.ceil(falling.sum() / problem.capacity))
    # With one rank an item, first fit always succeeds; the ranks it opened are enough.
    placed_at, _ = first_fit_decreasing(
        falling, falling, n, problem.capacity, problem.capacity, n + 1, n
    )
    enough = int(placed_at.max()) + 1
    if problem.equal_count:
        enough = max(enough, problem.ranks + 1)
    return (
        f"{n} items of total size {falling.sum():g} find no room in {problem.ranks} ranks of "
        f"capacity {problem.capacity:g}: give at least {max(at_least, problem.ranks + 1)} ranks "
        f"({enough} suffice when counts are free), or raise the capacity"
    )
