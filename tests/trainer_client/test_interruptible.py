"""Waits that an interrupt ends, even one that comes in the instant before the lock's wait."""

import signal
import threading

import pytest

from trainer_client.interruptible import wait_for


class Interrupted(Exception):
    pass


@pytest.fixture
def interrupts():
    """SIGUSR1 raises Interrupted, as SIGINT raises KeyboardInterrupt."""

    def raise_it(number, frame):
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, raise_it)
    yield
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_woke_nobody_is_noticed_all_the_same(interrupts):
    changed, late, stop = threading.Condition(), threading.Event(), threading.Event()

    def signal_then_end() -> None:
        with changed:  # only once the main thread waits, and has let go of it
            pass
        stop.wait(0.2)
        # Handled in this thread, it leaves the main thread asleep: what the race does by chance.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if not stop.wait(30.0):
            late.set()
            with changed:
                changed.notify_all()

    thread = threading.Thread(target=signal_then_end)
    with changed:
        thread.start()
        with pytest.raises(Interrupted):
            wait_for(changed, late.is_set, 60.0)
    stop.set()
    thread.join()
    assert not late.is_set()


def test_an_interrupt_while_the_lock_is_let_go_comes_out_as_what_it_is(monkeypatch):
    changed = threading.Condition()

    def interrupted(timeout_s):
        changed.release()  # the handler runs before the condition can take it again
        raise Interrupted

    monkeypatch.setattr(changed, "wait", interrupted)
    with pytest.raises(Interrupted), changed:
        wait_for(changed, lambda: False, 60.0)
    with changed:
        pass


def test_it_says_whether_it_came_true_in_time():
    changed = threading.Condition()
    with changed:
        assert wait_for(changed, lambda: True, 0.0)
        assert not wait_for(changed, lambda: False, 0.01)
