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


def digests_of_item(item: NDArray[np.uint8] | NDArray[np.float32]) -> list[str]:
    """Digest of each frame of a picture or clip, which may come in pieces, or of a recording: its
    shape, type and bytes."""
    return [_digest(frame) for frame in item] if item.ndim == 4 else [_digest(item)]


def _digest(values: NDArray[np.uint8] | NDArray[np.float32]) -> str:
    about = f"{values.shape} {values.dtype.str}".encode()
    digest = hashlib.blake2b(about, digest_size=DIGEST_BYTES)
    digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()
