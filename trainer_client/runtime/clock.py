"""Times of a step on the device that computes, and the seconds of each phase.

A step is always in one phase, so the seconds of its phases add up to the step's. ``switch_phase``
costs a clock reading on a CPU and an event on a GPU's stream; nothing waits for the device until
the step is over.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

OTHER = "other"


class Clock(Protocol):
    """Notes moments of a step, which are read afterwards in seconds since the clock was made.

    ``on_stream``: whether a moment is known only once the device has come so far.
    """

    on_stream: bool

    def mark(self) -> int:
        """Note this moment; returns its number."""
        ...

    def read(self) -> list[float]:
        """All moments that were noted, in seconds since the clock was made."""
        ...

    def seconds_at(self, event: torch.cuda.Event) -> float:
        """When an event of this device was, in the same seconds."""
        ...


def start_clock(device: torch.device) -> Clock:
    """A clock of the device that computes: the host's for CPU, the current stream's for CUDA."""
    return _StreamClock(device) if device.type == "cuda" else _HostClock()


_host_time: ContextVar[Callable[[], float]] = ContextVar("host time", default=time.perf_counter)


@contextmanager
def host_time(now: Callable[[], float]) -> Iterator[None]:
    """A CPU's phases are counted in these seconds, such as those of ``time.process_time``, in which
    neither other programs nor waiting count."""
    token = _host_time.set(now)
    try:
        yield
    finally:
        _host_time.reset(token)


class _HostClock:
    on_stream = False

    def __init__(self) -> None:
        self._now = _host_time.get()
        self._origin_s = self._now()
        self._moments_s: list[float] = []

    def mark(self) -> int:
        self._moments_s.append(self._now() - self._origin_s)
        return len(self._moments_s) - 1

    def read(self) -> list[float]:
        return self._moments_s

    def seconds_at(self, event: torch.cuda.Event) -> float:
        raise TypeError("a CPU's clock has no events")


class _StreamClock:
    """The host only enqueues work, so moments are events on its stream."""

    on_stream = True

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._origin = self._event()
        self._moments: list[torch.cuda.Event] = []

    def mark(self) -> int:
        self._moments.append(self._event())
        return len(self._moments) - 1

    def read(self) -> list[float]:
        if self._moments:
            self._moments[-1].synchronize()  # not the stream, on which more may be queued by now
        return [self._origin.elapsed_time(moment) / 1e3 for moment in self._moments]

    def seconds_at(self, event: torch.cuda.Event) -> float:
        event.synchronize()
        return float(self._origin.elapsed_time(event)) / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class PhaseClock:
    """Counts seconds by phase since it was made. It begins in phase ``other``.

    A phase may have a ``place``: what several replicas go through together, such as an exchange.
    """

    def __init__(self, device: torch.device, *, place: Hashable = None) -> None:
        self.began_s = time.perf_counter()
        self.notes: list[Note] | None = None
        self._clock = start_clock(device)
        self.on_stream = self._clock.on_stream
        self._begun = [(OTHER, place, self._clock.mark())]
        self.labels: dict[int, str] = {}  # of some of `spans`, by their places there
        self._ended: int | None = None

    def switch(self, phase: str, place: Hashable = None, *, label: str = "") -> None:
        """Begin this phase, at this place. A trace shows the label around the phases that follow
        one another."""
        if label:
            self.labels[len(self._begun)] = label
        self._begun.append((phase, place, self._clock.mark()))

    def stop(self) -> None:
        """End the last phase."""
        self._ended = self._clock.mark()

    def seconds(self) -> dict[tuple[str, Hashable], float]:
        """Seconds of every phase until it was stopped, or so far, at each of its places. Waits for
        the device to come that far."""
        spent: dict[tuple[str, Hashable], float] = {}
        for phase, place, begun_s, ended_s in self.spans():
            spent[phase, place] = spent.get((phase, place), 0.0) + ended_s - begun_s
        return spent

    def spans(self) -> list[tuple[str, Hashable, float, float]]:
        """(phase, place, start, end) of each phase in turn, in seconds since the clock was made. As
        `seconds`."""
        ended = self._clock.mark() if self._ended is None else self._ended
        moments_s = self._clock.read()
        ends = [mark for *_, mark in self._begun[1:]] + [ended]
        return [
            (phase, place, moments_s[begun], moments_s[end])
            for (phase, place, begun), end in zip(self._begun, ends, strict=True)
        ]

    def moments_s(self) -> list[float]:
        """All moments by their numbers, in seconds since the clock was made."""
        return self._clock.read()

    def seconds_at(self, event: torch.cuda.Event) -> float:
        """When an event on another stream of the clock's device was, in its seconds."""
        return self._clock.seconds_at(event)

    def mark(self) -> int:
        """Note this moment; returns its number."""
        return self._clock.mark()


@dataclass(kw_only=True, slots=True)
class Note:
    """A transfer in a traced step: its name, and the moments of posting and of waiting for it."""

    clock: PhaseClock
    name: str
    posted: int
    began: int = -1
    ended: int = -1

    @contextmanager
    def waited(self) -> Iterator[None]:
        """The body waits for it."""
        self.began = self.clock.mark()
        yield
        self.ended = self.clock.mark()
        if self.clock.notes is not None:
            self.clock.notes.append(self)


_running: ContextVar[PhaseClock | None] = ContextVar("phase clock of this step", default=None)
_listener: ContextVar[Callable[[PhaseClock], None] | None] = ContextVar("told clocks", default=None)
_under_way: list[PhaseClock] = []  # of all threads


@contextmanager
def phase_clock(device: torch.device, *, place: Hashable = None) -> Iterator[PhaseClock]:
    """The clock that ``switch_phase`` of this thread switches; it begins at ``place``."""
    clock = PhaseClock(device, place=place)
    listener = _listener.get()
    if listener is not None:
        clock.notes = []
    token = _running.set(clock)
    _under_way.append(clock)
    try:
        yield clock
    finally:
        _under_way.remove(clock)
        _running.reset(token)
    if listener is not None:
        listener(clock)


@contextmanager
def telling_clocks(listener: Callable[[PhaseClock], None]) -> Iterator[None]:
    """The listener is given the clock of each step that ends in the body without an error."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def note_transfer(name: str) -> Note | None:
    """A transfer that is posted now; None where no step is traced."""
    clock = _running.get()
    if clock is None and len(_under_way) == 1:
        clock = _under_way[0]  # a thread of the device's, which runs its backward pass
    if clock is None or clock.notes is None:
        return None
    return Note(clock=clock, name=name, posted=clock.mark())


def switch_phase(phase: str, place: Hashable = None, *, label: str = "") -> None:
    """Begin a phase of the step that runs in this thread, if one is measured: as
    ``PhaseClock.switch``."""
    if (clock := _running.get()) is not None:
        clock.switch(phase, place, label=label)


def switch_in_backward(tensor: Tensor, phase: str, place: Hashable = None) -> Tensor:
    """Returns the same tensor; the phase begins when its gradient arrives."""
    clock = _running.get()
    if clock is None or not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    same: Tensor = _SwitchInBackward.apply(tensor, phase, place, clock)  # type: ignore[no-untyped-call]
    return same


def switch_after_backward(loss: Tensor, phase: str, place: Hashable = None) -> Tensor:
    """Returns the same loss; the phase begins when its backward pass is over, before whatever DDP
    and FSDP still wait for."""
    clock = _running.get()
    if clock is None or not loss.requires_grad:
        return loss
    same: Tensor = _SwitchAfterBackward.apply(loss, phase, place, clock)  # type: ignore[no-untyped-call]
    return same


class _SwitchInBackward(torch.autograd.Function):
    # Backward may run in another thread, one of the device's, so the clock is passed on.
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, phase: str, place: Hashable, clock: PhaseClock) -> Tensor:
        ctx.phase, ctx.place, ctx.clock = phase, place, clock
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.switch(ctx.phase, ctx.place)
        return grad, None, None, None


class _SwitchAfterBackward(_SwitchInBackward):
    # Callbacks run in the order in which they are queued, and this one is queued first.
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: ctx.clock.switch(ctx.phase, ctx.place))
        return grad, None, None, None
