"""Memory of parts, filled again once no tensor of a part is left.

To fill fresh pages costs the kernel several times what copying into pages in use does, and a part
is too large for the allocator to keep its pages. What `KEPT_BYTES` has no room for goes back to the
kernel, as does everything with the last reference to the buffers.
"""

import mmap
import threading
import weakref
from collections import deque
from contextlib import suppress

import numpy as np
import torch

KEPT_BYTES = 256 * 2**20
"""Free memory that is kept: a few steps of pictures."""
LEAST_BYTES = 2**20
"""Below it, the allocator keeps pages itself."""
LARGEST_SHARE = 2  # of a part, in the memory that it takes


def block_bytes(size_bytes: int) -> int:
    """The size of a new block for a part of this size: the next of 4, 5, 6 and 7 eighths of a power
    of two, so that parts of like sizes take one another's memory."""
    step = max(1 << max(size_bytes.bit_length() - 3, 0), mmap.PAGESIZE)
    return -(-size_bytes // step) * step


class RecycledBuffers:
    """Buffers on the host, uint8. May be used by many threads; tensors may end on any."""

    def __init__(self, *, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._ended: deque[mmap.mmap] = deque()

    def empty(self, size_bytes: int) -> torch.Tensor:
        """A buffer of any content, uint8 [size_bytes]. Raises OSError where there is no memory."""
        if size_bytes < LEAST_BYTES:
            return torch.empty(size_bytes, dtype=torch.uint8)
        block = self._taken(size_bytes)
        if block is None:
            block = _new_block(size_bytes)
        held = np.frombuffer(block, np.uint8, size_bytes)
        # The tensor's storage holds the array, and no other reference to it is left here.
        weakref.finalize(held, self._ended.append, block).atexit = False
        return torch.frombuffer(held, dtype=torch.uint8)

    def _taken(self, size_bytes: int) -> mmap.mmap | None:
        """The smallest block that is free and large enough, and not much too large."""
        with self._lock:
            while self._ended:
                self._free.append(self._ended.popleft())
            fitting = (b for b in self._free if size_bytes <= len(b) <= LARGEST_SHARE * size_bytes)
            block = min(fitting, key=len, default=None)
            if block is not None:
                self._free.remove(block)
            left_bytes = sum(map(len, self._free))
            while left_bytes > self._kept_bytes:  # the oldest first
                left_bytes -= len(self._free.pop(0))
            return block


def _new_block(size_bytes: int) -> mmap.mmap:
    """In huge pages where the kernel has them for who asks: to copy into them takes a tenth less,
    and their first filling a few faults instead of thousands. NumPy asks for its arrays too."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # a forked process has its own
    block = mmap.mmap(-1, block_bytes(size_bytes), flags=flags)
    with suppress(AttributeError, OSError):  # another system, a kernel without them
        block.madvise(mmap.MADV_HUGEPAGE)
    return block
