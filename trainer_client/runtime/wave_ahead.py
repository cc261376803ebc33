"""A step's waves in turn, each started before the decoder has the one before it.

    encode 0 ─ post ─ encode 1 ─ wait 0 ─ decode 0 ─ post 1 ─ back 0 ─ encode 2 ─ wait 1 ─ …

What is posted travels while the decoder computes, so nothing waits for the transfer, nor for an
encoder that is slower elsewhere. It is posted behind the decoder's forward pass, whose rings would
else queue behind it, and so behind the slowest encoder of all replicas; the backward pass is the
longer of the two. Where there is none, it is posted before the decoder. One wave is started ahead,
never two; of it live its feature rows, and where encoders train, what their backward pass needs.
Nothing that a wave's backward pass adds up depends on the next wave, so gradients are the same to
the last bit either way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, Protocol, TypeVar

import torch

from trainer_client.runtime.encoder_stream import EncoderStream
from trainer_client.shard import Microbatch, Shard


class Posted(Protocol):
    """What was started of a wave."""

    def post(self) -> None:
        """Start to send what is not on its way yet."""
        ...


Started = TypeVar("Started", bound=Posted)
Given = TypeVar("Given", bound=Posted, covariant=True)


class Start(Protocol[Given]):
    """Encodes a microbatch's items on the stream, or on the current one, and with `post` starts to
    send each."""

    def __call__(
        self, microbatch: Microbatch, *, stream: EncoderStream | None, post: bool
    ) -> Given: ...


class WaveAhead(Generic[Started]):
    """The microbatches of a step, gone through once, and what was started of the next one.

    ``ahead``: whether the next one is started; None for where that keeps nothing for a backward
    pass. ``stream``: where encoders run.
    """

    def __init__(self, shard: Shard, ahead: bool | None, stream: EncoderStream | None) -> None:
        self._microbatches = shard.microbatches
        self._planned = shard.planned
        self._ahead = ahead
        self._stream = stream
        self._place = 0
        self._started: dict[int, tuple[Microbatch, Started]] = {}

    def __iter__(self) -> Iterator[Microbatch]:
        for place, microbatch in enumerate(self._microbatches):
            self._place = place
            yield microbatch

    def take(
        self,
        microbatch: Microbatch,
        start: Start[Started],
        keeps: Callable[[Microbatch], bool],
    ) -> Started:
        """What was started of the microbatch that this is at, or is now. Then the next one is
        started, if it may be; ``keeps``: whether one keeps anything for a backward pass."""
        _, taken = self._started.pop(self._place, (microbatch, None))
        if taken is None:
            taken = start(microbatch, stream=self._stream, post=True)
        following = self._place + 1
        if following not in self._started and self._may_start(following, keeps):
            held = self._microbatches[following]  # else it would leave the device again
            before_decoder = not torch.is_grad_enabled()
            started = start(held, stream=self._stream, post=before_decoder)
            self._started[following] = held, started
        return taken

    def post(self) -> None:
        """The decoder's forward pass is queued: what was started of the next wave is sent."""
        for _, started in self._started.values():
            started.post()

    def _may_start(self, place: int, keeps: Callable[[Microbatch], bool]) -> bool:
        if place == len(self._planned):
            return False
        return not keeps(self._planned[place]) if self._ahead is None else self._ahead


_running: ContextVar[WaveAhead[Any] | None] = ContextVar("waves of this step", default=None)


@contextmanager
def waves_of(
    shard: Shard, ahead: bool | None, *, stream: EncoderStream | None
) -> Iterator[WaveAhead[Any]]:
    """The waves of the step that runs in the body; ``wave_taken`` takes them."""
    waves: WaveAhead[Any] = WaveAhead(shard, ahead, stream)
    token = _running.set(waves)
    try:
        yield waves
    finally:
        _running.reset(token)


def wave_taken(
    microbatch: Microbatch,
    start: Start[Started],
    keeps: Callable[[Microbatch], bool],
) -> Started:
    """As ``WaveAhead.take`` of the step that runs in this thread; outside of one, started now."""
    waves = _running.get()
    if waves is None:
        return start(microbatch, stream=None, post=True)
    taken: Started = waves.take(microbatch, start, keeps)
    return taken
