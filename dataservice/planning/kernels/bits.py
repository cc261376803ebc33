"""Bits of a 64-bit word, for kernels that keep a set of places as words."""

import numpy as np

from dataservice.planning.kernels.compile import leaf

# A de Bruijn sequence: its top six bits differ for each of the 64 places that it is shifted by.
_SEQUENCE = 0x03F79D71B4CB0A89
_PLACES = np.zeros(64, np.int64)
for _place in range(64):
    _PLACES[(_SEQUENCE << _place & (1 << 64) - 1) >> 58] = _place


@leaf
def lowest_bit(word: np.uint64) -> int:
    """Place of the lowest set bit; the word is not 0."""
    alone = word & (~word + np.uint64(1))
    return int(_PLACES[(alone * np.uint64(_SEQUENCE)) >> np.uint64(58)])
