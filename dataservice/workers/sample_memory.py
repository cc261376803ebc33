"""A decoded sample as one run of bytes, passed between processes with a single copy.

    input_ids │ labels │ item 0 │ item 1 │ …        each at a multiple of 64 bytes

The place of each array follows from the sample's planned lengths, which both sides know; neither
side trusts a shape or offset that the other sends. The decoder's process writes a large sample into
a sealed memory file: that is the one copy. The worker maps the file and serves views of the
mapping. The file has no name that could be left behind, and the last view unmaps it.
"""

import ctypes
import fcntl
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import DecodedSample, SampleLengths
from dataservice.workers.pack import ITEM_DTYPES

ALIGNMENT_BYTES = 64
# Below this size, copying through the socket costs less than a memory file.
INLINE_LIMIT_BYTES = 32 * 1024
# If a mapped file can still shrink, whoever sends its descriptor can crash the process that maps
# it.
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def sample_bytes(planned: SampleLengths) -> int:
    """Size of a sample of these lengths."""
    return _end(_places(planned))


def sample_buffers(decoded: DecodedSample, planned: SampleLengths) -> list[memoryview | bytes]:
    """The sample's bytes in order, gaps included; only strided arrays are copied. The sample must
    have its planned shape."""
    buffers: list[memoryview | bytes] = []
    at = 0
    arrays = (decoded.input_ids, decoded.labels, *decoded.items)
    for place, array in zip(_places(planned), arrays, strict=True):
        if place.size_bytes == 0:
            continue
        if place.offset_bytes > at:
            buffers.append(bytes(place.offset_bytes - at))
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        at = place.offset_bytes + place.size_bytes
    return buffers


def write_memory(buffers: list[memoryview | bytes], size_bytes: int) -> int:
    """A descriptor of a sealed memory file that holds these buffers. Raises OSError."""
    descriptor = os.memfd_create("sample", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size_bytes)
        write_buffers(descriptor, buffers)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_buffers(descriptor: int, buffers: Sequence[memoryview | bytes]) -> None:
    """Write these end to end, from the file's beginning. Raises OSError."""
    at = 0
    for buffer in buffers:
        view = memoryview(buffer)
        while len(view):
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written


def sample_of_memory(descriptor: int, planned: SampleLengths) -> DecodedSample:
    """Views of a memory file, whose descriptor is closed. Raises ValueError unless the file is
    sealed and as large as planned, OSError or MemoryError when it can be neither mapped nor
    read."""
    try:
        size_bytes = sample_bytes(planned)
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError("the memory file of a sample is not sealed")
        if os.fstat(descriptor).st_size != size_bytes:
            raise ValueError("the memory file of a sample has not its planned size")
        return sample_of_bytes(_mapped(descriptor, size_bytes), planned)
    finally:
        os.close(descriptor)


def sample_of_bytes(data: Any, planned: SampleLengths) -> DecodedSample:
    """Views of a buffer that holds exactly a sample of these lengths."""
    whole = np.frombuffer(data, dtype=np.uint8)
    ids, labels, *items = (
        whole[place.offset_bytes : place.offset_bytes + place.size_bytes]
        .view(place.dtype)
        .reshape(place.shape)
        for place in _places(planned)
    )
    return DecodedSample(input_ids=ids, labels=labels, items=tuple(items))


def _places(planned: SampleLengths) -> list[_Place]:
    tokens: tuple[np.dtype[Any], tuple[int, ...]] = (np.dtype(np.int32), (planned.llm_tokens,))
    arrays = [tokens, tokens]
    arrays += [(ITEM_DTYPES[item.modality], item.shape) for item in planned.items]
    places: list[_Place] = []
    for dtype, shape in arrays:
        start = -(-_end(places[-1:]) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        places.append(_Place(dtype=dtype, shape=shape, offset_bytes=start))
    return places


def _end(places: list[_Place]) -> int:
    return places[-1].offset_bytes + places[-1].size_bytes if places else 0


def _mapped(descriptor: int, size_bytes: int) -> Any:
    """The file's bytes as a buffer that unmaps itself. Python's own mmap would keep a descriptor
    for each mapping. The kernel limits a process's mappings; beyond that limit the file is read."""
    protection, flags = mmap.PROT_READ, mmap.MAP_PRIVATE
    address = libc.mmap(None, size_bytes, protection, flags, descriptor, 0)
    if address == MAP_FAILED:
        return read_memory(descriptor, size_bytes)
    buffer = (ctypes.c_char * size_bytes).from_address(address)
    weakref.finalize(buffer, libc.munmap, address, size_bytes).atexit = False
    return memoryview(buffer).toreadonly()


def read_memory(descriptor: int, size_bytes: int) -> NDArray[np.uint8]:
    """A copy of a memory file's first bytes. Raises ValueError when it has fewer, OSError."""
    data = np.empty(size_bytes, dtype=np.uint8)
    view, at = data.data, 0
    while at < size_bytes:
        read = os.preadv(descriptor, [view[at:]], at)
        if read == 0:
            raise ValueError("the memory file of a sample ends early")
        at += read
    return data
