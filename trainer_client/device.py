"""Copies a shard's microbatches to the device that trains, one ahead of the one that computes.

    prefetch thread                            training loop
    numbers and ring layouts ─ bundled ─┐      for mb in shard.microbatches:
    items, pinned as they arrived ──────┴─▶      k: wait for its copies, start those of k + 1
                                                      └─ on a stream of their own ─┘

The plan's numbers (`cu_seqlens`, `lengths`, `sample_ids`, splits) stay on the host, where groups
are worked out from them. The blocks of ring attention, which follow from them, are worked out in
the prefetch thread and travel with the tokens.

On the device are the microbatch that computes, the next one, and the first of every step that
waits. Until a step is over, its bytes stay on the host as well. The host never waits for the
device: it starts copies from pinned memory, and tells the loop's stream to wait for them. A buffer
on the host lives until its copies are done (torch's pinned allocator sees to it), and one on the
device until the loop's stream has used it (`record_stream`). Other devices than CUDA get plain
copies, the host none.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol, overload
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from trainer_client.shard import Microbatch, Shard
from trainer_client.staging import BufferCopies, bundled


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CopyTimes:
    """When the copies of a wave's microbatch were made: between two CUDA events, where there are
    streams, else between two readings of `time.perf_counter`."""

    wave: int
    size_bytes: int
    began_s: float
    ended_s: float
    began: torch.cuda.Event | None = None
    copied: torch.cuda.Event | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sent:
    """A microbatch whose copies have been started, and its buffers on the device."""

    microbatch: Microbatch
    buffers: Sequence[Tensor]
    times: CopyTimes


class CopyQueue(Protocol):
    """Starts copies, and orders work behind them."""

    def start(self, microbatch: Microbatch) -> Sent:
        """Start copying from the host; returns at once."""
        ...

    def arrive(self, sent: Sent) -> Microbatch:
        """The microbatch, for work on the calling thread's current stream."""
        ...


class PlainQueue:
    """For devices without streams of ours."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def start(self, microbatch: Microbatch) -> Sent:
        """Copy."""
        copies, began_s = BufferCopies(self.copy, self._device), perf_counter()
        there = microbatch.mapped(copies)
        times = CopyTimes(
            wave=microbatch.wave,
            size_bytes=sum(buffer.nbytes for buffer in copies.buffers),
            began_s=began_s,
            ended_s=perf_counter(),
        )
        return Sent(microbatch=there, buffers=copies.buffers, times=times)

    def arrive(self, sent: Sent) -> Microbatch:
        """The copy."""
        return sent.microbatch

    def copy(self, whole: Tensor) -> Tensor:
        """A buffer's bytes on the device."""
        return whole.to(self._device, non_blocking=True)


class StreamQueue(PlainQueue):
    """A CUDA stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, microbatch: Microbatch) -> Sent:
        """Copy on the stream, between two events."""
        with torch.cuda.stream(self._stream):
            began, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            began.record(self._stream)
            sent = super().start(microbatch)
            copied.record(self._stream)
        return replace(sent, times=replace(sent.times, began=began, copied=copied))

    def arrive(self, sent: Sent) -> Microbatch:
        """The current stream waits for the copies."""
        assert sent.times.copied is not None, "started by this queue"
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(sent.times.copied)
        for buffer in sent.buffers:
            buffer.record_stream(computing)
        return sent.microbatch


_listener: ContextVar[Callable[[CopyTimes], None] | None] = ContextVar("told copies", default=None)


@contextmanager
def telling_copies(listener: Callable[[CopyTimes], None]) -> Iterator[None]:
    """The listener is told of each microbatch's copies when the body takes it up."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class StagedMicrobatches(Sequence[Microbatch]):
    """A step's microbatches, each copied to the device while the one before it computes.

    Taking one up starts the copies of the next, in the order of the step or of `take_in_order`. One
    that nobody holds any more is gone from the device, and is copied again if it is asked for
    again. For one thread at a time.
    """

    def __init__(self, on_host: Sequence[Microbatch], queue: CopyQueue) -> None:
        self._on_host = on_host
        self._queue = queue
        self._ahead: dict[int, Sent] = {}
        self._taken: WeakValueDictionary[int, Microbatch] = WeakValueDictionary()
        self._order: Sequence[int] = range(len(on_host))
        for first in self._order[:1]:
            self._start(first)

    def take_in_order(self, places: Sequence[int]) -> None:
        """All places, in the order in which they will be taken up first."""
        self._order = places

    def __len__(self) -> int:
        return len(self._on_host)

    @overload
    def __getitem__(self, place: int) -> Microbatch: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Microbatch, ...]: ...
    def __getitem__(self, place: int | slice) -> Microbatch | tuple[Microbatch, ...]:
        if isinstance(place, slice):
            return tuple(self[each] for each in range(*place.indices(len(self))))
        place = range(len(self))[place]  # counts from the end, and raises IndexError
        taken = self._taken.get(place)
        if taken is None:
            self._start(place)
            sent = self._ahead.pop(place)
            taken = self._queue.arrive(sent)
            if (listener := _listener.get()) is not None:
                listener(sent.times)
            self._taken[place] = taken
        turn = self._order.index(place)
        later = self._order[turn + 1 :]
        self._ahead = {k: sent for k, sent in self._ahead.items() if k in later}
        for following in later[:1]:
            self._start(following)
        return taken

    def _start(self, place: int) -> None:
        if place not in self._ahead and place not in self._taken:
            self._ahead[place] = self._queue.start(self._on_host[place])


class DeviceCopier:
    """Sends shards to `device`; None leaves them where they are, unpinned.

    `queue` starts the copies, by default as the device does it best.
    """

    def __init__(self, device: torch.device | None, *, queue: CopyQueue | None = None) -> None:
        self.pins = device is not None and device.type == "cuda"
        """Whether bytes should arrive in pinned memory."""
        if queue is None and device is not None and device.type != "cpu":
            queue = StreamQueue(device) if self.pins else PlainQueue(device)
        self._queue = queue

    def send(self, shard: Shard) -> Shard:
        """The shard, its microbatches on their way; called by the prefetch thread."""
        if self._queue is None:
            return shard
        on_host = tuple(self._prepared(microbatch) for microbatch in shard.microbatches)
        staged = StagedMicrobatches(on_host, self._queue)
        return replace(shard, microbatches=staged, on_host=on_host)

    def _prepared(self, microbatch: Microbatch) -> Microbatch:
        # A client whose shards stay on the host loads no runtime.
        from trainer_client.runtime.ring_layout import causal_layouts

        placed = microbatch.laid_out(causal_layouts(microbatch))
        return bundled(placed.mapped, pin=self.pins)


def resolve_device(device: torch.device | str | None) -> torch.device | None:
    """`device` with its index: threads other than the caller's would take "cuda" for cuda:0."""
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
