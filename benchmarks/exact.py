"""Optima of small cases: by enumeration, and by scipy's integer programs (HiGHS)."""

import functools
import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dataservice.core.cost import ContextCost
from dataservice.core.layout import padded_tokens
from dataservice.planning.pipeline_parallel.simulator import FORWARD, make_program


def best_max_load(costs: NDArray[np.float64], ranks: int) -> float:
    """The least possible largest sum, by enumeration. O(ranksⁿ)."""
    loads = np.zeros((1, ranks))  # [assignment of the items so far, rank]
    for place, cost in enumerate(costs):
        loads = np.concatenate(
            [loads + cost * (np.arange(ranks) == rank) for rank in range(min(place + 1, ranks))]
        )
    return float(loads.max(axis=1).min())


def best_padded_load(lengths: NDArray[np.float64], ranks: int, beta: float) -> float:
    """The least possible largest b·m + β·b·m² of any batch, by enumeration. O(ranksⁿ)."""
    counts = longest = np.zeros((1, ranks))
    for place, length in enumerate(lengths):
        on = np.arange(ranks) == np.arange(min(place + 1, ranks))[:, None]  # [choice, rank]
        counts = (counts[:, None, :] + on).reshape(-1, ranks)
        longest = np.maximum(longest[:, None, :], length * on).reshape(-1, ranks)
    return float((counts * (longest + beta * longest**2)).max(axis=1).min())


def best_order_makespan(forward: NDArray[np.float64], backward: NDArray[np.float64]) -> float:
    """The least 1F1B makespan over all orders of the microbatches, all simulated at once."""
    count, stages = forward.shape
    orders = np.array(list(itertools.permutations(range(count))))
    program = make_program(count, stages)
    ends = np.zeros((program.kind.size + 1, len(orders)))  # the last, 0, stands for none
    for k in range(program.kind.size):
        times = forward if program.kind[k] == FORWARD else backward
        begin = np.maximum(ends[program.before[k]], ends[program.needs[k]])
        ends[k] = begin + times[orders[:, program.position[k]], program.chunk[k]]
    return float(ends.max(axis=0).min())


def solver_max_load(costs: NDArray[np.float64], ranks: int) -> float:
    """The least possible largest sum by integer programming: x[item, rank] Boolean, min t."""
    items = costs.size
    variables = items * ranks
    item, rank = np.divmod(np.arange(variables), ranks)
    each = np.arange(ranks)
    rows = np.concatenate([item, items + rank, items + each])
    columns = np.concatenate(
        [np.arange(variables), np.arange(variables), np.full(ranks, variables)]
    )
    values = np.concatenate([np.ones(variables), costs[item], -np.ones(ranks)])
    matrix = coo_array((values, (rows, columns)), shape=(items + ranks, variables + 1)).tocsr()
    once = np.ones(items)
    lower = np.concatenate([once, np.full(ranks, -np.inf)])
    upper = np.concatenate([once, np.zeros(ranks)])
    return _least_last(matrix, lower, upper, variables)


def solver_degrees(times: NDArray[np.float64], ranks: int) -> float:
    """The least makespan of degrees by integer programming: one column for each allowed
    (group, degree), from `times` [group, degree], infinity where a degree is not allowed."""
    groups = times.shape[0]
    group, column = np.nonzero(np.isfinite(times))
    variables = group.size
    each = np.arange(groups)
    chosen = np.arange(variables)
    rows = np.concatenate([group, groups + group, groups + each, np.full(variables, 2 * groups)])
    columns = np.concatenate([chosen, chosen, np.full(groups, variables), chosen])
    values = np.concatenate(
        [np.ones(variables), times[group, column], -np.ones(groups), column + 1.0]
    )
    matrix = coo_array((values, (rows, columns)), shape=(2 * groups + 1, variables + 1)).tocsr()
    once = np.ones(groups)
    lower = np.concatenate([once, np.full(groups + 1, -np.inf)])
    upper = np.concatenate([once, np.zeros(groups), [ranks]])
    return _least_last(matrix, lower, upper, variables)


def _least_last(
    matrix: coo_array, lower: NDArray[np.float64], upper: NDArray[np.float64], variables: int
) -> float:
    """Minimise the last variable, which is real; all before it are Boolean."""
    solution = milp(
        np.append(np.zeros(variables), 1.0),
        constraints=LinearConstraint(matrix, lower, upper),
        integrality=np.append(np.ones(variables), 0.0),
        bounds=Bounds(np.zeros(variables + 1), np.append(np.ones(variables), np.inf)),
    )
    if solution.x is None:
        raise RuntimeError(f"the solver found nothing: {solution.message}")
    return float(solution.fun)


def best_context_waves(
    tokens: NDArray[np.int64],
    *,
    ranks: int,
    memory_tokens: int,
    ranks_per_node: int,
    cost: ContextCost,
) -> float:
    """The least possible sum of the waves' makespans, over all waves, groups, degrees and places on
    nodes. Subsets of the samples are the bits of a mask. O(3ⁿ · moves)."""
    times = _times_of_sets(tokens, ranks, memory_tokens, cost)
    moves = _moves(ranks, ranks_per_node)
    masks = 1 << tokens.size
    # [set of samples, ranks free on the nodes]: least seconds of these samples on these ranks.
    wave = np.full((masks, moves.states), np.inf)
    wave[0] = 0.0
    step = np.full(masks, np.inf)
    step[0] = 0.0
    for mask in range(1, masks):
        lowest = mask & -mask
        inside = np.arange(1, mask + 1)
        group = inside[(inside & ~mask == 0) & (inside & lowest > 0)]  # sets with the first sample
        alone = times[group][:, moves.crosses, moves.degree - 1]  # [set, move]
        both = np.maximum(alone, wave[mask ^ group][:, moves.after]).min(axis=0)
        np.minimum.at(wave[mask], moves.before, both)
        step[mask] = (wave[group, 0] + step[mask ^ group]).min()
    return float(step[-1])


class _Moves(NamedTuple):
    """Ways to give a group ranks: `before` and `after` number what is free on the nodes, the first
    of `states` being all; `degree` ranks go, and the group `crosses` nodes. All int64[moves]."""

    states: int
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    degree: NDArray[np.int64]
    crosses: NDArray[np.int64]


@functools.cache
def _moves(ranks: int, ranks_per_node: int) -> _Moves:
    nodes = -(-ranks // ranks_per_node)
    free = [min(ranks_per_node, ranks - node * ranks_per_node) for node in range(nodes)]
    states = list(itertools.product(*[range(room, -1, -1) for room in free]))
    number = {state: place for place, state in enumerate(states)}
    found = [
        (number[state], number[after], sum(taken), sum(t > 0 for t in taken) > 1)
        for state in states
        for taken in itertools.product(*[range(room + 1) for room in state])
        if sum(taken)
        for after in [tuple(room - t for room, t in zip(state, taken, strict=True))]
    ]
    before, after, degree, crosses = np.array(found, dtype=np.int64).T
    return _Moves(len(states), before, after, degree, crosses)


def _times_of_sets(
    tokens: NDArray[np.int64], ranks: int, memory_tokens: int, cost: ContextCost
) -> NDArray[np.float64]:
    """Seconds of every set of samples as a group [set, crosses, degree − 1]; infinity where the
    degree does not hold it."""
    holds = np.arange(1 << tokens.size)[:, None] >> np.arange(tokens.size) & 1  # [set, sample]
    degree = np.arange(1, ranks + 1)
    padded = padded_tokens(tokens[:, None], degree[None, :])  # [sample, degree]
    total = holds @ padded  # [set, degree]
    squares = holds @ padded.astype(np.float64) ** 2
    times = np.stack(
        [cost.group_times_s(total, squares, degree, crosses) for crosses in (False, True)], axis=1
    )
    return np.where((total <= memory_tokens * degree)[:, None, :], times, np.inf)
