"""How long a worker's stream may bring nothing before its bytes are asked for elsewhere."""

import threading

# A stream that went on after a pause may pause this many times as long.
PAUSES = 3.0
# What a pause has taught fades by this factor with every fetch.
FADING = 0.9
# No stream is waited for longer than so many times the base.
MOST = 16.0


class Patience:
    """`limit_s` of silence: `base_s`, and more where the network is slow but alive.

    A message arrives whole or not at all, so a thin line is silent while one is on its way. The
    limit is therefore thrice the longest pause after which a part went on; and it doubles with
    every fetch in a row that stalled, from the second on, so that any line brings a message in
    the end. May be used by many threads.
    """

    def __init__(self, base_s: float) -> None:
        self._base_s = base_s
        self._longest_s = 0.0
        self._stalls = 0
        self._lock = threading.Lock()

    @property
    def limit_s(self) -> float:
        """Seconds of silence that are borne now."""
        with self._lock:
            doubled_s = self._base_s * 2.0 ** max(0, min(self._stalls, 16) - 1)
            return min(max(doubled_s, PAUSES * self._longest_s), MOST * self._base_s)

    def paused(self, pause_s: float) -> None:
        """A part went on after so many seconds."""
        with self._lock:
            self._longest_s = max(self._longest_s, pause_s)

    def fetched(self, *, stalled: bool) -> None:
        """A fetch has ended, with a stream that stalled or without."""
        with self._lock:
            self._stalls = self._stalls + 1 if stalled else 0
            self._longest_s *= FADING
