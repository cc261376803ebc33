"""Streams of the played device: what is queued where, and whether anything comes too early.

Every stream counts its operations, and knows how many of each other stream come before what it does
next (a vector clock; Lamport 1978, Mattern 1989). Each memory of the device knows who wrote and who
read it last. Two things are faults: to use what another stream writes, or to write what it uses,
without having waited for it; and to let memory go, back to the stream that took it, while another
one may still use it that neither was waited for nor is recorded (``record_stream``).

What backward passes do is left to autograd, which orders the streams of a graph itself.
"""

import time
import traceback
from collections import Counter, defaultdict
from contextlib import contextmanager

import torch
from torch._C import _current_autograd_node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from tests.trainer_client.runtime.fake_device import DeviceTensor, FakeDevice, Staged, name_of

COMPUTING, ENCODERS, SENDING = "computing", "encoders", "sending"


class Memory:
    """A storage of the device, of the stream that took it."""

    def __init__(self, storage, home):
        self.alive = StorageWeakRef(storage)
        self.home, self.recorded = home, set()
        self.uses = {}  # (stream, begin, end, writes): the number of its last such operation


def extent(tensor):
    """The bytes of its storage from its first to its last number."""
    begin = tensor.storage_offset()
    last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    numbers = last + 1 if tensor.numel() else 0
    return begin * tensor.itemsize, (begin + numbers) * tensor.itemsize


class PlayedStreams:
    """All streams of the device; ``faults`` lists what came too early."""

    def __init__(self):
        self.known = defaultdict(Counter)
        self.current = COMPUTING
        self.memories, self.faults = {}, []
        self.log, self.operations = [], Counter()

    def plays(self, tensor):
        """Whether it lies on the device."""
        return isinstance(tensor, DeviceTensor)

    def numbers(self, tensor):
        """What holds its numbers."""
        return tensor.held

    def left_to_autograd(self):
        """Whether what runs now is not checked."""
        return _current_autograd_node() is not None

    def step(self, stream):
        """One more operation of the stream."""
        self.known[stream][stream] += 1
        self.operations[stream] += 1

    def wait(self, stream, known):
        """The stream goes on once all that is known there is done."""
        self.sweep()
        self.known[stream] |= known

    def memory_of(self, tensor):
        storage = self.numbers(tensor).untyped_storage()
        if storage.nbytes() == 0:
            return None
        found = self.memories.get(storage.data_ptr())
        if found is None:
            found = self.memories[storage.data_ptr()] = Memory(storage, self.current)
        return found

    def used(self, stream, tensor, *, writes):
        """The stream's present operation reads or writes it."""
        memory = self.memory_of(tensor)
        if memory is None:
            return
        if self.left_to_autograd():
            memory.recorded.add(COMPUTING)  # by autograd, with the waits
            return
        begin, end = extent(self.numbers(tensor))
        for (other, first, last, wrote), count in memory.uses.items():
            meet = first < end and begin < last and (writes or wrote)
            if meet and self.known[stream][other] < count:
                self.fault(f"{stream} {'writes' if writes else 'reads'} beside {other}")
        memory.uses[stream, begin, end, writes] = self.known[stream][stream]

    def sweep(self):
        """Memory that nobody holds any more goes back to its stream."""
        gone = [place for place, memory in self.memories.items() if memory.alive.expired()]
        for place in gone:
            memory = self.memories.pop(place)
            safe = {memory.home} | memory.recorded
            for (other, *_), count in memory.uses.items():
                if not any(self.known[each][other] >= count for each in safe):
                    self.fault(f"memory of {memory.home} is let go while {other} uses it")

    def fault(self, what):
        where = [f"{f.filename.split('/')[-1]}:{f.lineno}" for f in traceback.extract_stack()]
        self.faults.append((what, [each for each in where if "played" not in each][-6:]))


class StreamedDevice(FakeDevice):
    """The played device, whose operations are queued on the current stream."""

    def __init__(self, streams):
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        streams = self.streams
        streams.sweep()
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor)]
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        made = [each for each in tree_leaves(result) if isinstance(each, DeviceTensor)]
        if given or made:
            self._queue(name_of(operation), given, made, args)
        return result

    def _queue(self, name, given, made, args):
        streams = self.streams
        streams.step(streams.current)
        into = args[0] if name.endswith("_") else None
        places = {each.held.untyped_storage().data_ptr() for each in given}
        for each in given:
            streams.used(streams.current, each, writes=each is into)
        for each in made:
            if each.held.untyped_storage().data_ptr() not in places:
                streams.used(streams.current, each, writes=True)


def play(streams):
    """The calls of torch.cuda that use streams, in this process; the classes of streams and events,
    and what enters a stream."""

    class Stream:
        def __init__(self, device=None, name=ENCODERS):
            self.name = name

        def wait_stream(self, other):
            streams.log.append(f"{self.name} waits for {other.name}")
            streams.wait(self.name, streams.known[other.name])

        def wait_event(self, event):
            streams.log.append(f"{self.name} waits for {event.of}")
            streams.wait(self.name, event.known)

    class Event:
        def __init__(self, *, enable_timing=False):
            self.known = Counter()

        def record(self, stream):
            self.of, self.known = stream.name, Counter(streams.known[stream.name])
            self.at_s = time.perf_counter()

    @contextmanager
    def entered(stream):
        before, streams.current = streams.current, stream.name
        try:
            yield
        finally:
            streams.current = before

    def record_stream(tensor, stream):
        streams.log.append(f"{stream.name} keeps memory")
        memory = streams.memory_of(tensor)
        if memory is not None:
            memory.recorded.add(stream.name)

    torch.cuda.Stream, torch.cuda.Event, torch.cuda.stream = Stream, Event, entered
    torch.cuda.current_stream = lambda device=None: Stream(name=streams.current)
    DeviceTensor.record_stream = record_stream
    return Stream, Event, entered


class StreamedTransport(Staged):
    """Gloo that is ordered as NCCL is: behind the stream that posts, before the one that waits."""

    def __init__(self, transport, streams):
        super().__init__(transport)
        self._streams = streams

    def send(self, tensors, *where):
        return self._posted(tensors, super().send(tensors, *where), writes=False)

    def recv(self, tensors, *where):
        return self._posted(tensors, super().recv(tensors, *where), writes=True)

    def allreduce(self, tensors, operation):
        return self._posted(tensors, super().allreduce(tensors, operation), writes=True)

    def _posted(self, tensors, work, *, writes):
        streams = self._streams
        streams.wait(SENDING, streams.known[streams.current])
        streams.step(SENDING)
        for tensor in tensors:
            if streams.plays(tensor):
                streams.used(SENDING, tensor, writes=writes)
                if (memory := streams.memory_of(tensor)) is not None:
                    memory.recorded.add(SENDING)  # as torch does
        return _Work(work, streams, Counter(streams.known[SENDING]))


class _Work:
    def __init__(self, work, streams, known):
        self._work, self._streams, self._known = work, streams, known

    def is_completed(self):
        return self._work.is_completed()

    def wait(self, *limit):
        done = self._work.wait(*limit)
        self._streams.wait(self._streams.current, self._known)
        return done
