"""A binary min-heap over parallel arrays, for use inside numba kernels; ties go to the lower id."""

import numpy as np
from numpy.typing import NDArray

from dataservice.planning.kernels.compile import leaf


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
