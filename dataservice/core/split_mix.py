"""SplitMix64: a hash of 64 bits that is the same on every machine and with every version of numpy.

Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014: add the
golden ratio, then two rounds of xor-shift and multiply.
"""

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = np.uint64(30), np.uint64(27), np.uint64(31)


def split_mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output for each of these states: uint64[n]. That of seed s at place i, from 0, is of the
    state s + i · GOLDEN."""
    mixed = np.array(state, dtype=np.uint64)
    mix_in_place(mixed, np.empty_like(mixed))
    return mixed


def mix_in_place(state: NDArray[np.uint64], shifted: NDArray[np.uint64]) -> None:
    """The same, in place of the states, for who mixes the same ones often; what `shifted`
    uint64[n] holds is lost."""
    state += GOLDEN
    for bits, factor in ((_SHIFT_1, _MIX_1), (_SHIFT_2, _MIX_2)):
        state ^= np.right_shift(state, bits, out=shifted)
        state *= factor
    state ^= np.right_shift(state, _SHIFT_3, out=shifted)
