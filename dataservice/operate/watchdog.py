"""Whether the service works, as seen from threads that nothing else uses.

    sign                    how it is seen                                  each in its own thread
    the event loop          it runs a callback
    the state store         a transaction that changes nothing
    our own port            a health check over a new connection, with TLS if we serve TLS
    threads of a purpose    not all of them are in calls that do not return

                ┌─► health port       READY, LIVENESS
    verdict ────┼─► main port's health
    each 0.5 s  ├─► GetHealth, `dataservice status`: the sentences
                └─► the log: once when trouble begins, with the threads' stacks, and when it ends

Contract. The service is not ready while some sign has not been seen for `limit_s` (threads of a
purpose: three times `limit_s`, since planning a large step may take long). It is not alive either
where the cause *hangs*, because only a restart ends that. A restart would not help where the cause
*fails* (a locked file, an expired certificate). Nothing here waits for the event loop.
"""

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataservice.core.threads import every_purpose

log = logging.getLogger(__name__)

LOOK_EVERY_S, LOOKS_WITHIN_LIMIT = 1.0, 5
"""Signs are looked for so many times within their limit, and no sooner than each second: a look at
our own port makes a connection, which takes milliseconds of a processor."""
JUDGE_EVERY_S = 0.5
STUCK_LIMITS = 3.0
"""Limit for threads of a purpose, as a multiple of the limit for other signs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """What is wrong: `sentence` is for every caller, `detail` for the operator's log. `hangs` is
    True where only a restart ends it."""

    what: str
    sentence: str
    detail: str = ""
    threads: tuple[int, ...] = ()
    hangs: bool = True


class Sign:
    """One sign that the service works, which a thread of its own checks again and again."""

    def __init__(
        self,
        what: str,
        look: Callable[[], None],
        *,
        every_s: float = LOOK_EVERY_S,
        threads: Callable[[], tuple[int, ...]] = tuple,
    ) -> None:
        """`look` returns once it has seen the sign, and raises the reason where it cannot.
        `threads` gives the threads whose stacks are logged when `look` does neither."""
        self._what = what
        self._look = look
        self._every_s = every_s
        self._threads = threads
        self._seen_s = time.monotonic()
        self._error: Exception | None = None
        self._began_s = self._seen_s  # of the look under way, or of the last
        self._looking = False
        self._closed = threading.Event()
        threading.Thread(target=self._run, name=f"watch {what}", daemon=True).start()

    def trouble(self, limit_s: float) -> Trouble | None:
        """What is wrong; None if the sign was seen within the limit."""
        now_s = time.monotonic()
        silent_s = now_s - self._seen_s
        if silent_s <= limit_s:
            return None
        # What the look before failed with says nothing of one that does not come back.
        error = None if self._looking and now_s - self._began_s > limit_s else self._error
        return Trouble(
            what=self._what,
            sentence=(
                f"{self._what} has {'failed' if error is not None else 'not answered'} for "
                f"{silent_s:.0f} s"
            ),
            detail="" if error is None else f": {error}",
            threads=self._threads(),
            hangs=error is None,
        )

    def close(self) -> None:
        """Stop checking. A check that hangs is not waited for."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._began_s, self._looking = time.monotonic(), True
            try:
                self._look()
            except Exception as error:  # whatever it is, the sign was not seen
                self._error = error
            else:
                self._error = None
                self._seen_s = time.monotonic()
            self._looking = False
            self._closed.wait(self._every_s)


Tell = Callable[[bool, bool], None]
"""Called with (ready, alive) at every change; must not wait for anything."""


class Watchdog:
    """Judges the signs; see the module's contract."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._signs: list[Sign] = []
        self._told: list[Tell] = []
        self._troubles: dict[str, Trouble] = {}
        self._verdict = (True, True)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def troubles(self) -> tuple[str, ...]:
        """What is wrong now, one sentence each."""
        return tuple(trouble.sentence for trouble in self._troubles.values())

    def watch(
        self, what: str, look: Callable[[], None], *, threads: Callable[[], tuple[int, ...]] = tuple
    ) -> None:
        """Check this sign from now on; see Sign."""
        every_s = max(LOOK_EVERY_S, self._limit_s / LOOKS_WITHIN_LIMIT)
        self._signs.append(Sign(what, look, every_s=every_s, threads=threads))

    def watch_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check from now on that the event loop of this thread runs callbacks."""
        thread = threading.get_ident()
        self.watch("the event loop", lambda: _turned(loop), threads=lambda: (thread,))

    def tell(self, tell: Tell) -> None:
        """Set the function that is called at every change."""
        self._told.append(tell)

    def start(self) -> None:
        """Start judging the signs."""
        self._thread.start()

    def close(self) -> None:
        """Stop judging the signs."""
        self._closed.set()
        for sign in self._signs:
            sign.close()

    def _run(self) -> None:
        while not self._closed.wait(JUDGE_EVERY_S):
            before, self._troubles = self._troubles, {t.what: t for t in self._found()}
            found = self._troubles.values()
            verdict = not found, not any(trouble.hangs for trouble in found)
            if verdict != self._verdict:
                self._verdict = verdict
                for tell in self._told:
                    tell(*verdict)
            # Last, because logging may hang as well: whoever reads stderr may have stopped.
            for what, trouble in self._troubles.items():
                if what not in before:
                    log.error("not well: %s%s%s", trouble.sentence, trouble.detail, stacks(trouble))
            for what in before.keys() - self._troubles.keys():
                log.warning("well again: %s", what)

    def _found(self) -> Iterator[Trouble]:
        for sign in self._signs:
            if (trouble := sign.trouble(self._limit_s)) is not None:
                yield trouble
        for purpose in every_purpose():
            if not purpose.for_all:
                continue
            stuck_s = purpose.stuck_s(self._limit_s * STUCK_LIMITS)
            if stuck_s is not None:
                running = purpose.running()
                yield Trouble(
                    what=f"threads of {purpose.purpose}",
                    sentence=(
                        f"all {len(running)} threads for {purpose.purpose} have been at their "
                        f"calls for over {stuck_s:.0f} s"
                    ),
                    threads=tuple(call.thread_id for call in running[:1]),
                )


def stacks(trouble: Trouble) -> str:
    """The stacks of its threads, one paragraph each."""
    frames = sys._current_frames()
    return "".join(
        "\n" + "".join(traceback.format_stack(frames[thread])).rstrip()
        for thread in trouble.threads
        if thread in frames
    )


def _turned(loop: asyncio.AbstractEventLoop) -> None:
    turned = threading.Event()
    with contextlib.suppress(RuntimeError):  # the loop is closed: the service has stopped
        loop.call_soon_threadsafe(turned.set)
        turned.wait()
