"""Stable sorts that are the same on every processor, and a heap: least first, ties to the lower id.

numpy's fast argsort breaks ties by whatever vector instructions the processor has, and a plan
must be the same wherever it is made; numpy's stable argsort is several times slower than this.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray
from dataservice.planning.kernels.compile import kernel, leaf

_DIGIT_BITS = 11
_BUCKETS = 1 << _DIGIT_BITS
_LOW = (1 << 32) - 1
_FEW = 64  # that are inserted one by one: a pass takes as long as its buckets


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


@leaf
def _insert_few(order: NDArray[np.int64], begin: int, end: int, keys: NDArray[np.uint64]) -> None:
    """Sort order[begin:end] by keys, ties as they stand."""
    for place in range(begin + 1, end):
        moved = order[place]
        key = keys[moved]
        hole = place
        while hole > begin and keys[order[hole - 1]] > key:
            order[hole] = order[hole - 1]
            hole -= 1
        order[hole] = moved


@kernel
def _argsort_digits(
    keys: NDArray[np.uint64], below: np.uint64, differing: np.uint64
) -> NDArray[np.int64]:
    """`radix_argsort` by 32 bits of the keys, those from bit `below` on."""
    carried = np.empty(keys.size, np.uint64)
    for i in range(keys.size):
        carried[i] = ((keys[i] >> below) << np.uint64(32)) | np.uint64(i)
    return _argsort_carried(carried, differing)


@kernel
def _sort_alike(order: NDArray[np.int64], keys: NDArray[np.uint64], below: np.uint64) -> None:
    """Sort each run of `order` whose keys are alike but for their lowest `below` bits, at most 32
    of them, by these."""
    begin = 0
    while begin < order.size:
        last = keys[order[begin]]
        high = last >> below
        rises = True
        end = begin + 1
        while end < order.size and keys[order[end]] >> below == high:
            rises = rises and last <= keys[order[end]]
            last = keys[order[end]]
            end += 1
        if end - begin <= _FEW:
            _insert_few(order, begin, end, keys)
        elif not rises:
            run = order[begin:end].copy()
            order[begin:end] = run[_argsort_digits(keys[run], np.uint64(0), np.uint64(_LOW))]
        begin = end


@kernel
def radix_argsort(keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Ascending stable argsort. O(n): by the highest 32 of the bits that differ, carried with their
    places, and then by those below them where these are alike."""
    if keys.size <= _FEW:
        few = np.arange(keys.size)
        _insert_few(few, 0, keys.size, keys)
        return few
    differing = np.uint64(0)
    for key in keys:
        differing |= key ^ keys[0]
    below = np.uint64(0)
    while differing >> below > np.uint64(_LOW):
        below += np.uint64(1)
    order = _argsort_digits(keys, below, differing >> below)
    if below > np.uint64(0):
        _sort_alike(order, keys, below)
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
    for i in range(n):
        keys[i] = np.uint64(most - sizes[i])
    return radix_argsort(keys)


def argsort_descending(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of non-negative finite float64[n] `costs`, largest first, ties by index. O(n)."""
    # The bits of non-negative floats order as the floats do; +0.0 turns a negative zero around.
    bits = (costs + 0.0).view(np.uint64)
    return radix_argsort(~bits)


@kernel
def argsort_rising(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Stable argsort for use inside kernels; one function, so that it is compiled once."""
    return np.argsort(values, kind="mergesort")


@kernel
def group_stable(
    keys: IntArray, order: NDArray[np.int64], groups: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Reorder `order` int64[m], which names no place twice, by keys[order], each in [0, groups),
    keeping ties as they are.

    Returns (order, begins int64[groups + 1]): group g is order[begins[g] : begins[g + 1]].
    Counting sort, O(m + groups); applied twice it sorts by two keys.
    """
    begins = np.zeros(groups + 1, np.int64)  # int64[groups + 1]
    if order.size == keys.size:  # all are counted, so as they lie in memory
        for key in keys:
            begins[key + 1] += 1
    else:
        for place in order:
            begins[keys[place] + 1] += 1
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
