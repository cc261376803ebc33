"""Where every token of a pack lies: padding and zigzag chunks of a context-parallel group.

A pack of degree 1 is its samples end to end. At degree d > 1 each sample is padded to a
multiple of 2d and cut into 2d chunks; member i of the group holds chunks i and 2d-1-i of
every sample, so that under a causal mask all members do the same work.

    degree 2, one sample of 8 tokens          member 0: 0 1 . . . . 6 7
    chunks  [0 1][2 3][4 5][6 7]              member 1: . . 2 3 4 5 . .

Planner, worker and trainer all derive positions from these functions.
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import IntArray


def padded_tokens(tokens: IntArray, degree: int | IntArray) -> NDArray[np.int64]:
    """Length of each sample once padded for its group: int64[n], of `tokens` int[n]."""
    if isinstance(degree, int) and degree <= 1:
        return np.array(tokens, dtype=np.int64)
    unit = np.where(np.asarray(degree) > 1, 2 * np.asarray(degree), 1)
    return -(-np.asarray(tokens, dtype=np.int64) // unit) * unit


def sample_starts(padded: IntArray) -> NDArray[np.int64]:
    """Offsets of the samples in their pack, the end included: int64[n+1] (`cu_seqlens`)."""
    starts = np.zeros(len(padded) + 1, dtype=np.int64)
    # Numbers that are widened while they are added take three times as long.
    np.add.accumulate(np.asarray(padded, dtype=np.int64), out=starts[1:])
    return starts


def counts_between(starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The reverse: what lies between each offset and the next, int64[n] of int64[n+1]. In a step of
    few samples `np.diff` would take most of the time for which it is asked so often."""
    return starts[1:] - starts[:-1]


def expanded(first: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Runs (first, rows) as single row numbers: int64[sum(rows)]."""
    ends = rows.cumsum()
    numbers: NDArray[np.int64] = (first - ends + rows).repeat(rows)
    numbers += np.arange(len(numbers))
    return numbers


def member_rows(padded: IntArray, degree: int, cp_rank: int) -> NDArray[np.int64]:
    """Rows of the padded pack that member `cp_rank` holds, in its own order.

    `padded` int[n] are the padded sample lengths; returns int64[sum(padded) / degree].
    """
    starts = sample_starts(padded)
    if degree == 1:
        return np.arange(starts[-1])
    pieces = []
    for start, length in zip(starts[:-1], padded, strict=True):
        chunk = int(length) // (2 * degree)
        for index in (cp_rank, 2 * degree - 1 - cp_rank):
            pieces.append(start + np.arange(index * chunk, (index + 1) * chunk))
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def locate(
    position: IntArray, padded: IntArray, degree: IntArray, start: IntArray
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which member holds a token, and at which of its local rows.

    All arguments int[k]: the token's offset in its sample, that sample's padded length, the
    degree of its group, and the sample's start in the padded pack. Returns (cp_rank, row).
    """
    position, padded, degree, start = (
        np.asarray(a, dtype=np.int64) for a in (position, padded, degree, start)
    )
    chunk = np.where(degree > 1, padded // (2 * degree), padded)
    index = position // np.maximum(chunk, 1)
    first_half = index < degree
    cp_rank = np.where(first_half, index, 2 * degree - 1 - index)
    row = start // degree + position - index * chunk + np.where(first_half, 0, chunk)
    return cp_rank, row
