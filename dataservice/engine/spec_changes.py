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

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {_short(self.before)} → {_short(self.after)}"


def spec_changes(before: str, after: str) -> tuple[SpecChange, ...]:
    """The keys in which two stored job files differ, by name. Sources are matched by name; of one
    that is in one file alone, its weight and its url are named."""
    old, new = (dict(_leaves(json.loads(text), ())) for text in (before, after))
    for one, other in ((old, new), (new, old)):
        there = {path[:2] for path in other}
        for path in [each for each in one if each[0] == "sources" and each[:2] not in there]:
            if path[2:] not in (("url",), ("weight",)):
                del one[path]
    return tuple(
        SpecChange(path=path, before=old.get(path, "-"), after=new.get(path, "-"))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
    )


def cost_of(spec_json: str) -> str:
    """The coefficients that steps are planned with under a stored job file, as JSON; "-" where it
    has none."""
    plan = json.loads(spec_json).get("plan") or {}
    return json.dumps(plan["cost"], sort_keys=True) if "cost" in plan else "-"


def misgrown(before: str, after: str) -> str:
    """What is wrong with how the sources and changes of a stored job file differ from those of its
    older version, with the remedy; empty where they are the same, and new ones wait behind."""
    old, new = json.loads(before), json.loads(after)
    names, now = ([source["name"] for source in each["sources"]] for each in (old, new))
    if gone := [name for name in names if name not in now]:
        return (
            f"Source {gone[0]!r} is missing: a source stays in its job under its name. Put it "
            "back; a change of the mixture to weight 0 leaves it out."
        )
    if now[: len(names)] != names:
        return (
            f"Its sources are {_named(now)}, those of the job {_named(names)}: keep them in their "
            "places, and put new ones behind them all."
        )
    for source in new["sources"][len(names) :]:
        if source["weight"]:
            return (
                f"Source {source['name']!r} is new and has weight {source['weight']:g}: "
                "give it weight 0, and bring it in by a change of the mixture, with `dataservice "
                f"job mixture JOB --weight {source['name']}=...` or in the file."
            )
    known = old.get("mixture_changes", [])
    if new.get("mixture_changes", [])[: len(known)] != known:
        return (
            "Its mixture_changes differ from the job's: keep those that there are in their places, "
            "and put new ones behind them."
        )
    return ""


def _named(sources: Sequence[str]) -> str:
    return _short(", ".join(sources))


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
