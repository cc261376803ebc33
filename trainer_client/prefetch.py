"""Two threads beside the training loop: one fetches ahead, one sends commits.

Success: `Prefetcher.next` gives the items in order; `Committer.flush` returns once all that
was put is sent.
Failure: the first exception of the thread is kept, ends the thread, and is raised by the
next call from the training loop, after the items that were ready before it.
Cancellation: `close` wakes the callers and lets the thread end at its next turn; what the
thread is blocked in must be ended by its owner (close the channels first).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from trainer_client.errors import MisuseError, ServiceTimeout
from trainer_client.interruptible import await_end, wait_for

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Keeps up to `depth` items ready or on their way; `load` returns one after another, then
    None."""

    def __init__(self, load: Callable[[], Item | None], *, depth: int) -> None:
        self._load = load
        self._depth = depth
        self._ready: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shard-prefetch", daemon=True)
        self._thread.start()

    def next(self, timeout_s: float) -> Item | None:
        """Take the next item, None after the last. Raises ServiceTimeout where it takes longer."""
        with self._changed:
            item = self._first(timeout_s)
            if item is not None:
                self._ready.popleft()
                self._changed.notify_all()
            return item

    def peek(self, timeout_s: float) -> Item | None:
        """The item that `next` will take. Raises ServiceTimeout where it takes longer."""
        with self._changed:
            return self._first(timeout_s)

    def ready(self) -> Item | None:
        """The item that `next` will take, None if it is not there yet; never waits or raises."""
        with self._changed:
            return self._ready[0] if self._ready else None

    def close(self) -> None:
        """Drop what is ready and stop."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; call after `close`."""
        await_end(self._thread, timeout_s)

    def _first(self, timeout_s: float) -> Item | None:
        if not wait_for(self._changed, self._something_to_say, timeout_s):
            raise ServiceTimeout(
                f"the next step did not come within {timeout_s:g} s, and no call failed. Look "
                "at `dataservice status` for what the job waits for: workers that decode too "
                "slowly, a rank that does not ask for its shard, or a network that drops "
                "packets. Raise timeout_s if such a wait is usual."
            )
        if self._ready:
            return self._ready[0]
        if self._closed:
            raise MisuseError("the dataset was closed while it was iterated")
        if self._failure is not None:
            raise self._failure
        return None

    def _something_to_say(self) -> bool:
        return bool(self._ready) or self._ended or self._closed or self._failure is not None

    def _room(self) -> bool:
        return self._closed or len(self._ready) < self._depth

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(self._room)
                    if self._closed:
                        return
                item = self._load()
                with self._changed:
                    if item is None:
                        self._ended = True
                    elif not self._closed:
                        self._ready.append(item)
                    self._changed.notify_all()
                if item is None:
                    return
                del item
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """A step that this rank has trained, with its seconds, in total and by phase, where they were
    measured."""

    step: int
    measured_s: float | None = None
    phase_s: Mapping[str, float] = field(default_factory=dict)


class Committer:
    """Calls `commit(trained)` for each step put, in order, without blocking the caller of `put`.

    A call for a later step may take commits along: `riding` gives those that nobody has taken, and
    `arrived` says that they were. What has not arrived `ride_s` after it was put, or once someone
    flushes, is sent by itself; the service takes a commit that comes twice as one.
    """

    def __init__(self, commit: Callable[[Trained], None], *, ride_s: float = 0.0) -> None:
        self._commit = commit
        self._ride_s = ride_s
        self._steps: deque[Trained] = deque()
        self._put_s = 0.0
        self._hurry = False
        self._changed = threading.Condition()
        self._closed = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shard-commit", daemon=True)
        self._thread.start()

    def put(self, trained: Trained) -> None:
        """Have a step sent. Raises the error of an earlier one."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            if not self._steps:
                self._put_s = time.monotonic()
            self._steps.append(trained)
            self._changed.notify_all()

    def riding(self) -> tuple[Trained, ...]:
        """The commits that are yet to be taken, in order."""
        with self._changed:
            return tuple(self._steps)

    def arrived(self, through_step: int) -> None:
        """The service has taken the commits up to this step."""
        with self._changed:
            while self._steps and self._steps[0].step <= through_step:
                self._steps.popleft()
            self._put_s = time.monotonic()
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> None:
        """Wait until all is sent. Raises the error of a commit, and ServiceTimeout where it takes
        longer."""
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            wait_for(self._changed, self._settled, timeout_s)
            self._hurry = False
            if self._failure is not None:
                raise self._failure
            if self._steps and not self._closed:
                raise ServiceTimeout(
                    f"{len(self._steps)} commits, from step {self._steps[0].step} on, were not "
                    f"taken within {timeout_s:g} s. The position in the checkpoint does not depend "
                    "on them; check that the coordinator is reachable."
                )

    def close(self) -> None:
        """Stop; commits that are not sent by now are dropped."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread; call after `close`."""
        await_end(self._thread, timeout_s)

    def _settled(self) -> bool:
        return not self._steps or self._closed or self._failure is not None

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._steps or self._closed)
                    if self._closed:
                        return
                    left_s = self._put_s + self._ride_s - time.monotonic()
                    if left_s > 0 and not self._hurry:
                        self._changed.wait(left_s)
                        continue
                    trained = self._steps[0]
                self._commit(trained)
                self.arrived(trained.step)  # only now, because `flush` waits for the answer
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
