"""The thread that fetches ahead."""

import threading

import pytest

from trainer_client.prefetch import Committer, Prefetcher


def test_what_is_ready_is_told_without_waiting_and_without_the_threads_failure():
    go_on, failing = threading.Event(), threading.Event()
    items = iter(["item 0"])

    def load():
        for item in items:
            return item
        go_on.wait()
        failing.set()
        raise RuntimeError("lost")

    prefetcher = Prefetcher(load, depth=2)
    assert prefetcher.peek(60.0) == "item 0"
    assert prefetcher.ready() == "item 0"
    assert prefetcher.next(60.0) == "item 0"
    assert prefetcher.ready() is None
    go_on.set()
    failing.wait()
    prefetcher.join(60.0)
    assert prefetcher.ready() is None
    with pytest.raises(RuntimeError, match="lost"):
        prefetcher.next(60.0)
    prefetcher.close()


@pytest.mark.parametrize("wait", ["next", "peek", "flush"])
def test_waits_hold_their_lock_once_so_that_an_interrupt_can_give_it_back(monkeypatch, wait):
    go_on = threading.Event()
    if wait == "flush":
        waiting = Committer(lambda trained: go_on.wait())
        waiting.put(0)
    else:
        waiting = Prefetcher(lambda: go_on.wait() and None, depth=1)

    def interrupted(changed, holds, timeout_s):
        changed.release()
        with pytest.raises(RuntimeError, match="un-acquired"):
            changed.notify(0)
        changed.acquire()
        raise KeyboardInterrupt

    monkeypatch.setattr("trainer_client.prefetch.wait_for", interrupted)
    with pytest.raises(KeyboardInterrupt):
        getattr(waiting, wait)(60.0)
    waiting.close()
    go_on.set()
    waiting.join(60.0)
