"""Best-fit decreasing by memory: DHP's stage 1, atomic groups with a least degree.

Units fall by size. One that needs d ranks opens a group with the room of d ranks; each other one
goes to the open group whose room left is smallest but enough, and opens a group when none is.

    size ↓   [####################]  degree 3, room ▒▒▒      groups kept in buckets of room left;
             [#########] degree 1, room ▒▒▒▒▒▒▒▒▒▒▒          best fit = first bucket that is enough
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.units import Setting, Units
from dataservice.planning.kernels.compile import kernel, leaf
from dataservice.planning.kernels.integers import lowest_bit, padded_length
from dataservice.planning.kernels.sort import argsort_falling

# Groups wait in lists by the room they have left; a set bit of `filled` marks a list that is not
# empty, so that the next one is found by a few bit operations.
_BITS = 64
_WORDS = 64
_BUCKETS = _BITS * _WORDS
# Groups looked at for one unit, in all and in one bucket: its rooms are about equal, and all of the
# first one may be too small.
_LOOKS = 256
_BUCKET_LOOKS = 8


def group_by_memory(
    units: Units, least: NDArray[np.int64], setting: Setting
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group of each unit int64[u] and least degree of each group int64[G]. About O(u)."""
    order = argsort_falling(units.total)
    return _best_fit(units.total, units.offsets, units.tokens, least, order, setting.memory_tokens)


@kernel
def _best_fit(
    total: NDArray[np.int64],
    offsets: NDArray[np.int64],
    tokens: NDArray[np.int64],
    least: NDArray[np.int64],
    order: NDArray[np.int64],
    memory_tokens: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    group_of = np.empty(order.size, np.int64)  # int64[u]
    degree = np.empty(order.size, np.int64)  # int64[groups], at most one a unit
    room = np.empty(order.size, np.int64)  # int64[groups]
    # Groups by room: lists that begin at first[bucket] and go on at after[group]; the bits of those
    # that hold any, the last word over the words; and how many rooms share a bucket.
    first, after = np.full(_BUCKETS, -1, np.int32), np.empty(order.size, np.int32)
    filled = np.zeros(_WORDS + 1, np.uint64)
    most = memory_tokens  # room that any group has beside the unit that opened it
    for unit in range(order.size):
        most = max(most, memory_tokens * least[unit] - total[unit])
    width = max(1, -(-2 * most // _BUCKETS))
    groups = 0
    for unit in order:
        size, begin, end = total[unit], offsets[unit], offsets[unit + 1]
        bucket = min(size // width, _BUCKETS - 1)
        chosen = _take(size, begin, end, bucket, tokens, room, degree, first, after, filled)
        if chosen < 0:
            chosen = groups
            groups += 1
            degree[chosen] = least[unit]
            room[chosen] = memory_tokens * least[unit]
        group_of[unit] = chosen
        room[chosen] -= _padded(size, begin, end, tokens, degree[chosen])
        if degree[chosen] > 1:  # only whole chunks of padding count
            room[chosen] -= room[chosen] % (2 * degree[chosen])
        if room[chosen] > 0:
            bucket = min(room[chosen] // width, _BUCKETS - 1)
            after[chosen] = first[bucket]
            first[bucket] = chosen
            _mark(filled, bucket)
    return group_of, degree[:groups].copy()


@leaf
def _take(
    total: int,
    begin: int,
    end: int,
    bucket: int,
    tokens: NDArray[np.int64],
    room: NDArray[np.int64],
    degree: NDArray[np.int64],
    first: NDArray[np.int32],
    after: NDArray[np.int32],
    filled: NDArray[np.uint64],
) -> int:
    """Take out of the lists, from `bucket` on, and return the first group with room for a unit; −1
    if there is none."""
    bucket = _next_filled(filled, bucket)
    looks = 0
    while bucket < _BUCKETS and looks < _LOOKS:
        before = -1
        group = int(first[bucket])
        enough = min(_LOOKS, looks + _BUCKET_LOOKS)
        while group >= 0 and looks < enough:
            looks += 1
            size = total  # room is whole chunks: enough for the padding of one sequence
            if end > begin + 1:
                size = _padded(total, begin, end, tokens, degree[group])
            if room[group] >= size:
                if before < 0:
                    first[bucket] = after[group]
                else:
                    after[before] = after[group]
                if first[bucket] < 0:
                    _unmark(filled, bucket)
                return group
            before, group = group, int(after[group])
        bucket = _next_filled(filled, bucket + 1)
    return -1


@leaf
def _padded(total: int, begin: int, end: int, tokens: NDArray[np.int64], degree: int) -> int:
    """The sequences tokens[begin:end] of a unit, `total` in all, each padded for a degree."""
    if degree == 1:
        return total
    padded = 0
    for at in range(begin, end):
        padded += padded_length(tokens[at], degree)
    return padded


@leaf
def _mark(filled: NDArray[np.uint64], bucket: int) -> None:
    word = bucket // _BITS
    filled[word] |= np.uint64(1) << np.uint64(bucket % _BITS)
    filled[_WORDS] |= np.uint64(1) << np.uint64(word)


@leaf
def _unmark(filled: NDArray[np.uint64], bucket: int) -> None:
    word = bucket // _BITS
    filled[word] &= ~(np.uint64(1) << np.uint64(bucket % _BITS))
    if filled[word] == 0:
        filled[_WORDS] &= ~(np.uint64(1) << np.uint64(word))


@leaf
def _next_filled(filled: NDArray[np.uint64], bucket: int) -> int:
    """The first bucket from `bucket` on with a group in it; _BUCKETS if none."""
    if bucket >= _BUCKETS:
        return _BUCKETS
    word = bucket // _BITS
    bits = filled[word] >> np.uint64(bucket % _BITS)
    if bits != 0:
        return bucket + lowest_bit(bits)
    if word + 1 >= _WORDS:
        return _BUCKETS
    words = filled[_WORDS] >> np.uint64(word + 1)
    if words == 0:
        return _BUCKETS
    word += 1 + lowest_bit(words)
    return word * _BITS + lowest_bit(filled[word])
