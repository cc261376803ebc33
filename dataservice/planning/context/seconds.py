"""Seconds of a context-parallel group, for kernels: they take `ContextCost.coefficients`."""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel

# Places of the coefficients in the array that the kernels take.
ATTENTION, LINEAR, GROUP, RING_INTRA, RING_INTER, RING_HOP = range(6)


@kernel
def ring_seconds(
    tokens: float, degree: int, crosses_node: bool, coefficients: NDArray[np.float64]
) -> float:
    """Ring exchange of one group: each rank passes on (d−1)/d of all keys and values."""
    if degree == 1:
        return 0.0
    per_token = coefficients[RING_INTER] if crosses_node else coefficients[RING_INTRA]
    hops = coefficients[RING_HOP] * (degree - 1)
    return float(per_token * tokens * (degree - 1) / degree + hops)


@kernel
def group_seconds(
    tokens: float,
    squares: float,
    degree: int,
    crosses_node: bool,
    coefficients: NDArray[np.float64],
) -> float:
    """DHP eq. 8–10 from a group's padded Σs and Σ(1+η)s². T = linear + β₁ + max(attention, ring):
    the same as T_cp + T_cm − min(attention, T_cm)."""
    attention = coefficients[ATTENTION] * squares / degree
    ring = ring_seconds(tokens, degree, crosses_node, coefficients)
    linear = coefficients[LINEAR] * tokens / degree
    return float(linear + coefficients[GROUP] + max(attention, ring))
