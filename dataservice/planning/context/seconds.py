"""Seconds of a context-parallel group, for kernels: the one place that reads single coefficients.

They take `ContextCost.coefficients`; `core.cost` holds the same formula for arrays. In the sums of
a group's padded sequences, tokens Σs and squares Σ(1+η)s², its time is linear but for one maximum:

    T = β₁ + linear·Σs + max(attention·Σ(1+η)s², ring·Σs + hops)        (DHP eq. 8–10)

Whoever times many groups of one degree takes its `Rates` once.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import leaf

# Places of the coefficients in the array that the kernels take.
_ATTENTION, _LINEAR, _GROUP, _RING_INTRA, _RING_INTER, _RING_HOP = range(6)


class Rates(NamedTuple):
    """What a group of one degree takes: seconds of each padded token (`linear`), of each token²
    (`attention`) and of each token on the `ring`; `hops` and `fixed` in seconds."""

    linear: float
    attention: float
    ring: float
    hops: float
    fixed: float


@leaf
def group_rates(degree: int, crosses_node: bool, coefficients: NDArray[np.float64]) -> Rates:
    """The rates of a group of `degree` ranks, its divisions done."""
    return Rates(
        coefficients[_LINEAR] / degree,
        coefficients[_ATTENTION] / degree,
        passing_seconds(degree, crosses_node, coefficients) / degree,
        coefficients[_RING_HOP] * (degree - 1),
        coefficients[_GROUP],
    )


@leaf
def seconds_at(rates: Rates, tokens: float, squares: float) -> float:
    """T = linear + β₁ + max(attention, ring): the same as T_cp + T_cm − min(attention, T_cm)."""
    covered = max(rates.attention * squares, rates.ring * tokens + rates.hops)
    return float(rates.linear * tokens + rates.fixed + covered)


@leaf
def group_seconds(
    tokens: float,
    squares: float,
    degree: int,
    crosses_node: bool,
    coefficients: NDArray[np.float64],
) -> float:
    """Time of one group from its padded Σs and Σ(1+η)s²."""
    return seconds_at(group_rates(degree, crosses_node, coefficients), tokens, squares)


@leaf
def ring_seconds(
    tokens: float, degree: int, crosses_node: bool, coefficients: NDArray[np.float64]
) -> float:
    """Ring exchange of one group, were nothing to hide it."""
    rates = group_rates(degree, crosses_node, coefficients)
    return float(rates.ring * tokens + rates.hops)


@leaf
def passing_seconds(degree: int, crosses_node: bool, coefficients: NDArray[np.float64]) -> float:
    """Rank-seconds that the ring takes for each token, hops aside: all ranks but its own get it."""
    rate = coefficients[_RING_INTER] if crosses_node else coefficients[_RING_INTRA]
    return float(rate * (degree - 1))


@leaf
def fixed_seconds(coefficients: NDArray[np.float64]) -> float:
    """β₁, which every group takes whatever it holds."""
    return float(coefficients[_GROUP])


@leaf
def attention_seconds(squares: float, coefficients: NDArray[np.float64]) -> float:
    """Rank-seconds of attention, at any degree."""
    return float(coefficients[_ATTENTION] * squares)


def with_attention(share: float, coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
    """The coefficients of samples that all attend `share` times as much."""
    more = coefficients.copy()
    more[_ATTENTION] *= share
    return more


@leaf
def work_seconds(tokens: float, squares: float, coefficients: NDArray[np.float64]) -> float:
    """Rank-seconds of sequences at any degree, β₁ and rings aside; padding counts if it is in."""
    return attention_seconds(squares, coefficients) + float(coefficients[_LINEAR] * tokens)
