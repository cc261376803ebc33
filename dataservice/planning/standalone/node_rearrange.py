"""Which rank takes which new batch, so that little crosses between nodes: OrchMLLM Alg. 3.

Renumbering balanced batches changes no load, only what crosses the network. x[j, k] says batch j
goes to node k; the largest volume any rank sends out of, or receives into, its node is least:

    min t   s.t.  Σ_k x[j,k] = 1,  Σ_j x[j,k] = c,  x Boolean d × (d/c)
            Σ_j V[i,j]·(1 − x[j, node i]) ≤ t          every rank i sends
            Σ_k (Σ_{i ∉ k} V[i,j])·x[j,k] ≤ t          every batch j receives

The paper's x is one row short of that, says intra-node for inter-node, and bounds sends only.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import coo_array

from dataservice.core.errors import PlanningError
from dataservice.core.plan_options import algorithm_named
from dataservice.planning.invariants import check_permutation
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_rising

RearrangeMethod = Literal["auto", "ilp", "search"]

# The most variables, d²/c, for which a method solves the program. Branch and bound takes over a
# tenth of a second beyond 64.
METHODS: dict[RearrangeMethod, float] = {"auto": 64, "ilp": np.inf, "search": 0}
_ILP_NODES = 200  # a limit in nodes, not seconds: the same answer on every machine
_WORK_LIMIT = 20_000_000  # swaps looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class NodewiseRearrangement:
    """`permutation` int32[d]: rank that takes each new batch. `inter_node_max`: largest volume a
    rank then sends to or receives from other nodes; `lower_bound`: none can be smaller;
    `inter_node_volume`: all that crosses between nodes. In the unit of the volumes given."""

    permutation: NDArray[np.int32]
    inter_node_max: float
    lower_bound: float
    inter_node_volume: float


def rearrange_nodewise(
    volume: ArrayLike, ranks_per_node: int, *, method: RearrangeMethod = "auto"
) -> NodewiseRearrangement:
    """Place d new batches on d ranks so that the busiest rank's traffic between nodes is least.

    `volume` float64[d, d]: what rank i (row) holds of new batch j (column). `method` "ilp" solves
    the integer program with HiGHS (the bound is its dual bound), "search" improves a greedy
    placement by swaps (bound: each rank keeps at most its c largest), "auto" takes the program
    where it is small. Raises PlanningError on a bad matrix or if d is not whole nodes.
    """
    matrix = _as_volume(volume, ranks_per_node)
    ranks = matrix.shape[0]
    nodes = ranks // ranks_per_node
    most_variables = algorithm_named(METHODS, method, "method")
    held = matrix.reshape(nodes, ranks_per_node, ranks).sum(axis=1)  # [node, batch]
    received = held.sum(axis=0) - held  # what batch j pulls in when on node k
    node_of = _greedy_nodes(held, ranks_per_node)
    bound = _simple_bound(matrix, received, ranks_per_node)
    best = _inter_node_max(matrix, received, node_of, ranks_per_node)
    if best > bound * (1.0 + 1e-9):
        _swap_nodes(matrix, received, node_of, ranks_per_node, _WORK_LIMIT)
        best = _inter_node_max(matrix, received, node_of, ranks_per_node)
    if best > bound * (1.0 + 1e-9) and ranks * nodes <= most_variables:
        solved, dual = _solve_program(matrix, received, ranks_per_node)
        bound = max(bound, dual)
        if solved is not None:
            value = _inter_node_max(matrix, received, solved, ranks_per_node)
            if value < best:
                node_of, best = solved, value
    crossing = float(received[node_of, np.arange(ranks)].sum())
    permutation = _ranks_in_nodes(matrix, node_of, ranks_per_node)
    check_permutation(permutation, ranks, "order of ranks")
    return NodewiseRearrangement(
        permutation=permutation,
        inter_node_max=best,
        lower_bound=min(bound, best),
        inter_node_volume=crossing,
    )


def _as_volume(volume: ArrayLike, ranks_per_node: int) -> NDArray[np.float64]:
    matrix = np.require(volume, np.float64, ("C", "W"))
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.shape[0] == 0:
        raise PlanningError(f"volume has shape {matrix.shape}; give [ranks, ranks], not empty")
    if not (matrix.min() >= 0.0 and matrix.max() < np.inf):
        raise PlanningError("volume holds a negative, infinite or NaN value; give tokens or bytes")
    check_nodes(matrix.shape[0], ranks_per_node)
    return matrix


def check_nodes(ranks: int, ranks_per_node: int) -> int:
    """Number of nodes. Raises PlanningError unless the ranks fill whole nodes."""
    if ranks_per_node < 1 or ranks % ranks_per_node:
        raise PlanningError(
            f"{ranks} ranks do not fill nodes of {ranks_per_node}; give a divisor of the ranks"
        )
    return ranks // ranks_per_node


@kernel
def _least_sent(matrix: NDArray[np.float64], ranks_per_node: int) -> float:
    """The most any rank must send out: all but the `ranks_per_node` largest of its volumes."""
    worst = 0.0
    for i in range(matrix.shape[0]):
        kept = np.zeros(ranks_per_node)  # rising
        total = 0.0
        for value in matrix[i]:
            total += value
            if value <= kept[0]:
                continue
            at = 1
            while at < ranks_per_node and kept[at] < value:
                kept[at - 1] = kept[at]
                at += 1
            kept[at - 1] = value
        worst = max(worst, total - kept.sum())
    return worst


@kernel
def _sent_out(
    matrix: NDArray[np.float64], node_of: NDArray[np.int64], ranks_per_node: int
) -> NDArray[np.float64]:
    """Volume each rank sends to batches on other nodes, float64[d]."""
    ranks = matrix.shape[0]
    sent = np.zeros(ranks)
    for i in range(ranks):
        node = i // ranks_per_node
        for j in range(ranks):
            if node_of[j] != node:
                sent[i] += matrix[i, j]
    return sent


def _simple_bound(
    matrix: NDArray[np.float64], received: NDArray[np.float64], ranks_per_node: int
) -> float:
    """The larger of what some rank must send and what some batch must receive."""
    return max(float(_least_sent(matrix, ranks_per_node)), float(received.min(axis=0).max()), 0.0)


def _inter_node_max(
    matrix: NDArray[np.float64],
    received: NDArray[np.float64],
    node_of: NDArray[np.int64],
    ranks_per_node: int,
) -> float:
    sent = _sent_out(matrix, node_of, ranks_per_node)
    return max(float(sent.max()), float(received[node_of, np.arange(node_of.size)].max()))


@kernel
def _greedy_nodes(held: NDArray[np.float64], ranks_per_node: int) -> NDArray[np.int64]:
    """Batches with the most to lose first, each to the node that holds most of it and has room."""
    nodes, batches = held.shape
    lead = np.empty(batches)
    for j in range(batches):
        first, second = -1.0, 0.0
        for k in range(nodes):
            if held[k, j] > first:
                first, second = held[k, j], max(first, 0.0)
            elif held[k, j] > second:
                second = held[k, j]
        lead[j] = first - second
    room = np.full(nodes, ranks_per_node)
    node_of = np.empty(batches, np.int64)
    for j in argsort_rising(-lead):
        best = -1
        for k in range(nodes):
            if room[k] > 0 and (best < 0 or held[k, j] > held[best, j]):
                best = k
        node_of[j] = best
        room[best] -= 1
    return node_of


@kernel
def _swap_nodes(
    matrix: NDArray[np.float64],
    received: NDArray[np.float64],
    node_of: NDArray[np.int64],
    ranks_per_node: int,
    work_limit: int,
) -> None:
    """Relieve the busiest rank, in place, by swapping one batch for another between nodes.

    Among swaps that lower the largest volume of the two nodes and both batches, the best is taken.
    """
    ranks = matrix.shape[0]
    sent = _sent_out(matrix, node_of, ranks_per_node)
    work = 0
    while work < work_limit:
        worst = 0.0
        busy_rank = -1
        busy_batch = -1
        for i in range(ranks):
            if sent[i] > worst:
                worst, busy_rank, busy_batch = sent[i], i, -1
            if received[node_of[i], i] > worst:
                worst, busy_rank, busy_batch = received[node_of[i], i], -1, i
        best = worst * (1.0 - 1e-12)
        best_x = -1
        best_y = -1
        for x in range(ranks):
            # Sends of a rank fall only if its own node gives one batch away for a better one.
            if busy_rank >= 0 and node_of[x] != busy_rank // ranks_per_node:
                continue
            if busy_batch >= 0 and x != busy_batch:
                continue
            a = node_of[x]
            for y in range(ranks):
                b = node_of[y]
                if a == b or (busy_rank >= 0 and matrix[busy_rank, y] <= matrix[busy_rank, x]):
                    continue
                work += 1
                value = max(received[a, y], received[b, x])
                for m in range(ranks_per_node):
                    if value >= best:
                        break
                    i = a * ranks_per_node + m
                    value = max(value, sent[i] + matrix[i, x] - matrix[i, y])
                    i = b * ranks_per_node + m
                    value = max(value, sent[i] + matrix[i, y] - matrix[i, x])
                if value < best:
                    best, best_x, best_y = value, x, y
        work += ranks
        if best_x < 0:
            return
        a = node_of[best_x]
        b = node_of[best_y]
        for m in range(ranks_per_node):
            i = a * ranks_per_node + m
            sent[i] += matrix[i, best_x] - matrix[i, best_y]
            i = b * ranks_per_node + m
            sent[i] += matrix[i, best_y] - matrix[i, best_x]
        node_of[best_x] = b
        node_of[best_y] = a


def _solve_program(
    matrix: NDArray[np.float64], received: NDArray[np.float64], ranks_per_node: int
) -> tuple[NDArray[np.int64] | None, float]:
    """(node of each batch or None if no integer solution was found, dual bound), by HiGHS."""
    ranks = matrix.shape[0]
    nodes = ranks // ranks_per_node
    variables = ranks * nodes + 1  # x[j, k] at j·nodes + k, then t
    scale = float(matrix.sum(axis=1).max()) or 1.0  # volumes of order one keep tolerances apt
    batch = np.repeat(np.arange(ranks), nodes)
    node = np.tile(np.arange(nodes), ranks)
    x = np.arange(ranks * nodes)
    t = np.full(ranks, ranks * nodes)
    each = np.arange(ranks)
    # Rows: batches once, nodes filled, sends, receives.
    mine = each[:, None] * 0 + each[None, :] * nodes + (each // ranks_per_node)[:, None]
    rows = np.concatenate(
        (
            batch,
            ranks + node,
            np.repeat(ranks + nodes + each, ranks),
            ranks + nodes + each,
            2 * ranks + nodes + batch,
            2 * ranks + nodes + each,
        )
    )
    columns = np.concatenate((x, x, mine.ravel(), t, x, t))
    one = np.ones(ranks)
    values = np.concatenate(
        (
            np.ones(2 * x.size),
            -matrix.ravel() / scale,
            -one,
            received.T.ravel() / scale,
            -one,
        )
    )
    sent = matrix.sum(axis=1) / scale
    lower = np.concatenate((one, np.full(nodes, ranks_per_node), np.full(2 * ranks, -np.inf)))
    upper = np.concatenate((one, np.full(nodes, ranks_per_node), -sent, np.zeros(ranks)))
    constraints = coo_array((values, (rows, columns)), shape=(3 * ranks + nodes, variables))
    whole = np.ones(variables)
    whole[-1] = 0
    solution = milp(
        np.concatenate((np.zeros(x.size), np.ones(1))),
        constraints=LinearConstraint(constraints.tocsr(), lower, upper),
        integrality=whole,
        bounds=Bounds(np.zeros(variables), np.append(np.ones(x.size), np.inf)),
        options={"node_limit": _ILP_NODES, "mip_rel_gap": 1e-6},
    )
    dual = solution.mip_dual_bound
    bound = 0.0 if dual is None or not np.isfinite(dual) else float(dual) * scale * (1.0 - 1e-6)
    if solution.x is None:
        return None, bound
    return solution.x[:-1].reshape(ranks, nodes).argmax(axis=1).astype(np.int64), bound


def _ranks_in_nodes(
    matrix: NDArray[np.float64], node_of: NDArray[np.int64], ranks_per_node: int
) -> NDArray[np.int32]:
    """Within a node, give each batch to the rank that already holds most of it."""
    permutation = np.empty(node_of.size, np.int32)
    for node in range(node_of.size // ranks_per_node):
        batches = np.flatnonzero(node_of == node)
        own = matrix[node * ranks_per_node : (node + 1) * ranks_per_node, batches]
        rank, batch = linear_sum_assignment(own, maximize=True)
        permutation[batches[batch]] = node * ranks_per_node + rank
    return permutation
