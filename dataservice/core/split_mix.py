"""SplitMix64: a hash of 64 bits that is the same on every machine and with every version of numpy.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: add the
golden ratio, then two rounds of xor-shift and multiply.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)
Words = TypeVar("Words", np.uint64, NDArray[np.uint64])


def split_mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output for each of these states: uint64[n]. That of seed s at place i, from 0, is of the
    state s + i · GOLDEN."""
    return mixed(np.asarray(state, dtype=np.uint64))


def mixed(state: Words) -> Words:
    """The same of an array or, in a kernel that compiles this, of a number."""
    state = state + GOLDEN
    state = (state ^ (state >> _SHIFT_1)) * _MIX_1
    state = (state ^ (state >> _SHIFT_2)) * _MIX_2
    return state ^ (state >> _SHIFT_3)
