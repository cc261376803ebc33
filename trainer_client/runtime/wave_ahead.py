"""A step's waves in turn, each started before the decoder has the one before it.

    encode 0 ─ post ─ encode 1 ─ post ─ wait 0 ─ decode 0, back ─ encode 2 ─ post ─ wait 1 ─ …

What is posted travels while the decoder computes, so nothing waits for the transfer, nor for an
encoder that is slower elsewhere. One wave is started ahead, never two; of it live its feature
rows, and where encoders train, what their backward pass needs. Nothing that a wave's backward pass
adds up depends on the next wave, so gradients are the same to the last bit either way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from trainer_client.shard import Microbatch, Shard

Started = TypeVar("Started")


class WaveAhead(Generic[Started]):
    """The microbatches of a step, gone through once, and what was started of the next one.

    ``ahead``: whether the next one is started; None for where that keeps nothing for a backward
    pass.
    """

    def __init__(self, shard: Shard, ahead: bool | None) -> None:
        self._microbatches = shard.microbatches
        self._planned = shard.planned
        self._ahead = ahead
        self._place = 0
        self._started: dict[int, tuple[Microbatch, Started]] = {}

    def __iter__(self) -> Iterator[Microbatch]:
        for place, microbatch in enumerate(self._microbatches):
            self._place = place
            yield microbatch

    def take(
        self,
        microbatch: Microbatch,
        start: Callable[[Microbatch], Started],
        keeps: Callable[[Microbatch], bool],
    ) -> Started:
        """What was started of the microbatch that this is at, or is now. Then the next one is
        started, if it may be; ``keeps``: whether one keeps anything for a backward pass."""
        _, taken = self._started.pop(self._place, (microbatch, None))
        if taken is None:
            taken = start(microbatch)
        following = self._place + 1
        if following not in self._started and self._may_start(following, keeps):
            held = self._microbatches[following]  # else it would leave the device again
            self._started[following] = held, start(held)
        return taken

    def _may_start(self, place: int, keeps: Callable[[Microbatch], bool]) -> bool:
        if place == len(self._planned):
            return False
        return not keeps(self._planned[place]) if self._ahead is None else self._ahead


_running: ContextVar[WaveAhead[Any] | None] = ContextVar("waves of this step", default=None)


@contextmanager
def waves_of(shard: Shard, ahead: bool | None) -> Iterator[WaveAhead[Any]]:
    """The waves of the step that runs in the body; ``wave_taken`` takes them."""
    waves: WaveAhead[Any] = WaveAhead(shard, ahead)
    token = _running.set(waves)
    try:
        yield waves
    finally:
        _running.reset(token)


def wave_taken(
    microbatch: Microbatch,
    start: Callable[[Microbatch], Started],
    keeps: Callable[[Microbatch], bool],
) -> Started:
    """As ``WaveAhead.take`` of the step that runs in this thread; outside of one, started now."""
    waves = _running.get()
    if waves is None:
        return start(microbatch)
    taken: Started = waves.take(microbatch, start, keeps)
    return taken
