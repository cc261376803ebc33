"""Waits of the training loop that an interrupt (Ctrl-C, or a handler of the trainer's own) ends.

Python runs a signal's handler between two bytecodes of the main thread. A signal that arrives
after the last look and before a lock's wait begins is noted, but wakes nobody: the handler runs
when that wait ends. On a busy machine that moment lasts until the thread is scheduled again, and
every tenth Ctrl-C falls into it, so the main thread never waits long at a stretch. A handler that
raises just after the condition has let go of its lock would leave the caller without it, and the
caller's `with` would raise RuntimeError in the interrupt's place; so the lock is taken again.
"""

import threading
import time
from collections.abc import Callable

# The longest time for which an interrupt goes unnoticed.
NOTICE_S = 0.5


def wait_for(changed: threading.Condition, holds: Callable[[], object], timeout_s: float) -> bool:
    """`Condition.wait_for`: whether `holds()` came true within `timeout_s`. The caller holds
    `changed`, once (its lock may be one that can be held twice)."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            return False
        try:
            changed.wait(min(left_s, NOTICE_S))
        except BaseException:
            _hold(changed)
            raise
    return True


def await_end(thread: threading.Thread, timeout_s: float) -> None:
    """Wait for a thread, unless it never began, or waits here itself: the collector closes what it
    finds in whatever thread it happens to run."""
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(timeout_s)


def _hold(changed: threading.Condition) -> None:
    """Take the lock, unless this thread has it."""
    try:
        changed.notify(0)
    except RuntimeError:
        changed.acquire()
