"""Groups reasons by their wording: a thousand samples without their picture become one line."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

NAMED_REASONS = 10  # of one source, where people read them
_OTHER = "…"
# The parts in which two reasons of one wording may differ: quoted text, paths, and words with a
# digit.
_VARIES = re.compile(
    r"('[^']*'|\"[^\"]*\"|(?<!\w)/[^\s,;]*[^\s,;:.)\]]|[\w.,×/-]*\d(?:[\w.,×/-]*\w)?)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReasonCount:
    """The number of samples left out for reasons of one wording, and the key of the first. Words
    that differ between the reasons are shown as …"""

    reason: str
    samples: int
    first_key: str


def by_wording(reasons: Iterable[tuple[str, str]]) -> tuple[ReasonCount, ...]:
    """Counts for the (key, reason) pairs of samples; the most frequent first. Keeps one reason per
    wording in memory."""
    shown: dict[tuple[str, ...], list[str]] = {}
    counts: dict[tuple[str, ...], int] = {}
    first_keys: dict[tuple[str, ...], str] = {}
    for key, reason in reasons:
        pieces = _VARIES.split(reason)  # wording and values in turn
        wording = tuple(pieces[::2])
        first_keys.setdefault(wording, key)
        values = shown.setdefault(wording, pieces[1::2])
        for place, value in enumerate(pieces[1::2]):
            if values[place] != value:
                values[place] = _OTHER
        counts[wording] = counts.get(wording, 0) + 1
    found = [
        ReasonCount(
            reason="".join(map("".join, zip_longest(wording, shown[wording], fillvalue=""))),
            samples=count,
            first_key=first_keys[wording],
        )
        for wording, count in counts.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.samples, each.reason)))


def reason_lines(source: str, reasons: Sequence[ReasonCount]) -> Iterator[str]:
    """A line a reason: how many samples, why, and the first of them; at most NAMED_REASONS."""
    for kind in reasons[:NAMED_REASONS]:
        yield f"{kind.samples:,} × {kind.reason} First: {source}/{kind.first_key}"
    if others := reasons[NAMED_REASONS:]:
        samples = sum(kind.samples for kind in others)
        yield f"{samples:,} × for {len(others)} more reason{'s' if len(others) > 1 else ''}"
