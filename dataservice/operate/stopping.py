"""SIGTERM and SIGINT: noticed even while the event loop is blocked, and obeyed in time.

    signal ─► wakeup descriptor ─► guard's thread ─► event loop: stop ─► clean, status 0
                                        │ limit_s later, or at a second signal
                                        └─► say what hangs, end the process: status ABANDONED

Contract. Python's C-level signal handler writes the signal's number to a file descriptor that the
guard's thread reads, so it works while the main thread is blocked. What still runs when the time
is up is not waited for: child processes die with this one, and an existing Ray cluster releases
the workers by itself. A thread that is blocked in C code and never releases the GIL stops the
guard too; then only SIGKILL helps.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from types import FrameType

from dataservice.core.threads import every_purpose

log = logging.getLogger(__name__)

ABANDONED = 6
"""Exit status of a service that had to abandon something to end in time."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
SAY_LIMIT_S = 2.0
LAST_CALLS_S = 2.0


class Ending:
    """Stops one thing after another, each within its limit; `left` names what did not stop."""

    def __init__(self) -> None:
        self.left: list[str] = []

    async def within(self, limit_s: float, what: str, ending: Awaitable[object]) -> None:
        """Wait at most `limit_s` for `what` to end; if it does not, note it in `left`."""
        try:
            await asyncio.wait_for(ending, limit_s)
        except TimeoutError:
            self.left.append(f"{what} did not end within {limit_s:g} s")
        except Exception as error:  # the others must be stopped all the same
            log.exception("%s did not stop cleanly", what)
            self.left.append(f"{what}: {error!r}")


class StopGuard:
    """Listens for the signals from its construction, which must be in the main thread, until the
    process ends."""

    def __init__(self, limit_s: float) -> None:
        """The process ends at the second signal, or at most `limit_s` after the first."""
        self._limit_s = limit_s
        self._heard, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        self._asked = threading.Event()
        self._on_asked: Callable[[], None] = lambda: None
        self._main = threading.get_ident()
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, _nothing)
        threading.Thread(target=self._run, name="stop-guard", daemon=True).start()

    async def asked(self) -> None:
        """Wait until a signal has come."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        self._on_asked = lambda: _soon(loop, event.set)
        if self._asked.is_set():
            event.set()
        await event.wait()

    def ask(self) -> None:
        """Act as on a signal: the process ends within the limit from now on."""
        self._wakeup.send(bytes([signal.SIGTERM]))

    def end_unless_clean(self, left: Sequence[str]) -> None:
        """Return if nothing still runs that the interpreter would wait for at exit; else end the
        process here."""
        deadline_s = time.monotonic() + LAST_CALLS_S
        while any(purpose.running() for purpose in every_purpose()):
            if time.monotonic() > deadline_s:
                self._end("calls are left that do not come back")
            time.sleep(0.01)
        if left:
            self._end(f"not everything was stopped: {'; '.join(left)}")

    def _run(self) -> None:
        self._next_signal(None)
        began_s = time.monotonic()
        self._asked.set()
        self._on_asked()
        if self._next_signal(began_s + self._limit_s):
            self._end("a second signal came")
        self._end(f"the {self._limit_s:g} s for stopping are over")

    def _next_signal(self, deadline_s: float | None) -> bool:
        """Whether a signal came before the deadline."""
        while True:
            left_s = None if deadline_s is None else max(0.001, deadline_s - time.monotonic())
            self._heard.settimeout(left_s)
            try:
                number = self._heard.recv(1)  # one: two that came together are two signals
            except TimeoutError:
                return False
            if number[0] in SIGNALS:
                return True

    def _end(self, why: str) -> None:
        """End the process now. Logging may hang too, so it gets `SAY_LIMIT_S` and no more."""
        saying = threading.Thread(target=self._say, args=(why,), daemon=True)
        saying.start()
        saying.join(SAY_LIMIT_S)
        os._exit(ABANDONED)

    def _say(self, why: str) -> None:
        frames = sys._current_frames()
        log.error("ending at once, with status %d: %s", ABANDONED, why)
        for purpose in every_purpose():
            for call in purpose.running():
                held_s = time.monotonic() - call.began_s
                log.error("%s: %s hangs for %.0f s", purpose.purpose, call.name, held_s)
        if (main := frames.get(self._main)) is not None:
            log.error("the main thread is at\n%s", "".join(traceback.format_stack(main)))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()


def in_thread(what: str, call: Callable[[], object]) -> "asyncio.Future[None]":
    """Run `call` in a daemon thread, which is not waited for at exit; done when it has returned."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def run() -> None:
        try:
            call()
        except BaseException as error:
            _soon(loop, settle, error)
        else:
            _soon(loop, settle, None)

    threading.Thread(target=run, name=f"stop {what}", daemon=True).start()
    return done


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed already
        loop.call_soon_threadsafe(call, *args)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Does nothing: only signals with a Python handler are written to the file descriptor."""
