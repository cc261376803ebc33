"""A stream of the device for encoders, beside the one on which the decoder computes.

    computing  … back k-1 ┬─ decode k ─────────────────────── back k ─┬─ decode k+1 …
    encoders              └─ encode k+1 ──────── send rows k+1 ───────┘

Contract
--------
Into the stream: whatever it computes begins once the work that the computing stream has queued so
far is done. So weights, inputs and memory that the host has let go of are in order for it.
Out of the stream: whoever computes with what it gave waits for an event of it, and marks the
memory as used (``record_stream``), since memory goes back to the stream that it was taken on.
The host waits for neither. Backward passes of what ran here run here too: autograd orders both
streams at each edge, and at the end has the caller's wait for the other.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderTimes:
    """Between two events on the stream, the items of a wave's modality were encoded."""

    modality: str
    wave: int
    began: torch.cuda.Event
    ended: torch.cuda.Event


class EncoderStream:
    """The stream. `device` has streams of its own: see ``encoder_stream_of``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """The body runs on the stream, behind what the computing one has queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        """This moment of the stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def wait(self, event: torch.cuda.Event) -> None:
        """The computing stream waits for a moment of this one; the host does not."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def hand_over(self, tensor: Tensor) -> None:
        """The computing stream uses a tensor of this one: its memory is not given away before."""
        tensor.record_stream(torch.cuda.current_stream(self._device))


@cache
def encoder_stream_of(device: torch.device) -> EncoderStream | None:
    """The process's encoder stream of a device; None where devices have no streams."""
    return EncoderStream(device) if device.type == "cuda" else None


_listener: ContextVar[Callable[[EncoderTimes], None] | None] = ContextVar(
    "told encoders", default=None
)


@contextmanager
def telling_encoders(listener: Callable[[EncoderTimes], None]) -> Iterator[None]:
    """The listener is told of each modality that the body encodes on a stream of its own."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell_encoded(times: EncoderTimes) -> None:
    """Tell the listener, if there is one."""
    if (listener := _listener.get()) is not None:
        listener(times)
