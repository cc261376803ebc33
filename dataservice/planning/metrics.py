"""How uneven batches are: OmniBal's Pad ratio and Dist ratio."""

import numpy as np
from numpy.typing import ArrayLike

from dataservice.core.errors import PlanningError
from dataservice.planning.loads.problem import as_amounts


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
