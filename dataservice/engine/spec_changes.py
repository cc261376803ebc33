"""In which keys two versions of a job's file differ, and what may differ in a job that exists."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Keys that may decide which samples there are, their order, and what they decode to. They are
# compared by content: the same data under another path are the same.
DATA_KEYS = ("sources", "weights", "mixture_changes", "index", "pipeline", "seed")
# Keys of a source that decide neither.
NOT_OF_DATA = {"error_budget", "loss_weight"}
NAMED_CHANGES = 8
SHOWN_CHARACTERS = 60

Path = tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecChange:
    """One key with its values as JSON; "-" where a version lacks it."""

    path: Path
    before: str
    after: str

    @property
    def of_data(self) -> bool:
        """Whether it may change samples or their order."""
        return self.path[0] in DATA_KEYS and not {*self.path[2:3]} & NOT_OF_DATA

    @property
    def of_cost(self) -> bool:
        """Whether it is a coefficient that steps are planned with."""
        return self.path[:2] == ("plan", "cost")

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {_short(self.before)} → {_short(self.after)}"


def spec_changes(before: str, after: str) -> tuple[SpecChange, ...]:
    """The keys in which two stored job files differ, by name. Sources are matched by name."""
    old, new = (dict(_leaves(json.loads(text), ())) for text in (before, after))
    return tuple(
        SpecChange(path=path, before=old.get(path, "-"), after=new.get(path, "-"))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    )


def in_words(changes: Sequence[SpecChange]) -> str:
    """The first changes in words, and the number of the others."""
    words = ", ".join(map(str, changes[:NAMED_CHANGES]))
    more = len(changes) - NAMED_CHANGES
    return f"{words}, and {more} more" if more > 0 else words


def _leaves(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, dict) and (value or not path):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    elif path == ("sources",) and isinstance(value, list):
        names = [str(source["name"]) for source in value]
        yield path, json.dumps(names)
        for name, source in zip(names, value, strict=True):
            yield from _leaves(source, (*path, name))
    else:
        yield path, json.dumps(value, sort_keys=True)


def _short(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."
