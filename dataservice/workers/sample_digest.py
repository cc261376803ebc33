"""A digest of each sample as it is delivered: its tokens, and every byte of its media.

The digest is BLAKE2b with 64 bits, over the pad token, the sample's ids, labels and positions, and
each item's type, shape and CRC-32. The CRC makes it cheap: media are nearly all of the bytes, and
zlib's CRC takes 0.27 s per GB on one core, little beside decoding them. The worker computes the
digest from the arrays that it streams, so a decoder's mistake about what it sent is noticed.
Padding is left out: a sample has one digest, whatever the degree of its pack.
"""

import hashlib
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dataservice.core.content import SAMPLE_DIGEST
from dataservice.core.sample import DecodedSample


def sample_digests(
    whole: Mapping[str, NDArray[np.int32]],
    starts: NDArray[np.int64],
    decoded: Sequence[DecodedSample],
    *,
    pad_token_id: int,
) -> bytes:
    """A digest of 8 bytes per sample, in the pack's order. `whole` has the pack's sequence arrays
    before they are cut; `starts` says where each sample begins in them."""
    pad = np.int32(pad_token_id).tobytes()
    digests = bytearray()
    for start, sample in zip(starts.tolist(), decoded, strict=False):
        hasher = hashlib.blake2b(pad, digest_size=SAMPLE_DIGEST.itemsize)
        for array in whole.values():
            hasher.update(array[start : start + len(sample.input_ids)].data)
        for item in sample.items:
            bytes_of = np.ascontiguousarray(item).reshape(-1).view(np.uint8).data
            hasher.update(f"{item.dtype.str}{item.shape}{zlib.crc32(bytes_of)}".encode())
        digests += hasher.digest()
    return bytes(digests)
