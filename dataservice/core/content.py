"""What a step delivered, in 20 bytes that tell later whether it is delivered again.

Workers digest each sample that they deliver (64 bits, see `workers/sample_digest.py`). A step
keeps two sums of them, by place in draw order, modulo the prime p = 2^61 - 1:

    total = Σ digest[i]        weighted = Σ weight[i] · digest[i]

So it is the same however the samples are packed and whoever decodes them. Where one sample differs,
by δ, the sums differ by δ and weight[i] · δ, which names it, as the syndromes of a Reed-Solomon
code do. Weights are as good as random, so that several samples which differ, even by the same δ,
are not taken for one. Masked samples are left out, since what masked them may pass; `which` tells
which samples the sums are over.
"""

import struct
import zlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataservice.core.split_mix import GOLDEN, split_mix

SAMPLE_DIGEST = np.dtype("<u8")
PRIME = 2**61 - 1
VERSION = 1  # of the digests and sums; others are not compared
_LAYOUT = struct.Struct("<IQQ")
_LIMB_BITS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContent:
    """The sums over a step's samples, and as `which` a checksum of the samples' ids."""

    which: int
    total: int
    weighted: int

    def to_bytes(self) -> bytes:
        """20 bytes."""
        return _LAYOUT.pack(self.which, self.total, self.weighted)

    @staticmethod
    def from_bytes(data: bytes) -> "StepContent":
        """Read `to_bytes`'s form. Raises ValueError where it is none."""
        if len(data) != _LAYOUT.size:
            raise ValueError(f"a step's content takes {_LAYOUT.size} bytes, not {len(data)}")
        which, total, weighted = _LAYOUT.unpack(data)
        return StepContent(which=which, total=total, weighted=weighted)


def content_of(
    sample_ids: NDArray[np.int64], digests: NDArray[np.uint64], masked: Collection[int]
) -> StepContent:
    """The content of samples in draw order, `sample_ids` int64[n] and `digests` uint64[n], without
    the ids that are `masked`. O(n), exact for n below 2^27."""
    kept, left_out = digests & np.uint64(PRIME), sample_ids[:0]
    if masked:
        dropped = np.isin(sample_ids, np.array(sorted(masked), dtype=np.int64))
        kept, left_out = np.where(dropped, np.uint64(0), kept), np.unique(sample_ids[dropped])
    limbs = _limbs(kept)
    products = [_joined(limbs @ weight) for weight in _limbs(_weights(len(sample_ids)))]
    return StepContent(
        which=_checksum(sample_ids, left_out),
        total=_joined(limbs.sum(axis=1)),
        weighted=_joined(products),
    )


def differing_place(before: StepContent, now: StepContent, samples: int) -> int | None:
    """The place of the one sample in which two contents of the same `samples` samples differ; None
    where they differ in more than one. O(samples)."""
    delta = (now.total - before.total) % PRIME
    if delta == 0:
        return None
    weight = (now.weighted - before.weighted) * pow(delta, -1, PRIME) % PRIME
    (places,) = np.nonzero(_weights(samples) == weight)
    return int(places[0]) if len(places) else None


def _checksum(sample_ids: NDArray[np.int64], left_out: NDArray[np.int64]) -> int:
    words = [np.array([VERSION, len(sample_ids)], dtype="<i8"), sample_ids, left_out]
    return zlib.crc32(np.concatenate(words).astype("<i8").tobytes())


def _weights(samples: int) -> NDArray[np.uint64]:
    """SplitMix64 of each place, below 2^61: uint64[samples]."""
    return split_mix(np.arange(samples, dtype=np.uint64) * GOLDEN) & np.uint64(PRIME)


def _limbs(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """16 bits each, the least first: uint64[4, n]."""
    halves = values.astype(SAMPLE_DIGEST).view("<u2").reshape(-1, 4)
    return np.ascontiguousarray(halves.T, dtype=np.uint64)


def _joined(sums: Iterable[int]) -> int:
    return sum(int(value) << (_LIMB_BITS * place) for place, value in enumerate(sums)) % PRIME
