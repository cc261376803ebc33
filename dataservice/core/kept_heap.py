"""Memory that is freed and kept by the C library, for the next who needs as much.

Fresh pages cost more than what is written there, since the system clears them: 40 % of the time of
a small picture, and half of that in which a large step's orders are written.
"""

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as glibc's mallopt calls them
# Larger blocks are returned once they are freed. More than half of a thread's heap is refused.
LARGEST_KEPT_BYTES = 32 * 2**20


def keep_freed(end_bytes: int) -> None:
    """Have the C library keep blocks of up to LARGEST_KEPT_BYTES that this process frees, but what
    is free at the end of a heap beyond `end_bytes`. Another library than glibc does as it likes."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, end_bytes)
