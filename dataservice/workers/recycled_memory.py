"""Memory files in which a decoder hands over large samples, filled again once they are released.

    decoder  FilledMemory  ── the number of a file, and a new one's descriptor ──►  worker
    worker   ReadMemory    ◄── with the next order: numbers that are free, or gone ──  decoder

To fill fresh pages costs the kernel several times what copying into pages in use does. Each file
belongs to one decoder process and is gone with it. Its size is sealed: a file that could shrink
would crash whoever reads it. Its bytes cannot be sealed. They are mapped for reading alone except
while they are filled, so that a codec which writes where it should not ends its process and spoils
no sample that was handed over; a decoder that means harm could change one, as it could have decoded
it wrongly.

The worker decides how much free memory is kept. What is released beyond that loses its pages at
once, and its file with the next order.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataservice.core.sample import DecodedSample, SampleLengths
from dataservice.workers.sample_memory import (
    MAP_FAILED,
    libc,
    read_memory,
    sample_bytes,
    sample_of_bytes,
    write_buffers,
)

KEPT_BYTES = 64 * 2**20
"""Of one decoder's memory that is free; about as much again may have been released since its last
order (exactly, where samples are of one size)."""
LARGEST_SHARE = 4  # of a sample, in the memory that it takes
_MADV_REMOVE = 9
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def file_bytes(size_bytes: int) -> int:
    """The size of a new memory file for a sample of this size: the next of 4, 5, 6 and 7 eighths of
    a power of two, so that samples of like sizes take one another's memory. Pages that are never
    written take none."""
    step = max(1 << max(size_bytes.bit_length() - 3, 0), mmap.PAGESIZE)
    return -(-size_bytes // step) * step


class MappedFile:
    """A whole memory file, mapped until the last reference to it is gone. Raises MemoryError when
    the kernel maps no more for this process. Python's own mmap would keep a descriptor."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        address = libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == MAP_FAILED:
            raise MemoryError(f"{size_bytes:,} bytes of a memory file cannot be mapped")
        self.address, self.size_bytes = address, size_bytes
        weakref.finalize(self, libc.munmap, address, size_bytes).atexit = False

    def bytes(self, size_bytes: int) -> Any:
        """Its first bytes as a buffer, which does not keep the mapping."""
        return (ctypes.c_char * size_bytes).from_address(self.address)

    @contextmanager
    def writable(self) -> Iterator[None]:
        """It may be written to. Raises MemoryError when the kernel refuses."""
        self.allow_writing()
        try:
            yield
        finally:
            self.forbid_writing()

    def allow_writing(self) -> None:
        """Until `forbid_writing`. Raises MemoryError when the kernel refuses."""
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def forbid_writing(self) -> None:
        """Whoever writes to it ends this process. Raises MemoryError when the kernel refuses."""
        self._protect(mmap.PROT_READ)

    def empty(self) -> None:
        """Give its pages back to the kernel; whoever reads it finds zeros."""
        with self.writable():
            libc.madvise(self.address, self.size_bytes, _MADV_REMOVE)

    def _protect(self, protection: int) -> None:
        if libc.mprotect(self.address, self.size_bytes, protection):
            raise MemoryError(f"{self.size_bytes:,} mapped bytes keep their protection")


@dataclass(frozen=True, slots=True)
class Handed:
    """A sample's memory by number; `descriptor` is -1 where the worker knows it."""

    number: int
    descriptor: int


@dataclass(frozen=True, slots=True)
class Returned:
    """Numbers of memory that may be filled again, and of memory that the worker has unmapped."""

    free: Sequence[int] = ()
    gone: Sequence[int] = ()


class FilledMemory:
    """The decoder's side."""

    def __init__(self) -> None:
        self._files: dict[int, MappedFile] = {}
        self._free: list[int] = []
        self._lent: int | None = None
        self._made = 0

    def lend(self, size_bytes: int) -> NDArray[np.uint8] | None:
        """Free memory for a sample of this size, uint8[size_bytes], that may be written to until
        `settle`, and is the same until then; None where there is none. What of a sample lies in its
        place there is handed over without a copy."""
        if self._lent is None:
            number = self._fitting(size_bytes)
            if number is None:
                return None
            try:
                self._files[number].allow_writing()
            except MemoryError:
                self._free.append(number)
                return None
            self._lent = number
        return self._beginning(self._lent, size_bytes)

    def settle(self) -> None:
        """What was lent and is not handed over is free again. Nothing may refer to it any more."""
        if self._lent is not None:
            self._free.append(self._returned())

    def _returned(self) -> int:
        number, self._lent = self._lent, None
        assert number is not None
        self._files[number].forbid_writing()
        return number

    def fill(self, buffers: Sequence[memoryview | bytes], size_bytes: int) -> Handed:
        """Memory that holds these buffers end to end; its descriptor, if there is one, is the
        caller's to close. Raises OSError or MemoryError when there is none."""
        number = self._lent
        if number is not None:
            own = self._beginning(number, size_bytes)
            if (left := _not_in_place(own, buffers)) is not None:
                for place, buffer in left:
                    place[:] = buffer
                return Handed(self._returned(), -1)
        number = self._fitting(size_bytes)
        if number is None:
            return self._new(buffers, size_bytes)
        with self._files[number].writable():
            at = 0
            own = self._beginning(number, size_bytes)
            for buffer in map(_bytes_of, buffers):
                own[at : at + len(buffer)] = buffer
                at += len(buffer)
        return Handed(number, -1)

    def _beginning(self, number: int, size_bytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(self._files[number].bytes(size_bytes), np.uint8)

    def take_back(self, returned: Returned) -> None:
        """What the worker has no use for any more. Numbers that it was never given are ignored."""
        for number in returned.gone:
            self._files.pop(number, None)
        self._free = [n for n in (*self._free, *returned.free) if n in self._files]

    def _fitting(self, size_bytes: int) -> int | None:
        """The smallest that is free and large enough, and not much too large."""
        most_bytes = LARGEST_SHARE * size_bytes
        fitting = (n for n in self._free if size_bytes <= self._files[n].size_bytes <= most_bytes)
        number = min(fitting, key=lambda n: self._files[n].size_bytes, default=None)
        if number is not None:
            self._free.remove(number)
        return number

    def _new(self, buffers: Sequence[memoryview | bytes], size_bytes: int) -> Handed:
        """Writes through the descriptor: fresh pages would be faulted in one by one."""
        whole_bytes = file_bytes(size_bytes)
        descriptor = os.memfd_create("sample", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, whole_bytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            write_buffers(descriptor, buffers)
            mapping = MappedFile(descriptor, whole_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        self._made += 1
        self._files[self._made] = mapping
        return Handed(self._made, descriptor)


def _bytes_of(buffer: memoryview | bytes) -> NDArray[np.uint8]:
    return np.frombuffer(buffer, np.uint8)


def _not_in_place(
    own: NDArray[np.uint8], buffers: Sequence[memoryview | bytes]
) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]] | None:
    """Of buffers that are to lie in `own` end to end, those that do not yet, each with its place;
    None where one lies there in another's place."""
    begin, left, at = _address(own), [], 0
    for buffer in map(_bytes_of, buffers):
        place, end = _address(buffer) - begin, at + len(buffer)
        if place != at:
            if -len(buffer) < place < len(own):
                return None
            left.append((own[at:end], buffer))
        at = end
    return left


def _address(array: NDArray[np.uint8]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


@dataclass(kw_only=True, slots=True)
class ReadMemory:
    """The worker's side, for one decoder process. Used by one thread at a time; views may end on
    any."""

    kept_bytes: int = KEPT_BYTES
    _files: dict[int, MappedFile] = field(default_factory=dict)
    _used: set[int] = field(default_factory=set)
    _ended: deque[int] = field(default_factory=deque)
    _gone: list[int] = field(default_factory=list)

    def sample(self, handed: Handed, planned: SampleLengths) -> DecodedSample:
        """Views of a sample; its memory counts as used until the last of them is gone. Closes the
        descriptor. Raises ValueError when the memory breaks the protocol, OSError or MemoryError
        when it can be neither mapped nor read."""
        try:
            return self._sample(handed, sample_bytes(planned), planned)
        finally:
            if handed.descriptor >= 0:
                os.close(handed.descriptor)

    def _sample(self, handed: Handed, size_bytes: int, planned: SampleLengths) -> DecodedSample:
        number = handed.number
        if handed.descriptor >= 0:
            self._check_new(handed, size_bytes)
            try:
                self._files[number] = MappedFile(handed.descriptor, file_bytes(size_bytes))
            except MemoryError:  # this process has no more mappings
                self._gone.append(number)
                return sample_of_bytes(read_memory(handed.descriptor, size_bytes), planned)
        file = self._files.get(number)
        if file is None or number in self._used or file.size_bytes < size_bytes:
            raise ValueError(f"the memory {number} of a sample is unknown, in use or too small")
        self._used.add(number)
        buffer = file.bytes(size_bytes)
        end = weakref.finalize(buffer, _end, self._ended, number, file, self.kept_bytes)
        end.atexit = False
        return sample_of_bytes(memoryview(buffer).toreadonly(), planned)

    def _check_new(self, handed: Handed, size_bytes: int) -> None:
        if fcntl.fcntl(handed.descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the size of a sample's memory file is not sealed")
        if os.fstat(handed.descriptor).st_size != file_bytes(size_bytes):
            raise ValueError("the memory file of a sample has not its planned size")
        if handed.number < 0 or handed.number in self._files:
            raise ValueError(f"the memory {handed.number} of a sample is no new one")

    def returned(self) -> Returned:
        """What has been released since the last call, for the next order."""
        free = [self._ended.popleft() for _ in range(len(self._ended))]
        self._used.difference_update(free)
        kept = [number for number in self._files if number not in self._used]
        left_bytes = sum(self._files[number].size_bytes for number in kept)
        gone, self._gone = self._gone, []
        for number in kept:  # the oldest first
            if left_bytes <= self.kept_bytes:
                break
            left_bytes -= self._files.pop(number).size_bytes
            gone.append(number)
        return Returned([number for number in free if number in self._files], gone)


def _end(ended: deque[int], number: int, file: MappedFile, kept_bytes: int) -> None:
    """Notes that the last view of a sample is gone; its mapping is held until then. Runs on any
    thread, at any moment: only the length of the list says how much is free. Pages go before the
    number is noted: afterwards the decoder may have filled them with the next sample."""
    if (len(ended) + 1) * file.size_bytes > kept_bytes:
        file.empty()
    ended.append(number)
