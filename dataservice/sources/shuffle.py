"""Permutations computed position by position, from an integer hash.

The image of a position is computed from its number alone, so the time and memory of an order of a
billion samples depend only on the part that is drawn. The permutation is a Feistel network over a
rectangle: a number x = left · columns + right, below rows · columns, has its left part shifted by a
hash of its right part, then its right part shifted by a hash of its left part, and so on. Each
shift can be undone, so no two numbers have the same image. The rectangle is the smallest
near-square that holds all positions; the few images that are no position go through the network
again until they are ("cycle walking").

Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, §4 and §5.

The hash is SplitMix64 (core/split_mix.py). Nothing depends on a library's generator, so an order is
the same on every machine and with every version of numpy. Changing anything here changes the order
of every job.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray
from dataservice.core.split_mix import mix_in_place, split_mix

_64_BITS = 0xFFFFFFFFFFFFFFFF
_HALF = np.uint64(32)
# Even, so that both sides end where they began. With 8 rounds, some orders of 5 samples are 15 %
# more or less frequent than they should be; with 12, none of our tests can tell them from chance.
_ROUNDS = 12
# Positions that go through all rounds together: what is computed of them stays in the cache.
_AT_ONCE = 16_384


def permuted(places: IntArray, size: int, *names: int) -> NDArray[np.int64]:
    """The images of these positions (int[n], each in 0 .. size-1) under a permutation of `size`
    that depends only on `names`: int64[n]. O(n), whatever the size."""
    return permuted_each(places, np.zeros(len(places), dtype=np.int64), [size], [names])


def permuted_each(
    places: IntArray, which: IntArray, sizes: Sequence[int], names: Sequence[tuple[int, ...]]
) -> NDArray[np.int64]:
    """The same under several permutations at once: each of these positions (int[n]) under the one
    of `sizes` and `names` that `which` (int[n]) counts: int64[n]."""
    if not len(places):
        return np.zeros(0, dtype=np.int64)
    one = len(sizes) == 1
    rows = np.array([_rows(size) for size in sizes], dtype=np.uint64)
    columns = np.array([max(1, -(-size // _rows(size))) for size in sizes], dtype=np.uint64)
    round_keys = np.stack([_round_keys(each) for each in names], axis=1)
    below = np.array(sizes, dtype=np.uint64)

    def through(numbers: NDArray[np.uint64], of: IntArray) -> NDArray[np.uint64]:
        return _rounds(numbers, rows[of], columns[of], (keys[of] for keys in round_keys))

    of = np.zeros(1, dtype=np.int64) if one else which  # one for all is broadcast
    numbers = np.asarray(places, dtype=np.uint64)
    out = np.empty_like(numbers)
    for start in range(0, len(numbers), _AT_ONCE):
        own = slice(start, start + _AT_ONCE)
        out[own] = through(numbers[own], of if one else of[own])
    while len(outside := np.flatnonzero(out >= below[of])):
        out[outside] = through(out[outside], of if one else of[outside])
    return out.view(np.int64)


def _rows(size: int) -> int:
    rows = math.isqrt(max(size - 1, 0)) + 1
    return rows + rows % 2  # shifts with two odd sides would give only even permutations


def _rounds(
    numbers: NDArray[np.uint64],
    rows: NDArray[np.uint64],
    columns: NDArray[np.uint64],
    round_keys: Iterable[NDArray[np.uint64]],
) -> NDArray[np.uint64]:
    """One pass through the network: uint64[n] below rows · columns, to other such numbers. Rows,
    columns and the key of each round are uint64[n] or [1]."""
    side, other = rows, columns
    left = numbers // other
    right = numbers - left * other
    shift, spare = np.empty_like(left), np.empty_like(left)
    for key in round_keys:
        np.copyto(shift, right)
        mix_in_place(shift, spare)
        shift ^= key
        mix_in_place(shift, spare)
        _reduce_below(side, shift)
        left += shift
        # Past the side it begins again. Before it, the difference is below zero, which is as great
        # as numbers without a sign become.
        np.minimum(left, np.subtract(left, side, out=spare), out=left)
        left, right, side, other = right, left, other, side
    left *= other
    left += right
    return left


def _reduce_below(limit: NDArray[np.uint64], hashed: NDArray[np.uint64]) -> None:
    """Hashes as numbers below a limit of at most 32 bits, in place. The 2^32 hash values are spread
    evenly: the counts of any two numbers differ by at most one."""
    hashed >>= _HALF
    hashed *= limit
    hashed >>= _HALF


@lru_cache(maxsize=4096)
def _round_keys(names: tuple[int, ...]) -> NDArray[np.uint64]:
    """One key per round, from all of `names` and their order."""
    return split_mix(_state(names) ^ split_mix(np.arange(_ROUNDS, dtype=np.uint64)))


def _state(names: tuple[int, ...]) -> NDArray[np.uint64]:
    state = np.zeros(1, dtype=np.uint64)
    for name in names:
        state = split_mix(state ^ np.array([name & _64_BITS], dtype=np.uint64))
    return state


def hashed(names: tuple[int, ...]) -> int:
    """A number below 2^64 from all of these and their order."""
    return int(split_mix(_state(names))[0])
