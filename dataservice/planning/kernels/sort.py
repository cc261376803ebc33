"""Stable sorts that are the same on every processor, and a heap: least first, ties to the lower id.

numpy's fast argsort breaks ties by whatever vector instructions the processor has, and a plan
must be the same wherever it is made; numpy's stable argsort is several times slower than this.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import kernel, leaf

_DIGIT_BITS = 11
_BUCKETS = 1 << _DIGIT_BITS
_LOW = (1 << 32) - 1


@kernel
def _argsort_carried(carried: NDArray[np.uint64], differing: np.uint64) -> NDArray[np.int64]:
    """`radix_argsort` of keys of 32 bits, each with its place below it, so that every pass reads in
    order; `carried` is lost. Digits begin at the lowest of the keys' bits that is `differing`:
    of multiples of a power of two, such as tokens of tiles, few bits do."""
    n = carried.size
    ones, low = np.uint64(_BUCKETS - 1), np.uint64(_LOW)
    spare = np.empty(n, np.uint64)
    counts = np.empty(_BUCKETS, np.int64)  # int64[buckets]
    first = 0
    while first < 32 and (differing >> np.uint64(first)) & np.uint64(1) == 0:
        first += 1
    for shift in range(first, 32, _DIGIT_BITS):
        step = np.uint64(shift + 32)
        if ((differing << np.uint64(32)) >> step) & ones == 0:
            continue
        counts[:] = 0
        for i in range(n):
            counts[(carried[i] >> step) & ones] += 1
        total = 0
        for bucket in range(_BUCKETS):
            total += counts[bucket]
            counts[bucket] = total - counts[bucket]
        for i in range(n):
            digit = (carried[i] >> step) & ones
            spare[counts[digit]] = carried[i]
            counts[digit] += 1
        carried, spare = spare, carried
    order = np.empty(n, np.int64)
    for i in range(n):
        order[i] = np.int64(carried[i] & low)
    return order


@kernel
def radix_argsort(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Ascending stable argsort; digits that all keys share cost one counting pass only."""
    n = keys.size
    ones = np.uint64(_BUCKETS - 1)
    differing = np.uint64(0)
    for i in range(n):
        differing |= keys[i] ^ keys[0]
    if differing <= np.uint64(_LOW):
        carried = np.empty(n, np.uint64)
        for i in range(n):
            carried[i] = (keys[i] << np.uint64(32)) | np.uint64(i)
        return _argsort_carried(carried, differing)
    order = np.arange(n)  # int64[n]
    spare = np.empty(n, np.int64)
    counts = np.empty(_BUCKETS, np.int64)  # int64[buckets]
    for shift in range(0, 64, _DIGIT_BITS):
        step = np.uint64(shift)
        if (differing >> step) & ones == 0:
            continue
        counts[:] = 0
        for i in range(n):
            counts[np.int64((keys[i] >> step) & ones)] += 1
        total = 0
        for bucket in range(_BUCKETS):
            total += counts[bucket]
            counts[bucket] = total - counts[bucket]
        for i in range(n):
            digit = np.int64((keys[order[i]] >> step) & ones)
            spare[counts[digit]] = order[i]
            counts[digit] += 1
        order, spare = spare, order
    return order


@kernel
def _argsort_counted(sizes: NDArray[Any], most: int, span: int) -> NDArray[np.int64]:
    """`argsort_falling` of numbers from most − span to `most`, each counted by itself."""
    starts = np.zeros(span + 2, np.int64)  # int64[span + 2]: where the next of each is written
    for i in range(sizes.size):
        starts[most - sizes[i] + 1] += 1
    for below in range(span):
        starts[below + 1] += starts[below]
    order = np.empty(sizes.size, np.int64)
    for i in range(sizes.size):
        below = most - sizes[i]
        order[starts[below]] = i
        starts[below] += 1
    return order


@kernel
def argsort_falling(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Places of integers [n], largest first, ties by place. O(n) where they span at most n numbers,
    as tokens of a large step do: one counting pass then; where they fall already, none."""
    n = sizes.size
    falls = True
    most = sizes[0] if n else 0
    least = most
    for i in range(1, n):
        falls = falls and sizes[i] <= sizes[i - 1]
        most = max(most, sizes[i])
        least = min(least, sizes[i])
    if falls:
        return np.arange(n)
    span = np.uint64(most - least)
    if span <= np.uint64(n):
        return _argsort_counted(sizes, most, most - least)
    keys = np.empty(n, np.uint64)
    if span > np.uint64(_LOW):
        for i in range(n):
            keys[i] = np.uint64(most - sizes[i])
        return radix_argsort(keys)
    differing = np.uint64(0)
    for i in range(n):
        key = np.uint64(most - sizes[i])
        differing |= key
        keys[i] = (key << np.uint64(32)) | np.uint64(i)
    return _argsort_carried(keys, differing)


def argsort_descending(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of non-negative finite float64[n] `costs`, largest first, ties by index.

    O(n) per differing 11-bit digit: integer-valued costs need two or three passes.
    """
    if costs.size < 64:
        return np.argsort(-costs, kind="stable").astype(np.int64)
    # The bits of non-negative floats order as the floats do; +0.0 turns a negative zero around.
    bits = (costs + 0.0).view(np.uint64)
    return radix_argsort(~bits)


@kernel
def argsort_rising(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Stable argsort for use inside kernels; one function, so that it is compiled once."""
    return np.argsort(values, kind="mergesort")


@kernel
def group_stable(
    keys: NDArray[np.int64], order: NDArray[np.int64], groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Reorder `order` int64[m] by keys[order], each in [0, groups), keeping ties as they are.

    Returns (order, begins int64[groups + 1]): group g is order[begins[g] : begins[g + 1]].
    Counting sort, O(m + groups); applied twice it sorts by two keys.
    """
    begins = np.zeros(groups + 1, np.int64)  # int64[groups + 1]
    for k in range(order.size):
        begins[keys[order[k]] + 1] += 1
    for group in range(groups):
        begins[group + 1] += begins[group]
    next_place = begins.copy()
    grouped = np.empty_like(order)  # int64[m]
    for k in range(order.size):
        key = keys[order[k]]
        grouped[next_place[key]] = order[k]
        next_place[key] += 1
    return grouped, begins


@leaf
def heap_before(key_a: float, id_a: int, key_b: float, id_b: int) -> bool:
    return key_a < key_b or (key_a == key_b and id_a < id_b)


@leaf
def heap_sift_down(
    keys: NDArray[np.float64], ids: NDArray[np.int64], size: int, start: int
) -> None:
    """Restore order below `start` after its key grew."""
    key = keys[start]
    item = ids[start]
    hole = start
    child = 2 * hole + 1
    while child < size:
        right = child + 1
        if right < size and heap_before(keys[right], ids[right], keys[child], ids[child]):
            child = right
        if not heap_before(keys[child], ids[child], key, item):
            break
        keys[hole] = keys[child]
        ids[hole] = ids[child]
        hole = child
        child = 2 * hole + 1
    keys[hole] = key
    ids[hole] = item


@leaf
def heap_sift_up(keys: NDArray[np.float64], ids: NDArray[np.int64], start: int) -> None:
    """Restore order above `start` after it was appended."""
    key = keys[start]
    item = ids[start]
    hole = start
    while hole > 0:
        parent = (hole - 1) // 2
        if not heap_before(key, item, keys[parent], ids[parent]):
            break
        keys[hole] = keys[parent]
        ids[hole] = ids[parent]
        hole = parent
    keys[hole] = key
    ids[hole] = item
