"""Columns of many messages, cut by message and written as fields of bytes, all at once.

Thousands of ranks have dozens of columns each, most of them of a few dozen bytes. Cut one by one,
each would be an object, made only to be joined with the others; so they are copied where they go.

    column 0   aaa|bb|…      message 0   head 3 aaa  head 2 dd …
    column 1   dd|eee|…      message 1   head 2 bb   head 3 eee …
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dataservice.core.field_bytes import BYTES, head_of
from dataservice.core.kernels import array, kernel, read_only


class CutWhenAsked(Mapping[str, bytes]):
    """The columns of one message by name, cut when one is asked for: most are sent as they were
    written for all at once."""

    __slots__ = ("_cut", "_found")

    def __init__(self, cut: Callable[[], dict[str, bytes]]) -> None:
        self._cut = cut
        self._found: dict[str, bytes] | None = None

    def _all(self) -> dict[str, bytes]:
        if self._found is None:
            self._found = self._cut()
        return self._found

    def __getitem__(self, name: str) -> bytes:
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


_GIVEN = read_only(np.uint8)


def cut_fields(
    numbered: Sequence[int], columns: Sequence[bytes], begins: Sequence[NDArray[np.int64]]
) -> list[bytes]:
    """Fields of bytes of n messages: the r-th has of the k-th column the bytes from `begins[k][r]`
    to `begins[k][r + 1]`, of int64[n+1], in the field of its number. Of what is empty there is no
    field. O(bytes + columns · n) of these messages."""
    some = [k for k, column in enumerate(columns) if column]
    if not some:
        return [b""] * (len(begins[0]) - 1)
    at = np.array([begins[k] for k in some])  # int64[columns, n + 1]
    first, last = at[:, 0].tolist(), at[:, -1].tolist()
    cut = [columns[k][start:stop] for k, start, stop in zip(some, first, last, strict=True)]
    shifts, end = [], 0
    for start, stop in zip(first, last, strict=True):
        shifts.append([end - start])
        end += stop - start
    at += np.array(shifts)
    heads = _heads(tuple(numbered[k] for k in some))
    written, stops = _written(np.frombuffer(b"".join(cut), np.uint8), at, *heads)
    data = written.data
    return [data[start:stop].tobytes() for start, stop in pairwise(stops.tolist())]


@lru_cache(maxsize=64)
def _heads(numbers: tuple[int, ...]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """What stands before fields of these numbers, end to end, and where each begins."""
    heads = [head_of(number, BYTES) for number in numbers]
    return np.frombuffer(b"".join(heads), np.uint8), np.cumsum([0, *map(len, heads)])


@kernel((_GIVEN, array(np.int64, 2), _GIVEN, array(np.int64)))
def _written(
    columns: NDArray[np.uint8],
    begins: NDArray[np.int64],
    heads: NDArray[np.uint8],
    head_begins: NDArray[np.int64],
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The messages end to end, and where each begins, int64[n+1]. `columns` and the `heads` before
    their fields are end to end too, and begin at `begins` int64[columns, n+1] and `head_begins`."""
    kinds, messages = begins.shape[0], begins.shape[1] - 1
    most = columns.size + (heads.size + 10 * kinds) * messages  # a length has ten bytes at most
    written, stops = np.empty(most, np.uint8), np.zeros(messages + 1, np.int64)
    end = 0
    for message in range(messages):
        for kind in range(kinds):
            start, stop = begins[kind, message], begins[kind, message + 1]
            size = stop - start
            if size == 0:
                continue
            for byte in range(head_begins[kind], head_begins[kind + 1]):
                written[end] = heads[byte]
                end += 1
            while size >= 0x80:  # seven bits a byte, and whether another comes
                written[end] = size & 0x7F | 0x80
                size >>= 7
                end += 1
            written[end] = size
            end += 1
            # Places in slices are never below zero, so that many bytes are copied at once.
            column, field = columns[start:stop], written[end : end + stop - start]
            for byte in range(column.size):
                field[byte] = column[byte]
            end += column.size
        stops[message + 1] = end
    return written[:end], stops
