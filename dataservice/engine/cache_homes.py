"""In which cache a sample is looked for first: rendezvous hashing.

    key of a sample ──► bucket ──► the cache whose hash with this bucket is the largest

Of the caches that stay, none gets a bucket that another of them had; a cache that comes takes
its part of all, and one that goes leaves its buckets to all.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", IEEE/ACM
Transactions on Networking 6(1), 1998, §3.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from dataservice.core.split_mix import GOLDEN, split_mix

BUCKETS = 4096


def cache_homes(caches: Mapping[str, int]) -> NDArray[np.int16]:
    """The home of each bucket, as a place among `caches`: int16[BUCKETS]. -1 without caches.

    `caches` are their names, and how many parts each takes. O(BUCKETS · parts).
    """
    parts = [
        (place, f"{name}/{k}") for place, name in enumerate(caches) for k in range(caches[name])
    ]
    if not parts:
        return np.full(BUCKETS, -1, np.int16)
    digests = [hashlib.blake2b(part.encode(), digest_size=8).digest() for _, part in parts]
    salts = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
    bucket = np.arange(BUCKETS, dtype=np.uint64) * GOLDEN
    largest = np.zeros(BUCKETS, np.uint64)
    home = np.zeros(BUCKETS, np.int16)
    for (place, _), salt in zip(parts, salts, strict=True):
        hashed = split_mix(salt + bucket)
        home[hashed > largest] = place
        np.maximum(largest, hashed, out=largest)
    return home
