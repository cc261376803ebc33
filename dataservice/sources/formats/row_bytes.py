"""How many bytes each row of an Arrow array takes once it is Python objects.

Arrow stores a value that many rows share only once (dictionary encoding); as Python objects, each
row has its own copy. So the size of rows is computed before they are converted.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

# Bytes of a Python object, with its entry in a list or dict.
_OBJECT_BYTES = 64


def row_bytes(array: "pa.Array[Any]") -> NDArray[np.int64]:
    """Bytes of each row, int64[rows]: an upper bound within a small factor. O(values), without
    copying them."""
    if isinstance(array, pa.DictionaryArray):
        each = row_bytes(array.dictionary)
        return each.take(_numbers(array.indices)) if len(each) else _objects(len(array))
    if isinstance(array, pa.StructArray):
        total = _objects(len(array))
        for field in array.flatten():
            total += row_bytes(field)
        return total
    if isinstance(array, pa.ListArray | pa.LargeListArray):
        counts = _numbers(pc.list_value_length(array))
        ends = np.cumsum(counts, dtype=np.int64)
        values = row_bytes(pc.list_flatten(array))
        items = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(values, out=items[1:])
        return _objects(len(array)) + items.take(ends) - items.take(ends - counts)
    if isinstance(array, pa.StringArray | pa.LargeStringArray):
        return _objects(len(array)) + _numbers(pc.binary_length(array))
    if isinstance(array, pa.BinaryArray | pa.LargeBinaryArray):
        return _objects(len(array)) + _numbers(pc.binary_length(array))
    return _objects(len(array))


def _objects(rows: int) -> NDArray[np.int64]:
    return np.full(rows, _OBJECT_BYTES, dtype=np.int64)


def _numbers(array: "pa.Array[Any]") -> NDArray[np.int64]:
    """The array as numbers, with empty cells as 0."""
    return np.asarray(array.fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
