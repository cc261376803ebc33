"""The thread that fetches ahead."""

import threading

import pytest

from trainer_client.prefetch import Prefetcher


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
    assert prefetcher.peek(10.0) == "item 0"
    assert prefetcher.ready() == "item 0"
    assert prefetcher.next(10.0) == "item 0"
    assert prefetcher.ready() is None
    go_on.set()
    failing.wait()
    prefetcher.join(10.0)
    assert prefetcher.ready() is None
    with pytest.raises(RuntimeError, match="lost"):
        prefetcher.next(10.0)
    prefetcher.close()
