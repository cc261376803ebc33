"""Post-balancing of packed batches where attention is not negligible: OrchMLLM Alg. 4, corrected.

The paper compares batches by linear sums within a tolerance and by squares otherwise, which is
not transitive and so no heap order. The objective is a sum over items, α·l + β·l², so it is plain
number partitioning of those costs, with its certificate.
"""

from numpy.typing import ArrayLike

from dataservice.planning.loads.partition import partition
from dataservice.planning.loads.problem import Partition, as_amounts
from dataservice.planning.standalone.padded_loads import check_weight


def balance_quadratic(lengths: ArrayLike, ranks: int, *, alpha: float, beta: float) -> Partition:
    """Spread packed items; the largest α·Σl + β·Σl² of a rank is what counts (OrchMLLM eq. 2).

    `lengths` [n] tokens. Raises PlanningError on bad input. Complexity of `partition`.
    """
    tokens = as_amounts(lengths, "lengths")
    alpha, beta = check_weight(alpha, "alpha"), check_weight(beta, "beta")
    return partition(alpha * tokens + beta * tokens * tokens, ranks)
