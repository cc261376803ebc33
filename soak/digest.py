"""Short digests of the data that a rank receives, for its journal and for the audit."""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 12


def digest_of_tokens(tensors: Iterable[NDArray[np.integer]]) -> str:
    """Digest of token tensors, whatever their integer type."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for tensor in tensors:
        digest.update(np.ascontiguousarray(tensor, dtype=np.int64).tobytes())
    return digest.hexdigest()


def digest_of_item(item: NDArray[np.uint8] | NDArray[np.float32]) -> str:
    """Digest of an encoder item: its shape, type and bytes."""
    digest = hashlib.blake2b(f"{item.shape} {item.dtype.str}".encode(), digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(item).tobytes())
    return digest.hexdigest()
