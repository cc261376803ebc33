"""Retries with growing waits and jitter, until a deadline."""

import random
import threading
import time

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 2.0


class Backoff:
    """The retries of one operation. The clock starts with the first `wait`.

    Each wait is drawn uniformly between zero and a limit that doubles up to `LONGEST_WAIT_S`
    ("full jitter"), so that ranks which fail at the same time do not retry at the same time.
    """

    def __init__(self, stop: threading.Event, deadline_s: float) -> None:
        self._stop = stop
        self._deadline_s = deadline_s
        self._began_s: float | None = None
        self.attempts = 0

    @property
    def spent_s(self) -> float:
        """Seconds since the first failure."""
        return 0.0 if self._began_s is None else time.monotonic() - self._began_s

    def wait(self) -> bool:
        """Sleep before the next attempt; False if the deadline has passed or `stop` is set."""
        if self._began_s is None:
            self._began_s = time.monotonic()
        left_s = self._deadline_s - self.spent_s
        if left_s <= 0 or self._stop.is_set():
            return False
        limit_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(self.attempts, 16))
        self.attempts += 1
        return not self._stop.wait(min(left_s, random.uniform(0.0, limit_s)))
