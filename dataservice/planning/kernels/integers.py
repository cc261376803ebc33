"""Whole numbers inside kernels: padding and chunks of a sequence, as `padded_tokens` and `locate`
of `core.layout` have them, and the bits of a word that keeps a set of places.
"""

import numpy as np

from dataservice.planning.kernels.compile import leaf

# A de Bruijn sequence: its top six bits differ for each of the 64 places that it is shifted by.
_SEQUENCE = 0x03F79D71B4CB0A89
_PLACES = np.zeros(64, np.int64)
for _place in range(64):
    _PLACES[(_SEQUENCE << _place & (1 << 64) - 1) >> 58] = _place


@leaf
def padded_length(tokens: int, degree: int) -> int:
    """`tokens` rounded up to a multiple of 2·degree: zigzag's chunks; as they are at degree 1."""
    if degree == 1:
        return tokens
    return (tokens + 2 * degree - 1) // (2 * degree) * (2 * degree)


@leaf
def ring_member(position: int, tokens: int, degree: int) -> int:
    """Which member of its group holds the token at `position` of a sample of so many `tokens`."""
    if degree == 1:
        return 0
    chunk = position // (padded_length(tokens, degree) // (2 * degree))
    return chunk if chunk < degree else 2 * degree - 1 - chunk


@leaf
def lowest_bit(word: np.uint64) -> int:
    """Place of the lowest set bit; the word is not 0."""
    alone = word & (~word + np.uint64(1))
    return int(_PLACES[(alone * np.uint64(_SEQUENCE)) >> np.uint64(58)])
