"""The bytes of an array as they are sent and summed."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def bytes_of(array: NDArray[Any]) -> memoryview:
    """The array's bytes, little-endian and contiguous; without a copy if they already are."""
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data
