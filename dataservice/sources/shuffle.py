"""Shuffles from an integer hash, so that an order never depends on a library's generator.

The hash is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014): add the golden ratio, then two rounds of xor-shift and multiply. An order is the
stable argsort of one 64-bit key a sample, so it is the same on every machine and with every
version of numpy. Changing anything here changes the order of every job.
"""

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def keys(rows: NDArray[np.int64], *names: int) -> NDArray[np.uint64]:
    """One key a row, uint64[n]: a hash of the row and of every one of `names`."""
    state = np.zeros(1, dtype=np.uint64)
    for name in names:
        state = _mix(state ^ np.array([name & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    # Two rounds: were rows only added to the state, two states close to each other would give
    # shifted copies of one sequence.
    return _mix(_mix(rows.astype(np.uint64)) ^ state)


def permutation(size: int, *names: int) -> NDArray[np.int64]:
    """A permutation of 0 .. size-1, int64[size], that depends on `names` alone. O(n log n)."""
    return np.argsort(keys(np.arange(size), *names), kind="stable")


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
