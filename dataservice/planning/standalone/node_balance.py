"""Balance ranks while moving next to nothing between nodes.

Renumbering batches afterwards (`rearrange_nodewise`) saves little where a batch has many items: a
freely balanced batch draws from everywhere. Balancing in two levels saves nearly all. With many
items a node's total is close to the mean already, so only the excess over it has to leave:

    node loads   103  98 | 101  98        limit = mean·(1 + tolerance)
    move out       2 ──►  1 ──►           only the excess, in items costly per unit of volume
    inside a node: plain number partitioning, over the fast links

The problems inside nodes are small and many, and a call for each would cost more than the work; so
all are solved in one, as `partition`'s `auto` does: greedy, then refinement.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.invariants import check_assignment
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_descending, group_stable
from dataservice.planning.loads.greedy import assign_least_loaded
from dataservice.planning.loads.problem import as_amounts, check_ranks
from dataservice.planning.loads.refine import refine_in_place
from dataservice.planning.nodes.excess import move_excess
from dataservice.planning.standalone.node_rearrange import check_nodes

_WORK_PER_ITEM = 60
# Part of the tolerance kept for the imbalance that remains inside a node.
_INSIDE_SHARE = 0.05


@kernel
def _solve_segments(
    costs: NDArray[np.float64],
    order: NDArray[np.int64],
    begins: NDArray[np.int64],
    ranks: int,
    tolerance: float,
    rank_of: NDArray[np.int32],
) -> None:
    for segment in range(begins.size - 1):
        items = order[begins[segment] : begins[segment + 1]]
        if items.size == 0:
            continue
        fell = costs[items]
        rank_at = assign_least_loaded(fell, ranks)
        loads = np.zeros(ranks)
        for place in range(items.size):
            loads[rank_at[place]] += fell[place]
        target = (1.0 + tolerance) * max(loads.sum() / ranks, fell[0])
        if loads.max() > target and ranks > 1:
            work = _WORK_PER_ITEM * items.size + 2000
            refine_in_place(rank_at, fell, fell, ranks, np.inf, False, target, work)
        for place in range(items.size):
            rank_of[items[place]] = rank_at[place]


def partition_segments(
    costs: NDArray[np.float64],
    segment_of: NDArray[np.int64],
    *,
    segments: int,
    ranks: int,
    tolerance: float,
) -> NDArray[np.int32]:
    """Rank within its segment of each item, int32[n].

    `costs` float64[n] checked already, `segment_of` int64[n] in [0, segments). Each segment's
    largest load aims at (1 + tolerance) times its own bound. O(n log ranks).
    """
    order, begins = group_stable(segment_of, argsort_descending(costs), segments)
    rank_of = np.empty(costs.size, np.int32)
    _solve_segments(costs, order, begins, int(ranks), float(tolerance), rank_of)
    return rank_of


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
    order, begins = group_stable(home_node, argsort_descending(amounts), nodes)
    move_excess(amounts, moved, order, begins, np.full(nodes, limit), node_of)
    inside = partition_segments(
        amounts,
        node_of,
        segments=nodes,
        ranks=ranks_per_node,
        tolerance=0.5 * _INSIDE_SHARE * tolerance,
    )
    rank_of = (node_of * ranks_per_node + inside).astype(np.int32)
    check_assignment(rank_of, ranks, "rank of an item")
    loads = np.bincount(rank_of, weights=amounts, minlength=ranks).astype(np.float64)
    return NodewisePartition(
        rank_of=rank_of,
        loads=loads,
        lower_bound=min(bound, float(loads.max())),
        inter_node_volume=float(moved[node_of != home_node].sum()),
        total_volume=float(moved.sum()),
    )
