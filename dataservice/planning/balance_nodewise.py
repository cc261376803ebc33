"""Balance ranks while moving next to nothing between nodes.

Renumbering batches afterwards (`rearrange_nodewise`) saves little where a batch has many items: a
freely balanced batch draws from everywhere. Balancing in two levels saves nearly all. With many
items a node's total is close to the mean already, so only the excess over it has to leave:

    node loads   103  98 | 101  98        limit = mean·(1 + tolerance)
    move out       2 ──►  1 ──►           only the excess, in items costly per unit of volume
    inside a node: plain number partitioning, over the fast links
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.nodewise import check_nodes
from dataservice.planning.partition import partition
from dataservice.planning.partition_problem import as_amounts, check_ranks

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
    check_ranks(ranks)
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
    node_of = _move_excess(amounts, moved, home_node, nodes, limit)
    rank_of = _balance_inside(amounts, node_of, nodes, ranks_per_node, tolerance)
    loads = np.bincount(rank_of, weights=amounts, minlength=ranks).astype(np.float64)
    return NodewisePartition(
        rank_of=rank_of,
        loads=loads,
        lower_bound=min(bound, float(loads.max())),
        inter_node_volume=float(moved[node_of != home_node].sum()),
        total_volume=float(moved.sum()),
    )


def _move_excess(
    costs: NDArray[np.float64],
    volume: NDArray[np.float64],
    home_node: NDArray[np.int64],
    nodes: int,
    limit: float,
) -> NDArray[np.int64]:
    """Node of each item after every node above `limit` gave its excess to nodes below it."""
    node_of = home_node.copy()
    loads = np.bincount(home_node, weights=costs, minlength=nodes).astype(np.float64)
    for node in np.argsort(-loads, kind="stable"):
        if loads[node] <= limit:
            break
        items = np.flatnonzero(home_node == node)
        for item in _leaving(costs[items], volume[items], float(loads[node] - limit)):
            mover = items[item]
            room = limit - loads
            room[node] = -np.inf
            fitting = np.flatnonzero(room >= costs[mover])
            # Tightest room that takes it, so that large rooms stay for large items; where none
            # does, the roomiest node still comes out lower than this one.
            target = int(fitting[room[fitting].argmin()] if fitting.size else room.argmax())
            if loads[target] + costs[mover] >= loads[node]:
                continue
            node_of[mover] = target
            loads[target] += costs[mover]
            loads[node] -= costs[mover]
    return node_of


def _leaving(
    costs: NDArray[np.float64], volume: NDArray[np.float64], excess: float
) -> NDArray[np.int64]:
    """Items whose summed cost just covers `excess`, at little volume.

    Greedy by cost per volume among items that do not overshoot; the rest by the one item that
    overshoots least volume. A knapsack cover, so near but not exactly minimal.
    """
    density = np.divide(costs, volume, out=np.full_like(costs, np.inf), where=volume > 0)
    order = np.lexsort((-costs, -density))
    chosen = []
    rest = excess
    for item in order:
        if 0.0 < costs[item] <= rest:
            chosen.append(item)
            rest -= costs[item]
    if rest > 0.0:
        taken = np.zeros(costs.size, np.bool_)
        taken[chosen] = True
        covering = np.flatnonzero(~taken & (costs >= rest))
        if covering.size:
            chosen.append(covering[volume[covering].argmin()])
    return np.asarray(chosen, dtype=np.int64)


def _balance_inside(
    costs: NDArray[np.float64],
    node_of: NDArray[np.int64],
    nodes: int,
    ranks_per_node: int,
    tolerance: float,
) -> NDArray[np.int32]:
    """Number partitioning within each node."""
    rank_of = np.empty(costs.size, np.int32)
    order = np.argsort(node_of, kind="stable")
    ends = np.cumsum(np.bincount(node_of, minlength=nodes))
    begin = 0
    for node in range(nodes):
        items = order[begin : ends[node]]
        begin = int(ends[node])
        inside = partition(costs[items], ranks_per_node, tolerance=_INSIDE_SHARE * tolerance / 2)
        rank_of[items] = node * ranks_per_node + inside.rank_of
    return rank_of
