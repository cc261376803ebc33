"""Reads the parts of an index, several at once, and gives their rows in their order.

Contract.
  Success       each row group of each part, in order. At most `READERS` parts are begun, of which
                each holds `ahead` row groups that are not asked for yet.
  Failure       the error of the first part that has one, once all before it was given.
  Cancellation  closing the generator ends every reader before it returns.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import islice
from typing import Generic, TypeVar

READERS = 4
GROUPS_AHEAD = 2

Group = TypeVar("Group")


def in_order(
    parts: Iterable[Callable[[], Iterable[Group]]], ahead: int = GROUPS_AHEAD
) -> Generator[Group, None, None]:
    """What these give, one part behind the other. Raises what they raise. Several are read at once
    as far as `ahead` lets them: a part that gives more than that waits for its turn."""
    waiting = iter(parts)
    begun = deque(_Reader(read, ahead) for read in islice(waiting, READERS))
    try:
        while begun:
            yield from begun[0].groups()
            begun.popleft()
            begun.extend(_Reader(read, ahead) for read in islice(waiting, 1))
    finally:
        for reader in begun:
            reader.close()


class _Reader(Generic[Group]):
    """Reads one part in a thread."""

    def __init__(self, read: Callable[[], Iterable[Group]], ahead: int) -> None:
        self._groups: queue.Queue[Group | Exception | None] = queue.Queue(ahead)
        self._read_part = read
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="index part", daemon=True)
        self._thread.start()

    def groups(self) -> Iterator[Group]:
        while (group := self._groups.get()) is not None:
            if isinstance(group, Exception):
                raise group
            yield group

    def close(self) -> None:
        self._closed = True
        while self._thread.is_alive():
            try:  # it may wait for room
                self._groups.get(timeout=0.01)
            except queue.Empty:
                continue

    def _read(self) -> None:
        try:
            for group in self._read_part():
                if self._closed:
                    return
                self._groups.put(group)
        except Exception as error:
            self._groups.put(error)
        else:
            self._groups.put(None)
