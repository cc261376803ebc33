"""How many bytes of packs a worker holds, and which packs wait for room.

A pack counts with its planned size from the moment its decoding may begin until it is released.
Decoding may begin
  - when the pack fits into the room left under the limit, and no pack that is needed sooner waits;
  - always, when the pack belongs to the first step that its job has here;
  - always, when a rank asks for the pack.

So this cannot deadlock: a rank waits for a pack only by asking for it, and a pack that was asked
for is decoded whatever else is held. The limit bounds only the bytes decoded ahead of need: packs
that ranks ask for, and one step of each job, may exceed it.
"""

from collections import Counter
from collections.abc import Iterable

from dataservice.core.orders import PackKey


class HeldBytes:
    """Counts the packs that were let in, and queues those that were not. Pure."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[PackKey, int] = {}
        self._waiting: dict[PackKey, int] = {}
        self._held_bytes = 0
        self._steps: dict[str, Counter[int]] = {}
        self._first: dict[str, int] = {}

    @property
    def held_bytes(self) -> int:
        """Planned bytes of the packs that were let in."""
        return self._held_bytes

    @property
    def waiting(self) -> int:
        """How many packs wait for room."""
        return len(self._waiting)

    def add(self, key: PackKey, size_bytes: int) -> list[PackKey]:
        """Let a new pack in, or queue it; returns the packs that may begin. O(waiting), or as
        `remove` where an earlier step than all of its job makes the others be needed later: what
        waited behind them may have room."""
        steps = self._steps.setdefault(key.job, Counter())
        steps[key.step] += 1
        before, first = self._first.get(key.job, key.step), min(steps)
        self._first[key.job] = first
        if first < before and self._waiting:
            self._waiting[key] = size_bytes
            return self._next_in()
        ahead = key.step - first
        fits = self._held_bytes + size_bytes <= self._limit_bytes
        if not ahead or (fits and all(ahead < self._ahead(other) for other in self._waiting)):
            self._let_in(key, size_bytes)
            return [key]
        self._waiting[key] = size_bytes
        return []

    def ask(self, key: PackKey) -> bool:
        """A rank asks for this pack; returns whether this let it in from the queue."""
        if key not in self._waiting:
            return False
        self._let_in(key, self._waiting.pop(key))
        return True

    def remove(self, keys: Iterable[PackKey]) -> list[PackKey]:
        """Release these packs; returns the packs that may begin in their place. Sorts, O(waiting ·
        log(waiting))."""
        for key in keys:
            self._forget(key)
        return self._next_in() if self._waiting else []

    def _next_in(self) -> list[PackKey]:
        let_in = []
        for key in sorted(self._waiting, key=self._ahead):
            size_bytes = self._waiting[key]
            if self._ahead(key) and self._held_bytes + size_bytes > self._limit_bytes:
                break
            self._let_in(key, self._waiting.pop(key))
            let_in.append(key)
        return let_in

    def _let_in(self, key: PackKey, size_bytes: int) -> None:
        self._held[key] = size_bytes
        self._held_bytes += size_bytes

    def _forget(self, key: PackKey) -> None:
        if key not in self._held and key not in self._waiting:
            return
        self._held_bytes -= self._held.pop(key, 0)
        self._waiting.pop(key, None)
        steps = self._steps[key.job]
        steps[key.step] -= 1
        if not steps[key.step]:
            del steps[key.step]
        if steps:
            self._first[key.job] = min(steps)
        else:
            del self._steps[key.job], self._first[key.job]

    def _ahead(self, key: PackKey) -> int:
        """Steps between this pack's and the first that its job has here."""
        return key.step - self._first[key.job]
