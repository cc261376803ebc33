"""Measures recovery: the times at which the service reports each team's commits."""

import threading
import time
from dataclasses import dataclass, field

from soak.team import Progress, Team

POLL_S = 0.1
STEPS_AWAITED = 5  # more steps than were planned and fetched ahead before the fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """Seconds from a fault to the next committed step, and the longest time between two of the next
    STEPS_AWAITED commits."""

    first_s: float
    stall_s: float


@dataclass
class Commits:
    """Follows one team from `start` to `stop`; `times_s` are those of its commits."""

    team: Team
    times_s: list[float] = field(default_factory=list)
    _last: Progress | None = None
    _looking: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to ask the service, in a separate thread."""
        self._thread = threading.Thread(target=self._follow, name="commits", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop asking."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Ask the service once. A look just before a fault keeps the commits before it from
        counting as recovery from it."""
        with self._looking:
            now, last = self.team.progress(), self._last
            if now is not None and (last is None or now.beyond(last)):
                self.times_s += [time.monotonic()] * (1 if last is None else now.steps_since(last))
                self._last = now

    def recovery(self, since_s: float) -> Recovery | None:
        """Recovery from a fault at this time; None before enough steps have been committed."""
        after = [at_s for at_s in self.times_s if at_s > since_s][:STEPS_AWAITED]
        if len(after) < STEPS_AWAITED:
            return None
        gaps = [b - a for a, b in zip([since_s, *after], after, strict=False)]
        return Recovery(first_s=after[0] - since_s, stall_s=max(gaps))

    def _follow(self) -> None:
        while not self._over.wait(POLL_S):
            self.look()
