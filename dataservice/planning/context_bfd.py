"""Best-fit decreasing by memory: DHP's stage 1, atomic groups with a least degree.

Units fall by size. One that needs d ranks opens a group with the room of d ranks; each other one
goes to the open group whose room left is smallest but enough, and opens a group when none is.

    size ↓   [####################]  degree 3, room ▒▒▒      groups kept in buckets of room left;
             [#########] degree 1, room ▒▒▒▒▒▒▒▒▒▒▒          best fit = first bucket that is enough
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.context_kernels import inner, kernel
from dataservice.planning.context_units import Setting, Units, padded_sums
from dataservice.planning.kernel_sort import argsort_descending

_BUCKETS = 1 << 12
_BLOCK = 1 << 6


def group_by_memory(
    units: Units, least: NDArray[np.int64], setting: Setting
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Group of each unit int64[u] and least degree of each group int64[G].

    O(u·(log u + 1)) but for a few hundred steps of bucket search a unit at worst.
    """
    order = argsort_descending(units.total.astype(np.float64))
    group_of, degree = _best_fit(units, least, order, setting)
    return group_of, degree


@kernel
def _best_fit(
    units: Units, least: NDArray[np.int64], order: NDArray[np.int64], setting: Setting
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    count = order.size
    group_of = np.empty(count, np.int64)
    degree = np.empty(count, np.int64)
    room = np.empty(count, np.int64)
    groups = 0
    # Rooms up to twice the memory fall in at most _BUCKETS lists; wider rooms share the last one.
    width = max(1, -(-2 * setting.memory_tokens // _BUCKETS))
    buckets = min(_BUCKETS, 2 * setting.memory_tokens // width + 1)
    head = np.full(buckets, -1, np.int64)
    following = np.empty(count, np.int64)
    filled = np.zeros(buckets // _BLOCK + 1, np.int64)
    for unit in order:
        chosen = -1
        if least[unit] == 1:
            chosen = _take(units, unit, width, head, following, filled, room, degree)
        if chosen < 0:
            chosen = groups
            groups += 1
            degree[chosen] = least[unit]
            room[chosen] = setting.memory_tokens * least[unit]
        group_of[unit] = chosen
        room[chosen] -= padded_sums(units, unit, degree[chosen])[0]
        if room[chosen] > 0:
            bucket = min(room[chosen] // width, buckets - 1)
            following[chosen] = head[bucket]
            head[bucket] = chosen
            filled[bucket // _BLOCK] += 1
    return group_of, degree[:groups].copy()


@inner
def _take(
    units: Units,
    unit: int,
    width: int,
    head: NDArray[np.int64],
    following: NDArray[np.int64],
    filled: NDArray[np.int64],
    room: NDArray[np.int64],
    degree: NDArray[np.int64],
) -> int:
    """Remove from the buckets, and return, the first group with room for the unit; −1 if none."""
    buckets = head.size
    bucket = min(units.total[unit] // width, buckets - 1)
    while bucket < buckets:
        if bucket % _BLOCK == 0 and filled[bucket // _BLOCK] == 0:
            bucket += _BLOCK
            continue
        before = -1
        group = head[bucket]
        while group >= 0:
            if room[group] >= padded_sums(units, unit, degree[group])[0]:
                if before < 0:
                    head[bucket] = following[group]
                else:
                    following[before] = following[group]
                filled[bucket // _BLOCK] -= 1
                return int(group)
            before = group
            group = following[group]
        bucket += 1
    return -1
