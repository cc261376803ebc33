"""The baselines that trainers come from: padded microbatches, in drawn or length order.

random            [ 7 2 9 1 | 3 8 ... ]   count × longest ≤ capacity
length grouped    [ 9 8 7 | 3 2 1 ... ]   the same, sorted first: less padding, same waves
    fixed counts      [ 7 2 9 | 1 3 8 ]       so many samples each, whatever they hold

`pad_ratio(lengths, packing.pack_of)` is what they waste. Fixed counts know no limits: every pack
counts as satisfied.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataservice.core.errors import PlanningError
from dataservice.core.sample import IntArray
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.sort import argsort_falling
from dataservice.planning.packs.packing import Packing, check_pair


def pack_padded(
    tokens: NDArray[np.int64], *, max_tokens: int, by_length: bool
) -> NDArray[np.int32]:
    """Cut samples into consecutive microbatches whose padded size fits: pack_of int32[n].

    `tokens` int64[n]; a microbatch of k samples costs k times its longest, at most `max_tokens`
    unless it is one sample alone. `by_length` sorts the samples first, longest first.
    O(n), or O(n log n) sorted.
    """
    order = argsort_falling(tokens) if by_length and len(tokens) else None
    order, offsets = cut_padded(tokens, max_tokens=max_tokens, order=order)
    pack_of = np.empty(len(tokens), dtype=np.int32)
    pack_of[order] = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
    return pack_of


def cut_padded(
    tokens: NDArray[np.int64], *, max_tokens: int, order: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The microbatches of `pack_padded` as they are cut, of samples in this `order` int64[n], or as
    they are drawn: the order, and where each begins in it, the end included: int64[packs+1]."""
    if order is None:
        return np.arange(len(tokens)), _cut(tokens, max_tokens)
    return order, _cut(tokens[order], max_tokens)


@kernel
def _cut(tokens: NDArray[np.int64], max_tokens: int) -> NDArray[np.int64]:
    offsets = np.empty(len(tokens) + 1, np.int64)
    packs, count, longest = 0, 0, 0
    for place in range(len(tokens)):
        longest = max(longest, tokens[place])
        if count == 0 or (count + 1) * longest > max_tokens:
            offsets[packs] = place
            packs, count, longest = packs + 1, 0, tokens[place]
        count += 1
    offsets[packs] = len(tokens)
    return offsets[: packs + 1].copy()


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


def pack_random(
    text_tokens: ArrayLike, vision_tokens: ArrayLike, *, samples_per_pack: int
) -> Packing:
    """Consecutive samples, `samples_per_pack` a pack, in the order given (already shuffled by the
    mixture). Raises PlanningError on bad input. O(n)."""
    text, vision = check_pair(text_tokens, vision_tokens)
    _check_count(samples_per_pack, "samples_per_pack")
    return _fixed_count(np.arange(text.size), text, vision, samples_per_pack)


def pack_length_grouped(
    text_tokens: ArrayLike,
    vision_tokens: ArrayLike,
    *,
    samples_per_pack: int,
    packs_per_megabatch: int = 50,
) -> Packing:
    """Sort by text, then vision length inside megabatches, and cut those into fixed counts, as
    length-grouped samplers do. Raises PlanningError on bad input. O(n log n)."""
    text, vision = check_pair(text_tokens, vision_tokens)
    _check_count(samples_per_pack, "samples_per_pack")
    _check_count(packs_per_megabatch, "packs_per_megabatch")
    megabatch = np.arange(text.size) // (samples_per_pack * packs_per_megabatch)
    order = np.lexsort((-vision, -text, megabatch))
    return _fixed_count(order, text, vision, samples_per_pack)


def _check_count(value: int, name: str) -> None:
    if value < 1:
        raise PlanningError(f"{name} is {value}; give at least 1")


def _fixed_count(
    order: NDArray[np.int64], text: NDArray[np.int64], vision: NDArray[np.int64], count: int
) -> Packing:
    packs = -(-order.size // count)
    pack_of = np.empty(order.size, np.int32)
    pack_of[order] = np.arange(order.size) // count
    totals = [np.zeros(packs, np.int64), np.zeros(packs, np.int64)]
    np.add.at(totals[0], pack_of, text)
    np.add.at(totals[1], pack_of, vision)
    return Packing(
        pack_of=pack_of,
        text_tokens=totals[0],
        vision_tokens=totals[1],
        satisfied=np.ones(packs, np.bool_),
        oversize=np.zeros(packs, np.bool_),
        lower_bound=packs,
    )
