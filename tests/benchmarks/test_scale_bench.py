"""The benchmark of scale counts what a step leaves to be done as the step's own, and times each
turn of the event loop."""

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


def test_the_turns_of_an_event_loop_are_told_apart_and_the_longest_is_told_once():
    turns = Turns()

    async def busy(longer_s: float) -> None:
        until_s = time.thread_time() + longer_s
        while time.thread_time() < until_s:
            pass

    async def watched(*longer_s: float) -> float:
        for each in longer_s:
            await busy(each)
            await asyncio.sleep(0)
        return turns.longest_s()

    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        longest = [runner.run(watched(*each)) for each in ([0.3], [0.0], [0.3, 0.3])]
    assert longest[1] < longest[0]
    assert longest[2] < 2 * longest[0], "two turns are not one"
