"""Balance ranks while moving next to nothing between nodes.

Renumbering batches afterwards (`rearrange_nodewise`) saves little where a batch has many items: a
freely balanced batch draws from everywhere. Balancing in two levels saves nearly all. With many
items a node's total is close to the mean already, so only the excess over it has to leave:

    node loads   103  98 | 101  98        limit = mean·(1 + tolerance)
    move out       2 ──►  1 ──►           only the excess, in items costly per unit of volume
    inside a node: plain number partitioning, over the fast links
"""

from dataclasses import dataclass

import numba
import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.kernels.sort import argsort_rising, group_stable
from dataservice.planning.loads.problem import as_amounts, check_ranks
from dataservice.planning.loads.segments import partition_segments
from dataservice.planning.nodes.rearrange import check_nodes

# Part of the tolerance kept for the imbalance that remains inside a node.
_INSIDE_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class NodewisePartition:
    """As `Partition`; `inter_node_volume` is what leaves the node it lives on, and
    `total_volume` all there is, so their ratio is the share that crosses the network."""

    rank_of: NDArray[np.int32]
    loads: NDArray[np.float64]
    lower_bound: float
    inter_node_volume: float
    total_volume: float

    @property
    def inter_node_share(self) -> float:
        """Part of the volume that crosses between nodes."""
        return self.inter_node_volume / self.total_volume if self.total_volume > 0 else 0.0


def balance_nodewise(
    costs: ArrayLike,
    home_rank: ArrayLike,
    volume: ArrayLike,
    ranks: int,
    ranks_per_node: int,
    *,
    tolerance: float = 0.005,
) -> NodewisePartition:
    """Spread items over ranks, preferring the node each is at home on.

    `costs` [n] any unit; `home_rank` [n] rank whose node holds the item; `volume` [n] what moving
    it costs the network. Largest load aims at (1 + tolerance)·lower bound; a smaller tolerance
    moves more. Raises PlanningError on bad input. O(n log n).
    """
    amounts = as_amounts(costs, "costs")
    moved = as_amounts(volume, "volume")
    home = np.asarray(home_rank, dtype=np.int64)
    ranks = check_ranks(ranks)
    nodes = check_nodes(ranks, ranks_per_node)
    if not amounts.shape == moved.shape == home.shape:
        raise PlanningError(
            f"costs, home_rank and volume have {amounts.size}, {home.size} and {moved.size} "
            "values; give one of each an item"
        )
    if home.size and (home.min() < 0 or home.max() >= ranks):
        raise PlanningError(
            f"home_rank runs from {home.min()} to {home.max()} for {ranks} ranks; number ranks "
            "from 0 and map items of ranks that are gone to one that is there"
        )
    if not tolerance >= 0:
        raise PlanningError(f"tolerance is {tolerance}; it must be at least 0, 0.005 is usual")
    largest = float(amounts.max()) if amounts.size else 0.0
    bound = max(float(amounts.sum()) / ranks, largest)
    limit = bound * ranks_per_node * (1.0 + tolerance * (1.0 - _INSIDE_SHARE))
    home_node = home // ranks_per_node
    node_of = home_node.copy()
    order, begins = group_stable(home_node, np.arange(home.size), nodes)
    _move_excess(amounts, moved, order, begins, limit, node_of)
    inside = partition_segments(
        amounts,
        node_of,
        segments=nodes,
        ranks=ranks_per_node,
        tolerance=0.5 * _INSIDE_SHARE * tolerance,
    )
    rank_of = (node_of * ranks_per_node + inside).astype(np.int32)
    loads = np.bincount(rank_of, weights=amounts, minlength=ranks).astype(np.float64)
    return NodewisePartition(
        rank_of=rank_of,
        loads=loads,
        lower_bound=min(bound, float(loads.max())),
        inter_node_volume=float(moved[node_of != home_node].sum()),
        total_volume=float(moved.sum()),
    )


@numba.njit(cache=True, nogil=True)
def _target_node(loads: NDArray[np.float64], node: int, cost: float, limit: float) -> int:
    """The fullest other node that still takes `cost` within the limit; if there is none, the
    emptiest one, provided it comes out below `node`; else −1."""
    tightest, emptiest = -1, -1
    for other in range(loads.size):
        if other == node:
            continue
        if loads[other] + cost <= limit and (tightest < 0 or loads[other] > loads[tightest]):
            tightest = other
        if emptiest < 0 or loads[other] < loads[emptiest]:
            emptiest = other
    if tightest >= 0:
        return tightest
    if emptiest >= 0 and loads[emptiest] + cost < loads[node]:
        return emptiest
    return -1


@numba.njit(cache=True, nogil=True)
def _move_excess(
    costs: NDArray[np.float64],
    volume: NDArray[np.float64],
    order: NDArray[np.int64],
    begins: NDArray[np.int64],
    limit: float,
    node_of: NDArray[np.int64],
) -> None:
    """Let every node above `limit` give its excess to nodes below it, heaviest node first.

    Which items leave is a knapsack cover: by falling cost per volume those that do not overshoot,
    then the one that covers the rest at least volume. Near the least volume, not proven least.
    """
    nodes = begins.size - 1
    loads = np.zeros(nodes)
    for item in range(costs.size):
        loads[node_of[item]] += costs[item]
    for node in argsort_rising(-loads):
        if loads[node] <= limit:
            continue
        items = order[begins[node] : begins[node + 1]]
        falling = np.empty(items.size)
        for k in range(items.size):
            falling[k] = -costs[items[k]]
        items = items[argsort_rising(falling)]
        density = np.empty(items.size)
        for k in range(items.size):
            free = volume[items[k]] <= 0.0
            density[k] = np.inf if free else costs[items[k]] / volume[items[k]]
        items = items[argsort_rising(-density)]
        for item in items:
            cost = costs[item]
            if 0.0 < cost <= loads[node] - limit:
                target = _target_node(loads, node, cost, limit)
                if target >= 0:
                    node_of[item] = target
                    loads[target] += cost
                    loads[node] -= cost
        if loads[node] <= limit:
            continue
        cover = -1
        for item in items:
            enough = node_of[item] == node and costs[item] >= loads[node] - limit
            if enough and (cover < 0 or volume[item] < volume[cover]):
                cover = item
        if cover >= 0:
            target = _target_node(loads, node, costs[cover], limit)
            if target >= 0:
                node_of[cover] = target
                loads[target] += costs[cover]
                loads[node] -= costs[cover]
