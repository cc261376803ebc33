"""In which order the sources of an epoch take turns, computed block by block.

An epoch of N places takes a given number of samples from each source. Its slots, those of one
source next to each other, are dealt out to blocks like cards, and each block is shuffled:

    slots    a a a a a a b b b c          a: 6, b: 3, c: 1
    dealt    a   a   a   b   b      a   a   a   b   c
    shuffled b a a b a            │ c a b a a

So every block has its share of every source, to within one sample; and how many of a source come
before any place is known from the block's number and a look into that block alone. Which card is
dealt first turns from epoch to epoch, so that a source of one sample is not always in the same
block. Nothing is stored: time and memory depend on what is asked for.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray
from dataservice.core.split_mix import split_mix
from dataservice.sources.shuffle import hashed

BLOCK = 1024
"""Places of a block: few enough that a step of a few hundred samples has its share of each source,
many enough that who comes next in it is anyone's guess."""


class Interleaving:
    """The order of the sources at places 0 .. N-1, from how many samples each gives and `names`.
    Immutable, safe for use from several threads."""

    def __init__(self, counts: IntArray, *names: int) -> None:
        """`counts` is int64[sources]; N is their sum."""
        self.places = int(np.sum(counts))
        self._blocks = max(1, -(-self.places // BLOCK))
        key = hashed(names)
        self._key = np.uint64(key)
        self._turn = key % self._blocks
        # Sources that are next to each other in one epoch are not in the next.
        sources = np.arange(len(counts), dtype=np.uint64)
        self._order = np.argsort(split_mix(sources ^ self._key), kind="stable")
        self._ends = np.cumsum(np.asarray(counts)[self._order], dtype=np.int64)
        self._counts = np.asarray(counts, dtype=np.int64)
        giving = np.flatnonzero(self._counts)
        self._only = int(giving[0]) if len(giving) == 1 else None

    def turns(self, start: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Of the places `start` .. `end` - 1: which source each is of, and how many of that source
        come before it: int64[end - start] each. O(end - start + BLOCK)."""
        if start >= end:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self._only is not None:  # it has every turn, in whatever order its slots come
            return np.full(end - start, self._only), np.arange(start, end)
        first = self._block_of(start)
        source = self._sources(first, self._block_of(end - 1))
        before = self._of_sources_before(first)
        cut = slice(start - self._places_before(first), end - self._places_before(first))
        return source[cut], (_ranks(source, len(before)) + before[source])[cut]

    def before(self, place: int) -> NDArray[np.int64]:
        """How many samples of each source come before a place of 0 .. N: int64[sources].
        O(sources + BLOCK)."""
        if place >= self.places:
            return self._counts
        block = self._block_of(place)
        inside = self._sources(block, block)[: place - self._places_before(block)]
        counts = np.bincount(inside, minlength=len(self._ends))
        return self._of_sources_before(block) + counts

    # A slot's number, moved on by the turn, modulo the number of blocks is its block.

    def _places_before(self, block: int) -> int:
        first, last = self._turn, self._turn + self.places
        return int(self._dealt(last, block) - self._dealt(first, block))

    def _of_sources_before(self, block: int) -> NDArray[np.int64]:
        to_ends = self._dealt(np.append(0, self._ends) + self._turn, block)
        before = np.empty(len(self._order), dtype=np.int64)
        before[self._order] = np.diff(to_ends)
        return before

    def _dealt(self, numbers: IntArray | int, block: int) -> IntArray:
        """How many of 0 .. number-1 lie in blocks before this one."""
        return numbers // self._blocks * block + np.minimum(numbers % self._blocks, block)

    def _block_of(self, place: int) -> int:
        block = place * self._blocks // self.places  # blocks differ by one place at most
        while self._places_before(block) > place:
            block -= 1
        while self._places_before(block + 1) <= place:
            block += 1
        return block

    def _sources(self, first: int, last: int) -> NDArray[np.int64]:
        """The sources at the places of these blocks, in order."""
        most = (self._turn + self.places) // self._blocks + 1
        rows = np.arange(first, last + 1)[:, None] + np.arange(most + 1) * self._blocks
        real = (rows >= self._turn) & (rows < self._turn + self.places)
        # One bit less, so that no hash is as great as what sorts behind all of them.
        by = split_mix(rows.astype(np.uint64) ^ self._key) >> np.uint64(1)
        by[~real] = np.uint64(0xFFFFFFFFFFFFFFFF)
        order = np.argsort(by, axis=1, kind="stable")
        # Slots rise along each row, and are found sooner than once they are shuffled.
        giving = np.searchsorted(self._ends, rows - self._turn, side="right")
        dealt = np.take_along_axis(giving, order, axis=1)
        return self._order[dealt[np.take_along_axis(real, order, axis=1)]]


def _ranks(source: NDArray[np.int64], sources: int) -> NDArray[np.int64]:
    """How many of the same source come before each: int64[n]."""
    counts = np.bincount(source, minlength=sources)
    # Numbers of 16 bits are sorted by their digits.
    order = np.argsort(source.astype(np.uint16) if sources <= 2**16 else source, kind="stable")
    ranks = np.empty(len(source), dtype=np.int64)
    ranks[order] = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks
