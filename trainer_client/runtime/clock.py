"""Times of a step on the device that computes, and the seconds of each phase.

A step is always in one phase, so the seconds of its phases add up to the step's. ``switch_phase``
costs a clock reading on a CPU and an event on a GPU's stream; nothing waits for the device until
the step is over.
"""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


class PhaseClock:
    """Counts seconds by phase since it was made. It begins in phase ``other``.

    A phase may have a ``place``: what several replicas go through together, such as an exchange.
    """

    def __init__(self, device: torch.device, *, place: Hashable = None) -> None:
        self._clock = start_clock(device)
        self.on_stream = self._clock.on_stream
        self._begun = [(OTHER, place, self._clock.mark())]
        self._ended: int | None = None

    def switch(self, phase: str, place: Hashable = None) -> None:
        """Begin this phase, at this place."""
        self._begun.append((phase, place, self._clock.mark()))

    def stop(self) -> None:
        """End the last phase."""
        self._ended = self._clock.mark()

    def seconds(self) -> dict[tuple[str, Hashable], float]:
        """Seconds of every phase until it was stopped, or so far, at each of its places. Waits for
        the device to come that far."""
        ended = self._clock.mark() if self._ended is None else self._ended
        moments_s = self._clock.read()
        spent: dict[tuple[str, Hashable], float] = {}
        ends = [mark for *_, mark in self._begun[1:]] + [ended]
        for (phase, place, begun), end in zip(self._begun, ends, strict=True):
            before_s = spent.get((phase, place), 0.0)
            spent[phase, place] = before_s + moments_s[end] - moments_s[begun]
        return spent


_running: ContextVar[PhaseClock | None] = ContextVar("phase clock of this step", default=None)


@contextmanager
def phase_clock(device: torch.device, *, place: Hashable = None) -> Iterator[PhaseClock]:
    """The clock that ``switch_phase`` of this thread switches; it begins at ``place``."""
    clock = PhaseClock(device, place=place)
    token = _running.set(clock)
    try:
        yield clock
    finally:
        _running.reset(token)


def switch_phase(phase: str, place: Hashable = None) -> None:
    """Begin a phase of the step that runs in this thread, if one is measured."""
    if (clock := _running.get()) is not None:
        clock.switch(phase, place)


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
