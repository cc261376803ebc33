"""Optima of small cases: by enumeration, and by scipy's integer programs (HiGHS)."""

import itertools

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dataservice.planning.pipeline_parallel.schedule import FORWARD, make_program


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
