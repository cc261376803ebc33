"""Bits of a 64-bit word, for kernels that keep a set of places as words."""

import numpy as np

from dataservice.planning.kernels.compile import kernel


@kernel
def lowest_bit(word: np.uint64) -> int:
    """Place of the lowest set bit, by halving; the word is not 0."""
    place = 0
    for half in (32, 16, 8, 4, 2, 1):
        if word & ((np.uint64(1) << np.uint64(half)) - np.uint64(1)) == 0:
            word >>= np.uint64(half)
            place += half
    return place
