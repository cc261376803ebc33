"""Notes of failures in the job's store, and the replica that they lead to.

All notes are in one key, to which replicas append, so that reading those of 2,560 replicas is one
operation. A step in which nothing fails writes and reads none; only a collective that waits for
longer than a part of a second looks whether the key exists.
"""

import time
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

UNKNOWN = "?"
POLL_S = 0.02
NOTES = "fault/notes"


def grace_s(timeout_s: float) -> float:
    """Part of a timeout, in seconds, that is kept for reading the other survivors' notes."""
    return min(2.0, timeout_s / 4)


def as_timedelta(seconds: float) -> timedelta:
    """At least a millisecond, because torch treats zero as no limit at all."""
    return timedelta(milliseconds=max(1, round(seconds * 1000)))


def append_to(store: Store, key: str, text: str) -> None:
    """Add text to a key, in one operation that no other rank's comes between."""
    store.append(key, text)  # type: ignore[attr-defined]  # torch's own stubs leave it out


class FaultBoard:
    """Notes about failures, shared through the job's store: replica → whom it awaited."""

    def __init__(self, store: Store, *, replica: int) -> None:
        self._store = store
        self._replica = replica

    def report(self, awaited: int | None) -> None:
        """Note whom this replica waited for; a later note takes the place of an earlier one."""
        append_to(self._store, NOTES, f"{self._replica}:{UNKNOWN if awaited is None else awaited} ")

    def any_report(self) -> bool:
        """Whether any replica reported a failure."""
        return self._store.check([NOTES])

    def culprits(
        self, members: Sequence[int], awaited: int | None, *, grace_s: float
    ) -> tuple[int, ...]:
        """Replicas that wrote no note, found by following the notes from ``awaited``.

        Without ``awaited`` (a collective), or where the notes end at a replica that was in a
        collective, all members that wrote none within the grace.
        """
        deadline = time.monotonic() + grace_s
        while True:
            notes = self._notes()
            followed = None if awaited is None else self._follow(awaited, notes)
            silent = self._silent(members, notes) if followed is None else followed
            open_end = followed is None and awaited is not None
            if time.monotonic() >= deadline or not (silent or open_end):
                return silent
            time.sleep(POLL_S)

    def silent(self, members: Sequence[int]) -> tuple[int, ...]:
        """Members other than this one that wrote no note."""
        return self._silent(members, self._notes())

    def _silent(self, members: Sequence[int], notes: dict[int, str]) -> tuple[int, ...]:
        return tuple(m for m in members if m != self._replica and m not in notes)

    def _follow(self, awaited: int, notes: dict[int, str]) -> tuple[int, ...] | None:
        """The replicas that wrote no note; empty if replicas waited in a circle, None if a note
        names no replica."""
        seen = {self._replica}
        while awaited not in seen:
            seen.add(awaited)
            note = notes.get(awaited)
            if note is None:
                return (awaited,)
            if note == UNKNOWN:
                return None
            awaited = int(note)
        return ()

    def _notes(self) -> dict[int, str]:
        if not self.any_report():
            return {}
        written = (note.split(":") for note in self._store.get(NOTES).decode().split())
        return {int(replica): awaited for replica, awaited in written}
