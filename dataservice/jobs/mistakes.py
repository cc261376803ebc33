"""What pydantic finds wrong with a YAML file, told to whoever wrote it.

One line a mistake: the line of the file, the place, what stands there, what to write instead.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from dataservice.core.errors import SpecError
from dataservice.core.quoting import cut, quoted
from dataservice.jobs.expected import (
    Expected,
    Place,
    Schema,
    form_words,
    listed,
    nearest,
    seen_words,
)
from dataservice.jobs.file_schema import schema_of

MOST_TOLD = 20
_MISSING = ("missing", "missing_keyword_only_argument", "missing_argument")
_NO_TEXT = "invalid_key"  # a key such as 2.5
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", _NO_TEXT)
_OWN = ("value_error", "assertion_error")  # raised by our own checks, in their own words
_NO_TAG, _WRONG_TAG = "union_tag_not_found", "union_tag_invalid"

LineOf = Callable[[Place], int | None]
"""The line in which a place of the file begins; None where the file doesn't have it."""


def spec_error(
    model: type[BaseModel],
    plain: object,
    error: ValidationError,
    what: str,
    line_of: LineOf,
    remedy: str,
) -> SpecError:
    """One error for all of pydantic's findings in the file `what`, whose content is `plain`; the
    `remedy` stands last."""
    schema = schema_of(model)
    found = list(_placed(plain, error.errors(include_url=False)))
    unknown = [place for place, each in found if each["type"] in _UNKNOWN]
    # A key that is needed and misspelt is one mistake, not an unknown key and a missing one.
    meant = {_At(schema, plain, place).meant for place in unknown[:MOST_TOLD]}
    found = [(at, each) for at, each in found if each["type"] not in _MISSING or at not in meant]
    lines = [f"the {what} has {len(found)} mistake{'s' if len(found) > 1 else ''}:"]
    for place, each in found[:MOST_TOLD]:
        line = line_of(place)
        where = f"line {line}, " if line is not None else ""
        said = _sentence(_At(schema, plain, place), place, each)
        lines.append(f"  {where}{_dotted(place) or what}: {said}")
    if len(found) > MOST_TOLD:
        lines.append(f"  and {len(found) - MOST_TOLD} more")
    return SpecError("\n".join([*lines, remedy]))


def _placed(plain: object, found: Sequence[Any]) -> Iterator[tuple[Place, Any]]:
    """The findings that are told, each with its place."""
    placed = [(_place(each, plain), each) for each in found]
    deeper = {place[:end] for place, _ in placed for end in range(len(place))}
    told: set[tuple[Place, str]] = set()
    for place, each in placed:
        kind = each["type"]
        # Where several forms are allowed, pydantic has a finding for each: those that look further
        # into the value say more, and of the rest one says enough.
        of_a_form = len(place) < len(each["loc"]) and kind not in (*_OWN, *_MISSING, *_UNKNOWN)
        key = (place, kind if kind in _OWN else "")
        if not (of_a_form and place in deeper) and key not in told:
            yield place, each
        told.add(key)


def _place(found: Any, plain: object) -> Place:
    """The place in the file: pydantic's, without the names of the alternatives that it tried."""
    loc, place, here = found["loc"], [], plain
    for number, part in enumerate(loc):
        if _has(here, part):
            here = _inside(here, part)
        elif found["type"] not in (*_MISSING, _NO_TEXT) or number < len(loc) - 1:
            continue
        place.append(part)
    if found["type"] in (_NO_TAG, _WRONG_TAG):
        place.append(found["ctx"]["discriminator"].strip("'"))
    return tuple(place)


class _At:
    """What stands at a place, what may stand there, and what may stand around it."""

    def __init__(self, schema: Schema, plain: object, place: Place) -> None:
        self._place = place
        self.whole = self.around = self.expected = Expected.of_file(schema, plain)
        self.seen = plain
        for part in place:
            self.around, self.seen = self.expected, _inside(self.seen, part)
            self.expected = self.around.inside(part, self.seen)

    @property
    def meant(self) -> Place | None:
        """The place of the key that is most like this unknown one, if one is."""
        near = nearest(str(self._place[-1]), self.around.keys)
        return (*self._place[:-1], near) if near is not None else None


def _sentence(at: _At, place: Place, found: Any) -> str:
    kind, seen, expected = found["type"], at.seen, at.expected
    name = next((part for part in reversed(place) if isinstance(part, str)), "")
    if kind in _UNKNOWN:
        return _unknown(at, str(place[-1]))
    if kind in _MISSING:
        return f"required, and missing. {_first_sentence(expected.description)}".rstrip()
    if kind in _OWN:
        said = found["msg"].removeprefix("Value error, ").removesuffix(".")
        return f"{said} (seen: {quoted(seen)})" if isinstance(seen, str | int | float) else said
    if kind == _NO_TAG and seen is None:
        return f"required, and missing; {expected.wanted(name, '')}"
    if found["loc"][-1:] == ("[key]",):
        form = form_words(str(found.get("ctx", {}).get("pattern", "")))
        return f"a name here cannot be {quoted(place[-1])}; give {form}"
    said = f"it is {seen_words(seen)}; {expected.wanted(name, seen)}"
    if isinstance(seen, list | dict | None) and expected.description:
        return f"{said}. {_first_sentence(expected.description)}"
    return said


def _unknown(at: _At, key: str) -> str:
    said = "there is no such key here"
    if elsewhere := at.whole.places_of(key):
        there = [f"under {each}" if each else "at the top of the file" for each in elsewhere]
        return f"{said}; it belongs {listed(sorted(there))}"
    if at.meant is not None:
        return f"{said}; did you mean {at.meant[-1]}?"
    return f"{said}; the keys here are {listed(at.around.keys, 'and')}" if at.around.keys else said


def _has(value: object, part: str | int) -> bool:
    if isinstance(value, Mapping):
        return part in value
    return isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)


def _inside(value: object, part: str | int) -> object:
    if isinstance(value, Mapping):
        return value.get(part)
    return value[part] if isinstance(value, list | tuple) and isinstance(part, int) else None


def _dotted(place: Place) -> str:
    said = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in place)
    return cut(said.removeprefix("."))


def _first_sentence(text: str) -> str:
    first = text.partition(". ")[0].rstrip(".")
    return f"{first}." if first else ""
