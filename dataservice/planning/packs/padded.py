"""The baselines that trainers come from: padded microbatches, in drawn or length order.

random            [ 7 2 9 1 | 3 8 ... ]   count × longest ≤ capacity
length grouped    [ 9 8 7 | 3 2 1 ... ]   the same, sorted first: less padding, same waves
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray
from dataservice.planning.kernels.compile import leaf
from dataservice.planning.kernels.sort import argsort_falling


def pack_padded(
    tokens: NDArray[np.int64], *, max_tokens: int, by_length: bool
) -> NDArray[np.int32]:
    """Cut samples into consecutive microbatches whose padded size fits: pack_of int32[n].

    `tokens` int64[n]; a microbatch of k samples costs k times its longest, at most `max_tokens`
    unless it is one sample alone. `by_length` sorts the samples first, longest first.
    O(n), or O(n log n) sorted.
    """
    n = len(tokens)
    order = np.arange(n)
    if by_length and n:
        order = argsort_falling(tokens)
    pack_of = np.empty(n, dtype=np.int32)
    _cut(tokens[order], order, max_tokens, pack_of)
    return pack_of


@leaf
def _cut(
    tokens: NDArray[np.int64],
    order: NDArray[np.int64],
    max_tokens: int,
    pack_of: NDArray[np.int32],
) -> None:
    pack, count, longest = 0, 0, 0
    for place in range(len(tokens)):
        longest_with = max(longest, tokens[place])
        if count > 0 and (count + 1) * longest_with > max_tokens:
            pack, count, longest_with = pack + 1, 0, tokens[place]
        count, longest = count + 1, longest_with
        pack_of[order[place]] = pack


def padded_to_longest(tokens: NDArray[np.int64], pack_of: NDArray[np.int32]) -> NDArray[np.int64]:
    """What each sample costs once padded to the longest of its microbatch: int64[n]."""
    longest = np.zeros(int(pack_of.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(longest, pack_of, tokens)
    return longest[pack_of]


@leaf
def padded_sum(tokens: IntArray, max_tokens: int) -> int:
    """All tokens of the microbatches that `pack_padded` cuts in drawn order, padding counted."""
    total, count, longest = 0, 0, 0
    for size in tokens:
        longest_with = max(longest, size)
        if count > 0 and (count + 1) * longest_with > max_tokens:
            total += count * longest
            count, longest_with = 0, size
        count, longest = count + 1, longest_with
    return total + count * longest
