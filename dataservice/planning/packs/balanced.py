"""Packs of equal work for just as many seats as the waves have.

Where samples are many, planning packs and groups together buys little and costs much. So the
least number of waves that can hold everything is found first; long samples take the seats
that memory makes them share, and the rest is partitioned over the seats left, by work, with the
memory of a replica as a hard limit on its tokens.

    2 waves × 4 replicas   [ long, degree 3 | 5 ]  [ 5 | 5 | 5 | 5 ]   five packs of work 5
"""

import numpy as np
from numpy.typing import NDArray

from dataservice.core.errors import PlanningError
from dataservice.planning.loads.partition import partition

# Greedy placement fills memory this well without a search; a tighter fit takes another wave.
FULL = 0.995
TOLERANCE = 1e-2


def pack_balanced(
    tokens: NDArray[np.int64],
    work_s: NDArray[np.float64],
    *,
    replicas: int,
    memory_tokens: int,
) -> NDArray[np.int32]:
    """Pack of each sample, int32[n]; samples beyond `memory_tokens` are packs of their own.

    `tokens` int64[n], `work_s` float64[n] seconds at degree 1. The packs are to be grouped into
    waves of `replicas` seats. O(n log n).
    """
    long = np.flatnonzero(tokens > memory_tokens)
    short = np.flatnonzero(tokens <= memory_tokens)
    pack_of = np.empty(len(tokens), dtype=np.int32)
    pack_of[long] = np.arange(len(long))
    if len(short) == 0:
        return pack_of
    shared = int((-(-tokens[long] // memory_tokens)).sum())
    needed = int(np.ceil(tokens[short].sum() / (FULL * memory_tokens)))
    waves = -(-(shared + needed) // replicas)
    while True:
        seats = min(waves * replicas - shared, len(short))
        try:
            seat_of = partition(
                work_s[short],
                seats,
                capacity=float(memory_tokens),
                sizes=tokens[short],
                tolerance=TOLERANCE,
            ).rank_of
        except PlanningError:
            if seats == len(short):
                raise
            waves += 1
            continue
        # A seat may stay empty where samples are few; packs are numbered without gaps.
        _, pack_of[short] = np.unique(seat_of, return_inverse=True)
        pack_of[short] += len(long)
        return pack_of
