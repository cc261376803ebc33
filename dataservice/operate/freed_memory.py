"""Returns freed memory to the operating system.

The memory of a large step or job is freed when it ends, and yet stays with the process: glibc
keeps freed blocks of its heaps for later calls, and Arrow those of its pools. This module checks
at intervals how many bytes they keep. When that number has grown by `MUCH_BYTES`, and has stayed so
for `LOOKS` times, it asks both to return them.

Until then they are kept: a large step takes hundreds of MB and frees them, and when the next takes
as many, fresh pages cost more, since the system clears them, than what is written there.
"""

import asyncio
import ctypes
import functools
import logging
from collections import deque
from collections.abc import Callable

import pyarrow as pa

from dataservice.core.kept_heap import keep_freed

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
LOOKS = 6
MUCH_BYTES = 64 * 2**20
HEAP_END_BYTES = 2**30  # free at the end of a heap, beyond which it is returned at once


class _Mallinfo2(ctypes.Structure):
    """The struct that glibc's mallinfo2 returns; `fordblks` counts bytes that are free and kept."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """The C library if it is glibc 2.33 (2021) or later, else None."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2") or not hasattr(libc, "malloc_trim"):
        return None
    libc.mallinfo2.restype = _Mallinfo2
    return libc


def kept_bytes() -> int:
    """Freed bytes that the C library keeps; 0 where it does not report them."""
    libc = _libc()
    return 0 if libc is None else int(libc.mallinfo2().fordblks)


def keep_for_next_step() -> None:
    """Have the C library keep what is freed until it is given back."""
    if _libc() is not None:  # else nobody would
        keep_freed(HEAP_END_BYTES)


def give_back() -> None:
    """Have the C library and Arrow return the freed memory that they keep. Takes up to about
    100 ms, during which other threads run."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)
    pa.default_memory_pool().release_unused()


async def give_back_now_and_then(
    every_s: float = LOOK_EVERY_S,
    *,
    looks: int = LOOKS,
    kept: Callable[[], int] = kept_bytes,
    give: Callable[[], None] = give_back,
) -> None:
    """Until cancelled: return memory whenever `MUCH_BYTES` more are kept than after the last time,
    at each of so many `looks`: what the next step uses again is left. The comparison is with the
    last time because returned pages count as kept until they are used again."""
    left_bytes = kept()
    seen: deque[int] = deque(maxlen=looks)
    while True:
        await asyncio.sleep(every_s)
        try:
            now_bytes = await asyncio.to_thread(kept)
            left_bytes = min(left_bytes, now_bytes)
            seen.append(now_bytes)
            if len(seen) == looks and min(seen) - left_bytes >= MUCH_BYTES:
                seen.clear()
                await asyncio.to_thread(give)
                left_bytes = await asyncio.to_thread(kept)
        except Exception:
            log.exception("memory was not given back; it is tried again")
