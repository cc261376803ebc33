"""How much freed memory the C library keeps for the next message.

gRPC takes new memory for every message, a receiver in pieces as they come from the socket, and
Python takes it again as a whole; all of it is freed at once. By default glibc gives the end of a
heap back to the kernel as soon as a block or two are free there, and the next message has its pages
cleared and mapped anew: two fifths of what receiving it costs, and a tenth of sending. When a block
is freed that had a mapping of its own, glibc keeps as much from then on, up to twice that block at
the end of each heap (mallopt(3), M_MMAP_THRESHOLD). A process that has freed a large tensor is in
that state already; one whose owner has set thresholds (MALLOC_TRIM_THRESHOLD_) is left as it is.
"""

from functools import cache

BLOCK_BYTES = 8 * 2**20
"""Of a few messages under way at once; below the 32 MiB that glibc raises its threshold to at
most."""


@cache
def keep_freed_messages() -> None:
    """Have glibc keep the memory of messages; once a process. Another C library does as it
    likes."""
    bytes(BLOCK_BYTES)  # freed at once; no page of it is ever written
