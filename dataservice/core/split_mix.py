"""SplitMix64: a hash of 64 bits that is the same on every machine and with every version of numpy.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: add the
golden ratio, then two rounds of xor-shift and multiply.
"""

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def split_mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output for each of these states: uint64[n]. That of seed s at place i, from 0, is of the
    state s + i · GOLDEN."""
    state = state + GOLDEN
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
