"""Decides which groups of replicas are kept: every replica computes the same, without a message.

Groups are ordered by the last list that named them. When a replica keeps more than ``max_groups``,
its oldest groups are dropped, except those of the last two lists. An admission number is never
used twice, and so neither is a group's prefix in the store.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable

Members = tuple[int, ...]


class GroupLedger:
    """Records which groups each replica keeps."""

    def __init__(self, max_groups: int) -> None:
        self._max_groups = max_groups
        self._kept: OrderedDict[Members, int] = OrderedDict()
        self._load: dict[int, int] = {}
        self._admissions = itertools.count()
        self._previous: frozenset[Members] = frozenset()

    def groups(self) -> tuple[Members, ...]:
        """The groups that are kept, ordered by the last list that named them."""
        return tuple(self._kept)

    def admit(self, step_groups: Iterable[Members]) -> tuple[dict[Members, int], list[Members]]:
        """New groups with their admission numbers, and the groups to drop. O(kept groups)."""
        current = dict.fromkeys(group for group in step_groups if len(group) > 1)
        admitted: dict[Members, int] = {}
        for group in current:
            if group not in self._kept:
                admitted[group] = self._kept[group] = next(self._admissions)
                self._shift_load(group, 1)
            self._kept.move_to_end(group)
        named_now = frozenset(current)
        dropped = self._drop_oldest(protected=self._previous | named_now)
        self._previous = named_now
        return admitted, dropped

    def _drop_oldest(self, protected: frozenset[Members]) -> list[Members]:
        dropped = []
        for group in tuple(self._kept):
            if not any(load > self._max_groups for load in self._load.values()):
                break
            crowded = any(self._load[member] > self._max_groups for member in group)
            if crowded and group not in protected:
                del self._kept[group]
                self._shift_load(group, -1)
                dropped.append(group)
        return dropped

    def _shift_load(self, group: Members, change: int) -> None:
        for member in group:
            self._load[member] = self._load.get(member, 0) + change
