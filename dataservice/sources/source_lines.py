"""How much a source gives over time, and in which order: lines, and the windows of its ring."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Window:
    """`count` samples of a row from the `start`-th on, in an order named by `epoch` and `position`:
    those that a source gives in that epoch from that position on."""

    start: int
    count: int
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class Line:
    """What a source gives from a place on: `given` samples at time `since`, in epochs, and
    `per_epoch` more each epoch, up to `most`. Its row is its ring again and again, but for what it
    was giving whenever its weight changed in the middle: those windows stay `shuffled`, so that
    what was left of them comes next."""

    epoch: int
    position: int
    since: Fraction
    given: int
    per_epoch: Fraction
    most: int | None
    shuffled: tuple[Window, ...] = ()

    def at(self, time: Fraction | int) -> int:
        given = self.given + math.floor((time - self.since) * self.per_epoch + Fraction(1, 2))
        return given if self.most is None else min(given, self.most)

    def window(self, epoch: int) -> Window:
        """What it gives in this epoch."""
        start, position = self.given, self.position
        if self.epoch < epoch:
            start, position = self.at(epoch), 0
        return Window(start, max(0, self.at(epoch + 1) - start), epoch, position)


def first_giving(lines: Sequence[Line], epoch: int, end: int) -> int:
    """The first epoch from this one on, and before `end`, in which a source gives something; `end`
    where none does. O(lines · log epochs)."""
    before = [line.at(epoch) for line in lines]

    def has_given(by: int) -> bool:
        return any(line.at(by) > was for line, was in zip(lines, before, strict=True))

    return epoch + bisect_left(range(epoch + 1, end + 1), True, key=has_given)


def windows_by_age(
    lines: Sequence[Line], windows: Sequence[Window]
) -> tuple[Mapping[int, Window], ...]:
    """The shuffled windows that what is given now comes through, the last one of each source first,
    then the one before it, and so on."""
    left = {
        source: _met(line.shuffled, now.start)
        for source, (line, now) in enumerate(zip(lines, windows, strict=True))
    }
    deepest = max(map(len, left.values()))
    return tuple(
        {source: each[age] for source, each in left.items() if len(each) > age}
        for age in range(deepest)
    )


def _met(shuffled: Sequence[Window], start: int) -> list[Window]:
    """Those of these windows, the last one first, that places from `start` on are led into: each by
    those behind it."""
    met = []
    for window in reversed(shuffled):
        if window.start + window.count > start:
            met.append(window)
            start = min(start, window.start)
    return met
