"""Best-fit decreasing by memory: DHP's stage 1, atomic groups with a least degree.

Units fall by size. One that needs d ranks opens a group with the room of d ranks; each other one
goes to the open group whose room left is smallest but enough, and opens a group when none is.

    size ↓   [####################]  degree 3, room ▒▒▒      groups kept in buckets of room left;
             [#########] degree 1, room ▒▒▒▒▒▒▒▒▒▒▒          best fit = first bucket that is enough
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context.units import Setting, Units, padded_sums
from dataservice.planning.kernels.bits import lowest_bit
from dataservice.planning.kernels.compile import kernel
from dataservice.planning.kernels.sort import argsort_descending

# Groups wait in lists by the room they have left; a set bit of `filled` marks a list that is not
# empty, so that the next one is found by a few bit operations.
_BITS = 64
_WORDS = 64
_BUCKETS = _BITS * _WORDS
# Groups looked at for one unit, in all and in one bucket: its rooms are about equal, and all of the
# first one may be too small.
_LOOKS = 256
_BUCKET_LOOKS = 8


class Rooms(NamedTuple):
    """Groups by room: `first` int64[buckets] and `after` int64[groups] are the lists, `filled`
    uint64[words + 1] their bits, the last word over the words; `width` rooms share a bucket."""

    first: NDArray[np.int64]
    after: NDArray[np.int64]
    filled: NDArray[np.uint64]
    width: int


def group_by_memory(
    units: Units, least: NDArray[np.int64], setting: Setting
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group of each unit int64[u] and least degree of each group int64[G]. About O(u)."""
    order = argsort_descending(units.total.astype(np.float64))
    return _best_fit(units, least, order, setting)


@kernel
def _best_fit(
    units: Units, least: NDArray[np.int64], order: NDArray[np.int64], setting: Setting
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    count = order.size
    group_of = np.empty(count, np.int64)  # int64[u]
    degree = np.empty(count, np.int64)  # int64[groups], at most one a unit
    room = np.empty(count, np.int64)  # int64[groups]
    groups = 0
    most = setting.memory_tokens  # room that any group has beside the unit that opened it
    for unit in range(count):
        most = max(most, setting.memory_tokens * least[unit] - units.total[unit])
    rooms = Rooms(
        np.full(_BUCKETS, -1),
        np.empty(count, np.int64),
        np.zeros(_WORDS + 1, np.uint64),
        max(1, -(-2 * most // _BUCKETS)),
    )
    for unit in order:
        chosen = _take(units, unit, groups, room, degree, rooms)
        if chosen == groups:
            groups += 1
            degree[chosen] = least[unit]
            room[chosen] = setting.memory_tokens * least[unit]
        group_of[unit] = chosen
        room[chosen] -= padded_sums(units, unit, degree[chosen])[0]
        if degree[chosen] > 1:  # only whole chunks of padding count
            room[chosen] -= room[chosen] % (2 * degree[chosen])
        if room[chosen] > 0:
            bucket = min(room[chosen] // rooms.width, _BUCKETS - 1)
            rooms.after[chosen] = rooms.first[bucket]
            rooms.first[bucket] = chosen
            _mark(rooms.filled, bucket)
    return group_of, degree[:groups].copy()


@kernel
def _take(
    units: Units,
    unit: int,
    none: int,
    room: NDArray[np.int64],
    degree: NDArray[np.int64],
    rooms: Rooms,
) -> int:
    """Take out of the lists, and return, the first group with room for the unit; else `none`."""
    bucket = _next_filled(rooms.filled, min(units.total[unit] // rooms.width, _BUCKETS - 1))
    looks = 0
    while bucket < _BUCKETS and looks < _LOOKS:
        before = none
        group = rooms.first[bucket]
        enough = min(_LOOKS, looks + _BUCKET_LOOKS)
        while group >= 0 and looks < enough:
            looks += 1
            size = units.total[unit]
            if degree[group] > 1 and units.offsets[unit + 1] - units.offsets[unit] > 1:
                size = padded_sums(units, unit, degree[group])[0]
            if room[group] >= size:
                if before == none:
                    rooms.first[bucket] = rooms.after[group]
                else:
                    rooms.after[before] = rooms.after[group]
                if rooms.first[bucket] < 0:
                    _unmark(rooms.filled, bucket)
                return int(group)
            before = group
            group = rooms.after[group]
        bucket = _next_filled(rooms.filled, bucket + 1)
    return none


@kernel
def _mark(filled: NDArray[np.uint64], bucket: int) -> None:
    word = bucket // _BITS
    filled[word] |= np.uint64(1) << np.uint64(bucket % _BITS)
    filled[_WORDS] |= np.uint64(1) << np.uint64(word)


@kernel
def _unmark(filled: NDArray[np.uint64], bucket: int) -> None:
    word = bucket // _BITS
    filled[word] &= ~(np.uint64(1) << np.uint64(bucket % _BITS))
    if filled[word] == 0:
        filled[_WORDS] &= ~(np.uint64(1) << np.uint64(word))


@kernel
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
