"""The limit of silence of a worker's stream, after which its bytes are requested elsewhere."""

import threading

# The limit as a multiple of the longest pause after which a stream went on.
PAUSES = 3.0
# The remembered longest pause is multiplied by this factor after every fetch.
FADING = 0.9
# The largest limit, as a multiple of the base.
MOST = 16.0


class Patience:
    """The limit of silence: `base_s`, and more on a slow network.

    A message arrives whole or not at all, so a slow connection is silent while one is on its way.
    The limit is therefore at least three times the longest pause after which a part went on. It
    also doubles with every consecutive fetch that stalled, from the second on, so that a message
    gets through a slow connection in the end. May be used by many threads.
    """

    def __init__(self, base_s: float) -> None:
        self._base_s = base_s
        self._longest_s = 0.0
        self._stalls = 0
        self._lock = threading.Lock()

    @property
    def limit_s(self) -> float:
        """The limit now, in seconds."""
        with self._lock:
            doubled_s = self._base_s * 2.0 ** max(0, min(self._stalls, 16) - 1)
            return min(max(doubled_s, PAUSES * self._longest_s), MOST * self._base_s)

    def paused(self, pause_s: float) -> None:
        """A part went on after a pause of `pause_s`."""
        with self._lock:
            self._longest_s = max(self._longest_s, pause_s)

    def fetched(self, *, stalled: bool) -> None:
        """A fetch has ended; `stalled` says whether one of its streams stalled."""
        with self._lock:
            self._stalls = self._stalls + 1 if stalled else 0
            self._longest_s *= FADING
