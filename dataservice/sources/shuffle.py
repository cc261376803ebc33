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
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dataservice.core.kernels import array, inlined, kernel
from dataservice.core.sample import IntArray
from dataservice.core.split_mix import mixed, split_mix

_64_BITS = 0xFFFFFFFFFFFFFFFF
_HALF = np.uint64(32)
# Even, so that both sides end where they began. With 8 rounds, some orders of 5 samples are 15 %
# more or less frequent than they should be; with 12, none of our tests can tell them from chance.
_ROUNDS = 12
# Positions that go through each round together: many, so that they share the processor's vector
# instructions; few enough that what is computed of them stays in the nearest cache.
_AT_ONCE = 512
_Numbers = NDArray[np.uint64]

_mixed = inlined(cast(Callable[[np.uint64], np.uint64], mixed))


def permuted(places: IntArray, size: int, *names: int) -> NDArray[np.int64]:
    """The images of these positions (int[n], each in 0 .. size-1) under a permutation of `size`
    that depends only on `names`: int64[n]. O(n), whatever the size."""
    return permuted_each(places, np.zeros(len(places), dtype=np.int64), [size], [names])


def permuted_each(
    places: IntArray, which: IntArray, sizes: Sequence[int], names: Sequence[tuple[int, ...]]
) -> NDArray[np.int64]:
    """The same under several permutations at once: each of these positions (int[n]) under the one
    of `sizes` and `names` that `which` (int[n]) counts: int64[n]."""
    images = np.array(places, dtype=np.uint64)
    if len(images):
        rows = [_rows(size) for size in sizes]
        columns = [max(1, -(-size // of)) for size, of in zip(sizes, rows, strict=True)]
        _permute(
            images,
            np.ascontiguousarray(which, dtype=np.int64),
            np.array([sizes, rows, columns], dtype=np.uint64),
            np.stack([_round_keys(each) for each in names], axis=1),
        )
    return images.view(np.int64)


def _rows(size: int) -> int:
    rows = math.isqrt(max(size - 1, 0)) + 1
    return rows + rows % 2  # shifts with two odd sides would give only even permutations


@inlined
def _shifted(number: np.uint64, other: np.uint64, key: np.uint64, side: np.uint64) -> np.uint64:
    """A number below `side`, of at most 32 bits, shifted by a hash of the other one. The 2^32 hash
    values are spread evenly over the side: the counts of any two shifts differ by at most one."""
    hashed = _mixed(_mixed(other) ^ key) >> _HALF
    moved = number + (hashed * side >> _HALF)
    # Past the side it begins again. Before it, the difference is below zero, which is as great as
    # numbers without a sign become.
    return min(moved, moved - side)


@kernel((array(np.uint64), array(np.int64), array(np.uint64, 2), array(np.uint64, 2)))
def _permute(
    numbers: _Numbers, which: NDArray[np.int64], shapes: _Numbers, round_keys: _Numbers
) -> None:
    """Every one of `numbers` [n] to its image, in place. `which` [n] counts the columns of `shapes`
    [3, permutations], sizes, rows and columns, and of `round_keys` [rounds, permutations]."""
    at = np.empty(_AT_ONCE, np.int64)
    left, right = np.empty(_AT_ONCE, np.uint64), np.empty(_AT_ONCE, np.uint64)
    rows, columns = np.empty(_AT_ONCE, np.uint64), np.empty(_AT_ONCE, np.uint64)
    keys = np.empty(_AT_ONCE, np.uint64)
    one = shapes.shape[1] == 1
    for start in range(0, numbers.size, _AT_ONCE):
        count = min(_AT_ONCE, numbers.size - start)
        for k in range(count):
            at[k] = start + k
        while count:  # one pass through the network
            for k in range(count):
                of = 0 if one else which[at[k]]
                number, rows[k], columns[k] = numbers[at[k]], shapes[1, of], shapes[2, of]
                left[k] = number // columns[k]
                right[k] = number - left[k] * columns[k]
            for turn in range(round_keys.shape[0]):
                for k in range(count):
                    keys[k] = round_keys[turn, 0 if one else which[at[k]]]
                moved, other, side = (right, left, columns) if turn % 2 else (left, right, rows)
                for k in range(count):
                    moved[k] = _shifted(moved[k], other[k], keys[k], side[k])
            outside = 0
            for k in range(count):
                place = at[k]
                numbers[place] = left[k] * columns[k] + right[k]
                if numbers[place] >= shapes[0, 0 if one else which[place]]:
                    at[outside] = place
                    outside += 1
            count = outside


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
