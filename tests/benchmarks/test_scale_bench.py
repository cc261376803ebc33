"""The benchmark of scale counts what a step leaves to be done as the step's own, and names what
keeps an event loop."""

import asyncio
import itertools
import time

import pytest

from benchmarks.scale import play
from benchmarks.scale.play import Stage
from benchmarks.scale.service import Size, Turns, Used


class Coordinator:
    """Answers what it has used: nothing more each time, while the next steps are not planned."""

    def __init__(self, *, behind: int) -> None:
        self.asked = 0
        self._behind = behind

    def send(self, word: str) -> None:
        """One more question."""
        assert word == "used"
        self.asked += 1

    def recv(self) -> Used:
        """No processor time, as of one that waits for its workers."""
        return Used(cpu_s=1.0, rss_bytes=1, ahead=self.asked > self._behind)


@pytest.mark.parametrize("behind", [0, 1, 5])
def test_a_coordinator_that_waits_for_workers_is_not_at_rest(monkeypatch, behind):
    waits = itertools.count()
    monkeypatch.setattr(play.time, "sleep", lambda _: next(waits))
    coordinator = Coordinator(behind=behind)
    Stage(Size(ranks=1, samples_a_rank=1), coordinator, []).settle()
    assert coordinator.asked == max(2, behind + 1)


def test_what_keeps_an_event_loop_longest_is_named(monkeypatch):
    monkeypatch.setattr(asyncio.Handle, "_run", asyncio.Handle._run)  # taken back afterwards

    async def busy(until_s: float) -> None:
        while time.thread_time() < until_s:
            pass

    async def watched() -> tuple[float, str]:
        turns = Turns()
        await asyncio.gather(busy(0.0), busy(time.thread_time() + 0.2), asyncio.sleep(0))
        return turns.longest()

    _, name = asyncio.run(watched())
    assert name.endswith(".busy")
