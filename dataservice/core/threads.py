"""Threads by purpose, so that calls of one kind that hang leave the threads of other kinds free.

Contract. A call that is cancelled before it has a thread never begins; one that has begun goes
on, and its thread is taken until it returns. Nothing that must always answer (health, stopping)
waits for any of these threads.
"""

import asyncio
import functools
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")


_made: "weakref.WeakSet[CallThreads]" = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call that a thread is making."""

    name: str
    thread_id: int
    began_s: float


def every_purpose() -> "list[CallThreads]":
    """All `CallThreads` of this process."""
    return list(_made)


class CallThreads:
    """At most `threads` threads for calls of one purpose; made as they are needed."""

    def __init__(self, purpose: str, threads: int, *, for_all: bool = False) -> None:
        """`for_all`: no team can train without them, so the service is unhealthy while every one of
        them hangs."""
        self.purpose = purpose
        self.for_all = for_all
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=purpose.replace(" ", "-"))
        self._lock = threading.Lock()
        self._running: dict[int, Call] = {}
        _made.add(self)

    async def __call__(
        self, function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> Result:
        """The function's result, from one of the threads."""
        return await self.begin(functools.partial(function, *args, **kwargs))

    def begin(self, call: Callable[[], Result]) -> "asyncio.Future[Result]":
        """The call in one of the threads, without a task that waits for it."""
        return asyncio.get_running_loop().run_in_executor(self._pool, self._tracked, call)

    def close(self) -> None:
        """Begin no more calls. Those that have begun go on."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def running(self) -> list[Call]:
        """The calls that threads are making, the longest first."""
        with self._lock:
            return sorted(self._running.values(), key=lambda call: call.began_s)

    def stuck_s(self, limit_s: float) -> float | None:
        """The age of the newest call, where every thread is busy and that is above the limit; else
        None."""
        running = self.running()
        if len(running) < self.threads:
            return None
        youngest_s = time.monotonic() - running[-1].began_s
        return youngest_s if youngest_s > limit_s else None

    def _tracked(self, call: Callable[[], Result]) -> Result:
        thread = threading.get_ident()
        function = getattr(call, "func", call)
        name = getattr(function, "__qualname__", repr(function))
        with self._lock:
            self._running[thread] = Call(name=name, thread_id=thread, began_s=time.monotonic())
        try:
            return call()
        finally:
            with self._lock:
                del self._running[thread]
