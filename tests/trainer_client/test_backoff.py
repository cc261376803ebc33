"""Retries: waits that grow within limits, differ from rank to rank, and end at a deadline."""

import threading
import time

import pytest

from trainer_client import backoff
from trainer_client.backoff import FIRST_WAIT_S, LONGEST_WAIT_S, Backoff


class Waits(threading.Event):
    """Keeps how long it was waited on, and moves the clock instead of waiting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now_s = 0.0
        self.waits: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.now_s += timeout
        return self.is_set()


def test_waits_are_drawn_from_zero_to_a_limit_that_doubles_up_to_the_longest(monkeypatch):
    limits = []
    monkeypatch.setattr(
        backoff.random, "uniform", lambda low, high: limits.append((low, high)) or high
    )
    stop = Waits(monkeypatch)
    retry = Backoff(stop, deadline_s=1e6)
    for _ in range(40):
        assert retry.wait()
    assert {low for low, _ in limits} == {0.0}
    assert [high for _, high in limits[:3]] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert max(stop.waits) == LONGEST_WAIT_S == stop.waits[-1]


def test_two_ranks_do_not_wait_alike(monkeypatch):
    stops = [Waits(monkeypatch), Waits(monkeypatch)]
    for stop in stops:
        retry = Backoff(stop, deadline_s=1e6)
        for _ in range(8):
            retry.wait()
    assert stops[0].waits != stops[1].waits


def test_the_last_attempt_is_made_at_the_deadline_and_none_behind_it(monkeypatch):
    stop = Waits(monkeypatch)
    retry = Backoff(stop, deadline_s=12.0)
    while retry.wait():
        pass
    assert sum(stop.waits) == pytest.approx(12.0) == retry.spent_s
    assert retry.attempts == len(stop.waits)


def test_stopping_ends_the_waiting(monkeypatch):
    stop = Waits(monkeypatch)
    retry = Backoff(stop, deadline_s=12.0)
    assert retry.wait()
    stop.set()
    assert not retry.wait()
    assert len(stop.waits) == 1
