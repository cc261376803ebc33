"""Stable descending sort of non-negative costs, the same on every processor.

numpy's fast argsort breaks ties by whatever vector instructions the processor has, and a plan
must be the same wherever it is made; numpy's stable argsort is several times slower than this.
"""

import numba
import numpy as np
from numpy.typing import NDArray

_DIGIT_BITS = 11
_BUCKETS = 1 << _DIGIT_BITS


@numba.njit(cache=True, nogil=True)
def _radix_argsort(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Ascending stable argsort; digits that all keys share cost one counting pass only."""
    n = keys.size
    order = np.arange(n)
    spare = np.empty(n, np.int64)
    ones = np.uint64(_BUCKETS - 1)
    differing = np.uint64(0)
    for i in range(n):
        differing |= keys[i] ^ keys[0]
    counts = np.empty(_BUCKETS, np.int64)
    for shift in range(0, 64, _DIGIT_BITS):
        step = np.uint64(shift)
        if (differing >> step) & ones == 0:
            continue
        counts[:] = 0
        for i in range(n):
            counts[np.int64((keys[i] >> step) & ones)] += 1
        total = 0
        for bucket in range(_BUCKETS):
            held = counts[bucket]
            counts[bucket] = total
            total += held
        for i in range(n):
            bucket = np.int64((keys[order[i]] >> step) & ones)
            spare[counts[bucket]] = order[i]
            counts[bucket] += 1
        order, spare = spare, order
    return order


def argsort_descending(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of non-negative finite float64[n] `costs`, largest first, ties by index.

    O(n) per differing 11-bit digit: integer-valued costs need two or three passes.
    """
    if costs.size < 64:
        return np.argsort(-costs, kind="stable").astype(np.int64)
    # The bits of non-negative floats order as the floats do; +0.0 turns a negative zero around.
    bits = (costs + 0.0).view(np.uint64)
    return _radix_argsort(~bits)
