"""The streams of FSDP2 beside the runtime's, played with tensors of the CPU.

FSDP2 asks ``torch.cpu`` for its streams as it would ask ``torch.cuda``, so what it queues where is
its own doing, as is every event. What is checked is said in ``played_streams.py``; here backward
passes are checked too. Memory goes back as torch's allocator has it: at once, but only to the
stream that took it. So what still uses it must come before what that stream takes next.
"""

from collections import defaultdict

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trainer_client.runtime.fake_device import name_of
from tests.trainer_client.runtime.played_streams import Memory, PlayedStreams, play

COPY_IN, GATHERS, SCATTERS, SUMS = "copy-in", "gathers", "scatters", "sums"
IN_ORDER = (COPY_IN, GATHERS, SCATTERS, SUMS)  # in which FSDP2 makes its streams


class ShardedStreams(PlayedStreams):
    """``deaf``: a stream that waits for nothing, for a test that this is found."""

    def __init__(self):
        super().__init__()
        self.deaf = None
        self.given_back = defaultdict(list)  # of a stream: (who uses it, the last such operation)

    def plays(self, tensor):
        return isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor)

    def numbers(self, tensor):
        return tensor

    def left_to_autograd(self):
        return False

    def wait(self, stream, known):
        if stream != self.deaf:
            super().wait(stream, known)

    def hold(self, tensor):
        """The current stream has made this tensor before."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self.memories.setdefault(storage.data_ptr(), Memory(storage, self.current))

    def queue(self, reads, writes):
        """One operation of the current stream."""
        stream = self.current
        self.step(stream)
        for tensor in reads:
            self.hold(tensor)
            self.used(stream, tensor, writes=False)
        for tensor in writes:
            self._take(tensor)
            self.used(stream, tensor, writes=True)

    def _take(self, tensor):
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in self.memories:
            return
        stream = self.current
        self.memories[storage.data_ptr()] = Memory(storage, stream)
        for other, count in self.given_back.pop(stream, ()):
            if self.known[stream][other] < count:
                self.fault(f"{stream} takes memory that {other} uses")

    def sweep(self):
        for place in [place for place, memory in self.memories.items() if is_gone(place, memory)]:
            memory = self.memories.pop(place)
            self.given_back[memory.home] += [
                (other, count)
                for (other, *_), count in memory.uses.items()
                if other not in memory.recorded
            ]


def is_gone(place, memory):
    """Whether nobody holds it, or it was emptied, as FSDP2 empties gathered weights."""
    if memory.alive.expired():
        return True
    storage = torch.UntypedStorage._new_with_weak_ptr(memory.alive.cdata)
    return storage is None or storage.data_ptr() != place


class ShardedDevice(TorchDispatchMode):
    """While it is entered, operations are queued on the current stream."""

    def __init__(self, streams):
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        streams, kwargs = self.streams, kwargs or {}
        streams.sweep()
        given = list(filter(streams.plays, tree_leaves((args, kwargs))))
        into = list(filter(streams.plays, tree_leaves(written(operation, args, kwargs))))
        result = operation(*args, **kwargs)
        made = [
            tensor
            for tensor in filter(streams.plays, tree_leaves(result))
            if not any(same_memory(tensor, other) for other in given)
        ]
        if into or made:  # else it is a view
            reads = [tensor for tensor in given if not any(tensor is other for other in into)]
            streams.queue(reads, into + made)
        return result


def written(operation, args, kwargs):
    """What the operation writes of what it is given."""
    name = name_of(operation)
    if name == "all_gather_copy_in":
        return args[1]
    return args[0] if name.endswith("_") and args else kwargs.get("out", ())


def same_memory(one, other):
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def play_sharding(streams):
    """The calls of torch.cpu and torch.accelerator that use streams, in this process."""
    stream, event, entered = play(streams)

    class Stream(stream):
        names = iter(IN_ORDER * 9)  # of one model after the other

        def __init__(self, priority=0):
            super().__init__(name=next(self.names))

        def record_event(self):
            found = event()
            found.record(self)
            return found

    class Event(event):
        def record(self, stream=None):
            super().record(stream or torch.cpu.current_stream())

    torch.cpu.Stream, torch.cpu.Event, torch.cpu.stream = Stream, Event, entered
    torch.cpu.current_stream = torch.accelerator.current_stream = torch.cuda.current_stream
